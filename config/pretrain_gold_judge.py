# python core/pretrain.py config/pretrain_gold_judge.py
# The gold judge: a second judge with another seed and other filled texts, never used as a reward. 7 minutes on 2 CPU
# cores with --dtype=bfloat16 --compile=True
dataset = "char_diffusion"
mode = "sequence_scorer"
tied = False
n_layer = 6
n_head = 6
n_embd = 192
init_from = "out-trunk/model.safetensors"
fill_checkpoints = ("data/char_diffusion/pretrained/generator.safetensors",)
fill_temperature_low = 0.5
fill_temperature_high = 1.2
clean_share = 0.2
mask_random = 2.0
mask_span = 1.0
mask_line = 0.5
mask_low = 0.02
mask_high = 0.5
max_iters = 450
learning_rate = 1.5e-3
min_lr = 5e-5
warmup_iters = 30
seed = 7
out_dir = "out-gold-judge"
