"""A resumed run has the bits of the uninterrupted one; what a run writes; the command and the changes that it tells."""

import dataclasses
import json
import os
import re
import shlex
import signal

import pytest
import torch

from core import resume
from core.checkpoint_manager import check_same_step
from core.distributed import Distributed
from core.errors import Mistake
from core.models import load_model
from core.resume import changed_since, resume_command
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from grpo.report.page import write_report
from tests.tiny import all_settings, same, same_momentum, without_clock
from tests.trainers import evaluated_trainer, logged_keys, records, run, trainer, training_records

pytestmark = pytest.mark.usefixtures("without_pictures")


def expect_bits(whole, resumed):
    """A resumed run has the weights, the momentum and the counts of the uninterrupted one, to the last bit."""
    assert same(whole.policy, resumed.policy) and same_momentum(whole.optimizers, resumed.optimizers)
    assert whole.reference is None or same(whole.reference, resumed.reference)
    for name in ("step", "kl_beta", "iteration", "last_evaluation", "empty_steps", "skipped_steps"):
        assert getattr(whole, name) == getattr(resumed, name), name
    assert whole.buffer.stored == resumed.buffer.stored
    assert whole.buffer.evaluations[0] == resumed.buffer.evaluations[0]


@pytest.mark.parametrize("settings", [
    {"ppo_epochs": 2, "minibatches": 2, "top_p": 0.9}, {"reference_mode": "ema", "ema_alpha": 0.8, "kl_target": 1e-3},
    {"reference_mode": "periodic", "reference_update_freq": 2, "kl_in_reward": True},
    {"reference_mode": "none", "kl_beta": 0.0, "ppo_epochs": 3}], ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one(dataset, tmp_path, settings):
    settings = settings | {"lr_decay_iters": 8}
    whole = run(trainer(dataset, tmp_path / "whole", max_iters=8, **settings))
    cut = run(trainer(dataset, tmp_path / "cut", max_iters=5, **settings))
    assert cut.buffer.queue or "ppo_epochs" not in settings, "it was cut within an iteration"
    expect_bits(whole, run(trainer(dataset, tmp_path / "cut", max_iters=8, **settings), resume=True))


@pytest.mark.parametrize("place, step", [("rewards", 1), ("rewards", 3), ("evaluation", 3)])
def test_after_a_signal_the_run_is_saved_at_once_and_the_resumed_one_has_the_same_bits(dataset, tmp_path, capsys, place,
                                                                                     step):
    """An evaluation that the signal came before is the resumed run's."""
    settings = {"max_iters": 6, "ppo_epochs": 2, "reference_mode": "ema", "kl_target": 1e-3}
    whole = run(evaluated_trainer(dataset, tmp_path / "whole", **settings))
    cut = evaluated_trainer(dataset, tmp_path / "cut", **settings)
    inner = getattr(cut, place)

    def signalling(*arguments):
        if cut.step == (step if place == "evaluation" else step - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*arguments)

    setattr(cut, place, signalling)
    cut.run()
    assert (cut.step, cut.evaluated) == (step, (place, step) != ("rewards", 3))
    assert cut.stopped_by
    told = capsys.readouterr().out.strip().split("\n")[-1]
    assert "resume=True" in told and str(tmp_path / "cut") in told, "no script of this project was called"
    resumed = run(evaluated_trainer(dataset, tmp_path / "cut", **settings), resume=True)
    expect_bits(whole, resumed)
    assert whole.buffer.evaluations == resumed.buffer.evaluations
    one, two = (without_clock(records(t.config.out_dir)) for t in (whole, resumed))
    assert one == two


def tables_of(path):
    """The tables of figures of a page, without the time at which it was written."""
    html = path.read_text(encoding="utf-8")
    return re.findall(r'<table class="numbers">.*?</table>|<figure>.*?</figure>', html, re.S)


def test_the_page_has_the_evaluations_of_the_buffer_those_before_a_resume_too(dataset, tmp_path):
    whole = run(evaluated_trainer(dataset, tmp_path / "whole", max_iters=6))
    whole.write_page()
    by_trainer = tables_of(tmp_path / "whole" / "report.html")
    write_report(str(tmp_path / "whole"))
    assert tables_of(tmp_path / "whole" / "report.html") == by_trainer, "as metrics.jsonl has them"
    run(evaluated_trainer(dataset, tmp_path / "cut", max_iters=3))
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_text("".join(line for line in path.open() if "eval/" not in line))
    cut = run(evaluated_trainer(dataset, tmp_path / "cut", max_iters=6), resume=True)
    cut.write_page()
    held_out = [part for part in by_trainer if "eval/" in part or "<table" in part]
    assert len(held_out) > 2 and set(held_out) <= set(tables_of(tmp_path / "cut" / "report.html"))


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path, monkeypatch):
    monkeypatch.undo()  # with the picture
    t = run(evaluated_trainer(dataset, tmp_path, max_iters=5))
    assert {int(s["step"]) for o in t.optimizers for s in o.state_dict()["state"].values()} == {5}
    written = "console.log curves.png metrics.jsonl model.safetensors report.html samples.jsonl state.pt"
    assert set(written.split()) <= set(os.listdir(tmp_path))
    final, facts = load_model(str(tmp_path / "model.safetensors"))
    assert same(final, t.policy) and facts["step"] == 5 and "eval/judge" in facts
    assert [r["step"] for r in training_records(tmp_path)] == [1, 2, 3, 4, 5]
    expected = ("loss pg_loss kl_penalty mean_reward std_reward mean_advantage mean_kl mean_log_prob entropy "
                "clip_fraction grad_norm lr frac_reward_zero_std unique_completions mean_token_accuracy reward/judge "
                "tokens_per_second time/train skipped_steps eval/judge eval/kl")
    assert set(expected.split()) <= logged_keys(tmp_path)


