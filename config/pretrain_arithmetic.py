# python core/pretrain.py config/pretrain_arithmetic.py
# A causal model that is stopped long before it can add; half a minute on 2 CPU cores
dataset = "arithmetic"    # python data/arithmetic/prepare.py
mode = "language_model"
block_size = 80
tied = False
max_iters = 100
lr_decay_iters = 1000     # the schedule of a run that would learn it
eval_interval = 50
save_interval = 50
out_dir = "out-arithmetic"
