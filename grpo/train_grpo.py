"""Trains with GRPO: a fill-in generator against a frozen judge, or a causal one for rewards.

python grpo/train_grpo.py config/grpo_example.py
python grpo/train_grpo.py config/grpo_arithmetic.py
python grpo/train_grpo.py config/grpo_example.py --learning_rate=1e-4 --seed=2
torchrun --nproc_per_node=2 --shutdown-timeout=900 grpo/train_grpo.py config/grpo_example.py
"""

import os
import sys
from functools import partial
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from core.checkpoint_manager import states
from core.config import load_config
from core.errors import run_script
from core.run import job, launch
from grpo.build import (
    build_data, build_evaluation, build_models, build_rewards, build_what_is_missing, check_features, with_template)
from grpo.grpo_config import GRPOConfig
from grpo.grpo_trainer import GRPOTrainer
from grpo.plan import plan, plan_of_settings, with_example


def main(argv):
    """Loads the generator, the frozen reference and the judge, then takes GRPO steps."""
    config, origin = load_config(GRPOConfig, with_example(argv))
    with job(config, config.generator_checkpoint, check_features) as dist:
        if build_what_is_missing(config, dist, plan_of_settings(config, origin, dist)):
            return
        config = with_template(config, origin)
        data = build_data(config, dist)
        models = build_models(config, data, dist)  # the generator, the frozen reference and the judge
        rewards = build_rewards(config, models, data, dist)
        evaluation = build_evaluation(config, models, rewards, data)
        make_trainer = partial(GRPOTrainer, models.policy, models.reference, rewards, data, evaluation, config)
        lines = list(plan(config, origin, models, rewards, data, dist))
        if config.doctor and not config.dry_run:
            raise SystemExit(0 if is_healthy(config, models, rewards, data, make_trainer, lines, dist) else 1)
        launch(make_trainer, config, origin, lines, evaluation.columns, dist)  # every step: grpo_training_step


def is_healthy(config, models, rewards, data, make_trainer, lines, dist):
    """The doctor's visit: prints the plan and what one step shows. Returns whether nothing is wrong."""
    from grpo.doctor.checks import check_up
    print(*lines, sep="\n", flush=True)
    trainer = make_trainer(SimpleNamespace(say=print), dist)
    if config.resume and states(config.absolute_out_dir):
        trainer.resume()
    healthy, page = check_up(config, models, rewards, data, dist, trainer.holds)
    print(*page, sep="\n")
    return healthy


if __name__ == "__main__":
    run_script(main)
