# python grpo/train_grpo.py config/grpo_guess.py
# Guess a number in several turns: an environment answers + or -, and halving the range is best. Five minutes on 2 CPU
# cores; results: data/guess/README.md
dataset = "guess"
generator_checkpoint = "data/guess/pretrained/generator.safetensors"
environment = "Guess"
reward_file = "data/guess/environment.py"
reward_functions = ("environment",)
stop_sequences = ("\n",)          # ends a turn
max_turns = 14
max_new_tokens = 56
temperature = 1.0
top_p = 1.0
batch_size = 32
group_size = 8
objective = "dr_grpo"
kl_beta = 0.0
optimizer = "muon"
max_iters = 200
learning_rate = 3e-4
eval_problems = 256
eval_completions = 8
eval_interval = 50
sample_interval = 100
save_interval = 100
out_dir = "out-guess-grpo"
