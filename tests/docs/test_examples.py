"""Everything a page tells a reader to run is there and runs: configs, scripts, examples."""

import importlib.util
import pathlib
import re
import shlex
import string
import subprocess
import sys

import pytest

from core.config import load_config
from core.errors import exit_code
from core.files import read_object
from core.fill_in import UNMASK_ORDERS
from core.model import SEQUENCE_SCORER
from core.models import load_model
from core.pretrain import main as pretrain
from core.settings.other_names import names_elsewhere
from core.supervised.config import PretrainConfig
from grpo import losses
from grpo.grpo_config import GRPOConfig
from grpo.losses import OBJECTIVES
from grpo.rewards import PRESETS, REWARDS
from grpo.train_grpo import main as train_grpo
from tests.tiny import ROOT, all_settings, read_records, run_here

CONFIGS = sorted(pathlib.Path(ROOT, "config").glob("*.py"))
SCRIPTS = [str(p.relative_to(ROOT)) for folder in ("core", "grpo", "data", "bench", "docs", "tests") for p in sorted(
    pathlib.Path(ROOT, folder).rglob("*.py")) if "\n    run_script(main)\n" in p.read_text()]
# {setting: (its default here, its name and default in TRL)}, as docs/coming_from.md says
DIFFERENT = {"objective": ("grpo", "loss_type", "dapo"), "kl_beta": (0.1, "beta", 0.0),
             "temperature": (0.8, "temperature", 1.0), "top_p": (0.95, "top_p", 1.0),
             "max_new_tokens": (128, "max_completion_length", 512), "learning_rate": (1e-5, "learning_rate", 1e-6),
             "warmup_iters": (10, "warmup_steps", 0), "beta2": (0.95, "adam_beta2", 0.999),
             "weight_decay": (0.1, "weight_decay", 0.0), "grad_checkpoint": (False, "gradient_checkpointing", True),
             "save_interval": (50, "save_steps", 500), "seed": (1337, "seed", 42)}

RECIPE = "data/char_diffusion/recipe.sh"
COMMANDS_OF_PRESETS = r"""
python grpo/train_grpo.py --task_type=math --dataset=arithmetic --max_new_tokens=48 --template=plain \
    --generator_checkpoint=data/arithmetic/pretrained/generator.safetensors --optimizer=muon --learning_rate=3e-4
python grpo/train_grpo.py --task_type=code --dataset=code --max_new_tokens=96 --template=plain \
    --generator_checkpoint=data/code/pretrained/generator.safetensors --optimizer=muon --learning_rate=3e-4 \
    --reward_settings="{'length_max': 120}"
python grpo/train_grpo.py --task_type=general --dataset=code --max_new_tokens=96 \
    --generator_checkpoint=data/code/pretrained/generator.safetensors --optimizer=muon --learning_rate=3e-4 \
    --reward_settings="{'length_max': 120}"
python grpo/train_grpo.py --task_type=reasoning --dataset=arithmetic --max_new_tokens=48 --template=plain \
    --generator_checkpoint=data/arithmetic/pretrained/generator.safetensors --optimizer=muon --learning_rate=3e-4 \
    --reward_settings="{'length_max': 150}"
"""
OWN_ROWS = {  # {setting, or objective that is changed: lines of a config in docs/getting_started.md}
    "objective": '''
# objective.py: python grpo/train_grpo.py config/grpo_arithmetic.py objective.py
from grpo import losses

def no_clip(r, low, high, logp, advantage):
    """The term of a token, which is maximised."""
    return r * advantage

losses.SURROGATES["no_clip"] = no_clip
losses.OBJECTIVES["mine"] = losses.Objective(
    "-1/N sum_o 1/|o| sum_t r A", "no paper", advantage="group_mean", average="sequence", surrogate="no_clip")
objective = "mine"
advantage = None  # the first config sets one, which would win
''',
    "dro": '''
import dataclasses
from grpo import losses

losses.OBJECTIVES["dro"] = dataclasses.replace(losses.OBJECTIVES["dro"], constants={"beta": 0.1})
''',
    "kl_estimator": '''
from grpo.losses import KL_ESTIMATORS

KL_ESTIMATORS["r_k1"] = lambda logp, ref_logp: logp - ref_logp
kl_beta, kl_estimator = 0.05, "r_k1"
''',
    "unmask_order": '''
import torch
from core.fill_in import UNMASK_ORDERS

UNMASK_ORDERS["right_to_left"] = lambda noise: torch.linspace(1, 0, noise.shape[-1]).expand_as(noise)
UNMASK_ORDERS["unlikely_first"] = lambda logp, ids: logp.gather(1, ids)
unmask_order = "right_to_left"
'''}
ANY_ORDER = ("config/grpo_any_order.py", "--unmask_steps=2", "--max_new_tokens=6")
TINY = "--block_size=16 --batch_size=4 --max_iters=1 --dtype=float32 --device=cpu"
TINY_MODEL = "--n_layer=1 --n_head=2 --n_embd=16"
TINY_RUN = "--eval_problems=2 --group_size=2 --gold_judge_checkpoint=None"


