"""Prompts that are answered in any order: what is sampled, how likely it was, and where a completion ends."""

import dataclasses
from unittest import mock

import pytest
import torch

from core.distributions import kept_tokens, restrict, sampling_logp
from core.fill_in import UNMASK_ORDERS
from grpo.policies import prompt_fill
from grpo.sampling_settings import SamplingSettings
from tests.tiny import (
    CAUSAL, clear_gradient, flat_gradient, prompt_config, prompt_consumer, prompt_fill_policy, sampled)

SETTINGS = {"max_new_tokens": 9, "unmask_steps": 2, "block_length": 4, "kl_estimator": "exact"}
MASK, END = CAUSAL.mask_token_id, CAUSAL.stop_token_id
BUILT_IN = tuple(UNMASK_ORDERS)
ADDED = {  # orders that a config may add
    "first_to_last": lambda noise: torch.arange(noise.shape[1]).expand(noise.shape),
    "right_to_left": lambda noise: 5.0 - torch.arange(noise.shape[1]).expand(noise.shape),
    "likely_first": lambda logp, ids: -2 * logp.gather(1, ids),
    "unlikely_first": lambda logp, ids: logp.gather(1, ids)}


@pytest.fixture(autouse=True)
def added_orders(monkeypatch):
    for name, order in ADDED.items():
        monkeypatch.setitem(UNMASK_ORDERS, name, order)


def more_ends(policy):
    """The policy with end tokens that are as likely as a few others, so that completions end early."""
    with torch.no_grad():
        weight = policy.model.head.weight
        weight[END] = weight[5:25].mean(0)
    return policy


def passes_of(policy, problems, config):
    """The pass (P, G, L) that drew each token, the texts (P, G, S, T) that the passes read, and the rollout."""
    with mock.patch.object(prompt_fill, "texts_to_score", wraps=prompt_fill.texts_to_score) as texts_to_score:
        rollouts = policy.sample(problems, 0, SamplingSettings.of(config))
    _, turn, read, _ = texts_to_score.call_args[0]
    shape = len(problems["number"]), config.group_size
    return turn.unflatten(0, shape), read.unflatten(0, shape), rollouts


@pytest.mark.parametrize("more", [
    {}, {"top_p": 0.7}, {"unmask_order": "left_to_right", "unmask_steps": 4},
    {"unmask_order": "confidence", "group_size": 12}, {"block_length": None, "unmask_steps": 3},
    {"unmask_order": "right_to_left", "unmask_steps": 4},
    {"unmask_order": "unlikely_first", "group_size": 12}], ids=str)
