"""Long runs stay flat: the measurement itself, and a short run of each kind. `python tests/soak.py` is the long one."""

import sys

import pytest

from tests.soak import Soak, growing, run, summary


def line(**per_step):
    """100 measurements of a run in which these grow by so much in a step."""
    flat = {"seconds": 0.01, "cpu_seconds": 0.01, "bytes": 500.0, "megabytes": 0.0, "handles": 0.0, "threads": 0.0}
    per_step = flat | per_step
    return [{"step": step} | {key: 7 + rate * step for key, rate in per_step.items()} for step in range(10, 1010, 10)]


@pytest.mark.parametrize("name, rate", [("megabytes", 0.002), ("handles", 0.01), ("threads", 0.001)])
def test_growth_is_found(name, rate):
    found = summary(Soak(steps=1000), line(**{name: rate}))
    assert found[f"{name}_per_1000_steps"] == pytest.approx(1000 * rate, rel=1e-3)
    assert growing(found) == [f"{name}_per_1000_steps"]
    assert not growing(summary(Soak(steps=1000), line()))


@pytest.mark.parametrize("key, name", [("cpu_seconds", "last_tenth_to_second_in_cpu_time"),
                                       ("bytes", "last_tenth_to_second_in_bytes")])
def test_steps_that_get_slower_and_records_that_get_larger_are_found(key, name):
    measured = line()
    for i, m in enumerate(measured):
        m[key] = i * i
    found = summary(Soak(steps=1000), measured)
    assert 6 < found[name] < 7 and growing(found) == [name]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["fill", "causal"])
def test_handles_threads_and_records_of_a_short_run_are_flat(kind):
    settings = Soak(kind=kind, steps=200, every=5, interval=20)
    measured = run(settings)
    assert len({m["handles"] for m in measured[len(measured) // 2 :]}) == 1
    assert len({m["threads"] for m in measured[len(measured) // 2 :]}) == 1
    found = summary(settings, measured)
    assert 200 < found["metrics_bytes_per_step"] < 2500 and 0.8 < found["last_tenth_to_second_in_bytes"] < 1.25
