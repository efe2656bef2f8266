"""Everything a page tells a reader to run is there and runs: configs, scripts, examples."""

import importlib.util
import pathlib
import re
import sys

import pytest

from core.config import load_config
from core.settings.script import exit_code
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from grpo.losses import OBJECTIVES
from tests.tiny import ROOT, run_script

CONFIGS = sorted(pathlib.Path(ROOT, "config").glob("*.py"))
SCRIPTS = [str(p.relative_to(ROOT)) for folder in ("core", "grpo", "data", "bench") for p in sorted(
    pathlib.Path(ROOT, folder).rglob("*.py")) if "\n    run_script(main)\n" in p.read_text()]
# {setting: (its default here, its default in TRL)}, as docs/coming_from.md says
DIFFERENT = {"learning_rate": (1e-5, 1e-6), "temperature": (0.8, 1.0), "top_p": (0.95, 1.0), "kl_beta": (0.1, 0.0),
             "clip_high": (None, None)}
IN_TRL = {"kl_beta": "beta", "clip_high": "epsilon_high"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_config_is_one(path):
    script = re.match(r"# python (\S+) config/", path.read_text())[1]
    _, origin = load_config({"core/pretrain.py": PretrainConfig, "grpo/train_grpo.py": GRPOConfig}[script], [str(path)])
    assert len(origin) > 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(f"script_{script.replace('/', '_')}", pathlib.Path(ROOT, script))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    code, (out, err) = exit_code(module.main), capsys.readouterr()
    assert code in (0, None) and "--" in out and not err, err


@pytest.mark.slow
def test_the_defaults_that_differ_from_trl_are_those_of_both():
    trl = pytest.importorskip("trl").GRPOConfig
    for key, (ours, theirs) in DIFFERENT.items():
        assert getattr(GRPOConfig(), key) == ours and getattr(trl, IN_TRL.get(key, key)) == theirs, key
    assert OBJECTIVES["dapo"].clip_high == 0.28 and trl.epsilon == 0.2
