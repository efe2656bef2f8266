# python core/pretrain.py config/pretrain_code.py
# A causal model that writes functions of a line or two, stopped early. Three to four minutes on 2 CPU cores
dataset = "code"          # python data/code/prepare.py
mode = "language_model"
block_size = 192
tied = False
batch_size = 32
max_iters = 250
min_lr = 1e-4
lr_decay_iters = 400      # the learning rates of a run long enough to learn the task
eval_interval = 50
save_interval = 50
out_dir = "out-code"
