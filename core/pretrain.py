"""Supervised training of a generator, a judge or a language model.

python core/pretrain.py config/pretrain_generator.py
python core/pretrain.py config/pretrain_judge.py --out_dir=out-judge
python core/pretrain.py --init_from=FOLDER --dataset=my.jsonl --optimizer=adamw --learning_rate=1e-5
The last one fine-tunes a Hugging Face model on prompt records; with --lora_rank=16 an adapter of it.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.config import describe, load_config
from core.distributed import Distributed
from core.errors import run_script
from core.logger import create_logger
from core.models import is_small
from core.prompts import PromptConsumer
from core.run import build_missing, check_run_folder, naming_what_lowers_memory, recorded, run_folder
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.trainer import COLUMNS, Trainer


def main(argv):
    """Trains the model that the config files and --key=value settings in argv describe."""
    config, origin = load_config(PretrainConfig, argv)
    check_run_folder(config.absolute_out_dir, config.resume)
    if config.wandb_log or config.report_to:
        from core.trackers import check_trackers
        check_trackers(config)
    small = is_small(config.init_from)
    with Distributed(config.device, config.dtype, small) as dist, naming_what_lowers_memory(config):
        if build_missing(config, ("init_from",), dist):
            if dist.is_main:
                print("dry run: nothing was built or trained, and what is there was not checked")
            return
        data = build_data(config, dist)
        model = build_model(config, data, dist)
        batches, evaluate = build_batches(config, data, dist)
        lines = "\n".join([*describe(config, origin), *plan(config, model, data, dist)])
        if config.dry_run:
            if dist.is_main:
                print(lines, "dry run: everything is in place, nothing was trained", sep="\n")
            return
        with run_folder(config, dist) as resume:
            logger = create_logger(config, dist, config.max_iters, COLUMNS)
            if config.compile:
                model.states = torch.compile(model.states)
            trainer = Trainer(model, config, batches, evaluate, data.tokenizer, logger, dist)
            if resume:
                trainer.resume()
            with recorded(config, origin, dist, trainer, resume):
                logger.say(lines)
                trainer.run()


def plan(config, model, data, dist):
    """Lines that tell the user what is about to happen."""
    batch, ranks = config.batch_size * config.gradient_accumulation_steps, dist.world
    yield (f"{model.mode}: {model.num_parameters() / 1e6:.2f} M parameters on {dist.device}, {dist.dtype}; "
           f"{data.size()}; {config.batch_size} windows x {config.gradient_accumulation_steps} accumulation x {ranks} "
           f"ranks = {batch * ranks} per step")
    if isinstance(data, PromptConsumer):
        yield from data.describe_prompts(batch * ranks)


if __name__ == "__main__":
    run_script(main)
