# python core/pretrain.py config/pretrain_judge.py
# A judge as large as the generator, which it starts from: it learns which characters of a text were filled in. On one
# thread 14 minutes with --dtype=bfloat16 --compile=True. Recipe of the shipped judges: data/char_diffusion/README.md
dataset = "char_diffusion"
mode = "sequence_scorer"
tied = False
init_from = "data/char_diffusion/pretrained/generator.safetensors"
fill_checkpoints = ("data/char_diffusion/pretrained/generator.safetensors",)
mask_low = 0.05             # from nearly unchanged texts to mostly filled ones
mask_high = 0.6
max_iters = 800
learning_rate = 1e-3
min_lr = 5e-5
warmup_iters = 30
out_dir = "out-small-0"
