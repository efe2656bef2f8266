"""Mismatch and importance weights against loops in float64."""

import dataclasses
import math

import pytest
import torch

from grpo.grpo_training_step import rollout_loss
from grpo.objectives import OBJECTIVES, policy_loss, token_weights
from grpo.policies.fill_views import FILL_ESTIMATORS
from grpo.samplers import importance as module
from grpo.samplers.importance import check_mismatch, kept_sequences, truncated_ratios, with_importance
from grpo.scoring import score
from grpo.step_metrics import EXTREMES, NO_MISMATCH, mismatch, mismatch_metrics
from tests.tiny import (Catcher, causal_policy, collect, config, consumer, fill_policy, fixed_rewards, flat_gradient,
                        grpo_step, length_reward, prompt_config, prompt_consumer, sampled, train)
from tests.tiny_objectives import MAX_TOKENS, OWN_CLIP, N, M, objective_config, table_rollouts, with_advantage



def test_the_mismatch_is_over_the_tokens_of_the_loss(dataset):
    rollouts = sampled(fill_policy(), dataset, config())
    rollouts.train_mask = rollouts.mask * torch.rand(rollouts.mask.shape).round()
    logp = rollouts.old_logp + torch.randn(rollouts.mask.shape)
    found = mismatch(logp, rollouts)
    d = [float(logp[n, m] - rollouts.old_logp[n, m]) for n, m in rollouts.train_mask.nonzero().tolist()]
    by_hand = {"ratio_minus_one": sum(abs(math.exp(x) - 1) for x in d), "mismatch_kl": sum(math.exp(x) - x - 1 for x in d),
               "mismatch_mean": sum(map(abs, d)), "ratio_mean": sum(map(math.exp, d)),
               "ratio_square": sum(math.exp(2 * x) for x in d)}
    assert found.keys() == NO_MISMATCH.keys() == {*by_hand, *EXTREMES}
    for name, value in by_hand.items():
        assert [float(x) for x in found[name]] == pytest.approx([value, len(d)], rel=1e-4), name
    assert [float(found[name][0]) for name in EXTREMES] == pytest.approx([max(d), -min(d)], rel=1e-5)


@pytest.mark.parametrize("off", [100, -100])
def test_a_mismatch_is_finite_however_far_apart_sampler_and_policy_are(dataset, off):
    rollouts = sampled(fill_policy(), dataset, config())
    found = mismatch(rollouts.old_logp + off, rollouts)
    metrics = mismatch_metrics({name: float(x) for name, (x, _) in found.items()}, float(found["ratio_mean"][1]))
    assert all(map(math.isfinite, metrics.values())) and metrics["mismatch_max"] == 20
    assert metrics["ratio_min"] == metrics["ratio_max"] == pytest.approx(math.exp(off / 5), rel=1e-5)


@pytest.mark.parametrize("weights, share", [([1, 1, 1], 1.0), ([3, 3], 1.0), ([1, 0, 0, 0], 0.25), ([4, 1, 1], 2 / 3)])
def test_the_effective_sample_size_is_kishs(weights, share):
    """n equal weights count as n samples, and one weight among zeros as one."""
    totals = dict.fromkeys(EXTREMES, 0.0) | {"ratio_mean": sum(weights), "ratio_square": sum(w * w for w in weights)}
    assert mismatch_metrics(totals, len(weights))["effective_sample_size"] == pytest.approx(share)


# Importance weights

@pytest.fixture
def caps(monkeypatch):
    """Sets both caps."""
    def set_to(cap):
        monkeypatch.setattr(module, "TOKEN_CAP", cap)
        monkeypatch.setattr(module, "SEQUENCE_CAP", cap)
    return set_to


def log_ratios(seed=0, n=6, m=9, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(m) < torch.randint(1, m + 1, (n, 1), generator=g)).double()
    return scale * torch.randn(n, m, dtype=torch.float64, generator=g) * mask, mask


@pytest.mark.parametrize("cap", [1.0, 2.0, 100.0])
def test_a_tokens_weight_is_its_ratio_up_to_the_cap(caps, cap):
    caps(cap)
    d, mask = log_ratios()
    d[0, :4] = torch.tensor([1e4, math.inf, -1e4, -math.inf])
    weight, kept = truncated_ratios(d, mask)
    by_hand = [[min(math.exp(min(x, 100)), cap) for x in row] for row in d.tolist()]
    torch.testing.assert_close(weight, torch.tensor(by_hand, dtype=torch.float64))
    assert kept.tolist() == [1] * len(d)


