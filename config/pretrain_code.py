# python core/pretrain.py config/pretrain_code.py
# A causal model that writes functions of a line or two; five minutes on 2 CPU cores
dataset = "code"          # python data/code/prepare.py
mode = "language_model"
block_size = 192
tied = False
batch_size = 32
max_iters = 400
eval_interval = 200
save_interval = 200
out_dir = "out-code"
