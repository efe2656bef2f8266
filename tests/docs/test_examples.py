"""Everything a page tells a reader to run is there and runs: configs, scripts, examples."""

import importlib.util
import pathlib
import re
import sys

import pytest

from core.config import load_config
from core.errors import exit_code
from core.settings.other_names import names_elsewhere
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from grpo.losses import OBJECTIVES
from grpo.rewards import PRESETS, REWARDS
from tests.tiny import ROOT, all_settings, run_here, run_script

CONFIGS = sorted(pathlib.Path(ROOT, "config").glob("*.py"))
SCRIPTS = [str(p.relative_to(ROOT)) for folder in ("core", "grpo", "data", "bench") for p in sorted(
    pathlib.Path(ROOT, folder).rglob("*.py")) if "\n    run_script(main)\n" in p.read_text()]
# {setting: (its default here, its name and default in TRL)}, as docs/coming_from.md says
DIFFERENT = {"objective": ("grpo", "loss_type", "dapo"), "kl_beta": (0.1, "beta", 0.0),
             "temperature": (0.8, "temperature", 1.0), "top_p": (0.95, "top_p", 1.0),
             "max_new_tokens": (128, "max_completion_length", 512), "learning_rate": (1e-5, "learning_rate", 1e-6),
             "warmup_iters": (10, "warmup_steps", 0), "beta2": (0.95, "adam_beta2", 0.999),
             "weight_decay": (0.1, "weight_decay", 0.0), "grad_checkpoint": (False, "gradient_checkpointing", True),
             "save_interval": (50, "save_steps", 500), "seed": (1337, "seed", 42)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_config_is_one(path):
    script = re.match(r"# python (\S+) config/", path.read_text())[1]
    _, origin = load_config({"core/pretrain.py": PretrainConfig, "grpo/train_grpo.py": GRPOConfig}[script], [str(path)])
    assert len(origin) > 3


@pytest.mark.parametrize("argument", ("--help", "-h", "--help=all"))
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_begins_with_the_docstring_of_the_script(script, argument, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(f"script_{script.replace('/', '_')}", pathlib.Path(ROOT, script))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first = {"bench/bench.py": ["fill"], "grpo/tools/check_loss.py": ["my_loss.py:loss"]}.get(script, [])
    monkeypatch.setattr(sys, "argv", [script, *first, argument])
    code, (out, err) = exit_code(module.main), capsys.readouterr()
    assert code in (0, None) and not err, err
    begin = module.__doc__.strip() + "\n"
    assert out.startswith(begin) and "--" in out
    assert hasattr(module, "load_config") == ("\n  --" in out.removeprefix(begin)), "settings follow, if there are any"


@pytest.mark.slow
def test_the_defaults_that_differ_from_trl_are_those_of_both():
    trl = pytest.importorskip("trl").GRPOConfig
    for key, (ours, name, theirs) in DIFFERENT.items():
        assert (getattr(GRPOConfig(), key), getattr(trl, name)) == (ours, theirs), key
    assert (OBJECTIVES["dapo"].clip_high, trl.epsilon, trl.epsilon_high) == (0.28, 0.2, None)


def test_names_of_other_projects_lead_to_settings():
    fields = all_settings(GRPOConfig, PretrainConfig)
    for name, (ours, note) in names_elsewhere().items():
        assert {setting.partition("=")[0] for setting in ours} <= fields - {name}, name
        assert ours or note, name


@pytest.mark.slow
def test_the_python_example_learns():
    done = run_script("docs/from_python.py")
    assert done.returncode == 0, done.stderr
    rewards = [float(line.split()[1]) for line in done.stdout.strip().split("\n")]
    assert len(rewards) == 20 and rewards[-1] > rewards[0] + 0.1


def test_the_map_has_a_line_for_every_file():
    done = run_here("grpo/tools/map.py", "core", "grpo", "bench")
    files = [p for folder in ("core", "grpo", "bench") for p in pathlib.Path(ROOT, folder).rglob("*.py")]
    entries = [line for line in done.stdout.split("\n") if line.startswith("  ")]
    assert len(entries) >= len([p for p in files if p.name != "__init__.py"])
    assert all(len(line.split()) > 2 for line in entries)


def test_the_presets_are_those_promised_and_the_table_of_rewards_has_every_name():
    assert PRESETS["math"] == ("math_format", "math_answer", "math_number")
    assert PRESETS["code"] == ("code_correctness", "length_penalty")
    assert (PRESETS["general"], PRESETS["reasoning"]) == (("length_penalty",), ("math_format", "length_penalty"))
    shown = run_here("grpo/rewards.py").stdout.split()
    assert {*REWARDS, *PRESETS} <= {*shown}
