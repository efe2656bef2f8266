"""The table of settings under other projects' names agrees with the defaults, here and there."""

import ast
import dataclasses
import inspect
import pathlib
import re
import shlex
import typing

import pytest

from core.config import UsageError, load_config
from core.supervised.config import PretrainConfig
from grpo.advantages import ADVANTAGES
from grpo.grpo_config import GRPOConfig
from grpo.kl import KL_ESTIMATORS
from grpo.objectives import OBJECTIVES
from tests.test_docs import CODE, tables
from tests.tiny import ROOT

ROWS = [(heading[0], *cells) for heading, cells in tables("docs/coming_from.md")]
DEFAULTS = [(project, name, CODE.findall(here), *found.groups()) for project, name, here, told in ROWS
            if (found := re.fullmatch(r"(\S+) here, (\S+) there", told))]


def test_the_tables_name_settings_and_values_that_exist():
    values = {"`advantage`": ADVANTAGES, "`objective`": OBJECTIVES, "`kl_estimator`": KL_ESTIMATORS}
    fields = {f.name for cls in (GRPOConfig, PretrainConfig) for f in dataclasses.fields(cls)}
    assert len(ROWS) > 50
    for project, theirs, here, remark in ROWS:
        assert theirs and here, project
        named = CODE.findall(f"{here} {'' if here in values else remark}")
        assert {name for name in named if not name.startswith("python ")} <= fields, named
        if here in values:
            assert CODE.findall(remark) and set(CODE.findall(remark)) <= set(values[here]), remark


@pytest.mark.slow
def test_the_defaults_and_the_names_of_trl_are_those_of_trl():
    for _, name, keys, here, _ in DEFAULTS:
        assert [repr(getattr(GRPOConfig(), key)) for key in keys] == [here], name
    trl = pytest.importorskip("trl")
    there = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    told = {name: ast.literal_eval(value) for project, name, _, _, value in DEFAULTS if project == "TRL"}
    assert len(told) > 15 and told == {name: there[name] for name in told}
    rows = [(name.partition("=")[0], remark) for project, name, _, remark in ROWS if project == "TRL"]
    unknown = {name for name, _ in rows} - there.keys() - inspect.signature(trl.GRPOTrainer).parameters.keys()
    assert len(rows) > 35 and unknown == {name for name, remark in rows if remark.startswith("gone from TRL")}


def test_the_command_with_the_defaults_of_trl_sets_every_one_that_differs_in_optimization_and_sampling():
    """Sizes, seeds and intervals are the user's."""
    text = pathlib.Path(ROOT, "docs/coming_from.md").read_text().replace("\\\n", " ")
    config, origin = load_config(GRPOConfig, shlex.split(re.search("python grpo/train_grpo.py (.* --objective=dapo.*)", text)[1]))
    left_out = {"seed", "save_interval", "min_p"}
    differing = {keys[0]: there for project, _, keys, here, there in DEFAULTS if project == "TRL" and here != there}
    assert left_out < differing.keys()
    told = {key: ast.literal_eval(there) for key, there in differing.items() if key not in left_out}
    assert len(told) > 7 and {key: getattr(config, key) for key in told} == told
    assert config.objective == "dapo" and config.clip_high == 0.2 == OBJECTIVES["dapo"].clip_low


@pytest.mark.parametrize("cls", [GRPOConfig, PretrainConfig])
def test_an_unknown_name_of_the_tables_gets_a_setting_of_its_row_and_no_other(cls):
    known, asked = typing.get_type_hints(cls), 0
    for _, theirs, here, remark in ROWS:
        for name in (cell.strip(" .").partition("=")[0] for cell in theirs.split(",")):
            if name in known or name.endswith(".py"):
                continue
            asked += 1
            with pytest.raises(UsageError) as error:
                load_config(cls, [f"--{name}=1"])
            rows = [ours for _, other, ours, _ in ROWS if re.search(rf"(^|[ .,]){re.escape(name)}($|[,=])", other)]
            allowed = set(CODE.findall(" ".join([*rows, remark]))) & known.keys()
            offered = re.findall(r"did you mean (.*)\?", str(error.value))
            offered = set(offered[0].split(" or ")) if offered else set()
            assert offered <= allowed and bool(offered) == bool(allowed), (str(error.value), allowed)
    assert asked > 80


@pytest.mark.parametrize(("typed", "setting"), [
    ("beta", "kl_beta"), ("max_completion_length", "max_new_tokens"), ("actor_rollout_ref.rollout.n", "group_size"),
    ("num_iterations", "max_iters"), ("grup_size", "group_size")])
def test_a_name_of_another_project_or_a_slip_of_the_pen_is_translated(typed, setting):
    with pytest.raises(UsageError, match=rf"unknown key {typed}; did you mean {setting}(\?| or )"):
        load_config(GRPOConfig, [f"--{typed}=1"])


@pytest.mark.parametrize("typed", ["repetition_penalty", "time", "gamma", "betas", "tensor_parallel_size", "num_samples"])
def test_a_name_without_a_counterpart_gets_no_suggestion(typed):
    with pytest.raises(UsageError, match=f"unknown key {typed}; --help=all lists the keys"):
        load_config(GRPOConfig, [f"--{typed}=1"])
