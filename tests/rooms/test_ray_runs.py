"""Whole runs whose completions are sampled by real workers of a real local Ray take the steps of a run without it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch

from core.errors import Mistake, exit_code
from core.fill_in import UNMASK_ORDERS
from core.models import save_model
from grpo import train_grpo
from grpo.losses import KL_ESTIMATORS, OBJECTIVES
from grpo.samplers.ray import RaySampler, build, start_ray
from tests.families import model_folder, write_sums
from tests.tiny import (
    CAUSAL, ROOT, judge, model, one_process, prompt_config, prompt_fill_policy, read_records, run_script, save,
    without_clock)

ray = pytest.importorskip("ray")
pytest.importorskip("peft")
pytestmark = pytest.mark.slow
RUN = {"max_iters": 3, "batch_size": 4, "group_size": 4, "eval_problems": 4, "eval_completions": 2, "log_interval": 1,
       "device": "cpu", "learning_rate": 1e-2, "min_lr": 1e-2, "warmup_iters": 0, "temperature": 1.0, "top_p": 1.0}
ROUNDING = {"mismatch_kl", "mismatch_max", "ratio_minus_one"}
LETTERS = '''
def letters(prompts, completions, **columns):
    """The share of letters among the characters."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]
'''


def settings_of(folder, **more):
    """Settings of a run that trains an adapter of a model in Hugging Face format. Writes its files to the folder."""
    (folder / "letters.py").write_text(LETTERS)
    return RUN | {"dataset": write_sums(folder / "sums.jsonl"), "reward_file": folder / "letters.py", "lora_rank": 4,
                  "generator_checkpoint": model_folder(folder / "lfm2", "lfm2"), "max_new_tokens": 5,
                  "reward_functions": "('letters',)"} | more


@pytest.fixture(scope="module")
def own_ray():
    """A Ray of this process, which the runs of this file use and leave open, started where authentication is off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        start_ray(ray, {"PYTHONPATH": ROOT}, num_cpus=2)
    yield ray
    ray.shutdown()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(name, config files, settings) -> (records of steps, weights) of a run in this process."""
    def finished(name, *files, **settings):
        arguments = [*files, *(f"--{key}={x}" for key, x in (settings | {"out_dir": tmp_path / name}).items())]
        monkeypatch.setattr("sys.argv", ["grpo/train_grpo.py", *arguments])
        assert exit_code(train_grpo.main) == 0, capsys.readouterr().err
        records = without_clock(read_records(str(tmp_path / name / "metrics.jsonl")))
        state = torch.load(tmp_path / name / "state.pt", weights_only=True)
        return [r for r in records if "loss" in r], state["model"]
    return finished


def expect_alike(local, others, staleness=(0, 0, 0)):
    """Two runs took the same steps, up to the rounding of log-probabilities, and learned from them."""
    (steps, weights), (other_steps, other_weights) = local, others
    for a, b in zip(steps, other_steps, strict=True):
        for name in (a.keys() & b.keys()) - ROUNDING:
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4), (name, a["step"])
        assert b["mismatch_kl"] < 0.1
    assert tuple(record["staleness"] for record in other_steps) == staleness
    assert all(record["std_reward"] > 0 and record["grad_norm"] > 0 for record in steps)
    for name, x in weights.items():
        torch.testing.assert_close(other_weights[name], x, rtol=1e-3, atol=1e-4)


def test_a_run_starts_a_ray_of_its_own_and_ends_it(run, dataset, tmp_path):
    fill = RUN | {"dataset": dataset, "generator_checkpoint": save(tmp_path / "fill.safetensors", model()),
                  "judge_checkpoint": save(tmp_path / "judge.safetensors", judge()), "block_size": 32,
                  "dtype": "float32"}
    expect_alike(run("local", **fill), run("ray", **fill, sampler="ray"))
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "raylet"], capture_output=True)
    assert not ray.is_initialized() and not children.stdout, children


def test_a_run_whose_worker_is_killed_is_the_run_without_workers(own_ray, run, tmp_path, monkeypatch):
    finish, calls = RaySampler.finish, []

    def kill_and_finish(sampler):
        calls.append(sampler)
        if len(calls) == 3:
            own_ray.kill(sampler.workers[0], no_restart=False)
        return finish(sampler)

    monkeypatch.setattr(RaySampler, "finish", kill_and_finish)
    settings = settings_of(tmp_path, max_iters=6, max_staleness=1)
    outside = run("ray", **settings, sampler="ray", ray_workers=2)
    assert len(calls) == 6
    expect_alike(run("local", **settings), outside, staleness=(0, 1, 1, 1, 1, 1))


OWN_ROWS = """
import torch
from core.fill_in import UNMASK_ORDERS
from grpo.losses import KL_ESTIMATORS, OBJECTIVES

def backwards(noise):
    return torch.linspace(1, 0, noise.shape[-1]).expand_as(noise)

UNMASK_ORDERS["backwards"] = backwards
UNMASK_ORDERS["unlikely_first"] = lambda logp, ids: logp.gather(1, ids)
KL_ESTIMATORS["mine"] = lambda logp, ref_logp: logp - ref_logp
OBJECTIVES["mine"] = OBJECTIVES["rloo"]
objective = kl_estimator = "mine"
"""


@pytest.mark.parametrize("order", ["backwards", "unlikely_first"])
def test_workers_know_what_a_config_adds_to_the_tables(own_ray, run, prompts, tmp_path, monkeypatch, order):
    for table, names in ((UNMASK_ORDERS, ("backwards", "unlikely_first")), (KL_ESTIMATORS, ["mine"]),
                         (OBJECTIVES, ["mine"])):
        for name in names:
            monkeypatch.setitem(table, name, None)  # taken out again at the end
    (tmp_path / "own.py").write_text(OWN_ROWS)
    (tmp_path / "letters.py").write_text(LETTERS)
    save_model(str(tmp_path / "g.safetensors"), prompt_fill_policy().model, CAUSAL)
    settings = RUN | {"dataset": prompts, "generator_checkpoint": tmp_path / "g.safetensors",
                      "reward_file": tmp_path / "letters.py", "reward_functions": "('letters',)",
                      "max_new_tokens": 6, "unmask_steps": 3, "unmask_order": order, "kl_beta": 0.1}
    found = [run(sampler, str(tmp_path / "own.py"), **settings, sampler=sampler) for sampler in ("local", "ray")]
    expect_alike(*found)


def test_an_order_that_cannot_be_sent_to_a_worker_is_one_line(own_ray, monkeypatch):
    lock = threading.Lock()
    monkeypatch.setitem(UNMASK_ORDERS, "mine", lambda noise: noise if lock else noise)
    c = prompt_config(sampler="ray", unmask_steps=2, unmask_order="mine")
    with pytest.raises(Mistake, match="test_ray_runs.py, line .*unmask_order='mine'"):
        build(prompt_fill_policy(), c, one_process())


@pytest.fixture
def cluster(monkeypatch):
    """The address of a Ray cluster that was started as docs/scaling.md says, on this machine alone."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token of this test, which nobody else has")
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        port, unused = (free.getsockname()[1] for free in (one, other))
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2",
         "--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={unused}",
         "--include-dashboard=false", "--disable-usage-stats"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    limit = threading.Timer(300, os.killpg, (head.pid, signal.SIGKILL))  # seconds
    limit.start()
    try:
        said = []
        while not said or said[-1] and "ray.init(" not in said[-1]:
            said.append(head.stdout.readline())
        assert said[-1], "".join(said)
        limit.cancel()
        yield f"127.0.0.1:{port}"
    finally:
        limit.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.communicate()


def test_two_sharded_ranks_join_a_cluster_and_train_as_one_process(cluster, run, tmp_path):
    settings = settings_of(tmp_path, parallel="fsdp", optimizer="adamw")
    alone = run("alone", **settings)
    out = tmp_path / "two"
    settings |= {"batch_size": 2, "out_dir": out, "sampler": "ray"}
    arguments = (f"--{key}={x}" for key, x in settings.items())
    done = run_script("grpo/train_grpo.py", *arguments, ranks=2, RAY_ADDRESS=cluster)
    assert done.returncode == 0, done.stderr
    records = [r for r in without_clock(read_records(str(out / "metrics.jsonl"))) if "loss" in r]
    expect_alike(alone, (records, torch.load(out / "state.pt", weights_only=True)["model"]))


GAME = """
from grpo.environments import environment

@environment
class Game:
    def step(self, text):
        from helper import answer
        return answer, 1.0
"""


def test_an_environment_in_a_worker_finds_the_neighbours_of_its_file(own_ray, tmp_path):
    (tmp_path / "mine.py").write_text(GAME)
    (tmp_path / "helper.py").write_text("answer = 'a neighbour'\n")

    def step(path):
        from grpo.environments import find_environment
        return find_environment("Game", path)().step("")

    answer = own_ray.remote(num_cpus=1)(step).remote(str(tmp_path / "mine.py"))
    assert own_ray.get(answer, timeout=300) == ("a neighbour", 1.0)


OUTSIDER = "import sys, ray; ray.init(sys.argv[1]); print(ray.get(ray.remote(num_cpus=0)(lambda: 'code ran').remote()))"


def test_an_outsider_cannot_join_the_ray_of_a_run_even_where_authentication_is_off(own_ray):
    address = own_ray.get_runtime_context().gcs_address
    outsider = subprocess.run([sys.executable, "-c", OUTSIDER, address], capture_output=True, text=True,
                              env=os.environ | {"RAY_AUTH_MODE": "disabled"})
    assert outsider.returncode == 1 and "code ran" not in outsider.stdout
    assert "InvalidAuthToken" in outsider.stdout + outsider.stderr
