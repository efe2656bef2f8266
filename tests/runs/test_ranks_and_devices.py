"""Ranks wait long enough and not for ever; a device that is not there is refused; the precision that was asked for."""

import re

import pytest
import torch

from core.device import detect_device
from tests.tiny import ROOT, TORCHRUN, run_script


@pytest.fixture
def gpus(monkeypatch):
    """A function that makes torch see so many GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_rank_gets_the_gpu_of_its_number_unless_one_is_named_or_shown_alone(gpus, monkeypatch):
    gpus(2)
    assert detect_device("auto", local_rank=1) == torch.device("cuda", 1)
    assert detect_device("cuda:0", local_rank=1) == torch.device("cuda", 0)
    for count in (2, 1):
        gpus(count)
        with pytest.raises(ValueError, match=f"GPU {count} "):
            detect_device("cuda", count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert {detect_device(name, local_rank=3) for name in ("auto", "cuda", "cuda:0")} == {torch.device("cuda", 0)}


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_use_the_cpu_in_silence(tmp_path, monkeypatch):
    monkeypatch.setattr("core.device.NVIDIA", str(tmp_path))  # a path that exists
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="device='cpu'"):
        detect_device("auto")
    assert detect_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_device("auto") == torch.device("cpu"), "the GPU was hidden"


MEETING = """
import sys, time
from datetime import timedelta
sys.path.insert(0, {root!r})
from core import distributed
distributed.EXCHANGE_WAIT = timedelta(seconds=3)
from core.settings.script import run_script

def main(argv):
    with distributed.Distributed("cpu") as dist:
        if dist.rank == 1:
            time.sleep(3.5)
        dist.barrier()
        values = dist.gather({{"rank": dist.rank}})
        if dist.is_main:
            print(values, dist.agree(0))
        else:
            dist.agree(dist.rank)
            time.sleep(3600)
        dist.agree(0)

run_script(main)
"""


@pytest.mark.slow
def test_a_barrier_waits_longer_than_an_exchange(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING.format(root=ROOT))
    done = run_script(*TORCHRUN, "--shutdown-timeout=1", script)
    assert "[{'rank': 0}, {'rank': 1}] 1" in done.stdout, done.stderr
    assert re.search("error: rank 0 ended because another ", done.stderr)


RESTARTED = """
import os, sys
sys.path.insert(0, {root!r})
from core.distributed import Distributed
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with Distributed("cpu") as dist:
    if attempt == 0 and dist.rank == 1:
        os._exit(3)
    print(attempt, dist.agree(dist.rank), flush=True)
"""


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_meet_again(tmp_path):
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED.format(root=ROOT))
    done = run_script(*TORCHRUN, "--max-restarts=1", script)
    assert done.returncode == 0 and done.stdout.count("1 1") == 2, done.stderr
