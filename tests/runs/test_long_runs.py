"""Long runs stay flat: a short one of each kind. `python tests/soak.py` is the long one."""

import sys

import pytest

from tests.soak import Soak, growth, run


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["fill", "causal"])
def test_handles_threads_and_records_of_a_short_run_are_flat(kind):
    measured = run(Soak(kind=kind, steps=200, every=10))
    found = growth(measured)
    assert found["handles"] == found["threads"] == 0 and 0.8 < found["bytes"] < 1.25
    assert 200 < measured[-1]["bytes"] / 200 < 2500
