"""Group-relative policy optimization of a fill-in generator against a frozen judge, or of a causal one for rewards.

python grpo/train_grpo.py config/grpo_example.py
python grpo/train_grpo.py config/grpo_arithmetic.py
python grpo/train_grpo.py config/grpo_example.py --learning_rate=1e-4 --seed=2
torchrun --nproc_per_node=2 grpo/train_grpo.py config/grpo_example.py
"""

import os
import sys
from dataclasses import asdict

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.checkpoint_manager import load_tokenizer, set_aside
from core.config import describe, load_config, run_script, save_config
from core.dataset_consumer import dataset_folder
from core.distributed import Distributed, detect_dtype
from core.logger import create_logger
from core.recipes import build_missing_checkpoint, build_missing_dataset
from grpo.grpo_config import GRPOConfig
from grpo.grpo_trainer import GRPOTrainer
from grpo.models import load_models
from grpo.problems import build_data, build_evaluation
from grpo.rewards import REWARDS, Rewards


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


def plan(config, origin, models, rewards, data, dist, dtype):
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
    yield f"data: {data.folder}, {data.size()}"
    yield "rewards: " + ", ".join(f"{weight:g} x {name} [{REWARDS[name].low:g}, {REWARDS[name].high:g}]"
                                  for name, weight in zip(rewards.names, rewards.weights, strict=True))
    generator = models["generator"].num_parameters()
    weights = 4 * sum(model.num_parameters() for model in models.values() if model is not None) + 12 * generator
    length = max(config.block_size, models["generator"].config.block_size)
    wide = max(model.config.n_embd * (12 + 2 * model.config.n_layer) for model in models.values() if model is not None)
    activations = 4 * length * 64 * wide
    yield (f"on {dist.device} in {dtype}; about {(weights + activations) / 1e6:.0f} MB for weights, optimizer and "
           "activations")


def main(argv):
    """Config, device, data, models, evaluation, trainer; then run."""
    config, origin = load_config(GRPOConfig, argv)
    dist = Distributed(config.device)
    dtype = detect_dtype(config.dtype, dist.device)
    if not config.dry_run:
        build_what_is_missing(config, origin, dist)
    data = build_data(config, dist)
    policy, reference, judge, gold_judge = load_models(config, data.tokenizer, dist.device)
    models = {"generator": policy, "reference": reference, "judge": judge, "gold judge": gold_judge}
    rewards = Rewards(config, judge, load_tokenizer(config.judge_checkpoint) if judge is not None else None)
    evaluation = build_evaluation(config, policy, reference, rewards, gold_judge, data, dist, dtype)
    lines = list(plan(config, origin, models, rewards, data, dist, dtype))
    if config.dry_run:
        if dist.is_main:
            print(*(f"{key} = {value!r}" for key, value in asdict(config).items()), "", *lines,
                  "dry run: everything is in place, nothing was trained",
                  sep="\n")
        return dist.close()
    if dist.is_main:
        if not config.resume and set_aside(config.out_dir):
            print(f"{config.out_dir} held an earlier run, which is now in {config.out_dir}/previous")
        os.makedirs(config.out_dir, exist_ok=True)
        save_config(config, os.path.join(config.out_dir, "config.json"))
    logger = create_logger(config, dist, config.max_iters, evaluation.columns)
    logger.say("\n".join(lines))
    if config.compile:
        policy.states = torch.compile(policy.states, dynamic=True)
    trainer = GRPOTrainer(policy, reference, rewards, data, evaluation, config, logger, dist, dtype)
    if config.resume:
        trainer.resume()
    trainer.run()
    dist.close()


if __name__ == "__main__":
    run_script(main)