def commands(text, page, **variables):
    """(main of the script, arguments) of each command of a block that a page shows."""
    assert text in pathlib.Path(ROOT, page).read_text()
    text = string.Template(text).substitute(variables)
    mains = {"core/pretrain.py": pretrain, "grpo/train_grpo.py": train_grpo}
    for command in text.replace("\\\n", " ").split("\npython ")[1:]:
        script, *arguments = shlex.split(command, comments=True)
        yield mains[script], arguments


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_config_is_one(path):
    script = re.match(r"# python (\S+) config/", path.read_text())[1]
    _, origin = load_config({"core/pretrain.py": PretrainConfig, "grpo/train_grpo.py": GRPOConfig}[script], [str(path)])
    assert len(origin) > 3


@pytest.mark.slow
def test_the_recipe_of_the_judges_starts_each_command_on_what_those_before_it_made(dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(f"{ROOT}/config")
    shapes = {}
    text = pathlib.Path(ROOT, RECIPE).read_text()
    for main, arguments in commands(text, RECIPE, G="out-generator/model.safetensors"):
        tiny = TINY_RUN
        if main is pretrain:
            tiny = TINY_MODEL
            config, _ = load_config(PretrainConfig, arguments)
            shape = config.n_layer, config.n_head, config.n_embd
            assert config.init_from is None or shapes[config.init_from] == shape, arguments
            shapes[f"{config.out_dir}/model.safetensors"] = shape
        main([*arguments, f"--dataset={dataset}", *TINY.split(), *tiny.split()])
    for judge in ("out-large-judge", "out-judge", "out-gold-judge"):
        assert load_model(f"{judge}/model.safetensors")[0].mode == SEQUENCE_SCORER


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_ROWS)
def test_a_config_that_adds_a_row_to_a_table_trains_with_it(name, tmp_path, monkeypatch):
    assert OWN_ROWS[name] in pathlib.Path(ROOT, "docs/getting_started.md").read_text()
    for table in (losses.OBJECTIVES, losses.SURROGATES, losses.KL_ESTIMATORS, UNMASK_ORDERS):
        for added in ("mine", "no_clip", "r_k1", "right_to_left", "unlikely_first"):
            monkeypatch.setitem(table, added, None)  # which is undone at the end
            del table[added]
    monkeypatch.setitem(losses.OBJECTIVES, "dro", losses.OBJECTIVES["dro"])
    monkeypatch.chdir(ROOT)
    (tmp_path / "own.py").write_text(OWN_ROWS[name])
    more = ANY_ORDER if name == "unmask_order" else ("config/grpo_arithmetic.py", "--max_new_tokens=6")
    more += ("--objective=dro",) if name == "dro" else ()
    train_grpo([*more, f"{tmp_path}/own.py", f"--out_dir={tmp_path}/out", "--max_iters=2", "--batch_size=2",
                "--group_size=2", "--eval_problems=2", "--eval_completions=2", "--dtype=float32", "--device=cpu"])
    saved = read_object(str(tmp_path / "out" / "config.json"), "config.json", "")
    expected = {"objective": "mine", "kl_estimator": "r_k1", "unmask_order": "right_to_left"}
    assert saved.get(name) == expected.get(name)
    assert (losses.OBJECTIVES["dro"].constants == {"beta": 0.1}) == (name == "dro")
    records = [record for record in read_records(tmp_path / "out" / "metrics.jsonl") if "loss" in record]
    assert len(records) == 2 and (name != "kl_estimator" or records[-1]["mean_kl"] != 0)


@pytest.mark.slow
def test_the_commands_of_the_presets_start(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("arithmetic", "code"):
        done = run_here(f"data/{name}/prepare.py", "--problems=100", f"--out={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
    found = []
    for main, arguments in commands(COMMANDS_OF_PRESETS, "docs/rewards.md"):
        config, _ = load_config(GRPOConfig, arguments)
        found.append(config.task_type)
        out = tmp_path / f"out-{config.task_type}"
        main([*arguments, f"--dataset={tmp_path}/{config.dataset}", f"--out_dir={out}", "--max_iters=1",
              "--batch_size=2", "--group_size=2", "--eval_problems=2", "--dtype=float32", "--device=cpu"])
        step = next(record for record in read_records(out / "metrics.jsonl") if "mean_reward" in record)
        assert {f"reward/{name}" for name in PRESETS[config.task_type]} <= step.keys()
    assert sorted(found) == sorted(PRESETS.keys() - {"fill_in"})


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
    assert out.startswith(begin) and f"\npython {script}" in begin
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


def test_both_halves_of_the_python_example_learn_cell_by_cell_as_in_a_notebook(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", sys.path[:])
    cells = re.split(r"(?m)^# %%.*\n", pathlib.Path("docs/from_python.py").read_text())
    names = {"__name__": "__main__"}
    learned = []
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
        rewards = re.findall(r"(?m)^\d+ (\d\.\d+) ", capsys.readouterr().out)
        if rewards:
            assert len(rewards) == 20
            learned.append(float(rewards[-1]) - float(rewards[0]))
    assert len(cells) == 6 and len(learned) == 2 and min(learned) > 0.1
    assert [step["mean_reward"] for step in names["history"]][-1] == pytest.approx(float(rewards[-1]), abs=1e-3)


@pytest.mark.slow
def test_without_transformers_the_second_half_of_the_python_example_ends_in_one_line_with_the_command():
    code = "import runpy, sys; sys.modules['transformers'] = None; runpy.run_path('docs/from_python.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 20
    assert len(done.stderr.splitlines()) == 1 and "pip install" in done.stderr


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
