"""Trains with GRPO: a fill-in generator against a frozen judge, or a causal one for rewards.

python grpo/train_grpo.py config/grpo_example.py
python grpo/train_grpo.py config/grpo_arithmetic.py
python grpo/train_grpo.py config/grpo_example.py --learning_rate=1e-4 --seed=2
torchrun --nproc_per_node=2 --shutdown-timeout=900 grpo/train_grpo.py config/grpo_example.py
"""

import os
import sys
from functools import partial
from importlib import import_module
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.checkpoint_manager import states
from core.config import load_config
from core.data import has_prompts
from core.distributed import Distributed
from core.errors import check_version, run_script
from core.logger import create_logger
from core.models import is_small
from core.run import check_run_folder, naming_what_lowers_memory, recorded, run_folder
from grpo.build import build_data, build_evaluation, build_models, build_rewards, build_what_is_missing
from grpo.grpo_config import GRPOConfig
from grpo.grpo_trainer import GRPOTrainer
from grpo.plan import plan, plan_of_settings, with_example


def main(argv):
    """Config, device, data, models, evaluation, trainer; then run."""
    config, origin = load_config(GRPOConfig, with_example(argv))
    check_run_folder(config.absolute_out_dir, config.resume)
    if config.wandb_log or config.report_to:
        from core.trackers import check_trackers
        check_trackers(config)
    if config.sampler != "local":
        import_module(f"grpo.samplers.{config.sampler}").check(config)
    if config.parallel == "fsdp":
        check_version("torch.distributed.fsdp", torch.__version__, "parallel='fsdp'", "-r requirements.txt")
    small = is_small(config.generator_checkpoint)
    with Distributed(config.device, config.dtype, small) as dist, naming_what_lowers_memory(config):
        if build_what_is_missing(config, dist):
            if dist.is_main:
                print(*plan_of_settings(config, origin, dist), sep="\n")
                print("dry run: nothing was built or trained, and what is there was not checked")
            return
        if has_prompts(config.dataset):
            from grpo.template import with_template
            config = with_template(config, origin)
        elif config.template is None:
            config = config.varied(template="plain")
        data = build_data(config, dist)
        models = build_models(config, data, dist)
        rewards = build_rewards(config, models, data, dist)
        evaluation = build_evaluation(config, models, rewards, data)
        trainer_of = partial(GRPOTrainer, models.policy, models.reference, rewards, data, evaluation, config, dist=dist)
        lines = list(plan(config, origin, models, rewards, data, dist))
        if config.dry_run:
            if dist.is_main:
                print(*lines, "dry run: everything is in place, nothing was trained", sep="\n")
            return
        if config.doctor:
            from grpo.doctor.checks import check_up
            print(*lines, sep="\n", flush=True)
            trainer = trainer_of(SimpleNamespace(say=print))
            if config.resume and states(config.absolute_out_dir):
                trainer.resume()
            healthy, page = check_up(config, models, rewards, data, dist, trainer.holds)
            print(*page, sep="\n")
            raise SystemExit(0 if healthy else 1)
        with run_folder(config, dist) as resume:
            logger = create_logger(config, dist, config.max_iters, evaluation.columns)
            trainer = trainer_of(logger)
            if resume:
                trainer.resume()
            sampler = None  # the policy itself
            if config.sampler != "local":
                sampler = import_module(f"grpo.samplers.{config.sampler}").build(models.policy, config, dist)
            with recorded(config, origin, dist, trainer, resume, trainer.write_page):
                logger.say("\n".join(lines))
                trainer.run(sampler)


if __name__ == "__main__":
    run_script(main)
