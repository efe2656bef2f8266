# python core/pretrain.py config/pretrain_guess.py
# A causal model that plays: it guesses numbers that are still possible. Four minutes with one thread beside other work
dataset = "guess"         # python data/guess/prepare.py
mode = "language_model"
block_size = 80
tied = False
max_iters = 250
min_lr = 1e-4
eval_interval = 50
save_interval = 100
out_dir = "out-guess"
