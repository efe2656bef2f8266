"""The settings of supervised training."""

import pytest

from core.supervised.config import PretrainConfig


@pytest.mark.parametrize(("setting", "message"), [
    ({"mode": "poet"}, "mode='poet'"),
    ({"judge_head": "cls"}, "judge_head='cls' is a setting of mode=sequence_scorer"),
    ({"mask_low": 0.7}, "mask_low=0.7 .* mask_high"),
    ({"mode": "sequence_scorer", "fill_temperature_low": 2.0}, "fill_temperature_low=2.0"),
    ({"lora_rank": 4, "init_from": "out-pretrain/model"}, "init_from='out-pretrain/model' .* out_dir")])
def test_values_that_cannot_work_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig(**setting)
