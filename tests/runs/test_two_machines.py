"""A run on two machines, as far as their network goes: two network namespaces, joined by a virtual cable."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from core.models import save_model
from tests.tiny import CAUSAL, ROOT, causal_model, run_here, write_prompt_dataset

pytestmark = pytest.mark.slow
TRAIN = "grpo/train_grpo.py"
ADDRESSES = "10.77.0.1", "10.77.0.2"
REWARD = "def mine(prompts, completions, **columns): return [sum(map(ord, text)) % 7 / 6 for text in completions]"


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr)


@pytest.fixture
def machines():
    """The names of two network namespaces that reach nothing but each other. The network device of each has its
    name."""
    names = [f"nano{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except OSError as error:
        pytest.skip(f"needs the command ip of iproute2, and the right to make network namespaces: {error}")
    finally:
        for name in names if shutil.which("ip") else ():
            end_all(name)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def end_all(name):
    """Ends every process of a namespace. torchrun starts its own in sessions of their own."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def run_on(machines, *arguments):
    """The command of docs/scaling.md on both machines at once."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
                "--master_port=29500", f"--master_addr={ADDRESSES[0]}"]
    processes = [subprocess.Popen(
        ["ip", "netns", "exec", name, "timeout", "300", *torchrun, f"--node_rank={rank}", TRAIN, *arguments], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": name}, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT) for rank, name in enumerate(machines)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs


def test_a_sharded_run_on_two_machines_equals_one_process(machines, tmp_path):
    write_prompt_dataset(tmp_path / "sums")
    save_model(str(tmp_path / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {"dataset": tmp_path / "sums", "generator_checkpoint": tmp_path / "g.safetensors", "max_new_tokens": 5,
                "reward_file": tmp_path / "reward.py", "reward_functions": "('mine',)", "group_size": 3,
                "eval_problems": 4, "eval_completions": 2, "device": "cpu", "optimizer": "adamw", "max_iters": 3}

    def as_arguments(**more):
        return [f"--{key}={value}" for key, value in (settings | more).items()]

    run_on(machines, *as_arguments(parallel="fsdp", batch_size=2, out_dir=tmp_path / "two"))
    alone = run_here(TRAIN, *as_arguments(batch_size=4, out_dir=tmp_path / "one"))
    assert alone.returncode == 0, alone.stderr
    one, two = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("one", "two"))
    assert one["step"] == two["step"] == 3
    for name, x in one["model"].items():
        torch.testing.assert_close(two["model"][name], x, rtol=1e-4, atol=1e-5)
