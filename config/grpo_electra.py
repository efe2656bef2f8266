# python grpo/train_grpo.py config/grpo_electra.py
# Once before it:
# python data/char_diffusion/prepare.py --tokenizer=hf:google/electra-small-generator --out=data/electra_pieces
# Google's small ELECTRA generator against its own detector of replaced tokens, which shares its word pieces. Needs
# pip install -r requirements-hf.txt and, once, a network; with folders of your own: docs/huggingface.md. Not run with
# the published weights so far, so these values are a start and not a measured result
dataset = "electra_pieces"
generator_checkpoint = "hf:google/electra-small-generator"
judge_checkpoint = "hf:google/electra-small-discriminator"
block_size = 126          # of the 128 positions that the models were trained on, two are [CLS] and [SEP]
mask_low = 0.15           # the share that ELECTRA's generator was trained on
mask_high = 0.3
temperature = 1.0
top_p = 1.0
advantage = "batch_std"
credit_window = 2         # a token's reward is the detector's score of the word pieces near it
kl_beta = 0.1
max_iters = 200
learning_rate = 2e-5      # 14 million parameters: less than the 4e-4 of the shipped models of 0.8 million
min_lr = 2e-6
eval_interval = 50
out_dir = "out-electra"
