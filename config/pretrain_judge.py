# python core/pretrain.py config/pretrain_trunk.py
# python core/pretrain.py config/pretrain_judge.py
# A judge: it starts from the trunk and learns which characters of a text the generator filled in. 6 minutes on 2 CPU
# cores with --dtype=bfloat16 --compile=True
dataset = "char_diffusion"
mode = "sequence_scorer"
tied = False
n_layer = 6
n_head = 6
n_embd = 192
init_from = "out-trunk/model.safetensors"
fill_checkpoints = ("data/char_diffusion/pretrained/generator.safetensors",)
mask_low = 0.05             # from nearly unchanged texts to mostly filled ones
mask_high = 0.6
max_iters = 400
learning_rate = 1e-3
min_lr = 5e-5
warmup_iters = 30
out_dir = "out-judge-0"
