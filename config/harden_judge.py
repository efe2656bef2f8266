# python core/pretrain.py config/harden_judge.py --init_from=JUDGE "--fill_checkpoints=['GENERATOR', 'POLICY', ...]"
# One hardening round: trains a judge further, on texts filled in by policies that fooled it
# (data/char_diffusion/pretrained/README.md). 5 minutes on 2 CPU cores with --dtype=bfloat16 --compile=True
dataset = "char_diffusion"
mode = "sequence_scorer"
tied = False
n_layer = 6
n_head = 6
n_embd = 192
fill_temperature_low = 0.3  # a trained policy writes like the generator at a low temperature
fill_temperature_high = 1.0
mask_low = 0.05
mask_high = 0.6
max_iters = 350
learning_rate = 1e-3
min_lr = 5e-5
warmup_iters = 20
seed = 11
out_dir = "out-judge-1"
