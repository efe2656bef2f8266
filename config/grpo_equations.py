# python grpo/train_grpo.py config/grpo_equations.py
# Fill-in in four passes with an exact checker; two minutes on 2 CPU cores; figures: docs/results.md
dataset = "equations"
dataset_recipe = "data/equations/prepare.py"
generator_checkpoint = "out-equations/generator.safetensors"
generator_recipe = "config/pretrain_equations.py"
block_size = 32
mask_low = 0.3
mask_high = 0.7
unmask_steps = 4
temperature = 1.0
top_p = 1.0
reward_functions = ("equations",)
advantage = "group_mean"
kl_beta = 0.001
optimizer = "muon"
max_iters = 100
learning_rate = 3e-4
min_lr = 3e-5
batch_size = 16
group_size = 8
eval_interval = 20
sample_interval = 100
save_interval = 100
out_dir = "out-equations-grpo"
