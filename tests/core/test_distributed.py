"""A single process; several ranks are tested in tests/grpo/test_ranks.py."""

import re
import socket

import pytest
import torch

from core.checkpoint_manager import check_same_step
from core.distributed import Distributed
from tests.tiny import ROOT, TORCHRUN, run_script

GLOO = "[enforce fail at gloo/transport/tcp/pair.cc:538] "


@pytest.mark.parametrize("words", ["Connection closed by peer [127.0.0.1]:4711", "Timed out waiting 5000ms"])
def test_what_goes_wrong_between_ranks_is_one_line(words):
    with pytest.raises(ValueError, match=f"^rank 0 ended because another [^\n]*{re.escape(words)}$"):
        with Distributed("cpu"):
            raise RuntimeError(GLOO + words)


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("x"), RuntimeError("no such file: /data/igloo/model.pt")])
def test_errors_of_the_rank_itself_are_not_blamed_on_others(error):
    with pytest.raises(type(error)) as caught, Distributed("cpu"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("given", [{"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_variables_that_are_of_no_run_are_refused(monkeypatch, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="RANK"):
        Distributed("cpu")


def test_tf32_is_for_runs_in_bfloat16_on_cuda_alone(monkeypatch):
    monkeypatch.setattr("core.distributed.detect_device", lambda name, rank: torch.device(name))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    found, before = [], torch.get_float32_matmul_precision()
    for device, dtype in (("cuda", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16")):
        Distributed(device, dtype)
        found.append(torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision(before)
    assert found == ["highest", "highest", "high"]


def test_ranks_must_resume_from_the_same_step():
    class OfTwo(Distributed):
        """A rank of two, the other of which has the number 8."""
        agree = lambda self, number: max(number, 8 if number >= 0 else -8)
        barrier = lambda self: None

    check_same_step(OfTwo("cpu"), 8, "out")
    for step, words in ((5, "steps 5 to 8"), (9, "steps 8 to 9")):
        with pytest.raises(ValueError, match=f"resumes from step {step}, but the ranks have {words}: out_dir=out must"):
            check_same_step(OfTwo("cpu"), step, "out")


# several processes; what they compute: tests/grpo/test_ranks.py

MEETING = """
import sys, time
from datetime import timedelta
sys.path.insert(0, {root!r})
from core import distributed
distributed.START_WAIT = timedelta(seconds={limit})
distributed.EXCHANGE_WAIT = timedelta(seconds=3)
from core.settings.script import run_script

def main(argv):
    with distributed.Distributed("cpu") as dist:
        if dist.rank == 1:
            time.sleep(3.5)
        dist.barrier()
        values = dist.gather({{"rank": dist.rank}})
        if dist.is_main:
            print(values, dist.agree(0), distributed.dist.group.WORLD._get_backend(dist.device).options._timeout)
        else:
            dist.agree(dist.rank)
            time.sleep(3600)
        dist.agree(0)

run_script(main)
"""


@pytest.mark.slow
def test_a_barrier_waits_longer_than_an_exchange(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING.format(root=ROOT, limit=120))
    done = run_script(*TORCHRUN, "--shutdown-timeout=1", script)
    assert "[{'rank': 0}, {'rank': 1}] 1 12:00:00" in done.stdout, done.stderr
    assert re.search("error: rank 0 ended because another ", done.stderr)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_not_waited_for_for_ever(tmp_path):
    script = tmp_path / "meeting.py"
    script.write_text(MEETING.format(root=ROOT, limit=1))
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_script(script, **alone)
    assert done.returncode == 1 and done.stderr.startswith("error: rank 0 ended because another rank "), done.stderr


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
