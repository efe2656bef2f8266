"""The tables of settings under other projects' names agree with the code, here and there."""

import ast
import dataclasses
import re

import pytest

from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from grpo.losses import ADVANTAGES, KL_ESTIMATORS, OBJECTIVES
from tests.test_docs import CODE, tables
from tests.tiny import all_settings

ROWS = [(heading[0], *cells) for heading, cells in tables("docs/coming_from.md")]


def test_the_tables_name_settings_and_values_that_exist():
    values = {"`advantage`": ADVANTAGES, "`objective`": OBJECTIVES, "`kl_estimator`": KL_ESTIMATORS}
    fields = all_settings(GRPOConfig, PretrainConfig)
    for _, _, here, remark in ROWS:
        named = CODE.findall(f"{here} {'' if here in values else remark}")
        assert {name for name in named if not name.startswith("python ")} <= fields, named
        assert here not in values or set(CODE.findall(remark)) <= set(values[here]), remark


@pytest.mark.slow
def test_the_defaults_are_those_of_both_projects():
    trl = pytest.importorskip("trl")
    theirs, told = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}, 0
    for project, name, keys, remark in ROWS:
        if project == "TRL" and (found := re.fullmatch(r"(\S+) here, (\S+) there", remark)):
            told += 1
            assert found[1] == repr(getattr(GRPOConfig(), keys.strip("`")))
            assert ast.literal_eval(found[2]) == theirs[name], name
    assert told > 15
