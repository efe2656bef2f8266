# python grpo/train_grpo.py config/grpo_gym.py
# SmolLM2-135M-Instruct on twenty tasks of reasoning-gym, in sizes for a small model, after
# pip install -r requirements-hf.txt reasoning-gym math-verify[antlr4_13_2]
# Each evaluation has the score of every task, gym_gcd and so on. A single task:
# --dataset=gym:gcd --gym_settings="{'shots': 2, 'max_value': 60}" --eval_problems=64
dataset = ("gym:aiw+base_conversion+basic_arithmetic+chain_sum+coin_flip+count_bits+family_relationships+"
           "fraction_simplification+gcd+lcm+leg_counting+letter_counting+number_format+number_sorting+"
           "prime_factorization+products+simple_equations+spell_backward+syllogism+word_sorting")
gym_settings = {
    "size": 8000,
    "shots": 2,                   # solved problems before each: without them, a small model answers in sentences
    "aiw.task_type_weights": [1, 0, 0],
    "base_conversion.max_value": 60,
    "basic_arithmetic.min_terms": 2, "basic_arithmetic.max_terms": 2,
    "basic_arithmetic.min_digits": 1, "basic_arithmetic.max_digits": 1,
    "chain_sum.max_terms": 3, "chain_sum.max_digits": 1,
    "coin_flip.max_trials": 60,
    "count_bits.max_n": 2000,
    "fraction_simplification.max_factor": 10, "fraction_simplification.max_value": 50,
    "gcd.max_value": 60,
    "lcm.max_value": 40,
    "leg_counting.min_animals": 1, "leg_counting.max_animals": 2, "leg_counting.max_instances": 5,
    "letter_counting.min_words": 2, "letter_counting.max_words": 5,
    "number_format.max_num_candidates": 2, "number_format.min_n": 10, "number_format.max_n": 1000,
    "number_sorting.min_numbers": 3, "number_sorting.max_numbers": 4, "number_sorting.max_decimals": 0,
    "number_sorting.min_value": 0, "number_sorting.max_value": 50,
    "prime_factorization.max_value": 1500,
    "products.min_digits": 1, "products.max_digits": 2,
    "simple_equations.max_terms": 2, "simple_equations.max_value": 20,
    "spell_backward.min_word_len": 3, "spell_backward.max_word_len": 4,
    "word_sorting.min_words": 3, "word_sorting.max_words": 4,
}
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
reward_workers = 1
kl_beta = 0.0
lora_rank = 16
dtype = "bfloat16"
max_iters = 60
learning_rate = 2e-4
min_lr = 2e-5
warmup_iters = 5
eval_problems = 640
eval_completions = 4
eval_interval = 60
sample_interval = 60
save_interval = 60
out_dir = "out-gym-grpo"
