# python grpo/train_grpo.py config/grpo_math.py
# Qwen3-0.6B-Base on MATH, all weights, with the settings of a published run (docs/results.md, "The same work
# elsewhere"). Needs pip install -r requirements-hf.txt math-verify[antlr4_13_2], a network and a GPU with 24 GB. Not
# yet run with the published weights
dataset = "hf:nlile/hendrycks-MATH-benchmark"   # 12,000 problems to train on; held out are the 500 of MATH-500
generator_checkpoint = "hf:Qwen/Qwen3-0.6B-Base"
prompt_format = ("You are a helpful math assistant.\nAnswer the question and write the final result on a new line as:\n"
                 "\\boxed{ANSWER}\n\nQuestion:\n{prompt}\n\nAnswer:")
max_prompt_length = 1024
max_new_tokens = 512               # published accuracies allow 2048: --max_iters=0 --max_new_tokens=2048
temperature = 0.8
top_p = 0.9
batch_size = 1
group_size = 8
sample_rows = 64                   # each token of a row keeps 115 kB of keys and values
reward_functions = ("math_verify",)
reward_workers = 4
objective = "rloo"                 # sums over the tokens of a completion, as published ...
advantage = "group_std"            # ... with the advantage of GRPO
kl_beta = 0.0
grad_checkpoint = True
optimizer = "adamw"
max_iters = 50
learning_rate = 1e-5
min_lr = 1e-5
warmup_iters = 0
weight_decay = 0.01
beta2 = 0.999
grad_clip = 1.0
eval_problems = 500                # greedy_accuracy is the published metric
eval_completions = 2
eval_interval = 50
out_dir = "out-math-grpo"
