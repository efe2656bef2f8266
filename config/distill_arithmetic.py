# python grpo/train_grpo.py config/distill_arithmetic.py
# Sums with working-out, learned from a teacher without rewards. First train the teacher:
# python grpo/train_grpo.py config/grpo_arithmetic.py
dataset = "arithmetic"
generator_checkpoint = "data/arithmetic/pretrained/generator.safetensors"
teacher_checkpoint = "out-arithmetic-grpo/model.safetensors"
kl_beta = 0.0                     # no reference: the teacher takes its place
max_new_tokens = 48
temperature = 1.0
top_p = 1.0
batch_size = 64
group_size = 1                    # completions are not compared, so one of each prompt is enough
reward_functions = ("math_number",)
reward_weights = (0.0,)           # logged, not learned from
objective = "bnpo"                # averages over all tokens of the step
optimizer = "muon"
max_iters = 200
learning_rate = 1e-3
eval_problems = 256
eval_completions = 8
eval_interval = 40
sample_interval = 200
save_interval = 200
out_dir = "out-arithmetic-distill"
