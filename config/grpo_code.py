# python grpo/train_grpo.py config/grpo_code.py
# Short Python functions, whose tests run in a sandbox. Three to five minutes on 2 CPU cores; results:
# data/code/README.md
dataset = "code"
generator_checkpoint = "data/code/pretrained/generator.safetensors"
max_new_tokens = 96
temperature = 1.0
top_p = 1.0
batch_size = 8
group_size = 8
reward_functions = ("code_execution", "code_correctness")
reward_weights = (1.0, 0.1)
reward_timeout = 60.0
reward_settings = {"sandbox_seconds": 2.0}
objective = "dr_grpo"
kl_beta = 0.0
optimizer = "muon"
max_iters = 120
learning_rate = 3e-4
eval_problems = 128
eval_completions = 4
eval_interval = 40
out_dir = "out-code-grpo"
