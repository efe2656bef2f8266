"""Ranges of numbers: what lies in an interval, and that every number of every config has one."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from core import config, masking, model, sample
from core.huggingface import settings as huggingface
from core.settings.help import allowed_types
from core.settings.ranges import check_choices, check_ranges, is_inside
from core.supervised import config as pretrain_config
from grpo import environments, grpo_config
from grpo.reward_functions import settings as rewards
from grpo.samplers import settings as samplers
from grpo.sandbox import settings as sandbox

SHARED = (config.RANGES, masking.RANGES, huggingface.RANGES)


@pytest.mark.parametrize(("value", "interval", "inside"), [
    (1, "[1, 5]", True), (5, "[1, 5]", True), (0, "[1, 5]", False), (6, "[1, 5]", False), (1, "(1, 5)", False),
    (5, "(1, 5)", False), (1.001, "(1, 5)", True), (math.nan, "[1, 5]", False), (math.inf, "[0, inf)", False),
    (-math.inf, "[0, inf)", False), (1e308, "[0, inf)", True), (10**30, "[0, 1e6]", False)])
def test_a_bracket_tells_whether_an_interval_has_its_end(value, interval, inside):
    assert is_inside(value, interval) is inside


def test_the_first_setting_outside_is_named_and_none_passes():
    settings = SimpleNamespace(a=None, b=2, c=-1.0)
    check_ranges(settings, {"a": "[1, 2]", "b": "[1, 2]"})
    with pytest.raises(ValueError, match=r"^c=-1.0 must be in .0, 1.$"):
        check_ranges(settings, {"a": "[1, 2]", "c": "[0, 1]"})


@pytest.mark.parametrize(("cls", "tables"), [
    (pretrain_config.PretrainConfig, (*SHARED, pretrain_config.RANGES, ("n_layer", "n_head", "n_embd", "dropout"))),
    (grpo_config.GRPOConfig, (*SHARED, samplers.RANGES, rewards.RANGES, sandbox.RANGES,
                              environments.RANGES, grpo_config.RANGES)),
    (model.GPTConfig, (model.RANGES,)), (sample.SampleConfig, (sample.RANGES,))])
def test_every_number_of_a_config_has_a_range(cls, tables):
    numbers = {f.name for f in dataclasses.fields(cls) if {int, float} & set(allowed_types(f.type))}
    assert numbers == set().union(*tables)
    for key in numbers:
        with pytest.raises(ValueError, match=f"^{key}=-1 must be "):
            cls(**{key: -1})


def test_a_setting_that_is_none_of_its_choices_is_named_with_them():
    check_choices(SimpleNamespace(a=None, b="x"), {"a": (None, 1), "b": ("x", "y")})
    with pytest.raises(ValueError, match="^b='z' is not one of x, y$"):
        check_choices(SimpleNamespace(b="z"), {"b": ("x", "y")})
