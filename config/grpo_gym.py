# python grpo/train_grpo.py config/grpo_gym.py
# SmolLM2-135M-Instruct on twenty tasks of reasoning-gym, in sizes for a small model. Needs
# pip install -r requirements-hf.txt reasoning-gym math-verify[antlr4_13_2]
# An evaluation logs the score of every task: gym_gcd and so on. Other tasks: data/gym/prepare.py
dataset = "gym"
reward_file = "data/gym/reward.py"
generator_checkpoint = "data/smollm2/model"
template = "model"
max_prompt_length = 1500
max_new_tokens = 24
stop_sequences = ("\n",)          # an answer is one line
temperature = 1.0
top_p = 1.0
batch_size = 8
group_size = 8
reward_functions = ("gym",)
kl_beta = 0.0
lora_rank = 16
dtype = "bfloat16"
max_iters = 60
learning_rate = 2e-4
warmup_iters = 5
eval_problems = 640
eval_completions = 4
eval_interval = 60
out_dir = "out-gym-grpo"
