"""Trains with GRPO: a fill-in model against a frozen judge, or a language model.

python grpo/train_grpo.py config/grpo_example.py
python grpo/train_grpo.py config/grpo_arithmetic.py
python grpo/train_grpo.py config/grpo_example.py --learning_rate=1e-4 --seed=2
torchrun --nproc_per_node=2 --shutdown-timeout=900 grpo/train_grpo.py config/grpo_example.py
"""

import pathlib
import sys
from types import SimpleNamespace

root = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root))

from core.checkpoint_manager import states
from core.config import load_config
from core.errors import run_script
from core.logger import fitted
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
        lines = plan_of_settings(config, origin, dist)
        if build_what_is_missing(config, dist, lines):
            return
        config = with_template(config, origin)
        data = build_data(config, dist)
        models = build_models(config, data, dist)  # the generator, the frozen reference and the judge
        rewards = build_rewards(config, models, data, dist)
        evaluation = build_evaluation(config, models, rewards, data, dist)
        lines = list(plan(config, origin, models, rewards, data, dist))

        def make_trainer(logger, dist):
            evaluation.doing = logger.doing
            return GRPOTrainer(
                models.policy,
                models.reference,
                rewards,
                data,
                evaluation,
                config,
                logger,
                dist)

        if config.doctor and not config.dry_run:
            print(*map(fitted, lines), sep="\n", flush=True)
            trainer = make_trainer(SimpleNamespace(say=print, doing=None), dist)
            raise SystemExit(visit_doctor(config, models, rewards, data, trainer, dist))
        launch(make_trainer, config, origin, lines, evaluation.columns, dist)  # every step: grpo_training_step


def visit_doctor(config, models, rewards, data, trainer, dist):
    """Takes one step and prints the doctor's findings. Returns the exit code: 0 if nothing is wrong, else 1."""
    from grpo.doctor.checks import check_up
    if config.resume and states(config.absolute_out_dir):
        trainer.resume()
    healthy, page = check_up(config, models, rewards, data, dist, trainer.holds)
    print(*page, sep="\n")
    if healthy:
        return 0
    return 1


if __name__ == "__main__":
    run_script(main)
