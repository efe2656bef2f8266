"""Causal generators: the cache, generation, the shared prompt, and the step on prompts."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from core.checkpoint_manager import freeze
from core.losses import k3, kept_tokens, sampling_logp
from core.model import Cache
from core.sampling import Stop, draw_uniforms, generate
from core.training_step import build_optimizers
from grpo.advantages import compute_advantages
from grpo.grpo_training_step import grpo_training_step, rollout_loss
from grpo.objectives import OBJECTIVES, token_weights
from grpo.rollout import collect
from grpo.scoring import score, with_reference
from tests.tiny import CAUSAL, Catcher, causal_model, config, one_process, prompt_consumer

CPU, NO_CAST = torch.device("cpu"), torch.autocast("cpu", enabled=False)
never = lambda written: torch.zeros(len(written), dtype=torch.bool)


def settings(**changes):
    return config(**{"max_new_tokens": 6, "group_size": 4, "batch_size": 4, "task_type": "general"} | changes)


def gathered(prompts, policy, c, **changes):
    c = dataclasses.replace(c, **changes)
    data = prompt_consumer(prompts, c)
    return collect(policy, data.problems("train", 0), 0, c, CAUSAL, CPU, NO_CAST)


def test_logits_are_the_same_with_and_without_the_cache():
    net, tokens = causal_model(), torch.randint(0, 90, (3, 20))
    past, parts = Cache(), []
    for part in tokens.split([7, 1, 1, 5, 6], dim=1):
        parts.append(net(part, past=past))
    torch.testing.assert_close(torch.cat(parts, 1), net(tokens), rtol=1e-4, atol=1e-4)

    past = Cache()
    first = net(tokens[:, :9], past=past)
    roomy, parts = past.repeat(1, room=11), [first]
    for t in range(9, 20):
        parts.append(net(tokens[:, t : t + 1], past=roomy))
    torch.testing.assert_close(torch.cat(parts, 1), net(tokens), rtol=1e-4, atol=1e-4)


def test_padding_on_the_left_changes_nothing():
    net, tokens = causal_model(), torch.randint(0, 90, (2, 10))
    padded = torch.cat((torch.full((2, 4), CAUSAL.pad_token_id), tokens), 1)
    shown = net(padded, padding=torch.tensor([4, 4]))[:, 4:]
    torch.testing.assert_close(shown, net(tokens), rtol=1e-4, atol=1e-4)
    other = padded.clone()
    other[:, :4] = 7  # what the padding holds is never read: masks go by position
    assert torch.equal(shown, net(other, padding=torch.tensor([4, 4]))[:, 4:])


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_generated_tokens_are_as_frequent_as_their_reported_probability(truncation, temperature):
    net, prompt, n = causal_model(scale=4.0), torch.tensor([[5, 6, 7], [9, 9, 8]]), 4000
    out = generate(net, prompt, None, torch.rand(2, n, 2, dtype=torch.float64), never, temperature, **truncation)
    for i in range(2):
        first, logp = out.target[i * n : (i + 1) * n, 0], out.logp[i * n : (i + 1) * n, 0]
        values, counts = first.unique(return_counts=True)
        expected = torch.stack([logp[first == v][0].exp() for v in values]) * n
        assert abs(float(expected.sum()) / n - 1) < 0.02, "what was never drawn is rare"
        chi2 = ((counts - expected) ** 2 / expected)[expected > 5].sum()
        dof = int((expected > 5).sum())
        assert chi2 < dof + 5 * (2 * dof) ** 0.5 + 5
        v = int(values[counts.argmax()])  # the second token, given the most frequent first one
        rows = (first == v).nonzero().squeeze(1)
        second, p = out.target[i * n : (i + 1) * n, 1][rows], out.logp[i * n : (i + 1) * n, 1][rows].exp()
        top = int(second.mode().values)
        share, p = float((second == top).float().mean()), float(p[second == top][0])
        assert abs(share - p) < 5 * (p * (1 - p) / len(rows)) ** 0.5 + 1e-3


def test_what_is_kept_is_the_top_k_then_the_nucleus_then_what_is_likely_enough():
    logp = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    assert kept_tokens(logp, top_k=2).tolist() == [True, True, False, False, False]
    assert kept_tokens(logp, top_p=0.75).tolist() == [True, True, True, False, False]
    assert kept_tokens(logp, min_p=0.3).tolist() == [True, True, True, False, False]
    assert kept_tokens(logp, top_k=3, top_p=0.8).tolist() == [True, True, False, False, False]
    assert sampling_logp(logp, top_k=2).exp()[:2].tolist() == pytest.approx([4 / 7, 3 / 7])


def test_a_rollout_does_not_depend_on_the_batch_that_it_is_in():
    net, stop = causal_model(), Stop(CAUSAL)
    prompts = [CAUSAL.encode(text) for text in ("the quick", "a", "brown fox jumps", "owls")]
    longest, G, L = max(map(len, prompts)), 5, 12

    def run(rows):
        ids = torch.tensor([[CAUSAL.pad_token_id] * (longest - len(prompts[i])) + prompts[i] for i in rows])
        padding = torch.tensor([longest - len(prompts[i]) for i in rows])
        return generate(net, ids, padding, draw_uniforms(3, 7, rows, (G, L)), stop, temperature=1.3)

    together = run([0, 1, 2, 3])
    for i in range(4):
        alone = run([i])
        for g in range(G):
            n = int(alone.mask[g].sum())
            assert int(together.mask[i * G + g].sum()) == n
            assert torch.equal(alone.target[g, :n], together.target[i * G + g, :n])


def test_finished_rows_leave_the_batch_and_keep_what_they_wrote():
    net, seen = causal_model(scale=1.0), []
    states = net.states
    net.states = lambda tokens, *rest, **more: seen.append(len(tokens)) or states(tokens, *rest, **more)
    stops = lambda written: written[:, -1] < 24  # about a quarter of the vocabulary ends a row
    out = generate(net, torch.tensor([[1, 2]]), None, torch.rand(1, 64, 20, dtype=torch.float64), stops)
    assert seen[0] == 1, "one prefill per distinct prompt"
    assert seen[1] > 32 > seen[-1] and seen[1:] == sorted(seen[1:], reverse=True)
    length = out.mask.sum(1).long()
    for row, n in zip(out.target.tolist(), length.tolist(), strict=True):
        assert (row[n - 1] < 24 or n == 20) and all(t >= 24 for t in row[: n - 1]) and not any(row[n:])
    assert torch.equal(out.truncated, torch.tensor([row[n - 1] >= 24 for row, n in
                                                    zip(out.target.tolist(), length.tolist(), strict=True)]))


def test_stop_sequences_end_a_row_and_are_cut_from_its_text():
    stop = Stop(CAUSAL, ["END", ";"])
    rows = [CAUSAL.encode(text) for text in ("abcEND", "abcdEN", "abcde;")]
    assert stop(torch.tensor(rows)).tolist() == [True, False, True]
    assert [stop.text(row) for row in rows] == ["abc", "abcdEN", "abcde"]
    assert Stop(CAUSAL).text([*CAUSAL.encode("ab"), CAUSAL.stop_token_id]) == "ab"


def test_temperature_zero_takes_the_likeliest():
    net, prompt = causal_model(), torch.tensor([[1, 2, 3]])
    out, tokens = generate(net, prompt, None, torch.zeros(1, 1, 8), never, temperature=0), prompt
    for t in range(8):
        tokens = torch.cat((tokens, net(tokens)[:, -1:].argmax(-1)), 1)
    assert out.target[0].tolist() == tokens[0, 3:].tolist()


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 4, "min_p": 0.05}])
def test_rollouts_report_the_probability_that_the_scorer_finds(prompts, truncation):
    policy, c = causal_model(), settings(temperature=0.8, **truncation)
    rollouts = gathered(prompts, policy, c)
    said = score(policy, rollouts, c.temperature).logp
    torch.testing.assert_close(said * rollouts.mask, rollouts.old_logp, rtol=1e-4, atol=1e-4)


def loss_and_gradient(policy, rollouts, c, objective="grpo"):
    reward = torch.linspace(-1, 1, len(rollouts.target)).view(c.batch_size, -1, 1).sin()
    advantage = compute_advantages(reward, "group_mean").flatten(0, 1)
    weight = token_weights(rollouts.mask, OBJECTIVES[objective].average, c.max_new_tokens)
    policy.zero_grad()
    loss, _ = rollout_loss(policy, dataclasses.replace(rollouts, advantage=advantage), weight, c, c.kl_beta)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()]), advantage, weight


@pytest.mark.parametrize("estimator", ["k2", "k3", "exact"])
def test_reading_a_prompt_once_gives_the_gradient_of_repeating_it(prompts, estimator, monkeypatch):
    sampler, policy = causal_model(seed=1), causal_model(seed=1).double()
    reference, c = freeze(causal_model(seed=2).double()), settings(kl_beta=0.3, kl_estimator=estimator, temperature=0.7)
    found = []
    for shared, at_once in ((True, 2**25), (False, 2**25), (True, 500)):
        monkeypatch.setattr("grpo.scoring.LOGITS_AT_ONCE", at_once)  # the last one makes its logits in parts
        rollouts = gathered(prompts, sampler, c, shared_prompt=shared)
        assert (rollouts.prompt is not None) == shared
        rollouts = with_reference(rollouts, reference, c.temperature, 4, NO_CAST)
        found.append(loss_and_gradient(policy, rollouts, c))
    for loss, g, _, _ in found[1:]:
        assert abs(loss - found[0][0]) < 1e-6 and (g - found[0][1]).norm() / g.norm() < 1e-6


def test_loss_is_that_of_a_loop_over_completions_and_tokens(prompts):
    policy, reference, c = causal_model(seed=1), freeze(causal_model(seed=2)), settings(kl_beta=0.3, temperature=0.7)
    rollouts = with_reference(gathered(prompts, policy, c), reference, c.temperature, 4, NO_CAST)
    loss, g, advantage, _ = loss_and_gradient(policy, rollouts, c)
    data, total = prompt_consumer(prompts, c), 0.0
    batch = data.problems("train", 0)
    for n in range(len(rollouts.target)):
        prompt, length = batch["record"][n // c.group_size]["tokens"], int(rollouts.mask[n].sum())
        written = rollouts.target[n, :length].tolist()
        logits, ref = (net(torch.tensor([prompt + written]))[0] / c.temperature for net in (policy, reference))
        for t, token in enumerate(written):
            logp = logits[len(prompt) - 1 + t].log_softmax(-1)[token]
            ref_logp = ref[len(prompt) - 1 + t].log_softmax(-1)[token]
            kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
            total = total + (-advantage[n, 0] * torch.exp(logp - logp.detach()) + c.kl_beta * kl) / length / 16
    policy.zero_grad()
    total.backward()
    loop = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert abs(loss - total) < 1e-5 and (g - loop).norm() / loop.norm() < 1e-5


def rewarded(prompts, policy, reference, c, number=0, optimizers=None, accumulate=1, reward=None):
    data = prompt_consumer(prompts, c)
    batches = [data.problems("train", number, micro) for micro in range(accumulate)]
    batch = {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}

    def length(rollouts):
        value = rollouts.mask.sum(1).view(rollouts.problems, -1)
        return value, value[..., None], {"length": value.flatten()}

    return grpo_training_step(policy, reference, reward or length, batch, optimizers or build_optimizers(policy, c),
                              c.learning_rate, number, c, CAUSAL, one_process())


@pytest.mark.parametrize("estimator", ["k3", "exact"])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}])
def test_the_first_ratio_is_one_and_the_kl_zero(prompts, estimator, truncation):
    policy = causal_model(dropout=0.5)
    c = settings(temperature=0.8, kl_estimator=estimator, **truncation)
    metrics = rewarded(prompts, policy, freeze(copy.deepcopy(policy)), c)
    assert metrics["mean_kl"] == 0 and metrics["clip_fraction"] == 0
    assert metrics["ratio_minus_one"] < 1e-5, "the sampler with its cache and the scorer agree"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_gradient_does_not_depend_on_the_micro_batch(prompts, objective):
    found, policy = [], causal_model(seed=1)
    for batch_size, accumulate in ((4, 1), (1, 4), (2, 2)):
        c, catcher = settings(objective=objective, batch_size=batch_size), Catcher(policy)
        rewarded(prompts, policy, freeze(causal_model(seed=2)), c, optimizers=[catcher], accumulate=accumulate)
        found.append(catcher.gradient)
    for other in found[1:]:
        assert (other - found[0]).norm() < 2e-5 * found[0].norm()


def test_the_stop_token_is_trained(prompts):
    """The reward is to be short: a policy whose stop token had no gradient could not learn it."""
    policy, c = causal_model(scale=1.0), settings(kl_beta=0.0, learning_rate=3e-2, batch_size=8)
    optimizers, lengths = build_optimizers(policy, c), []

    def brief(rollouts):
        value = -rollouts.mask.sum(1).view(rollouts.problems, -1)
        return value, value[..., None], {"brief": value.flatten()}

    for number in range(60):
        lengths.append(rewarded(prompts, policy, None, c, number, optimizers, reward=brief)["completion_length"])
    assert lengths[0] > 5 and np.mean(lengths[-5:]) < 2


def test_truncated_completions_are_counted_and_can_be_left_out(prompts, monkeypatch):
    moved = {}
    for masked in (False, True):
        policy, c = causal_model(), settings(kl_beta=0.0, mask_truncated=masked, max_new_tokens=1, weight_decay=0.0)
        monkeypatch.setattr("core.sampling.Stop.__call__", lambda stop, written: torch.zeros(len(written), dtype=bool))
        before = [p.detach().clone() for p in policy.parameters()]
        reward = lambda r: (r.target[:, :1].float().view(4, -1), r.target[:, :1].float().view(4, -1, 1), {})
        metrics = rewarded(prompts, policy, None, c, reward=reward)
        assert metrics["truncated"] == 1 and metrics["completion_length"] == 1
        moved[masked] = max(float((a - b).abs().max()) for a, b in zip(policy.parameters(), before, strict=True))
    assert moved[False] > 0 and moved[True] == 0


def test_samples_that_no_reward_scores_are_skipped_and_counted(prompts):
    policy, c = causal_model(), settings(kl_beta=0.0)
    value = torch.rand(4, 4)
    value[0], value[1, 2] = torch.nan, torch.nan
    metrics = rewarded(prompts, policy, None, c, reward=lambda r: (value, value[..., None], {"some": value.flatten()}))
    assert metrics["skipped_samples"] == 5 and metrics["skipped_steps"] == 0
    assert metrics["mean_reward"] == pytest.approx(float(value.nanmean()), rel=1e-5)
    assert metrics["reward/some"] == pytest.approx(float(value.nanmean()), rel=1e-5)


def test_k3_by_hand():
    assert float(k3(torch.tensor(-1.0), torch.tensor(-1.5))) == pytest.approx(np.exp(-0.5) + 0.5 - 1)
