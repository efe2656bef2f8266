# python core/pretrain.py config/pretrain_trunk.py
# The trunk: the model that large judges start from. 2.7 M parameters, so that they know more than the generator.
# On 2 CPU cores 31 minutes with --dtype=bfloat16 --compile=True. Validation accuracy .567
dataset = "char_diffusion"
mode = "masked_fill"
tied = False
n_layer = 6
n_head = 6
n_embd = 192
max_iters = 2600
learning_rate = 3e-3
min_lr = 5e-5
out_dir = "out-trunk"
