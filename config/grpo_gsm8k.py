# python grpo/train_grpo.py config/grpo_gsm8k.py
# Qwen2.5-0.5B-Instruct on GSM8K, all weights, with the settings of a published run (docs/results.md, "The same work
# elsewhere"). Needs pip install -r requirements-hf.txt, a network and a GPU with 24 GB. Not yet run with the
# published weights
dataset = "hf:openai/gsm8k:main"   # 7,473 problems to train on, 1,319 held out
generator_checkpoint = "hf:Qwen/Qwen2.5-0.5B-Instruct"
template = "model"
prompt_format = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
max_new_tokens = 1024
temperature = 0.8
top_p = 1.0
batch_size = 4
gradient_accumulation_steps = 5    # 20 problems a step
group_size = 8
reward_file = "data/gsm8k/reward.py"
reward_functions = ("gsm8k",)
objective = "grpo"
clip_low = 0.2
clip_high = 0.28
kl_beta = 0.0
grad_checkpoint = True
optimizer = "adamw"
max_iters = 100
learning_rate = 1e-6
min_lr = 1e-6
warmup_iters = 0
weight_decay = 0.1
beta2 = 0.98
eval_problems = 1319               # greedy_accuracy is the published metric
eval_completions = 2
eval_interval = 50
out_dir = "out-gsm8k-grpo"
