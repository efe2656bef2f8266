# python grpo/train_grpo.py config/grpo_example.py
# The main job: fill in hidden characters of English text; a judge gives the reward. Four to five minutes on 2 CPU
# cores, under 1 GB of memory; results: data/char_diffusion/README.md
task_type = "fill_in"     # the reward is the judge's score
dataset = "char_diffusion"  # built from Python's own documentation if it is missing
generator_checkpoint = "data/char_diffusion/pretrained/generator.safetensors"
judge_checkpoint = "data/char_diffusion/pretrained/small_judge.safetensors"  # recipe: data/char_diffusion/README.md
gold_judge_checkpoint = "data/char_diffusion/pretrained/gold_judge.safetensors"
temperature = 1.0         # at 1.0 the policy is the model's own distribution, and completions differ enough
top_p = 1.0
group_size = 8            # try 8 to 16: more completions compare better, and a step takes longer
advantage = "batch_std"   # one scale for the whole step, so a group with nearly equal rewards changes little
credit_window = 2         # a token's reward is the judge's score of the text near it: docs/algorithm.md
kl_beta = 0.15            # try 0.01 to 0.3: higher if the gold judge or word_validity falls, lower if nothing moves
max_iters = 450
learning_rate = 4e-4      # try 1e-4 to 1e-3: lower if mean_kl or grad_norm jumps, higher if the judge hardly rises
min_lr = 2e-5
eval_interval = 225
log_interval = 25
