"""Supervised training of a generator, a judge or a language model.

python core/pretrain.py config/pretrain_generator.py
python core/pretrain.py config/pretrain_judge.py --out_dir=out-judge
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.batch import unpack_batch
from core.checkpoint_manager import freeze, load_model, set_aside
from core.config import describe, load_config, run_script, save_config
from core.dataset_consumer import DatasetConsumer
from core.distributed import Distributed, detect_dtype
from core.judge import FilledText, judge_report
from core.logger import create_logger
from core.losses import supervised_sums
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, bare
from core.pretrain_config import PretrainConfig
from core.prompts import PromptConsumer, has_prompts
from core.recipes import build_missing_checkpoint
from core.trainer import COLUMNS, Trainer


def build_data(config, dist):
    """Windows of running text, or lessons in completing prompts if the dataset is one of prompts."""
    if has_prompts(config.dataset):
        if config.mode != LANGUAGE_MODEL:
            raise ValueError(f"dataset={config.dataset} has prompts to complete: set mode='language_model'")
        data = PromptConsumer(config.dataset, config.batch_size, config.seed, dist.rank, dist.world,
                              block_size=config.block_size)
        data.require("completion", "supervised training")
        return data
    return DatasetConsumer(config.dataset, config.mode if config.mode != SEQUENCE_SCORER else MASKED_FILL,
                           config.block_size, config.batch_size, config.seed, dist.rank, dist.world, config.masks,
                           config.mask_low, config.mask_high)


def build_model(config, data):
    """A new model, or the trunk (for the same mode the whole) of init_from."""
    tokenizer, judging = data.tokenizer, config.mode == SEQUENCE_SCORER
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig(config.mode, tokenizer.vocab_size, tokenizer.base_vocab_size, config.block_size + judging,
                          config.n_layer, config.n_head, config.n_embd, config.dropout, config.tied, config.judge_head))
    if config.init_from:
        start, _ = load_model(config.init_from, tokenizer=tokenizer, key="init_from")
        same = start.config.mode == config.mode and start.config.judge_head == config.judge_head
        for key in ("n_layer", "n_head", "n_embd", *(("tied",) if same else ())):
            if getattr(start.config, key) != getattr(config, key):
                raise ValueError(f"init_from={config.init_from} has {key}={getattr(start.config, key)}, "
                                 f"the config {getattr(config, key)}; make them equal")
        model.load_state_dict({k: v for k, v in start.state_dict().items() if same or k != "head.weight"}, strict=False)
    return model


def build_batches(config, data, dist):
    """(batches(split, step, micro), evaluate(model)) for the mode."""
    if config.mode != SEQUENCE_SCORER:
        batches = lambda split, step, micro=0: unpack_batch(data.batch(split, step, micro), dist.device)

        def evaluate(model):
            parts = [supervised_sums(model, *batches("val", step)) for step in range(config.eval_batches)]
            total = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
            return {"val_loss": total["loss"] / total["count"], "val_accuracy": total["correct"] / total["count"]}
        return batches, evaluate

    if not config.fill_checkpoints:
        raise ValueError("fill_checkpoints is empty: name the generators whose fills the judge learns from")
    fillers = [freeze(load_model(path, dist.device, MASKED_FILL, data.tokenizer, "fill_checkpoints")[0])
               for path in config.fill_checkpoints]
    filled = FilledText(data, fillers, dist.device, config.judge_head, config.clean_share, config.fill_temperature_low,
                        config.fill_temperature_high)

    def evaluate(model):
        reports = [judge_report(bare(model), data, filler, dist.device, config.eval_batches) for filler in fillers]
        return {f"{name}/{i}": value for i, report in enumerate(reports) for name, value in report.items()}
    return filled.batch, evaluate


def main(argv):
    """Trains the model that the config files and --key=value settings in argv describe."""
    config, origin = load_config(PretrainConfig, argv)
    dist = Distributed(config.device)
    dtype = detect_dtype(config.dtype, dist.device)
    data = build_data(config, dist)
    if dist.is_main:
        build_missing_checkpoint(config.init_from, config.init_recipe, "init_from", config.dataset, print)
    dist.barrier()
    model = build_model(config, data).to(dist.device)
    batches, evaluate = build_batches(config, data, dist)
    if dist.is_main and not config.resume and set_aside(config.out_dir):
        print(f"{config.out_dir} held an earlier run, which is now in {config.out_dir}/previous")
    logger = create_logger(config, dist, config.max_iters, COLUMNS)
    logger.say("\n".join(describe(config, origin)))
    logger.say(f"{config.mode}: {model.num_parameters() / 1e6:.2f} M parameters on {dist.device}, {dtype}; "
               f"{data.size()}; {config.batch_size} windows x "
               f"{config.gradient_accumulation_steps} accumulation x {dist.world} ranks = "
               f"{config.batch_size * config.gradient_accumulation_steps * dist.world} per step")
    if dist.is_main:
        save_config(config, os.path.join(config.out_dir, "config.json"))
    model = torch.compile(model) if config.compile else model
    trainer = Trainer(model, config, batches, evaluate, data.tokenizer, logger, dist, dtype)
    if config.resume:
        trainer.resume()
    trainer.run()
    dist.close()


if __name__ == "__main__":
    run_script(main)
