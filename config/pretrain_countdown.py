# python core/pretrain.py config/pretrain_countdown.py
# A causal model that solves half of the problems. Two minutes on 2 CPU cores
dataset = "countdown"     # python data/countdown/prepare.py
mode = "language_model"
block_size = 64
tied = False
max_iters = 800
min_lr = 1e-4
lr_decay_iters = 1600
eval_interval = 200
save_interval = 200
out_dir = "out-countdown"
