# python core/pretrain.py config/pretrain_generator.py
# The generator of the main job, 0.8 M parameters. On 2 CPU cores 8 minutes with --dtype=bfloat16 --compile=True, about
# 15 without. Validation accuracy .506 at masked positions
dataset = "char_diffusion"
mode = "masked_fill"
tied = False                # better than a tied output layer at a high learning rate: dev/LOG.md
max_iters = 1800
learning_rate = 4e-3        # Muon's updates are scaled to the size of AdamW's, so the same rate suits both
min_lr = 1e-4
out_dir = "out-generator"
