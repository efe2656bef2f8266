# python grpo/train_grpo.py config/grpo_equations.py
# Fill in parts of lines like 3+9=12 in two passes; every true sum is right. Two minutes on 2 CPU cores, after as many
# for python core/pretrain.py config/pretrain_equations.py --export=out-equations/generator.safetensors
# Results: data/equations/README.md
dataset = "equations"
generator_checkpoint = "out-equations/generator.safetensors"
block_size = 32
masks = {"line": 1.0}     # with these shares 3 to 6 characters of one line, or of two lines
mask_low = 0.1
mask_high = 0.2
unmask_steps = 2
temperature = 1.0
top_p = 1.0
reward_file = "data/equations/reward.py"
reward_functions = ("equations",)
advantage = "group_mean"
kl_beta = 0.001
optimizer = "muon"
max_iters = 200
learning_rate = 8e-4
batch_size = 16
group_size = 8
eval_interval = 20
sample_interval = 100
save_interval = 100
out_dir = "out-equations-grpo"
