# python grpo/train_grpo.py config/grpo_any_order.py
# Countdown with a masked model: reach a target with given numbers, each used once. The model fills in the answer in
# eight passes, in random order. Five minutes on 2 CPU cores; results: data/countdown/README.md
dataset = "countdown"
generator_checkpoint = "data/countdown/pretrained/any_order.safetensors"
max_new_tokens = 12
unmask_steps = 8
fill_estimator = "one_step"       # learns as much as the exact trajectory, in less time: docs/diffusion.md
temperature = 1.0
top_p = 1.0
batch_size = 32
group_size = 8
reward_functions = ("countdown",)
objective = "dr_grpo"
kl_beta = 0.0                     # the answer is verified: there is no judge to fool
optimizer = "muon"
max_iters = 200
learning_rate = 3e-4
eval_problems = 256
eval_completions = 8
eval_interval = 100
out_dir = "out-any-order-grpo"
