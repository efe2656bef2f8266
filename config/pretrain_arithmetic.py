# python core/pretrain.py config/pretrain_arithmetic.py
# A causal model, stopped early, so that GRPO has something to teach it. Half a minute on 2 CPU cores
dataset = "arithmetic"    # python data/arithmetic/prepare.py
mode = "language_model"
block_size = 80
tied = False
max_iters = 100
min_lr = 1e-4
lr_decay_iters = 1000     # as if the run were long enough to learn the task
eval_interval = 50
out_dir = "out-arithmetic"