@torch.no_grad()
def test_each_token_has_the_probability_of_its_pass_in_a_text_without_padding(prompts, more):
    c = prompt_config(**SETTINGS | {"temperature": 0.8} | more)
    policy, data = more_ends(prompt_fill_policy(1)), prompt_consumer(prompts, c)
    problems = data.problems("train", 0)
    assert problems["padding"].any()
    turns, read, rollouts = passes_of(policy, problems, c)
    scores = policy.score(rollouts, c.temperature)
    torch.testing.assert_close(scores.logp, rollouts.old_logp, rtol=0, atol=1e-5)
    G, L = c.group_size, c.max_new_tokens
    T = read.shape[-1] - L
    blocks = -(-L // (c.block_length or L))
    ended_early = 0
    for n in range(len(rollouts.mask)):
        p, g = divmod(n, G)
        prompt = torch.from_numpy(problems["input"][p, problems["padding"][p] :])
        text = torch.cat((prompt, torch.full((L,), MASK)))
        turn, target = turns[p, g], rollouts.target[n].where(rollouts.mask[n] > 0, MASK)
        for s in range(blocks * c.unmask_steps):
            now = (turn == s).nonzero().flatten().tolist()
            logits = policy.project(policy.model.states(text[None]))[0]
            logp = sampling_logp(logits, c.temperature)
            logp = restrict(logp, kept_tokens(logp, top_p=c.top_p))
            for m in now:
                if rollouts.mask[n, m]:
                    assert abs(float(logp[len(prompt) + m, target[m]] - rollouts.old_logp[n, m])) < 1e-4
            later = read[p, g, s + 1 :, T:]                                   # what is drawn behind an end, too
            for m in now:
                text[len(prompt) + m] = later[0, m] if len(later) else target[m]
        drawn = turn >= 0
        length = int(rollouts.mask[n].sum())
        assert rollouts.mask[n, :length].all() and not rollouts.mask[n, length:].any()
        ends = (target == END) & drawn
        assert bool(rollouts.truncated[n]) == (not ends.any())
        if ends.any():
            assert length == int(ends.nonzero()[0]) + 1 and target[length - 1] == END
            ended_early += int(not drawn.all())
        else:
            assert length == L
    assert ended_early or c.top_p < 1 or c.block_length is None, "the passes of some completions are saved"


def test_padding_and_the_other_prompts_change_nothing(prompts):
    c = prompt_config(**SETTINGS)
    policy, data = more_ends(prompt_fill_policy(1)), prompt_consumer(prompts, c)
    problems = data.problems("train", 0)
    whole = policy.sample(problems, 0, SamplingSettings.of(c))
    for p in range(len(problems["number"])):
        alone = {key: x[p : p + 1] for key, x in problems.items()}
        cut = int(alone["padding"][0])
        alone |= {"input": alone["input"][:, cut:], "padding": alone["padding"] - cut}
        part = policy.sample(alone, 0, SamplingSettings.of(c))
        rows = slice(p * c.group_size, (p + 1) * c.group_size)
        assert part.texts.completions == whole.texts.completions[rows]
        torch.testing.assert_close(part.old_logp, whole.old_logp[rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("order", [*BUILT_IN, *ADDED])
@torch.no_grad()
def test_blocks_follow_each_other_and_the_order_within_them_is_the_one_asked_for(prompts, order):
    c = prompt_config(**SETTINGS | {"unmask_order": order, "unmask_steps": 4, "max_new_tokens": 8, "group_size": 16})
    turn, *_ = passes_of(prompt_fill_policy(2), prompt_consumer(prompts, c).problems("train", 0), c)
    whole = turn.flatten(0, 1)[(turn.flatten(0, 1) >= 0).all(1)]                     # (n, 8)
    assert len(whole) > 10
    for block in (0, 1):
        assert (whole[:, 4 * block : 4 * block + 4].sort(1)[0] == torch.arange(4) + 4 * block).all()
    expected = {"right_to_left": [3, 2, 1, 0, 7, 6, 5, 4]}.get(order, list(range(8)))
    in_order = (whole == torch.tensor(expected)).all(1)
    assert in_order.all() if order in ("left_to_right", "first_to_last", "right_to_left") else not in_order.all()


@pytest.mark.parametrize("built_in, added", [("left_to_right", "first_to_last"), ("confidence", "likely_first")])
@torch.no_grad()
def test_an_order_of_a_config_with_the_formula_of_a_built_in_one_gives_the_same_numbers(prompts, built_in, added):
    found = []
    for order in (built_in, added):
        c = prompt_config(**SETTINGS | {"unmask_order": order, "top_p": 0.8})
        policy = more_ends(prompt_fill_policy(1))
        rollouts = policy.sample(prompt_consumer(prompts, c).problems("train", 0), 0, SamplingSettings.of(c))
        found.append((rollouts.target, rollouts.old_logp, rollouts.mask, policy.score(rollouts, c.temperature).logp))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("estimator", ["trajectory", "one_step"])
def test_completions_read_alone_have_the_gradient_of_all(prompts, estimator):
    c = prompt_config(**SETTINGS | {"fill_estimator": estimator})
    policy = more_ends(prompt_fill_policy(1))
    rollouts, found = sampled(policy, prompts, c), []
    weight = torch.rand(rollouts.target.shape) * rollouts.mask
    for parts in ([torch.arange(rollouts.problems)], torch.arange(rollouts.problems).split(1)):
        clear_gradient(policy)
        for part in parts:
            some, rows = rollouts.select(part)
            (policy.score(some, c.temperature).logp * weight[rows]).sum().backward()
        found.append(flat_gradient(policy))
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm() > 0


@torch.no_grad()
def test_a_stop_sequence_ends_a_completion_with_the_token_that_completes_it(prompts):
    c = prompt_config(**SETTINGS | {"response_prefix": "so ", "top_p": 0.7})
    policy, data = more_ends(prompt_fill_policy(1)), prompt_consumer(prompts, c)
    problems = data.problems("train", 0)
    free = policy.sample(problems, 0, SamplingSettings.of(c))
    texts = [text[3:] for text in free.texts.completions]
    letter = max("abcdefghijklmnopqrstuvwxyz", key=lambda x: sum(x in text for text in texts))
    cut = policy.sample(problems, 0, dataclasses.replace(SamplingSettings.of(c), stop_sequences=(letter, "END")))
    assert torch.equal(cut.target, free.target * cut.mask.long()), "the draws are the same"
    ended = 0
    for n, whole in enumerate(texts):
        length = 1 + whole.find(letter) if letter in whole else int(free.mask[n].sum())
        assert cut.mask[n].tolist() == [1.0] * length + [0.0] * (c.max_new_tokens - length)
        assert cut.texts.completions[n] == "so " + whole.split(letter)[0]
        ended += letter in whole
    assert ended
    torch.testing.assert_close(policy.score(cut, c.temperature).logp, cut.old_logp, rtol=0, atol=1e-5)
