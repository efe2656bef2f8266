"""Group-relative policy optimization of a fill-in generator against a frozen judge.

python grpo/train_grpo.py config/grpo_example.py
python grpo/train_grpo.py config/grpo_example.py --learning_rate=1e-4 --seed=2
torchrun --nproc_per_node=2 grpo/train_grpo.py config/grpo_example.py
"""

import os
import sys
from dataclasses import asdict

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.checkpoint_manager import set_aside
from core.config import describe, load_config, run_script, save_config
from core.dataset_consumer import DatasetConsumer, dataset_folder
from core.distributed import Distributed, detect_dtype
from core.logger import create_logger
from core.model import MASKED_FILL
from core.recipes import build_missing_checkpoint, build_missing_dataset
from grpo.evaluate import build_evaluation
from grpo.grpo_config import GRPOConfig
from grpo.grpo_trainer import COLUMNS, GRPOTrainer
from grpo.models import load_models


def build_what_is_missing(config, origin, dist):
    """Recipes build what is missing; one applies only to a path set in the same place, so not to a typing error."""
    if dist.is_main:
        if origin.get("dataset") == origin.get("dataset_recipe"):
            build_missing_dataset(dataset_folder(config.dataset), config.dataset_recipe, print)
        for key in ("generator_checkpoint", "judge_checkpoint", "gold_judge_checkpoint"):
            recipe = key.replace("checkpoint", "recipe")
            if origin.get(key) == origin.get(recipe):
                build_missing_checkpoint(getattr(config, key), getattr(config, recipe), key, config.dataset, print)
    dist.barrier()


def plan(config, origin, models, data, dist, dtype):
    """What is about to happen, for people."""
    problems = config.batch_size * config.gradient_accumulation_steps * dist.world
    yield from describe(config, origin)
    yield (f"effective batch: {config.batch_size} problems x {config.group_size} completions x "
           f"{config.gradient_accumulation_steps} accumulation x {dist.world} ranks = {problems * config.group_size} "
           "completions")
    for name, model in models.items():
        if model is not None:
            yield (f"{name:<10} {model.config.mode}, {model.config.n_layer} layers x {model.config.n_embd}, "
                   f"{model.num_parameters() / 1e6:.2f} M parameters{'' if name == 'generator' else ', frozen'}")
    tokens = {split: len(ids) for split, ids in data.tokens.items()}
    yield (f"data: {data.folder}, {tokens['train']} training and {tokens['val']} validation tokens, "
           f"windows of {config.block_size}, {config.mask_low:.0%} to {config.mask_high:.0%} hidden "
           f"({', '.join(config.masks)})")
    generator = models["generator"].num_parameters()
    weights = 4 * sum(model.num_parameters() for model in models.values() if model is not None) + 12 * generator
    wide = max(model.config.n_embd * (12 + 2 * model.config.n_layer) for model in models.values() if model is not None)
    activations = 4 * config.block_size * 64 * wide
    yield (f"on {dist.device} in {dtype}; about {(weights + activations) / 1e6:.0f} MB for weights, optimizer and "
           "activations")


def main(argv):
    """Config, device, data, models, evaluation, trainer; then run."""
    config, origin = load_config(GRPOConfig, argv)
    dist = Distributed(config.device)
    dtype = detect_dtype(config.dtype, dist.device)
    if not config.dry_run:
        build_what_is_missing(config, origin, dist)
    data = DatasetConsumer(config.dataset, MASKED_FILL, config.block_size, config.batch_size, config.seed, dist.rank,
                           dist.world, config.masks, config.mask_low, config.mask_high)
    policy, reference, judge, gold_judge = load_models(config, data.tokenizer, dist.device)
    models = {"generator": policy, "reference": reference, "judge": judge, "gold judge": gold_judge}
    lines = list(plan(config, origin, models, data, dist, dtype))
    if config.dry_run:
        if dist.is_main:
            print(*(f"{key} = {value!r}" for key, value in asdict(config).items()), "", *lines,
                  "reward: the judge's score, in [0, 1]", "dry run: everything is in place, nothing was trained",
                  sep="\n")
        return dist.close()
    if dist.is_main:
        if not config.resume and set_aside(config.out_dir):
            print(f"{config.out_dir} held an earlier run, which is now in {config.out_dir}/previous")
        os.makedirs(config.out_dir, exist_ok=True)
        save_config(config, os.path.join(config.out_dir, "config.json"))
    logger = create_logger(config, dist, config.max_iters, COLUMNS)
    logger.say("\n".join(lines))
    evaluation = build_evaluation(config, reference, judge, gold_judge, dist, dtype)
    policy = torch.compile(policy, dynamic=True) if config.compile else policy
    trainer = GRPOTrainer(policy, reference, judge, data, evaluation, config, logger, dist, dtype)
    if config.resume:
        trainer.resume()
    trainer.run()
    dist.close()


if __name__ == "__main__":
    run_script(main)
