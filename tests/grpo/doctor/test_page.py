"""doctor=True, as a user runs it: the page, the exit code, and what it leaves alone."""

import os
import re
import sys

import pytest

from core import pretrain
from core.settings.script import exit_code
from grpo import train_grpo
from grpo.doctor.page import CHECKS, check_up, page
from grpo.doctor.rewards import OF_EACH
from tests.data.test_prepare import prepare
from tests.grpo.evaluation.patients import SHIPPED, completing, examined, filling, sums
from tests.tiny import ROOT, TEXT, jsonl, write_text_dataset

pytestmark = pytest.mark.slow  # it is the number of them that takes the time
SMALL = {"arithmetic": ["--problems=200"], "code": ["--problems=116"], "countdown": ["--problems=100"],
         "equations": ["--copies=3"], "sudoku": [], "example": None}  # of each config, arguments for a small dataset


@pytest.fixture
def ask_for(tmp_path, monkeypatch, capsys):
    """The command with doctor=True in this process: (exit code, stdout, stderr)."""
    def asked(*configs, **settings):
        settings |= {"device": "cpu", "out_dir": tmp_path / "out", "doctor": True}
        monkeypatch.setattr(sys, "argv", ["train", *configs, *(f"--{key}={x}" for key, x in settings.items())])
        code = exit_code(train_grpo.main)
        return code, *capsys.readouterr()
    return asked


@pytest.fixture
def ask(ask_for, tmp_path):
    """The same on the arithmetic task with these records."""
    def asked(records, **changes):
        settings = {"dataset": jsonl(tmp_path / "mine.jsonl", *records), "max_new_tokens": 48, "batch_size": 4,
                    "generator_checkpoint": f"{SHIPPED['arithmetic']}/generator.safetensors",
                    "reward_functions": "('math_number',)", "temperature": 1.0, "top_p": 1.0, "eval_problems": 4}
        return ask_for(**settings | changes)
    return asked


def test_a_healthy_run_passes_and_nothing_is_written(ask, tmp_path):
    before = sorted(os.listdir(tmp_path))
    code, out, err = ask(sums())
    assert code == 0 and err == "" and "nothing is wrong" in out and "WRONG" not in out, out
    assert "in memory alone; out_dir stays as it is" in out
    assert sorted({*os.listdir(tmp_path)} - {"mine.jsonl"}) == before
    titles = re.findall(r"^  (?:fine|look) +(.{18})  ", out, re.M)
    assert len(titles) == len(CHECKS) - 1 + len(OF_EACH), "all sentences but that of the judge"


def untrained_equations(folder):
    """The generator of config/grpo_equations.py, which is not shipped, after one step instead of two minutes."""
    pretrain.main(["config/pretrain_equations.py", f"--dataset={folder}/data", "--max_iters=1", "--warmup_iters=0",
                   "--batch_size=2", f"--out_dir={folder}/equations", "--device=cpu"])
    return f"{folder}/equations/model.safetensors"


@pytest.mark.parametrize(("name", "arguments"), SMALL.items())
def test_a_shipped_config_is_not_called_wrong(name, arguments, ask_for, tmp_path, capsys):
    changes = {"dataset": f"{tmp_path}/data", "batch_size": 4, "eval_problems": 4, "dtype": "float32"}
    if arguments is None:
        write_text_dataset(tmp_path / "data", TEXT)
    else:
        prepare(name).main([*arguments, f"--out={tmp_path}/data"])
    if name == "equations":
        changes["generator_checkpoint"] = untrained_equations(tmp_path)
    capsys.readouterr()
    code, out, err = ask_for(f"config/grpo_{name}.py", **changes)
    wrong = re.findall(r"^  WRONG  (.{18})  ", out, re.M)
    if name == "equations":  # it writes no true sum yet
        assert {title.strip() for title in wrong} <= {"gradient", "groups", "expected groups", "reward"}, out
    else:
        assert not wrong and code == 0 and err == "" and "nothing is wrong" in out, out


def test_every_shipped_config_is_asked_about():
    shipped = {path.removeprefix("grpo_").removesuffix(".py") for path in os.listdir(os.path.join(ROOT, "config"))
               if path.startswith("grpo_")}
    assert shipped - SMALL.keys() == {"electra"}, "its models are downloaded"


def test_an_earlier_run_stays_where_it_is(ask, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 7}\n')
    assert ask(sums())[0] == 0
    assert os.listdir(tmp_path / "out") == ["metrics.jsonl"]
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == '{"step": 7}\n'


def test_what_is_wrong_is_named_with_its_remedy_and_exit_code_1(ask):
    code, out, err = ask(sums(), max_new_tokens=3)
    assert code == 1 and err == "", out
    assert re.search(r"  WRONG  stop token +All 32 completions are cut", out) and "-> raise max_new_tokens=3" in out
    found = re.search(r"(\d+) of (\d+) checks found something wrong", out)
    assert int(found[1]) == out.count("  WRONG  ") and int(found[2]) == len(CHECKS) - 1 + len(OF_EACH)


def test_a_healthy_fill_in_run_passes(tmp_path):
    run = filling(tmp_path)
    healthy, lines = check_up(*vars(run).values())
    assert healthy and not any("WRONG" in line for line in lines), lines
    assert any("The judge gives" in line for line in lines)


def test_worker_processes_are_ended(tmp_path):
    run = completing(tmp_path)
    closed = []
    run.rewards.close = lambda: closed.append(True)
    run.dist.world = 2
    with pytest.raises(ValueError, match="one process"):
        check_up(*vars(run).values())
    assert closed == [True]


def test_lines_fit_a_terminal(tmp_path):
    x = examined(completing(tmp_path))
    found = [("a title", (False, "word " * 60, "do " * 60)), ("b", (None, "short", "look")),
             ("c", (True, "good", "not shown")), ("d", (None, "again", "look"))]
    lines = page(x, found)
    assert max(map(len, lines)) <= 120 and sum("->" in line for line in lines) == 3
    assert any(line.startswith("  look   b        short") for line in lines)
    assert "not shown" not in "".join(lines)
    assert [line.strip() for line in lines].count("-> as above") == 1, "a remedy is told once"
