"""Long runs stay flat: a short one of each kind. `python tests/soak.py` is the long one."""

import sys

import pytest

from tests.soak import Soak, run, summary


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["fill", "causal"])
def test_handles_threads_and_records_of_a_short_run_are_flat(kind):
    measured = run(Soak(kind=kind, steps=200, every=10))
    half = measured[len(measured) // 2 :]
    assert len({m["handles"] for m in half}) == 1 == len({m["threads"] for m in half})
    found = summary(measured)
    assert 200 < found["bytes"] / found["step"] < 2500 and 0.8 < found["bytes_last_tenth_to_second"] < 1.25