@pytest.mark.parametrize("cap", [1.0, 1.1, 1.5, 3.0])
def test_a_completion_stays_if_its_geometric_mean_is_within_the_bounds(caps, cap):
    caps(cap)
    d, mask = log_ratios(1, 40, scale=0.7)
    weight, kept = kept_sequences(d, mask)
    for n in range(len(d)):
        product = math.prod(math.exp(d[n, m]) for m in range(d.shape[1]) if mask[n, m])
        stays = 1 / cap <= product ** (1 / int(mask[n].sum())) <= cap
        assert kept[n] == stays and weight[n].tolist() == [float(stays)] * d.shape[1]
    assert 0 < kept.sum() < len(d) or cap in (1.0, 3.0)


def test_both_bounds_belong_to_the_range_and_ratios_that_are_not_finite_do_not(caps):
    caps(2.0)
    log_cap, inf = math.log(2.0), math.inf
    d = torch.tensor([[log_cap] * 2, [-log_cap] * 2, [log_cap + 0.01] * 2, [-log_cap - 0.01] * 2, [inf, 0], [-inf, 0],
                      [math.nan, 0], [inf, -inf]], dtype=torch.float64)
    assert kept_sequences(d, torch.ones_like(d))[1].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_under_the_cap_the_samplers_mean_is_the_policys(caps):
    """The reason for the weights: the sum over the sampler's distribution of weight times anything is the policy's."""
    caps(1e3)
    g = torch.Generator().manual_seed(3)
    p, q, f = (torch.randn(7, dtype=torch.float64, generator=g) for _ in range(3))
    p, q = p.log_softmax(0), q.log_softmax(0)
    weight, _ = truncated_ratios((p - q)[None], torch.ones(1, 7))
    torch.testing.assert_close((q.exp() * weight[0] * f).sum(), (p.exp() * f).sum())


def weighted_loss_by_hand(name, logits, rollouts, before, importance, cap):
    """The objective with the paper's formula, token by token, with weights and rejection. before: (N, M) log p."""
    lengths, p, loss = [int(n) for n in rollouts.mask.sum(1)], logits.log_softmax(-1), 0.0
    ratio = [[math.exp(before[i, t] - rollouts.old_logp[i, t]) for t in range(lengths[i])] for i in range(N)]
    kept = range(N)
    if importance == "sequence_mask":
        kept = [i for i in range(N) if 1 / cap <= math.prod(ratio[i]) ** (1 / lengths[i]) <= cap]
        assert 0 < len(kept) < N, "a part of the completions is rejected"
    low, high = OWN_CLIP.get(name, (0.2, 0.2))
    tokens, completions = sum(lengths[i] for i in kept), len(kept)
    for i in kept:
        logp = [p[i, t, rollouts.target[i, t]] for t in range(lengths[i])]
        now = [torch.exp(logp[t] - before[i, t]) for t in range(lengths[i])]
        if OBJECTIVES[name].ratio == "sequence":
            s = torch.exp(sum(logp[t] - before[i, t] for t in range(lengths[i])) / lengths[i]).detach()
            now = [s * torch.exp(x - x.detach()) for x in logp]
        for t in range(lengths[i]):
            w = min(ratio[i][t], cap) if importance == "token" else 1.0
            A, clipped = rollouts.advantage[i, 0], torch.clamp(now[t], 1 - low, 1 + high)
            term = torch.minimum(now[t] * A, clipped * A)
            if name == "cispo":
                term = clipped.detach() * A * logp[t]
            if name == "dppo":
                moved = (torch.exp(logp[t]) - torch.exp(before[i, t])).item()
                term = now[t] * A * (moved <= high if A > 0 else moved >= -low)
            share = {"sequence": 1 / lengths[i] / completions, "constant": 1 / MAX_TOKENS / completions,
                     "sum": 1 / completions, "token": 1 / tokens}[OBJECTIVES[name].average]
            loss = loss - share * w * term
    return loss


