# python core/pretrain.py config/pretrain_told_judge.py --init_from=JUDGE "--fill_checkpoints=['GENERATOR', 'POLICY']"
# Makes a judge that can be told which characters were filled in from one that cannot, on texts filled in by policies
# that were trained against it (data/char_diffusion/pretrained/README.md). 5 minutes on 2 CPU cores with
# --dtype=bfloat16 --compile=True
dataset = "char_diffusion"
mode = "sequence_scorer"
judge_head = "told"
tied = False
n_layer = 6
n_head = 6
n_embd = 192
fill_temperature_low = 0.5
fill_temperature_high = 1.0
mask_low = 0.1
mask_high = 0.55
max_iters = 400
learning_rate = 6e-4
min_lr = 3e-5
warmup_iters = 20
seed = 21
out_dir = "out-judge-told"
