"""The settings of supervised training."""

import dataclasses

import pytest

from core.config import RunConfig
from core.huggingface.settings import LoraConfig
from core.masking import MaskConfig
from core.supervised.config import PretrainConfig


@pytest.mark.parametrize(("setting", "message"), [
    ({"mode": "poet"}, "mode='poet' is not one of language_model, masked_fill, sequence_scorer"),
    ({"judge_head": "x"}, "judge_head='x' is not one of realness, cls"),
    ({"n_layer": 0}, "n_layer=0 must be at least 1"),
    ({"n_head": 0}, "n_head=0"), ({"n_embd": 0}, "n_embd=0"), ({"eval_batches": 0}, "eval_batches=0"),
    ({"block_size": 0}, "block_size=0 must be at least 2"), ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"mask_low": 0.7}, "mask_low=0.7 must be at most mask_high=0.6"), ({"mask_random": 0.0, "mask_span": 0.0}, "without masks"),
    ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
    ({"template": "poem"}, "template='poem' is not one of plain, chat, math, code, model"),
    ({"dropout": 1.0}, "dropout=1.0 must be below 1"), ({"clean_share": -0.1}, "clean_share=-0.1 must be at least 0"),
    ({"fill_temperature_low": 2.0}, "fill_temperature_low=2.0 must be at most fill_temperature_high=1.0"),
    ({"lora_rank": -1}, "lora_rank=-1"), ({"load_in_4bit": True}, "set lora_rank=16"),
    ({"lora_rank": 4, "init_from": "out-pretrain/model"}, "init_from=out-pretrain/model lies in out_dir=out-pretrain")])
def test_values_that_cannot_work_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**setting)


def test_it_shares_the_settings_of_runs_masks_and_adapters():
    c = PretrainConfig()
    names = {f.name for f in dataclasses.fields(c)}
    assert names > {f.name for cls in (RunConfig, MaskConfig, LoraConfig) for f in dataclasses.fields(cls)}
    assert c.masks == {"random": 1.0, "span": 1.0} and (c.mask_low, c.mask_high) == (0.1, 0.6)


def test_canonical_defaults():
    c = PretrainConfig()
    assert (c.batch_size, c.max_iters, c.optimizer, c.learning_rate, c.min_lr, c.warmup_iters, c.out_dir) == (
        64, 2000, "muon", 3e-3, None, 50, "out-pretrain")
    assert (c.log_interval, c.eval_interval, c.save_interval, c.max_bad_steps, c.eval_batches, c.seed) == (
        50, 500, 500, 10, 8, 1337)
