# python grpo/train_grpo.py config/grpo_calculator.py
# SmolLM2-135M-Instruct learns to multiply with a calculator. Needs pip install -r requirements-hf.txt.
# Six minutes on 2 CPU cores, 6 GB; results: data/calculator/README.md
dataset = "calculator"
generator_checkpoint = "data/smollm2/model"
template = "model"                # the chat template that it was trained with
environment = "Calculator"
reward_file = "data/calculator/environment.py"
reward_functions = ("environment",)
stop_sequences = ("</calc>",)     # ends a turn, and so does an end token
max_turns = 3
max_new_tokens = 48
temperature = 1.0
top_p = 1.0
batch_size = 8
group_size = 8
kl_beta = 0.0
lora_rank = 16
dtype = "bfloat16"                # float32 takes 1.4 times the CPU seconds where the CPU has avx512_bf16, and 1 GB more
max_iters = 20
learning_rate = 2e-4
warmup_iters = 3
eval_problems = 64
eval_completions = 4
eval_interval = 10
out_dir = "out-calculator-grpo"
