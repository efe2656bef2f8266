# python grpo/train_grpo.py config/grpo_countdown.py
# Numbers and a target: an expression that uses each number once; figures over seeds: docs/results.md
dataset = "countdown"
dataset_recipe = "data/countdown/prepare.py"
generator_checkpoint = "data/countdown/pretrained/generator.safetensors"
generator_recipe = "config/pretrain_countdown.py"
max_new_tokens = 16
temperature = 1.0
top_p = 1.0
batch_size = 32
group_size = 16
reward_functions = ("countdown",)
objective = "dr_grpo"
advantage = "leave_one_out"       # what train_pass_k needs to be the gradient of pass@k
train_pass_k = 2                  # a right completion counts more where the others are wrong: hard problems are kept
kl_beta = 0.02
kl_estimator = "exact"
optimizer = "muon"
max_iters = 500
learning_rate = 3e-4
min_lr = 3e-5
eval_problems = 256
eval_completions = 16
pass_k = 8
eval_interval = 100
sample_interval = 100
save_interval = 100
out_dir = "out-countdown-grpo"
