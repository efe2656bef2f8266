"""Ranks wait long enough and not for ever, and meet again when they are restarted."""

import re

import pytest

from tests.tiny import ROOT, TORCHRUN, run_script

MEETING = """
import sys, time
from datetime import timedelta
sys.path.insert(0, {root!r})
from core import distributed
distributed.EXCHANGE_WAIT = timedelta(seconds=3)
from core.errors import run_script

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
    os.write(1, b"%d %d\\n" % (attempt, dist.agree(dist.rank)))  # in one piece
"""


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_meet_again(tmp_path):
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED.format(root=ROOT))
    done = run_script(*TORCHRUN, "--max-restarts=1", script)
    assert done.returncode == 0 and done.stdout.count("1 1") == 2, done.stderr
