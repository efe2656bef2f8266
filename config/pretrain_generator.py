dataset = "char_diffusion"
mode = "masked_fill"
tied = False
max_iters = 1800
learning_rate = 4e-3
min_lr = 1e-4
out_dir = "out-generator"
export = "data/char_diffusion/pretrained/generator.safetensors"
