"""Builds the data, the model and the batches of a supervised run, and checks that they fit each other."""

from functools import partial

import torch

from core.data import DatasetConsumer, has_prompts, is_file_of_records, unpack_batch
from core.errors import Mistake
from core.huggingface.files import check_target
from core.huggingface.load import model_mode
from core.judge import calculate_realness, log_odds
from core.model import GPT, MASKED_FILL, SEQUENCE_SCORER, freeze
from core.models import is_huggingface, load_model, load_tokenizer
from core.prompts import PromptConsumer, PromptFormat
from core.settings.setting import changed
from core.supervised.judge_training import filled_batch, judge_report
from core.trainer import supervised_sums


def build_data(config, dist):
    """Returns windows of running text or, for a dataset of prompts, prompts with their completions."""
    mode = mode_of(config)
    tokenizer = None  # the dataset's own
    if starts_from_huggingface(config) or (config.init_from and is_file_of_records(config.dataset)):
        tokenizer = load_tokenizer(config.init_from, "init_from")
    common = {
        "batch_size": config.batch_size,
        "seed": config.seed,
        "rank": dist.rank,
        "world": dist.world,
        "tokenizer": tokenizer}
    if not has_prompts(config.dataset):
        if mode == SEQUENCE_SCORER:
            mode = MASKED_FILL  # a judge reads texts whose masks generators have filled in
        return DatasetConsumer(
            config.dataset,
            mode,
            config.block_size,
            masks=config.masks,
            mask_low=config.mask_low,
            mask_high=config.mask_high,
            **common)
    if mode == SEQUENCE_SCORER:
        raise Mistake(f"dataset={config.dataset} has prompts to complete, from which a judge learns nothing; name one "
                      "of running text")
    data = PromptConsumer(
        config.dataset,
        format=PromptFormat.of(config),
        block_size=config.block_size,
        masked=mode == MASKED_FILL,
        **common)
    data.require_completions()
    return data


def starts_from_huggingface(config):
    return config.init_from is not None and is_huggingface(config.init_from, "init_from")


def mode_of(config):
    """Returns the mode of the model. A Hugging Face model determines its own mode."""
    if starts_from_huggingface(config):
        return model_mode(config.init_from, "init_from")
    return config.mode


def build_model(config, data, dist):
    """Builds a new model, or opens the Hugging Face model in init_from, with an adapter if the config sets one."""
    if not starts_from_huggingface(config):
        return build_new_model(config, data.tokenizer).to(dist.device)
    for key in changed(config, "dropout", "judge_head"):
        value = vars(config)[key]
        raise Mistake(f"{key}={value} is for new models; leave it out with init_from={config.init_from}")
    if config.export:
        check_target(config.export, config.has_adapter)
    model, _ = load_model(
        config.init_from,
        dist.device,
        tokenizer=data.tokenizer,
        key="init_from",
        adapter=config,
        dtype=dist.dtype)
    if model.mode == MASKED_FILL and data.has_prompts:
        model.answer_prompts()
    return model


def build_new_model(config, tokenizer):
    """Builds a model with the config's shape. With init_from, it starts from the weights of that model, except the
    output layer if their modes or heads differ."""
    if config.has_adapter:
        raise Mistake(f"{config.adapter_setting} is for Hugging Face models: set init_from to a folder or "
                      "hf:owner/name")
    torch.manual_seed(config.seed)
    model = GPT(config.shape(tokenizer.vocab_size, tokenizer.base_vocab_size))
    if not config.init_from:
        return model
    start, _ = load_model(config.init_from, tokenizer=tokenizer, key="init_from")
    same_output = start.mode == model.mode and start.judge_head == model.judge_head
    must_be_equal = ["n_layer", "n_head", "n_embd"]
    if same_output:
        must_be_equal.append("tied")
    has = vars(start.config)
    wanted = vars(model.config)
    for key in must_be_equal:
        if has[key] != wanted[key]:
            raise Mistake(f"init_from={config.init_from} has {key}={has[key]}, the config {wanted[key]}; make them "
                          "equal")
    weights = start.state_dict()
    if not same_output:
        weights.pop("head.weight", None)
    model.load_state_dict(weights, strict=False)
    return model


def build_batches(config, data, dist):
    """Returns the (batches, evaluation) of a Trainer for the mode of the model."""
    mode = mode_of(config)
    if mode == SEQUENCE_SCORER:
        return build_judge_batches(config, data, dist)
    if config.fill_checkpoints:
        raise Mistake(f"fill_checkpoints is for judges, and the model has mode {mode}: set mode='sequence_scorer', or "
                      "leave fill_checkpoints out")

    def batches(split, step, micro=0):
        return unpack_batch(data.batch(split, step, micro), dist.device)

    @torch.no_grad()
    def evaluation(model):
        def sums_of(step):
            return supervised_sums(model, *batches("val", step))

        found = dist.map(sums_of, range(config.eval_batches))
        # Sums of each type by itself: float32 would round large counts
        loss, correct, predictions = map(sum, zip(*found, strict=True))
        return {
            "val_loss": float(loss) / float(predictions),
            "val_accuracy": float(correct) / float(predictions)}

    return batches, evaluation


def build_judge_batches(config, data, dist):
    """Returns the (batches, evaluation) of a judge, which learns from texts filled in by the generators in
    fill_checkpoints."""
    if not config.fill_checkpoints:
        raise Mistake("fill_checkpoints is empty: name the generators whose fills the judge learns from")
    fillers = []
    for path in config.fill_checkpoints:
        filler = load_reader("fill_checkpoints", path, MASKED_FILL, config, data, dist)
        fillers.append(filler)

    def evaluation(model):
        metrics = {}
        for i, filler in enumerate(fillers):
            report = judge_report(model, data, filler, dist, config.eval_batches)
            for name, value in report.items():
                metrics[f"{name}/{i}"] = value
        return metrics

    batches = partial(filled_batch, data, fillers, dist.device, config)
    if config.teacher_checkpoint is not None:
        teacher = load_reader(
            "teacher_checkpoint", config.teacher_checkpoint, SEQUENCE_SCORER, config, data, dist)
        if teacher.judge_head == "cls":
            raise Mistake(f"teacher_checkpoint={config.teacher_checkpoint} has one number for a text (judge_head=cls), "
                          "but log-odds of each token are needed")
        batches = partial(with_log_odds, batches, teacher, dist)
    return batches, evaluation


def load_reader(key, path, mode, config, data, dist):
    """Loads the frozen model of the setting `key`, which reads whole texts of the dataset."""
    model, _ = load_model(path, dist.device, mode, data.tokenizer, key)
    if model.longest_input < config.block_size:
        raise Mistake(f"{key}={path} reads {model.longest_input} tokens, and block_size is {config.block_size}: lower "
                      "block_size")
    return freeze(model)


def with_log_odds(batches, teacher, dist, split, step, micro=0):
    """Makes a batch whose targets are the teacher's log-odds that the tokens of the text are true."""
    filled, _, mask = batches(split, step, micro)
    with dist.autocast():
        realness = calculate_realness(teacher, filled)
    return filled, log_odds(realness), mask
