# python core/pretrain.py config/pretrain_equations.py
# The generator of config/grpo_equations.py: a masked-fill model of lines like 3+9=12. Two minutes on 2 CPU cores
dataset = "equations"     # python data/equations/prepare.py
mode = "masked_fill"
block_size = 32
n_layer = 3
tied = False
batch_size = 64
masks = {"random": 1.0, "line": 1.0}
mask_low = 0.05
mask_high = 0.4
max_iters = 800
learning_rate = 4e-3
min_lr = 1e-4
eval_interval = 400
out_dir = "out-equations"
