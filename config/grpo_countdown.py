# python grpo/train_grpo.py config/grpo_countdown.py
# Countdown: reach a target with given numbers, each used once. Six to seven minutes on 2 CPU cores; results:
# data/countdown/README.md
dataset = "countdown"
generator_checkpoint = "data/countdown/pretrained/generator.safetensors"
max_new_tokens = 16
temperature = 1.0
top_p = 1.0
batch_size = 32
group_size = 16
reward_functions = ("countdown",)
objective = "dr_grpo"
advantage = "leave_one_out"       # train_pass_k is the gradient of pass@k only with this advantage
train_pass_k = 2                  # a correct completion counts more where the others of its group are wrong
kl_beta = 0.02
kl_estimator = "exact"
optimizer = "muon"
max_iters = 500
learning_rate = 3e-4
eval_problems = 256
eval_completions = 8
eval_interval = 100
out_dir = "out-countdown-grpo"
