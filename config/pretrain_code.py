# python core/pretrain.py config/pretrain_code.py
# A causal model that writes functions of a line or two; three to four minutes on 2 CPU cores; stopped early
dataset = "code"          # python data/code/prepare.py
mode = "language_model"
block_size = 192
tied = False
batch_size = 32
max_iters = 250
lr_decay_iters = 400      # the schedule of a run that would learn it
eval_interval = 50
save_interval = 50
out_dir = "out-code"
