"""doctor=True, as a user runs it: the page, the exit code, and what it leaves alone."""

import os
import re
import sys

import pytest

from core import pretrain
from core.settings.script import exit_code
from grpo import train_grpo
from grpo.doctor.checks import CHECKS, OF_EACH_REWARD, check_up, page
from tests.data.test_prepare import prepare
from tests.grpo.evaluation.patients import SHIPPED, completing, sums
from tests.tiny import ROOT, TEXT, jsonl, write_text_dataset

SMALL = {"any_order": ["--problems=100"], "arithmetic": ["--problems=200"], "code": ["--problems=116"], "countdown": ["--problems=100"],
         "equations": ["--copies=3"], "guess": ["--most=16"], "sudoku": [], "example": None}  # of each config, arguments for a small dataset
DATASET = {"any_order": "countdown"}  # of a config that is not named after its own


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """The command with doctor=True in this process: (exit code, stdout, stderr)."""
    def asked(*configs, **settings):
        settings |= {"device": "cpu", "out_dir": tmp_path / "out", "doctor": True, "batch_size": 4, "eval_problems": 4}
        monkeypatch.setattr(sys, "argv", ["train", *configs, *(f"--{key}={x}" for key, x in settings.items())])
        capsys.readouterr()
        code = exit_code(train_grpo.main)
        return code, *capsys.readouterr()
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("most", [48, 3])
def test_what_is_wrong_is_named_with_its_remedy_and_the_folder_stays_as_it_is(ask, tmp_path, most):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 7}\n')
    code, out, err = ask(
        dataset=jsonl(tmp_path / "mine.jsonl", *sums()), reward_functions="math_number", max_new_tokens=most,
        generator_checkpoint=f"{SHIPPED['arithmetic']}/generator.safetensors", temperature=1.0, top_p=1.0)
    assert err == "" and sorted(os.listdir(tmp_path)) == ["mine.jsonl", "out"]
    assert os.listdir(tmp_path / "out") == ["metrics.jsonl"]
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == '{"step": 7}\n'
    checks = len(CHECKS) - 2 + len(OF_EACH_REWARD)  # all but those of the judge and of environments
    verdicts = re.findall(r"^  (fine|WRONG) +(.{16})  ", out, re.M)
    assert len(verdicts) == checks
    wrong = [title.strip() for verdict, title in verdicts if verdict == "WRONG"]
    if most == 48:
        assert code == 0 and not wrong and "nothing is wrong" in out, out
    else:
        assert code == 1 and "end" in wrong and "-> set max_new_tokens=" in out
        assert f"{len(wrong)} of {checks} checks found something wrong" in out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), SMALL.items())
def test_a_shipped_config_is_not_called_wrong(name, arguments, ask, tmp_path):
    changes = {"dataset": f"{tmp_path}/data", "dtype": "float32"}
    if arguments is None:
        write_text_dataset(tmp_path / "data", TEXT)
    else:
        prepare(DATASET.get(name, name)).main([*arguments, f"--out={tmp_path}/data"])
    if name == "equations":  # its generator is not shipped; after one step instead of two minutes it writes no true sum
        pretrain.main(["config/pretrain_equations.py", f"--dataset={tmp_path}/data", "--max_iters=1", "--device=cpu",
                       "--warmup_iters=0", "--batch_size=2", f"--out_dir={tmp_path}/equations"])
        changes["generator_checkpoint"] = f"{tmp_path}/equations/model.safetensors"
    code, out, err = ask(f"config/grpo_{name}.py", **changes)
    wrong = re.findall(r"^  WRONG  (.{16})  ", out, re.M)
    if name == "equations":
        assert {title.strip() for title in wrong} <= {"gradient"}, out
    else:
        assert not wrong and code == 0 and err == "" and "nothing is wrong" in out, out
    assert name != "example" or "The judge gives" in out
    assert (name == "guess") == ("equal starts" in out)


def test_every_shipped_config_is_asked_about():
    shipped = {path.removeprefix("grpo_").removesuffix(".py") for path in os.listdir(os.path.join(ROOT, "config"))
               if path.startswith("grpo_")}
    assert shipped - SMALL.keys() == {"calculator", "gsm8k", "gym", "math", "smollm2"}, "their models come from elsewhere, or are large"


def test_several_ranks_are_refused_and_worker_processes_are_ended(tmp_path):
    run = completing(tmp_path)
    closed = []
    run.rewards.close = lambda: closed.append(True)
    run.dist.world = 2
    with pytest.raises(ValueError, match="in one process, not in 2: start it without torchrun"):
        check_up(*vars(run).values())
    assert closed == [True]


def test_lines_fit_a_terminal():
    lines = page([("a title", (False, "word " * 60, "do " * 60)), ("c", (True, "good", "not shown"))])
    assert max(map(len, lines)) <= 120 and "not shown" not in "".join(lines) and lines[-1] == "  fine   c                 good"
