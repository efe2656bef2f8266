# python data/gym/prepare.py --task=aiw --settings="{'task_type_weights': [1.0, 0.0, 0.0]}" --out=data/gym/aiw
# python grpo/train_grpo.py config/grpo_smollm2_aiw.py
# The problem of Alice in Wonderland (arXiv 2406.02061): "Alice has 3 brothers and she also has 2 sisters. How many
# sisters does Alice's brother have?" TIME minutes on 2 CPU cores; the model's folder: data/smollm2/prepare.py
dataset = "data/gym/aiw"
generator_checkpoint = "data/smollm2/model"
template = "model"
max_new_tokens = 16
temperature = 1.0
top_p = 1.0
batch_size = 8
group_size = 8
reward_file = "data/gym/reward.py"
reward_functions = ("gym",)
kl_beta = 0.0
lora_rank = 16
dtype = "bfloat16"
max_iters = 80
learning_rate = 2e-4
min_lr = 2e-5
warmup_iters = 5
eval_problems = 64
eval_completions = 4
eval_interval = 40
sample_interval = 40
save_interval = 40
out_dir = "out-smollm2-aiw"
