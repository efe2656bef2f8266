"""What the comparisons with the usual step share."""

from types import SimpleNamespace

import pytest
import torch

from grpo.benchmarks.comparison import Bench, row


@pytest.mark.parametrize("naive, shared", [(6.0, 1.5), (1.5, 6.0)])
def test_a_row_has_both_sides_and_how_many_times_one_is_the_other(capsys, naive, shared):
    row("seconds", naive, shared, 2)
    assert capsys.readouterr().out.split() == ["seconds", f"{naive:.2f}", f"{shared:.2f}", "4.00"]


def test_the_first_step_only_warms_up():
    bench, calls = Bench(), []
    bench.c, bench.dist = SimpleNamespace(repeats=3), SimpleNamespace(device=torch.device("cpu"))
    clock = iter([0.0, 1.0, 10.0, 19.0, 20.0, 27.0, 30.0, 38.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.benchmarks.comparison.time.perf_counter", lambda: next(clock))
        assert bench.seconds(calls.append, "judged") == 7.0
    assert calls == ["judged"] * 4
