"""The data, the model and the batches of a supervised run, checked against each other before the first step."""

import torch

from core.checkpoint_manager import freeze, load_model
from core.dataset_consumer import DatasetConsumer, unpack_batch
from core.judge import FilledText, judge_report
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig
from core.prompts import PromptConsumer, has_prompts
from core.supervised_loss import supervised_sums


def build_data(config, dist):
    """Windows of running text, or prompts with their completions if the dataset is one of prompts."""
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
    """A new model. With init_from it starts from that model's weights, all but the output layer if the mode differs."""
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
        reports = [judge_report(model, data, filler, dist.device, config.eval_batches) for filler in fillers]
        return {f"{name}/{i}": value for i, report in enumerate(reports) for name, value in report.items()}
    return filled.batch, evaluate
