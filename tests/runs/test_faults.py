"""Runs as a user starts them, when a rank, the disk or a signal ends them, and what goes on afterwards."""

import os
import re
import subprocess
import sys

import pytest
import torch

from core.models import save_model
from tests.tiny import CAUSAL, ROOT, causal_model, run_here, run_script, write_prompt_dataset

pytestmark = pytest.mark.slow
TRAIN = "grpo/train_grpo.py"
FAULT = """
import os, pathlib, signal
from grpo.rewards import reward

calls = 0


@reward(0, 1)
def mine(prompts, completions, **columns):
    global calls
    calls += 1
    marker = pathlib.Path({marker!r})
    if calls == {call} and os.environ.get("RANK", "0") == {rank!r} and {fault!r} and not marker.exists():
        marker.touch()
        {fault}
    return [min(1.0, len(text) / 8) for text in completions]
"""
NEVER = ""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The settings of a run that works."""
    folder = tmp_path_factory.mktemp("faults")
    write_prompt_dataset(folder / "sums")
    save_model(str(folder / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    return {"dataset": folder / "sums", "generator_checkpoint": folder / "g.safetensors", "max_new_tokens": 5,
            "reward_functions": "('mine',)", "batch_size": 4, "group_size": 3, "max_iters": 6, "learning_rate": 1e-2,
            "save_interval": 2, "eval_interval": 3, "sample_interval": 3, "eval_problems": 4, "eval_completions": 2,
            "log_interval": 1, "device": "cpu"}


def settings_of(base, tmp_path, fault=NEVER, rank="1", call=6, name="out", **changes):
    """Command-line arguments of a run whose reward has a fault, once, in its call number `call` on a rank. The first is
    that with all records, the next two are in an evaluation, as are those after three more."""
    text = FAULT.format(marker=str(tmp_path / "done"), rank=rank, call=call, fault=fault)
    (tmp_path / "reward.py").write_text(text)
    settings = base | {"reward_file": tmp_path / "reward.py", "out_dir": tmp_path / name} | changes
    return [f"--{key}={value}" for key, value in settings.items()]


def state_of(folder):
    return torch.load(folder / "state.pt", weights_only=True)


def lines_of_error(text):
    """What each rank says; the lines of two may mix."""
    return re.split(r"(?<!I/O )error: ", text)[1:]


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("fault, errors, more", [
    ("raise ValueError('my reward broke')", 2, {}),
    ("raise ValueError('my reward broke')", 2, {"call": 7}),
    (KILL, 1, {}),
    (f"from core.performance import sharding; sharding.gathered_state = lambda *x, **y: {KILL}", 1,
     {"parallel": "fsdp", "optimizer": "adamw"})], ids=[
        "fails", "fails in an evaluation", "is killed in a step", "is killed in a sharded save"])
def test_if_a_rank_ends_the_other_ends_with_a_line_and_the_last_state_stays(base, tmp_path, fault, errors, more):
    done = run_script(TRAIN, *settings_of(base, tmp_path, fault, **more), ranks=2)
    assert done.returncode == 1 and (tmp_path / "done").exists(), done.stderr
    found = lines_of_error(done.stderr)
    assert len(found) == errors and "Traceback" not in done.stderr, done.stderr
    assert any("rank 0" in line for line in found) and ("my reward broke" in done.stderr) == (errors == 2), done.stderr
    assert state_of(tmp_path / "out")["step"] == 2


def test_a_full_disk_ends_the_run_in_one_line_with_its_last_state(base, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    in_space = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=8m none {disk}"
    if subprocess.run([*in_space, mount], capture_output=True).returncode:
        pytest.skip("a user may not mount a small disk here")
    fault = f"""
        try:
            pathlib.Path({str(disk / 'x')!r}).write_bytes(bytes(8 << 20))
        except OSError:
            pass"""
    arguments = settings_of(base, tmp_path, fault, "0", call=12, out_dir=disk / "out", max_iters=40)
    script = f"{mount} && {{ \"$@\"; code=$?; cp -r {disk}/out {tmp_path}/kept; exit $code; }}"
    done = subprocess.run([*in_space, script, "sh", sys.executable, TRAIN, *arguments], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1 and len(lines_of_error(done.stderr)) == 1, done.stderr
    step = state_of(tmp_path / "kept")["step"]
    assert step >= 2 and "No space left on device" in done.stderr
    assert f"{disk}/out/state.pt" in done.stderr and f"step {step}" in done.stderr
    assert not [name for name in os.listdir(tmp_path / "kept") if name.endswith(".tmp")]


def test_another_number_of_ranks_goes_on_between_two_iterations_with_the_same_problems(base, tmp_path):
    """Two ranks of one micro-batch are one rank of two: the same problems and noise, up to rounding."""
    one, more = {"gradient_accumulation_steps": 2}, {"max_iters": 4, "lr_decay_iters": 4, "ppo_epochs": 2}
    for name, parts in (("whole", [(1, one | more)]), ("out", [(2, more | {"max_iters": 2}),
                                                               (1, one | more | {"resume": True})])):
        for ranks, changes in parts:
            arguments = settings_of(base, tmp_path, name=name, **changes)
            done = run_here(TRAIN, *arguments) if ranks == 1 else run_script(TRAIN, *arguments, ranks=ranks)
            assert done.returncode == 0, done.stderr
    one, two = (state_of(tmp_path / name) for name in ("whole", "out"))
    assert one["buffers"][0]["stored"] == two["buffers"][0]["stored"] == 2 and one["step"] == two["step"] == 4
    for name, x in one["model"].items():
        torch.testing.assert_close(two["model"][name], x, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name, kind", [("KILL", "causal-2"), ("TERM", "fill")])
def test_runs_that_are_killed_at_random_moments_end_with_the_same_bits(name, kind):
    done = run_script("tests/kill.py", "--kills=1", f"--signal={name}", f"--kinds={kind}")
    assert done.returncode == 0 and "0 did not" in done.stdout, done.stdout + done.stderr


KILLED = """
import os, signal, torch
from grpo.rewards import reward

@reward(0, 1)
def mine(completions, **columns):
    if os.environ.get("RANK") == "2":
        torch.Tensor.backward = lambda *arguments, **settings: os.kill(os.getpid(), signal.SIGKILL)
    return [min(1.0, len(text) / 8) for text in completions]
"""


def test_if_a_rank_is_killed_in_a_sharded_step_the_others_end_with_a_line_each(base, tmp_path):
    arguments = settings_of(base, tmp_path, parallel="fsdp", optimizer="adamw", batch_size=1)
    (tmp_path / "reward.py").write_text(KILLED)
    done = run_script(TRAIN, *arguments, ranks=3)
    found = lines_of_error(done.stderr)
    assert done.returncode and "Traceback" not in done.stderr and len(found) == 2, done.stderr
    assert all(any(f"rank {rank}" in line for line in found) for rank in (0, 1)), found
