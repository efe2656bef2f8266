"""Which iterations are written when, by which weights, and how old rollouts may be: scheduled by hand."""

from types import SimpleNamespace

import pytest

from grpo.samplers.prefetch import MOST_RETRIES, Prefetcher
from grpo.samplers.sampler import SamplerError, SamplerOutput
from tests.tiny import config


class HandSampler:
    """Writes nothing. `events` tells what was asked of it; `late` has the versions of answers that are older than asked
    for: {(iteration, nth start of it): version}."""

    outside = True

    def __init__(self, late=None):
        self.events, self.queue, self.times, self.late = [], [], {}, late or {}

    def sync(self, weights, version):
        self.events.append(f"sync {version}")

    def start(self, problems, iteration, version):
        self.times[iteration] = self.times.get(iteration, 0) + 1
        self.events.append(f"start {problems} v{version}")
        version = self.late.get((iteration, self.times[iteration]), version)
        self.queue.append(SamplerOutput(SimpleNamespace(problems=4, name=problems), version))

    def finish(self):
        done = self.queue.pop(0)
        self.events.append(f"finish {done.rollouts.name}")
        return done


def prefetcher_of(k, sampler=None):
    sampler = sampler or HandSampler()
    policy = SimpleNamespace(weights=dict)
    return sampler, Prefetcher(sampler, policy, lambda iteration: f"{iteration}", config(max_staleness=k))


def get(prefetcher, iteration, again=0, last=100):
    return prefetcher.get(f"{iteration}{'+' * again}", iteration, again, last)


def staleness(output):
    return output.sums["sum of staleness"] / output.sums["count of staleness"]


def test_without_staleness_each_iteration_is_written_when_it_is_needed():
    sampler, prefetcher = prefetcher_of(0)
    assert [staleness(get(prefetcher, i)) for i in range(2)] == [0, 0]
    assert sampler.events == ["sync 0", "start 0 v0", "finish 0", "sync 1", "start 1 v1", "finish 1"]


def test_one_step_off_starts_the_next_iteration_before_this_one_is_trained():
    sampler, prefetcher = prefetcher_of(1)
    assert [staleness(get(prefetcher, i)) for i in range(3)] == [0, 1, 1]
    assert sampler.events == ["sync 0", "start 0 v0", "start 1 v0", "finish 0",
                              "sync 1", "start 2 v1", "finish 1", "sync 2", "start 3 v2", "finish 2"]


def test_two_steps_off_has_two_iterations_in_flight():
    sampler, prefetcher = prefetcher_of(2)
    assert [staleness(get(prefetcher, i)) for i in range(4)] == [0, 1, 2, 2]
    assert sampler.events == ["sync 0", "start 0 v0", "start 1 v0", "start 2 v0", "finish 0", "sync 1", "start 3 v1",
                              "finish 1", "sync 2", "start 4 v2", "finish 2", "sync 3", "start 5 v3", "finish 3"]


def test_nothing_is_written_beyond_the_last_iteration():
    sampler, prefetcher = prefetcher_of(2)
    for i in range(3):
        get(prefetcher, i, last=2)
    assert [event for event in sampler.events if "start" in event] == ["start 0 v0", "start 1 v0", "start 2 v0"]
    assert not prefetcher.waiting and not prefetcher.outputs


def test_rollouts_that_are_too_old_are_dropped_counted_and_written_again():
    sampler, prefetcher = prefetcher_of(1, HandSampler(late={(3, 1): 0}))  # iteration 3 is first written by the first weights
    found = [get(prefetcher, i) for i in range(5)]
    assert [staleness(x) for x in found] == [0, 1, 1, 0, 1]
    assert [x.sums["dropped_rollouts"] for x in found] == [0, 0, 0, 1, 0]
    assert [x.rollouts.name for x in found] == ["0", "1", "2", "3", "4"]
    assert sampler.events.count("start 3 v2") == 1 and sampler.events.count("start 3 v3") == 1
    assert sampler.events.count("start 4 v3") == 1  # it was finished before and waited for its turn


def test_a_sampler_that_never_takes_over_new_weights_ends_the_run():
    _, prefetcher = prefetcher_of(0, HandSampler(late={(1, n): 0 for n in range(1, 9)}))
    get(prefetcher, 0)
    with pytest.raises(SamplerError, match=f"iteration 1 {MOST_RETRIES} times with weights of iteration 0"):
        get(prefetcher, 1)


def test_other_problems_of_an_iteration_do_not_disturb_the_ones_ahead():
    sampler, prefetcher = prefetcher_of(1)
    assert get(prefetcher, 0).rollouts.name == "0"
    other = get(prefetcher, 0, again=1)
    assert (other.rollouts.name, staleness(other)) == ("0+", 0)
    assert sampler.events[-3:] == ["start 0+ v0", "finish 1", "finish 0+"]
    assert (get(prefetcher, 1).rollouts.name, sampler.events[-2:]) == ("1", ["sync 1", "start 2 v1"])


def test_staleness_is_logged_where_there_can_be_one():
    inside = HandSampler()
    inside.outside = False
    assert get(prefetcher_of(0, inside)[1], 0).sums == {}
    _, prefetcher = prefetcher_of(1)
    get(prefetcher, 0)
    assert get(prefetcher, 1).sums == {"dropped_rollouts": 0, "sum of staleness": 4, "count of staleness": 4}