@pytest.mark.parametrize("importance, cap", [("token", 1.05), ("token", 1.3), ("sequence_mask", 1.1)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_with_importance_equal_a_loop(caps, name, importance, cap):
    caps(cap)
    policy, rollouts, reference, reward = table_rollouts()
    c = objective_config(name, "none", importance=importance, max_staleness=1)
    rollouts = with_advantage("none", rollouts, reference, reward, c)
    g = torch.Generator().manual_seed(5)
    before = rollouts.old_logp + 0.2 * torch.randn(N, M, dtype=torch.float64, generator=g)
    weighted, sums = with_importance(rollouts, before, importance)
    weighted = dataclasses.replace(weighted, old_logp=before)
    weight = token_weights(weighted.train_mask, OBJECTIVES[name].average, MAX_TOKENS)
    loss, _ = rollout_loss(policy, weighted, weight, c, on_policy=False)
    loss.backward()
    twin = policy.logits.detach().clone().requires_grad_()
    by_hand = weighted_loss_by_hand(name, twin, rollouts, before, importance, cap)
    by_hand.backward()
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(policy.logits.grad, twin.grad)
    capped, tokens = sums["importance_capped"]
    rejected, completions = sums["importance_rejected"]
    assert tokens == rollouts.mask.sum() and completions == N
    assert capped > 0 and (rejected > 0) == (importance == "sequence_mask")


def samples_with_errors(policy, off):
    """The policy's sampler reports log-probabilities that are lower by off(rollouts), (N, M), than its own."""
    sample = policy.sample

    def sample_with_errors(problems, iteration, config):
        rollouts = sample(problems, iteration, config)
        return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off(rollouts) * rollouts.mask)

    policy.sample = sample_with_errors
    return policy


def step_gradient(policy, data, c):
    catcher = Catcher(policy)
    metrics = grpo_step(policy, None, length_reward, data, c, optimizers=[catcher])
    return catcher.gradient, metrics


@pytest.mark.parametrize("importance, ratio", [("token", 1.0), ("sequence_mask", 1.0), ("token", 1.5)])
def test_equal_ratios_below_the_cap_scale_the_gradient(prompts, importance, ratio):
    c = prompt_config(kl_beta=0.0, max_staleness=1)
    data, off = prompt_consumer(prompts, c), lambda rollouts: math.log(ratio)
    plain, _ = step_gradient(causal_policy(scale=3.0), data, c)
    policy = samples_with_errors(causal_policy(scale=3.0), off)
    found, metrics = step_gradient(policy, data, dataclasses.replace(c, importance=importance))
    torch.testing.assert_close(found, ratio * plain, rtol=1e-3, atol=1e-4 * float(plain.abs().max()))
    assert metrics["ratio_mean"] == pytest.approx(ratio, rel=1e-4) and metrics["clip_fraction"] == 0
    assert metrics["importance_capped"] == metrics["importance_rejected"] == 0
    assert metrics["effective_sample_size"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("objective", ["grpo", "dapo", "dr_grpo", "rloo"])
def test_rejected_completions_leave_no_trace_in_the_gradient(prompts, objective):
    """The first completion of each group is rejected: the gradient is that of the others with their advantages."""
    def off(rollouts):
        return (torch.arange(len(rollouts.mask)) % 4 == 0).float()[:, None]

    c = prompt_config(kl_beta=0.0, importance="sequence_mask", objective=objective, max_staleness=1)
    policy, data = samples_with_errors(causal_policy(scale=3.0), off), prompt_consumer(prompts, c)
    rollouts, sums = collect(policy, length_reward, data, c)
    assert rollouts.mask[::4].sum() == 0 and rollouts.mask[1::4].sum() > 0
    catcher = Catcher(policy)
    assert train(policy, rollouts, sums, c, [catcher])["importance_rejected"] == 0.25

    plain = causal_policy(scale=3.0)
    whole, _ = collect(plain, length_reward, data, dataclasses.replace(c, importance="none"))
    stays = torch.arange(len(whole.mask)) % 4 > 0
    logp, weight = score(plain, whole, c.temperature).logp, torch.zeros_like(whole.mask)
    weight[stays] = token_weights(whole.mask[stays], OBJECTIVES[objective].average, whole.max_tokens)
    (-(logp * whole.advantage * weight).sum()).backward()
    expected = flat_gradient(plain)
    torch.testing.assert_close(catcher.gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_a_step_whose_completions_are_all_rejected_changes_nothing(prompts):
    c = prompt_config(kl_beta=0.0, importance="sequence_mask", max_staleness=1)
    policy = samples_with_errors(causal_policy(scale=3.0), lambda rollouts: 1.0)
    metrics = grpo_step(policy, None, length_reward, prompt_consumer(prompts, c), c)
    assert metrics["importance_rejected"] == 1 and metrics["empty_steps"] == 1 and metrics["grad_norm"] == 0


@pytest.mark.parametrize("kind, importance", [("fill", "token"), ("prompts", "token"), ("prompts", "sequence_mask")])
def test_the_first_ratio_is_one_whoever_sampled(dataset, prompts, caps, kind, importance):
    """Weights are those to the policy before the step, and the clipped ratio starts from there."""
    caps(2.0)
    off = lambda rollouts: torch.randn_like(rollouts.mask) * 0.3
    if kind == "fill":
        c, policy = config(importance=importance, kl_beta=0.0, max_staleness=1), samples_with_errors(fill_policy(), off)
        data, reward = consumer(dataset, c), fixed_rewards(torch.rand(4, 4))
    else:
        c = prompt_config(importance=importance, kl_beta=0.0, max_staleness=1)
        policy, data, reward = samples_with_errors(causal_policy(), off), prompt_consumer(prompts, c), length_reward
    rollouts, sums = collect(policy, reward, data, c)
    assert torch.equal(score(policy, rollouts, c.temperature).logp, rollouts.old_logp)
    metrics = train(policy, rollouts, sums, c)
    assert metrics["clip_fraction"] == 0 and metrics["kl_to_old"] == 0 and metrics["mismatch_kl"] > 0.01
    assert not rollouts.advantage.requires_grad


def test_the_expected_gradient_with_the_ratio_to_the_sampler_is_the_policys():
    """Over all tokens that the sampler can write, each with its probability there: without a bound on the ratio the
    gradient is that of the expected advantage under the policy."""
    g = torch.Generator().manual_seed(4)
    theta, q, A = (torch.randn(7, dtype=torch.float64, generator=g) for _ in range(3))
    theta.requires_grad_()
    p, q = theta.log_softmax(0), q.log_softmax(0)
    unbounded = {"clip_low": 1.0, "clip_high": 1e9}
    loss, *_ = policy_loss(p[:, None], q[:, None], A[:, None], q.exp()[:, None], OBJECTIVES["rloo"], **unbounded)
    found, = torch.autograd.grad(-loss, theta)
    expected, = torch.autograd.grad((theta.softmax(0) * A).sum(), theta)
    torch.testing.assert_close(found, expected)


def test_the_ratio_to_the_sampler_is_clipped_and_no_pass_scores_before_the_step(prompts):
    """All ratios are 1.5, above the range: completions above their group's mean lose their gradient, the others count
    one and a half times."""
    c = prompt_config(kl_beta=0.0, max_staleness=1, ratio_to="sampler")
    data, plain = prompt_consumer(prompts, c), causal_policy(scale=3.0)
    found, metrics = step_gradient(samples_with_errors(causal_policy(scale=3.0), lambda _: math.log(1.5)), data, c)
    assert metrics["ratio_mean"] == pytest.approx(1.5, rel=1e-4) and "time/rescore" not in metrics
    rollouts, _ = collect(plain, length_reward, data, dataclasses.replace(c, ratio_to="policy"))
    weight = token_weights(rollouts.mask, "sequence", c.max_new_tokens)
    logp = score(plain, rollouts, c.temperature).logp
    (-1.5 * (logp * rollouts.advantage.clamp(max=0) * weight).sum()).backward()
    expected = flat_gradient(plain)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("estimator", FILL_ESTIMATORS)
def test_an_estimator_is_not_taken_for_a_fault_of_the_sampler(dataset, estimator):
    """What an estimator gives is not the probability of what was sampled, though sampler and policy are the same. But
    where it is that probability, a sampler with another temperature is a fault."""
    c = config(sampler="ray", fill_estimator=estimator, unmask_steps=4, kl_beta=0.0)
    policy = fill_policy(seed=1, scale=25.0)
    step = lambda: grpo_step(policy, None, fixed_rewards(torch.rand(4, 4)), consumer(dataset, c), c)
    assert (step()["mismatch_kl"] > 0.2) != c.scores_as_drawn
    if estimator == "trajectory":
        policy.sample = lambda problems, iteration, _: fill_policy(seed=1, scale=25.0).sample(
            problems, iteration, dataclasses.replace(c, temperature=5.0))
        with pytest.raises(ValueError, match="sampler='ray': mismatch_kl"):
            step()


def test_a_sampler_far_from_the_policy_ends_the_run_in_one_line():
    check_mismatch({"mismatch_kl": 0.19}, "vllm")
    check_mismatch({"mismatch_kl": math.nan}, "vllm")  # such a step is skipped and reported by itself
    check_mismatch({}, "ray")
    with pytest.raises(ValueError, match="^sampler='vllm': mismatch_kl=0.7 nats per token is above 0.2: .*temperature"):
        check_mismatch({"mismatch_kl": 0.7}, "vllm")
