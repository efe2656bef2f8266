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

    stale: its weights stay as they are; workers: how many answer; lost: how many of them do not
    """

    def __init__(self, policy, c, noise=0.0, workers=1, lost=0):
        self.twin, self.c, self.noise = copy.deepcopy(policy), c, noise
        self.workers, self.lost, self.stale = workers, lost, False

    def sync(self, policy):
        if not self.stale:
            self.twin.load_weights({name: x.clone() for name, x in policy.weights().items()})

    def score(self, problems, written):
        def answers():
            rollouts = self.twin.rollouts(problems, written, self.c)
            logp = score_in_batches(self.twin, rollouts, self.c)
            off = self.noise * torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
            return [None] * self.lost + [logp + off] * self.workers
        return answers


def move(policy, size, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(size * p.abs().mean() * torch.randn(p.shape, generator=g))


def causal(prompts):
    c = prompt_config(group_size=8)
    return causal_policy(scale=3.0), c, prompt_consumer(prompts, c)


def fill(dataset):
    c = config(group_size=8)
    return fill_policy(scale=3.0), c, consumer(dataset, c)


def both_sides(setup, **settings):
    policy, c, data = setup
    other = OtherSide(policy, c, **settings)
    return policy, other, SyncCheck(other, policy, data.problems("train", 0), c)


def sync(policy, other, sync_check, version):
    other.sync(policy)
    sync_check.begin(version)
    sync_check.check()


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["causal", "fill"])
def test_syncs_that_arrive_pass(dataset, prompts, kind, noise):
    policy, other, sync_check = both_sides(causal(prompts) if kind == "causal" else fill(dataset), noise=noise)
    for version in range(12):
        sync(policy, other, sync_check, version)
        move(policy, 10 ** -(version % 4 + 1), version)
    assert sync_check.earlier[0] > 4, "at least the large movements were seen to arrive"


@pytest.mark.parametrize("noise, movement", [(0.0, 1e-4), (0.0, 0.1), (0.01, 0.1)])
def test_a_sync_that_did_not_arrive_ends_the_run_and_is_named(prompts, noise, movement):
    policy, other, sync_check = both_sides(causal(prompts), noise=noise)
    sync(policy, other, sync_check, 6)
    other.stale = True
    move(policy, movement, 0)
    with pytest.raises(SamplerError, match="weights of iteration 7 did not arrive: known tokens get the "
                                           "log-probabilities of iteration 6 "):
        sync(policy, other, sync_check, 7)


def test_a_sampler_that_never_follows_is_found_once_training_has_gone_further_than_precisions_differ(prompts):
    policy, other, sync_check = both_sides(causal(prompts), noise=0.02)
    sync(policy, other, sync_check, 0)
    other.stale, found = True, None
    for version in range(1, 60):
        move(policy, 0.003, 7)  # each time in the same direction
        try:
            sync(policy, other, sync_check, version)
        except SamplerError as error:
            found = version, str(error)
            break
    assert found[0] > 2, "the first movements are smaller than the difference of the two sides"
    assert "of iteration 0 " in found[1], "the comparison is with the last version that surely arrived"


def test_another_model_is_refused_at_the_first_sync(prompts):
    policy, other, sync_check = both_sides(causal(prompts))
    other.twin, other.stale = causal_policy(seed=5, scale=3.0), True
    with pytest.raises(SamplerError, match=re.escape(f"more than {TOLERANCE:g}: it holds other weights")):
        sync(policy, other, sync_check, 0)


def test_scores_that_are_not_numbers_are_refused(prompts):
    policy, other, sync_check = both_sides(causal(prompts), noise=math.nan)
    with pytest.raises(SamplerError, match="differ from the policy's by nan"):
        sync(policy, other, sync_check, 0)


def test_one_of_several_workers_that_did_not_follow_is_enough(prompts):
    policy, other, sync_check = both_sides(causal(prompts), workers=2, lost=1)
    sync(policy, other, sync_check, 0)
    move(policy, 0.1, 0)
    answers, stale = other.score, copy.deepcopy(other.twin)

    def one_is_stale(problems, written):
        rollouts = stale.rollouts(problems, written, other.c)
        return lambda: [*answers(problems, written)(), score_in_batches(stale, rollouts, other.c)]

    other.score = one_is_stale
    with pytest.raises(SamplerError, match="of iteration 1 did not arrive"):
        sync(policy, other, sync_check, 1)


def test_workers_that_are_lost_say_nothing(prompts):
    policy, other, sync_check = both_sides(causal(prompts), workers=0, lost=3)
    sync(policy, other, sync_check, 0)
    assert sync_check.earlier is None, "nothing is known to have arrived"
    sync_check.check()  # a second look without a sync waits for nothing


def test_weights_that_training_left_alone_pass(prompts):
    policy, other, sync_check = both_sides(causal(prompts), noise=0.01)
    for version in range(3):
        sync(policy, other, sync_check, version)
