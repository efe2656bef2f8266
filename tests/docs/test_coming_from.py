"""The table of settings under other projects' names agrees with the defaults, here and there."""

import ast
import dataclasses
import re

import pytest

from core.config import load_config
from grpo.grpo_config import GRPOConfig
from tests.test_docs import CODE, tables

ROWS = [(heading[0], *cells) for heading, cells in tables("docs/coming_from.md")]
DEFAULTS = [(project, name, CODE.findall(here), *found.groups()) for project, name, here, told in ROWS
            if (found := re.fullmatch(r"(\S+) here, (\S+) there", told))]


def test_the_defaults_here_are_those_of_the_config():
    for _, name, keys, here, _ in DEFAULTS:
        assert [repr(getattr(GRPOConfig(), key)) for key in keys] == [here], name
    assert len(DEFAULTS) > 15


def test_the_defaults_of_trl_are_those_of_trl():
    trl = pytest.importorskip("trl")
    there = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    rows = [(name, ast.literal_eval(value)) for project, name, _, _, value in DEFAULTS if project == "TRL"]
    assert len(rows) > 15 and [(name, there[name]) for name, _ in rows] == rows


@pytest.mark.parametrize("arguments", [
    ["--objective=gspo"], ["--advantage=batch_std"], ["--advantage=group_mean"], ["--reference_mode=ema"],
    ["--reference_mode=periodic", "--reference_update_freq=64"], ["--reward_normalisation=group"],
    ["--zero_std=resample"], ["--resume=auto"], ["--head_dtype=float32"], ["--template=model"],
    ["--min_lr=1e-5", "--learning_rate=1e-5"], ["--optimizer=muon"], ["--lora_rank=8", "--load_in_4bit=True"],
    ["--kl_estimator=k3"], ["--clip_cap=3.0"], ["--stop_sequences=('END',)"], ["--report_to=('wandb',)"]])
def test_the_values_that_the_table_names_are_accepted(arguments):
    assert load_config(GRPOConfig, arguments)[0] != GRPOConfig()
