"""The simulated slow sampler keeps time as a sampler on other machines would, on a clock that the test moves."""

from types import SimpleNamespace

import pytest

from grpo.benchmarks import samplers
from grpo.benchmarks.samplers import SamplersConfig, SleepingSampler, run_samplers
from grpo.samplers.ahead import Ahead
from tests.tiny import config


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)

    def sleep(seconds):
        clock.now += seconds
    monkeypatch.setattr(samplers, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    return clock


@pytest.mark.parametrize("ahead, write, train, each", [(0, 3.0, 3.0, 6.0), (1, 3.0, 3.0, 3.0), (0, 5.0, 2.0, 7.0),
                                                       (1, 5.0, 2.0, 5.0), (1, 2.0, 5.0, 5.0), (2, 3.0, 3.0, 3.0)])
def test_an_iteration_takes_the_sum_of_both_times_in_turns_and_the_longer_one_ahead(clock, ahead, write, train, each):
    sampler = SleepingSampler(SimpleNamespace(problems=1), write)
    written = Ahead(sampler, SimpleNamespace(weights=dict), lambda i: "problems", config(max_staleness=ahead))
    ends = []
    for i in range(9):
        written.take("problems", i, 0, 100)
        clock.now += train
        ends.append(clock.now)
    assert ends[-1] - ends[-2] == each == ends[-2] - ends[-3]


def test_the_benchmark_prints_a_row_for_every_staleness(capsys):
    run_samplers(SamplersConfig(iterations=1, most_ahead=1, n_layer=1, n_head=1, n_embd=16, batch_size=2, group_size=2,
                                prompt_length=4, completion_length=4))
    out = capsys.readouterr().out
    assert '"ratio_0": 1.0, "ratio_1": ' in out and len(out.strip().split("\n")) == 5
