# python core/pretrain.py config/pretrain_sudoku.py
# The generator of config/grpo_sudoku.py, stopped early. A quarter of a minute on 2 CPU cores
dataset = "sudoku"        # python data/sudoku/prepare.py
mode = "masked_fill"
block_size = 20
n_embd = 64
tied = False
batch_size = 64
masks = {"in_lines": 1.0}
mask_low = 0.1            # with these shares 2 to 14 of the 16 digits
mask_high = 0.7
max_iters = 140
lr_decay_iters = 400
learning_rate = 3e-3
min_lr = 1e-4
eval_interval = 50
out_dir = "out-sudoku"
