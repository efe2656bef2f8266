# python grpo/train_grpo.py config/grpo_arithmetic.py
# Sums with working-out. Five minutes on 2 CPU cores; results: data/arithmetic/README.md
dataset = "arithmetic"
generator_checkpoint = "data/arithmetic/pretrained/generator.safetensors"
max_new_tokens = 48
temperature = 1.0
top_p = 1.0
batch_size = 32
group_size = 8
reward_functions = ("math_format", "math_working", "math_number")
reward_weights = (1.0, 5.0, 1.0)  # mostly for true equations in the working-out
success_reward = "math_number"
advantage = "batch_std"
kl_beta = 0.0                     # the answer is verified: there is no judge to fool, so no need for a KL penalty
optimizer = "muon"
max_iters = 350
learning_rate = 3e-4
eval_problems = 256
eval_completions = 8
eval_interval = 70
out_dir = "out-arithmetic-grpo"