def test_a_state_within_an_iteration_is_of_as_many_ranks(dataset, tmp_path):
    settings = {"ppo_epochs": 2, "save_interval": 1}
    run(trainer(dataset, tmp_path, max_iters=1, **settings))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["buffers"].append({})
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(Mistake, match="state.pt .*2 ranks"):
        trainer(dataset, tmp_path, max_iters=2, resume=True, **settings)


class OfTwo(Distributed):
    """A rank of two, the other of which is at step 8."""

    def agree(self, number):
        return max(number, 8 if number >= 0 else -8)

    def barrier(self):
        pass


def test_ranks_must_resume_from_the_same_step():
    check_same_step(OfTwo("cpu"), 8, "out")
    for step in (5, 9):
        with pytest.raises(Mistake, match="out_dir=out"):
            check_same_step(OfTwo("cpu"), step, "out")


TRAIN, PRETRAIN = "grpo/train_grpo.py", "core/pretrain.py"
SEVERAL = ["torchrun", "--nproc_per_node=4", "--shutdown-timeout=900"]
COMMANDS = {  # {how a run was started: the words of the command that resumes it; None: it was not by a script}
    (TRAIN, "out", 1, 1): ["python", TRAIN, "--resume=True", "--out_dir=out"],
    (f"{resume.STARTED_IN}/{PRETRAIN}", "my runs/1", 1, 1): [
        "python", f"{resume.STARTED_IN}/{PRETRAIN}", "--resume=True", "--out_dir=my runs/1"],
    (TRAIN, "/tmp/it's", 4, 4): [*SEVERAL, TRAIN, "--resume=True", "--out_dir=/tmp/it's"],
    (TRAIN, "out", 4, 8): ["--resume=True", "--out_dir=out", "on", "every", "machine"],
    ("/usr/lib/ipykernel_launcher.py", "/tmp/out", 1, 1): None,
    ("", "/tmp/out", 1, 1): None,
    ("-c", "/tmp/out", 1, 1): None,
}


