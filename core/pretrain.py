"""Supervised training of a generator, a judge or a language model.

python core/pretrain.py config/pretrain_generator.py
python core/pretrain.py config/pretrain_judge.py --out_dir=out-judge
python core/pretrain.py --init_from=FOLDER --dataset=my.jsonl --optimizer=adamw --learning_rate=1e-5
The last command fine-tunes a Hugging Face model on prompt records; with --lora_rank=16, it trains an adapter.
"""

import pathlib
import sys
from functools import partial

root = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root))

from core.config import describe, load_config
from core.errors import run_script
from core.run import build_missing, job, launch
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.trainer import COLUMNS, Trainer


def main(argv):
    """Trains the model that the config files and --key=value settings in argv describe."""
    config, origin = load_config(PretrainConfig, argv)
    with job(config, config.init_from) as dist:
        if build_missing(config, ("init_from",), dist):
            return
        data = build_data(config, dist)
        model = build_model(config, data, dist)
        batches, evaluation = build_batches(config, data, dist)
        make_trainer = partial(Trainer, model, config, batches, evaluation, data.tokenizer)
        lines = plan(config, origin, model, data, dist)
        launch(make_trainer, config, origin, lines, COLUMNS, dist)


def plan(config, origin, model, data, dist):
    """Describes the planned run, in lines for the user."""
    windows = config.batch_size * config.gradient_accumulation_steps * dist.world
    millions = model.num_parameters() / 1e6
    ranks = "rank" if dist.world == 1 else "ranks"
    lines = describe(config, origin)
    lines.append(
        f"{model.mode}: {millions:.2f} M parameters on {dist.device}, {dist.dtype}; {data.size()}; "
        f"{config.batch_size} windows x {config.gradient_accumulation_steps} accumulation x {dist.world} {ranks} = "
        f"{windows} per step")
    lines.append(
        f"{config.max_iters} steps, at most {config.max_iters * windows * config.block_size:,} tokens; an evaluation "
        f"of {config.eval_batches} batches every {config.eval_interval} steps")
    if data.has_prompts:
        lines += data.describe_prompts(windows)
    return lines


if __name__ == "__main__":
    run_script(main)
