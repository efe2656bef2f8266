# python grpo/train_grpo.py config/grpo_sudoku.py
# Fill in 4x4 sudoku in four passes; an exact checker gives the reward. Five minutes on one thread of a CPU; results:
# data/sudoku/README.md
dataset = "sudoku"
generator_checkpoint = "data/sudoku/pretrained/generator.safetensors"
block_size = 20                   # a board: four lines of four digits
masks = {"in_lines": 1.0}
mask_low = 0.3                    # with these shares 6 to 10 of the 16 digits
mask_high = 0.5
unmask_steps = 4
fill_estimator = "one_step"       # reads one text for a group; the exact trajectory reads 25
temperature = 1.0
top_p = 1.0
reward_file = "data/sudoku/reward.py"
reward_functions = ("sudoku", "sudoku_units")  # right boards, and the share of right rows, columns and quarters
advantage = "group_mean"
kl_beta = 0.001
optimizer = "muon"
max_iters = 900
learning_rate = 8e-4
batch_size = 32
group_size = 8
eval_interval = 100
out_dir = "out-sudoku-grpo"
