# python core/pretrain.py config/pretrain_equations.py
# A masked-fill model of lines like 17+8=25, for comparing ways to train in several passes; two minutes on 2 CPU cores
dataset = "equations"     # python data/equations/prepare.py
mode = "masked_fill"
block_size = 32
n_layer = 3
tied = False
batch_size = 64
mask_low = 0.1
mask_high = 0.9
max_iters = 1000
learning_rate = 4e-3
min_lr = 1e-4
eval_interval = 500
save_interval = 500
out_dir = "out-equations"
