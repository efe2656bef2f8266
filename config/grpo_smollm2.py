# python grpo/train_grpo.py config/grpo_smollm2.py
# SmolLM2-135M-Instruct, a published chat model, learns sums. Needs pip install -r requirements-hf.txt.
# Eight minutes on 2 CPU cores, 3 GB; results: data/smollm2/README.md
dataset = "smollm2"               # the first run makes the folder of the model too
generator_checkpoint = "data/smollm2/model"
template = "model"                # the chat template that it was trained with
max_new_tokens = 16
temperature = 1.0
top_p = 1.0
batch_size = 8
group_size = 8
reward_file = "data/smollm2/reward.py"
reward_functions = ("last_number",)
kl_beta = 0.0
lora_rank = 16
dtype = "bfloat16"                # float32 takes 1.4 times the CPU seconds where the CPU has avx512_bf16, and 1 GB more
max_iters = 80
learning_rate = 2e-4
warmup_iters = 5
eval_problems = 64
eval_completions = 4
eval_interval = 40
out_dir = "out-smollm2-grpo"
