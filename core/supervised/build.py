"""The data, the model and the batches of a supervised run, checked against each other before the first step."""

import torch

from core.dataset_consumer import DatasetConsumer, unpack_batch
from core.files.records import has_prompts, is_file_of_records, with_completion
from core.huggingface.files import check_target, model_mode
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, freeze
from core.models import is_huggingface, load_model, load_tokenizer
from core.prompts import PromptConsumer
from core.run.memory import memory_limit
from core.supervised.judge_training import FilledText, judge_report
from core.supervised.loss import supervised_sums

LARGE_RATE, LARGE_MODEL = 1e-3, 50e6  # learning rates above are refused for pretrained models with more parameters


def build_data(config, dist):
    """Windows of running text, or prompts with their completions if the dataset is one of prompts."""
    mode, tokenizer = mode_of(config), None
    if starts_from_huggingface(config) or config.init_from and is_file_of_records(config.dataset):
        tokenizer = load_tokenizer(config.init_from, "init_from")
    if has_prompts(config.dataset):
        if mode != LANGUAGE_MODEL:
            remedy = "use a causal model" if starts_from_huggingface(config) else "set mode='language_model'"
            raise ValueError(f"dataset={config.dataset} has prompts to complete: {remedy}")
        data = PromptConsumer(config.dataset, config.batch_size, config.seed, dist.rank, dist.world,
                              config.max_prompt_length, config.template, config.system_prompt,
                              block_size=config.block_size, tokenizer=tokenizer,
                              chat_template_kwargs=config.chat_template_kwargs)
        if not data.prepared:  # data/custom/prepare.py does this for a prepared one
            data.records = {split: [with_completion(r) for r in records] for split, records in data.records.items()}
        data.require("completion", "supervised training")
        return data
    return DatasetConsumer(config.dataset, mode if mode != SEQUENCE_SCORER else MASKED_FILL, config.block_size,
                           config.batch_size, config.seed, dist.rank, dist.world, config.masks, config.mask_low,
                           config.mask_high, tokenizer)


def starts_from_huggingface(config):
    """Whether the run fine-tunes a Hugging Face model."""
    return config.init_from is not None and is_huggingface(config.init_from, "init_from")


def mode_of(config):
    """The mode of the model: a Hugging Face model has its own."""
    return model_mode(config.init_from, "init_from") if starts_from_huggingface(config) else config.mode


def build_model(config, data, dist):
    """A Hugging Face model as init_from has it, or a new model; with init_from that starts from the named model's
    weights, all but the output layer if the mode differs."""
    if config.judge_head != "realness" and (config.mode != SEQUENCE_SCORER or starts_from_huggingface(config)):
        raise ValueError(f"judge_head={config.judge_head!r} is for new judges of this project: set "
                         "mode='sequence_scorer' and no Hugging Face init_from, or judge_head='realness'")
    if starts_from_huggingface(config):
        if config.dropout > 0:
            raise ValueError(f"dropout={config.dropout} is for new models; set dropout=0.0 with init_from="
                             f"{config.init_from}")
        if config.export:
            check_target(config.export, config.has_adapter, "export")
        model, _ = load_model(config.init_from, dist.device, None, data.tokenizer, "init_from", config, dist.dtype)
        if config.block_size > model.longest_input:
            raise ValueError(f"block_size={config.block_size} is larger than the {model.longest_input} of init_from="
                             f"{config.init_from}")
        if config.learning_rate > LARGE_RATE and model.num_parameters() > LARGE_MODEL:
            raise ValueError(f"learning_rate={config.learning_rate} is for small new models and would ruin the weights "
                             f"of init_from={config.init_from}; set optimizer='adamw', learning_rate=1e-5")
        return model
    if config.has_adapter:
        raise ValueError(f"{config.asked_for} is for Hugging Face models: set init_from to a folder or hf:owner/name")
    return build_new_model(config, data).to(dist.device)


def build_new_model(config, data):
    """A model of the config's shape, with the weights of init_from if it is set."""
    tokenizer, judging = data.tokenizer, config.mode == SEQUENCE_SCORER
    shape = GPTConfig(config.mode, tokenizer.vocab_size, tokenizer.base_vocab_size, config.block_size + judging,
                      config.n_layer, config.n_head, config.n_embd, config.dropout, config.tied, config.judge_head)
    size = 4 * (12 * config.n_layer * config.n_embd**2 + tokenizer.vocab_size * config.n_embd)  # bytes, about
    limit = memory_limit(torch.device("cpu"))
    if limit is not None and size > limit * 1e6:
        raise ValueError(f"n_layer={config.n_layer} and n_embd={config.n_embd} make a model of {size / 1e9:.0f} GB, "
                         f"but this machine has {limit / 1e3:.0f} GB of memory; make one of them smaller")
    torch.manual_seed(config.seed)
    model = GPT(shape)
    if config.init_from:
        start, _ = load_model(config.init_from, tokenizer=tokenizer, key="init_from")
        same = (start.config.mode, start.config.judge_head) == (config.mode, config.judge_head)
        for key in ("n_layer", "n_head", "n_embd", *(("tied",) if same else ())):
            if getattr(start.config, key) != getattr(config, key):
                raise ValueError(f"init_from={config.init_from} has {key}={getattr(start.config, key)}, "
                                 f"the config {getattr(config, key)}; make them equal")
        weights = {k: v for k, v in start.state_dict().items() if same or k != "head.weight"}
        model.load_state_dict(weights, strict=False)
    return model


def build_batches(config, data, dist):
    """(batches(split, step, micro), evaluate(model)) for the mode."""
    if mode_of(config) != SEQUENCE_SCORER:
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
