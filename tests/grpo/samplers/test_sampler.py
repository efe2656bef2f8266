"""Every sampler has the whole interface. Which iterations start when, and with which weights, with a sampler that writes nothing."""

from types import SimpleNamespace

import pytest

from grpo.samplers.sampler import Prefetcher
from tests.tiny import config


class HandSampler:
    """Writes nothing. `events` tells what was asked of it."""

    def __init__(self):
        self.events, self.queue = [], []

    def sync(self, weights, version):
        self.events.append(f"sync {version}")

    def start(self, problems, iteration):
        self.events.append(f"start {problems}")
        self.queue.append(SimpleNamespace(problems=4, name=problems))

    def finish(self):
        done = self.queue.pop(0)
        self.events.append(f"finish {done.name}")
        return done, {}


def prefetcher_of(k):
    sampler = HandSampler()
    return sampler, Prefetcher(sampler, SimpleNamespace(weights=dict), str, config(max_staleness=k))


def get(prefetcher, iteration, again=0, last=100):
    """(name of the rollouts, their staleness)"""
    rollouts, sums = prefetcher.get(f"{iteration}{'+' * again}", iteration, again, last)
    total, count = sums["staleness"]
    assert count == 4
    return rollouts.name, total / 4


@pytest.mark.parametrize("k, staleness, events", [
    (0, [0, 0, 0], "sync 0, start 0, finish 0, sync 1, start 1, finish 1, sync 2, start 2, finish 2"),
    (1, [0, 1, 1], "sync 0, start 0, start 1, finish 0, sync 1, start 2, finish 1, sync 2, start 3, finish 2"),
    (2, [0, 1, 2], "sync 0, start 0, start 1, start 2, finish 0, sync 1, start 3, finish 1, sync 2, finish 2")])
def test_later_iterations_start_before_this_one_is_trained_and_none_beyond_the_last(k, staleness, events):
    sampler, prefetcher = prefetcher_of(k)
    assert [get(prefetcher, i, last=3) for i in range(3)] == [(f"{i}", x) for i, x in enumerate(staleness)]
    assert ", ".join(sampler.events) == events


def test_other_problems_of_an_iteration_do_not_disturb_the_ones_ahead():
    sampler, prefetcher = prefetcher_of(1)
    assert get(prefetcher, 0) == ("0", 0)
    assert get(prefetcher, 0, again=1) == ("0+", 0)
    assert sampler.events[-3:] == ["start 0+", "finish 1", "finish 0+"]
    assert get(prefetcher, 1) == ("1", 1) and sampler.events[-2:] == ["sync 1", "start 2"]
