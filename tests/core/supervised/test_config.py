"""The settings of supervised training."""

import pytest

from core.supervised.config import PretrainConfig


@pytest.mark.parametrize(("setting", "message"), [
    ({"mode": "poet"}, "mode='poet' is not one of language_model, masked_fill, sequence_scorer"),
    ({"n_layer": 0}, "n_layer=0 must be in "),
    ({"judge_head": "cls"}, "judge_head='cls' is for new judges: set mode='sequence_scorer'"),
    ({"mask_low": 0.7}, "mask_low=0.7 must be at most mask_high=0.6"),
    ({"fill_temperature_low": 2.0}, "fill_temperature_low=2.0 is above fill_temperature_high"),
    ({"load_in_4bit": True}, "set lora_rank=16"),
    ({"lora_rank": 4, "init_from": "out-pretrain/model"}, "init_from=out-pretrain/model lies in out_dir=out-pretrain")])
def test_values_that_cannot_work_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**setting)
