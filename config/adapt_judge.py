# python core/pretrain.py config/adapt_judge.py
# The shipped judge, trained further on a text of yours, with fills of the generator of config/adapt_generator.py. About
# three minutes on one thread. On licence texts its AUC rose from .814 to .956
dataset = "mine"
mode = "sequence_scorer"
tied = False
n_layer = 6
n_head = 6
n_embd = 192
init_from = "data/char_diffusion/pretrained/judge.safetensors"
fill_checkpoints = ("data/mine/adapted_generator.safetensors",)
fill_temperature_low = 0.3  # a trained policy writes like the generator at a low temperature
fill_temperature_high = 1.0
mask_low = 0.05
mask_high = 0.6
batch_size = 32
max_iters = 100
learning_rate = 1e-3
min_lr = 5e-5
warmup_iters = 10
eval_batches = 4
eval_interval = 100
log_interval = 25
out_dir = "out-adapted-judge"
export = "data/mine/adapted_judge.safetensors"
