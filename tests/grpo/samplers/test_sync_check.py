"""The check tells weights that arrived from weights that did not, whatever else differs between the two sides."""

import copy
import math
import re

import pytest
import torch

from grpo.samplers.sampler import SamplerError
from grpo.scoring import score_in_batches
from grpo.samplers.sync_check import TOLERANCE, SyncCheck
from tests.tiny import causal_policy, config, consumer, fill_policy, prompt_config, prompt_consumer


class OtherSide:
    """A sampler in another process: scores with a copy of the policy, with errors of its own precision.

    stale: its weights stay as they are; stale_twins: policies of other workers
    """

    def __init__(self, policy, c, noise=0.0):
        self.twin, self.c, self.noise = copy.deepcopy(policy), c, noise
        self.stale, self.stale_twins = False, []

    def sync(self, policy):
        if not self.stale:
            self.twin.load_weights({name: x.clone() for name, x in policy.weights().items()})

    def score(self, problems, rollouts):
        answers = []
        for policy in (self.twin, *self.stale_twins):
            logp = score_in_batches(policy, rollouts, self.c)
            answers.append(logp + self.noise * torch.randn(logp.shape, generator=torch.Generator().manual_seed(1)))
        return lambda: answers


def move(policy, size, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(size * p.abs().mean() * torch.randn(p.shape, generator=g))


@pytest.fixture
def both_sides(prompts, dataset):
    """(kind, settings of OtherSide) -> (policy, OtherSide, SyncCheck)."""
    def made(kind="causal", **settings):
        if kind == "causal":
            c, policy = prompt_config(group_size=8), causal_policy(scale=3.0)
            data = prompt_consumer(prompts, c)
        else:
            c, policy = config(group_size=8), fill_policy(scale=3.0)
            data = consumer(dataset, c)
        other = OtherSide(policy, c, **settings)
        return policy, other, SyncCheck(other, policy, data.problems("train", 0), c)
    return made


def sync(policy, other, sync_check, version):
    other.sync(policy)
    sync_check.begin(version)
    sync_check.check()


@pytest.mark.parametrize("kind, noise", [("causal", 0.0), ("causal", 0.02), ("fill", 0.02)])
def test_syncs_that_arrive_pass(both_sides, kind, noise):
    sides = both_sides(kind, noise=noise)
    for version in range(12):
        sync(*sides, version)
        if version % 5:  # weights that training left alone pass too
            move(sides[0], 10 ** -(version % 4 + 1), version)
    assert sides[2].earlier[0] > 4, "at least the large movements were seen to arrive"


@pytest.mark.parametrize("noise, movement, workers", [(0.0, 1e-4, 1), (0.0, 0.1, 1), (0.01, 0.1, 1), (0.0, 0.1, 2)])
def test_a_sync_that_did_not_arrive_ends_the_run_and_is_named(both_sides, noise, movement, workers):
    """In the only worker, or in one of two."""
    policy, other, sync_check = both_sides(noise=noise)
    sync(policy, other, sync_check, 6)
    other.stale = workers == 1
    other.stale_twins = [copy.deepcopy(other.twin)] * (workers - 1)
    move(policy, movement, 0)
    with pytest.raises(SamplerError, match="weights of iteration 7 did not arrive: known tokens get the "
                                           "log-probabilities of iteration 6 "):
        sync(policy, other, sync_check, 7)


def test_a_sampler_that_never_follows_is_found_once_training_has_gone_further_than_precisions_differ(both_sides):
    policy, other, sync_check = both_sides(noise=0.02)
    sync(policy, other, sync_check, 0)
    other.stale = True
    with pytest.raises(SamplerError, match="of iteration 0 "):  # the last version that surely arrived
        for version in range(1, 60):
            move(policy, 0.003, 7)  # each time in the same direction
            sync(policy, other, sync_check, version)
    assert version > 2, "the first movements are smaller than the difference of the two sides"


@pytest.mark.parametrize("noise, line", [(0.0, f"more than {TOLERANCE:g}: it holds other weights"),
                                         (math.nan, "differ from the policy's by nan")])
def test_another_model_and_scores_that_are_no_numbers_are_refused_at_the_first_sync(both_sides, noise, line):
    policy, other, sync_check = both_sides(noise=noise)
    other.twin, other.stale = causal_policy(seed=5, scale=3.0), True
    with pytest.raises(SamplerError, match=re.escape(line)):
        sync(policy, other, sync_check, 0)
