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

from core.checkpoint_manager import set_aside
from core.config import load_config, run_script, save_config
from core.distributed import Distributed
from core.logger import create_logger
from grpo.build import (build_data, build_evaluation, build_models, build_rewards, build_what_is_missing,
                        choose_judge_readings, plan)
from grpo.grpo_config import GRPOConfig
from grpo.grpo_trainer import GRPOTrainer


def main(argv):
    """Config, device, data, models, evaluation, trainer; then run."""
    config, origin = load_config(GRPOConfig, argv)
    dist = Distributed(config.device, config.dtype)
    if not config.dry_run:
        build_what_is_missing(config, origin, dist)
    data = build_data(config, dist)
    models = build_models(config, data, dist)
    rewards = build_rewards(config, models, data, dist)
    evaluation = build_evaluation(config, models, rewards, data)
    lines = list(plan(config, origin, models, rewards, data, dist))
    if config.dry_run:
        if dist.is_main:
            print(*(f"{key} = {value!r}" for key, value in asdict(config).items()), "", *lines,
                  "dry run: everything is in place, nothing was trained",
                  sep="\n")
        return dist.close()
    dist.barrier()  # every rank has read its checkpoints, one of which may be about to move
    if dist.is_main and not config.resume and (previous := set_aside(config.out_dir)):
        print(f"{config.out_dir} held an earlier run, which is now in {previous}")
    logger = create_logger(config, dist, config.max_iters, evaluation.columns)
    logger.say("\n".join(lines))
    trainer = GRPOTrainer(models.policy, models.reference, rewards, data, evaluation, config, logger, dist)
    if config.resume:
        trainer.resume()
    for line in choose_judge_readings(models, data, config, dist, trainer.notes):
        logger.say(line)
    if dist.is_main:  # only now: a resume that is refused leaves the settings of the run as they are
        save_config(config, os.path.join(config.out_dir, "config.json"))
    trainer.run()
    dist.close()


if __name__ == "__main__":
    run_script(main)
