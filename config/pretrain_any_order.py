# python core/pretrain.py config/pretrain_any_order.py --export=data/countdown/pretrained/any_order.safetensors
# The start of config/grpo_any_order.py: a model that fills in the masked places behind a Countdown prompt
dataset = "countdown"     # python data/countdown/prepare.py
mode = "masked_fill"
block_size = 34           # of a prompt, its completion and end tokens
tied = False
max_iters = 4000
min_lr = 1e-4
eval_interval = 500
save_interval = 1000
out_dir = "out-any-order"
