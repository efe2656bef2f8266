# python core/pretrain.py config/adapt_generator.py
# The shipped generator, trained further on a text of yours that was prepared with --out=data/mine. About three minutes
# on one thread. On licence texts its validation accuracy rose from .370 to .493
dataset = "mine"
mode = "masked_fill"
tied = False
init_from = "data/char_diffusion/pretrained/generator.safetensors"
max_iters = 150
learning_rate = 2e-3        # half of what a new generator gets
min_lr = 1e-4
warmup_iters = 10
eval_interval = 50
out_dir = "out-adapted-generator"
export = "data/mine/adapted_generator.safetensors"