@pytest.mark.parametrize("start", COMMANDS, ids=str)
def test_the_command_that_resumes_a_run_is_that_of_its_start(monkeypatch, tmp_path, start):
    script, out_dir, ranks, all_ranks = start
    monkeypatch.setattr("sys.argv", [script, "config/grpo_example.py", "--seed=2", "--resume=auto"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("WORLD_SIZE", str(all_ranks))
    monkeypatch.chdir(tmp_path)  # as a user's reward may do
    told = resume_command(os.path.join(resume.STARTED_IN, out_dir))
    if COMMANDS[start] is None:
        assert told == f"resume=True, out_dir={out_dir!r}"
    else:
        assert shlex.split(told) == COMMANDS[start]


FULL = {"kl_beta": 0.1, "max_iters": 400, "reward_functions": ("exact_match",)}
CHANGES = [  # (what the last start had, what this one has, {setting: (before, now)} that is told)
    (FULL, FULL, {}),
    (FULL, FULL | {"out_dir": "b", "resume": True, "dry_run": True, "doctor": True}, {}),
    (FULL, FULL | {"max_iters": 30}, {"max_iters": (400, 30)}),
    (FULL, FULL | {"reward_functions": ("judge", "exact_match")},
     {"reward_functions": (["exact_match"], ["judge", "exact_match"])}),
    # features that end or begin: their other settings have their defaults on both sides
    (FULL, FULL | {"kl_beta": 0.0}, {"kl_beta": (0.1, 0.0)}),
    (FULL | {"kl_target": 0.5}, FULL | {"kl_beta": 0.0}, {"kl_beta": (0.1, 0.0), "kl_target": (0.5, None)}),
    (FULL, FULL | {"sampler": "ray", "ray_workers": 3}, {"sampler": ("local", "ray"), "ray_workers": (1, 3)}),
    # two spellings of a path, also in a list; another path
    ({"dataset": "char_diffusion"}, {"dataset": "./data/char_diffusion/"}, {}),
    ({"dataset": "tests/golden/golden.json"}, {"dataset": os.path.abspath("tests/golden/golden.json")}, {}),
    ({"judge_checkpoint": "README.md"}, {"judge_checkpoint": os.path.abspath("README.md")}, {}),
    ({"judge_checkpoint": "README.md"}, {"judge_checkpoint": "docs"}, {"judge_checkpoint": ("README.md", "docs")}),
    ({"response_prefix": ""}, {"response_prefix": "."}, {"response_prefix": ("", ".")}),
    ({"mode": "sequence_scorer", "fill_checkpoints": ("README.md", "docs")},
     {"mode": "sequence_scorer", "fill_checkpoints": ("./README.md", "docs/")}, {}),
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("before, now, told", CHANGES, ids=str)
def test_what_has_changed_since_the_last_start_is_told_and_nothing_else(monkeypatch, before, now, told, ranks):
    monkeypatch.chdir(resume.STARTED_IN)
    kind = PretrainConfig if "mode" in before else GRPOConfig
    saved = json.loads(json.dumps(dataclasses.asdict(kind(**before)) | {"starts": [{"ranks": 1}]}))
    line = changed_since(saved, kind(**now), ranks)
    told = told | ({"ranks": (1, 2)} if ranks == 2 else {})
    names = set(re.findall(r"\w+", line)) & (all_settings(kind) | {"ranks"})
    assert names == told.keys() and "\n" not in line, line
    for name, (one, other) in told.items():
        assert re.search(rf"\b{name}\b.*{re.escape(repr(one))}.*{re.escape(repr(other))}", line), line


def test_a_config_of_another_version_is_compared_as_far_as_it_goes():
    saved = json.loads(json.dumps(dataclasses.asdict(GRPOConfig()))) | {"old_setting": [1], "seed": 2}
    del saved["top_k"]  # it is newer
    words = re.findall(r"\w+", changed_since(saved, GRPOConfig(), 2))
    assert {"old_setting", "seed", "1337"} <= set(words) and not {"top_k", "ranks"} & set(words)
