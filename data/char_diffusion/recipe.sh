#!/bin/sh
# Trains the models of data/char_diffusion/pretrained from nothing: the generator and its judges.
#
#     sh data/char_diffusion/recipe.sh
#
# Shipped are float16 copies, as --export=FILE writes them. Minutes are on 2 CPU cores with --dtype=bfloat16
# --compile=True. To keep the shipped generator, set G=data/char_diffusion/pretrained/generator.safetensors and leave
# out the first command.
set -e
G=out-generator/model.safetensors
# The generator, 0.8 M, 8 minutes; where large judges start, 2.7 M, 31 minutes
python core/pretrain.py config/pretrain_generator.py
python core/pretrain.py config/pretrain_trunk.py
# A weak judge, a policy that fools it, and the first large judge, 6 minutes
python core/pretrain.py config/pretrain_judge.py --judge_head=cls --init_from=$G --fill_checkpoints="['$G']" \
    --mask_low=0.01 --max_iters=400 --warmup_iters=50 --out_dir=out-judge-cls
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G \
    --judge_checkpoint=out-judge-cls/model.safetensors --credit_window=None --advantage=group_std --kl_beta=0.05 \
    --learning_rate=3e-4 --min_lr=3e-5 --max_iters=120 --out_dir=out-fool-cls
python core/pretrain.py config/pretrain_trunk.py config/pretrain_judge.py --init_from=out-trunk/model.safetensors \
    --fill_checkpoints="['$G', 'out-fool-cls/model.safetensors']" --max_iters=400 --out_dir=out-judge-0
# Hardening, two rounds: policies that fool the judge, then a judge that learns from their fills
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G \
    --judge_checkpoint=out-judge-0/model.safetensors --credit_window=8 --kl_beta=0.05 \
    --learning_rate=1e-3 --min_lr=1e-4 --max_iters=60 --out_dir=out-fool-1
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G \
    --judge_checkpoint=out-judge-0/model.safetensors --credit_window=8 --kl_beta=0.05 \
    --learning_rate=3e-4 --min_lr=3e-5 --max_iters=60 --out_dir=out-fool-2
python core/pretrain.py config/pretrain_trunk.py config/pretrain_judge.py \
    --init_from=out-judge-0/model.safetensors --fill_checkpoints="['$G',
    'out-fool-cls/model.safetensors', 'out-fool-1/model.safetensors', 'out-fool-2/model.safetensors']" \
    --fill_temperature_low=0.3 --max_iters=350 --warmup_iters=20 --seed=11 --out_dir=out-judge-1
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G \
    --judge_checkpoint=out-judge-1/model.safetensors --credit_window=8 --kl_beta=0.05 \
    --learning_rate=3e-4 --min_lr=3e-5 --max_iters=160 --out_dir=out-fool-3
python core/pretrain.py config/pretrain_trunk.py config/pretrain_judge.py \
    --init_from=out-judge-1/model.safetensors --fill_checkpoints="['$G',
    'out-fool-1/model.safetensors', 'out-fool-2/model.safetensors',
    'out-fool-3/model.safetensors', 'out-fool-3/model.safetensors']" \
    --fill_temperature_low=0.6 --mask_low=0.1 --max_iters=260 --warmup_iters=20 --seed=12 --out_dir=out-large-judge
# The shipped judge, as large as the generator, about 45 minutes: in three rounds it learns the large one's log-odds
python core/pretrain.py config/pretrain_judge.py --init_from=$G --fill_checkpoints="['$G']"
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G --kl_beta=0.1 --max_iters=320 \
    --judge_checkpoint=out-large-judge/model.safetensors --out_dir=out-fool-4
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G --kl_beta=0.1 --max_iters=160 \
    --lr_decay_iters=320 --judge_checkpoint=out-small-0/model.safetensors --out_dir=out-fool-5
python core/pretrain.py config/pretrain_judge.py --init_from=out-small-0/model.safetensors \
    --teacher_checkpoint=out-large-judge/model.safetensors --fill_checkpoints="['$G', 'out-fool-4/model.safetensors',
    'out-fool-5/model.safetensors']" --fill_temperature_low=0.4 --fill_temperature_high=1.1 \
    --max_iters=400 --warmup_iters=20 --out_dir=out-small-1
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G --kl_beta=0.1 --max_iters=320 \
    --judge_checkpoint=out-small-1/model.safetensors --out_dir=out-fool-6
python core/pretrain.py config/pretrain_judge.py --init_from=out-small-1/model.safetensors \
    --teacher_checkpoint=out-large-judge/model.safetensors --fill_checkpoints="['$G', 'out-fool-4/model.safetensors',
    'out-fool-5/model.safetensors', 'out-fool-6/model.safetensors']" --fill_temperature_low=0.4 \
    --fill_temperature_high=1.1 --max_iters=400 --warmup_iters=20 --seed=11 --out_dir=out-small-2
python grpo/train_grpo.py config/grpo_example.py --generator_checkpoint=$G --kl_beta=0.1 --max_iters=160 \
    --lr_decay_iters=320 --judge_checkpoint=out-small-2/model.safetensors --out_dir=out-fool-7
python core/pretrain.py config/pretrain_judge.py --init_from=out-small-2/model.safetensors \
    --teacher_checkpoint=out-large-judge/model.safetensors --fill_checkpoints="['$G', 'out-fool-4/model.safetensors',
    'out-fool-5/model.safetensors', 'out-fool-6/model.safetensors', 'out-fool-7/model.safetensors',
    'out-fool-7/model.safetensors']" --fill_temperature_low=0.5 --fill_temperature_high=1.1 --max_iters=700 \
    --warmup_iters=20 --seed=21 --out_dir=out-judge
# The gold judge, 7 minutes: another seed, other masks and fills
python core/pretrain.py config/pretrain_trunk.py config/pretrain_judge.py --init_from=out-trunk/model.safetensors \
    --fill_checkpoints="['$G', 'out-fool-cls/model.safetensors']" \
    --masks="{'random': 2.0, 'span': 1.0, 'line': 0.5}" --mask_low=0.02 --mask_high=0.5 --clean_share=0.2 \
    --fill_temperature_low=0.5 --fill_temperature_high=1.2 --max_iters=450 --learning_rate=1.5e-3 --seed=7 \
    --out_dir=out-gold-judge
