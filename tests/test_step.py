"""The GRPO step: exact at the start, shared forwards, and a gradient that nothing but the mathematics decides."""

import copy

import pytest
import torch

from core.checkpoint_manager import freeze
from core.losses import sampling_logp
from core.training_step import build_optimizers
from grpo.advantages import ADVANTAGES, compute_advantages
from grpo.grpo_training_step import grpo_training_step, rollout_loss
from grpo.objectives import OBJECTIVES, token_weights
from grpo.rollout import collect, join
from grpo.scoring import with_reference
from grpo.step_metrics import unique_completions
from tests.tiny import TOKENIZER, Catcher, config, consumer, judge, model, one_process, rewards

NO_CAST = torch.autocast("cpu", enabled=False)


def whole(reward):
    """A reward of whole completions as Rewards returns it. reward: (P, G)."""
    return reward, reward[..., None], {"judge": reward.flatten()}


class CountingModel(torch.nn.Module):
    """Counts the input rows that a model reads."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config, self.rows = inner, inner.config, 0

    def forward(self, tokens, *rest):
        self.rows += len(tokens)
        return self.inner(tokens, *rest)

    def states(self, tokens, *rest, **more):
        self.rows += len(tokens)
        return self.inner.states(tokens, *rest, **more)

    def project(self, h):
        return self.inner.project(h)


def sampled(policy, dataset, c):
    return collect(policy, consumer(dataset, c).problems("train", 0), 0, c, TOKENIZER, torch.device("cpu"), NO_CAST)


def step(policy, reference, scorer, dataset, c, number=0, accumulate=1, optimizers=None):
    data = consumer(dataset, c)
    batch = join([data.batch("train", number, micro) for micro in range(accumulate)])
    optimizers = optimizers or build_optimizers(policy, c)
    scorer = rewards(c, scorer) if isinstance(scorer, torch.nn.Module) else scorer
    return grpo_training_step(policy, reference, scorer, batch, optimizers, c.learning_rate, number, c, TOKENIZER,
                              one_process())


def gradient(policy, reference, scorer, dataset, c, accumulate=1):
    """Flattened gradient of one step, caught before the optimizer clears it."""
    catcher = Catcher(policy)
    step(policy, reference, scorer, dataset, c, accumulate=accumulate, optimizers=[catcher])
    return catcher.gradient


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_first_ratio_is_exactly_one_and_kl_exactly_zero(dataset, top_p, accumulate):
    c = config(top_p=top_p, gradient_accumulation_steps=accumulate, temperature=0.8)
    policy = model(dropout=0.5)  # a dropout that was left on would show
    metrics = step(policy, freeze(copy.deepcopy(policy)), judge(), dataset, c, accumulate=accumulate)
    assert metrics["ratio_minus_one"] == 0 and metrics["mean_kl"] == 0 and metrics["clip_fraction"] == 0
    assert abs(metrics["mean_advantage"]) < 1e-5 and metrics["grad_norm"] > 0


def test_each_distinct_input_is_read_once(dataset):
    c = config(group_size=6)
    policy, reference, scorer = CountingModel(model()), CountingModel(model()), CountingModel(judge())
    step(policy, reference, scorer, dataset, c)
    assert policy.rows == 2 * c.batch_size, "once to sample, once to train: not once per completion"
    assert reference.rows == c.batch_size
    assert scorer.rows == c.batch_size * c.group_size


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradient_equals_that_of_every_completion_forwarded_on_its_own(dataset, objective):
    c = config(objective=objective, kl_beta=0.3, temperature=0.7, top_p=0.9)
    policy, reference, scorer = model(seed=1), freeze(model(seed=2)), judge()
    shared = gradient(policy, reference, scorer, dataset, c)

    rollouts = sampled(policy, dataset, c)
    reward, _, _ = rewards(c, scorer)(rollouts)
    advantage = compute_advantages(reward[..., None], OBJECTIVES[objective].advantage).flatten()
    N, loss = len(advantage), 0.0
    for n in range(N):
        i = n // c.group_size
        policy_logits, ref_logits = policy(rollouts.inputs[i : i + 1])[0], reference(rollouts.inputs[i : i + 1])[0]
        masked = [m for m in range(rollouts.mask.shape[1]) if rollouts.mask[n, m]]
        average = OBJECTIVES[objective].average
        share = {"sequence": 1 / len(masked) / N, "constant": 1 / c.block_size / N, "sum": 1 / N,
                 "token": 1 / float(rollouts.mask.sum())}[average]
        for m in masked:
            where = rollouts.position[i, m]
            drawn = sampling_logp(policy_logits[where], c.temperature, c.top_p)[rollouts.target[n, m]]
            p = (policy_logits[where] / c.temperature).log_softmax(-1)
            q = (ref_logits[where] / c.temperature).log_softmax(-1)
            kl = (p.exp() * (p - q)).sum()
            loss = loss + share * (-advantage[n] * drawn + c.kl_beta * kl)
    policy.zero_grad()
    loss.backward()
    naive = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert (shared - naive).norm() / naive.norm() < 1e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("credit_window", [None, 3])
def test_gradient_does_not_depend_on_the_micro_batch(dataset, objective, advantage, credit_window):
    same = {"objective": objective, "advantage": advantage, "credit_window": credit_window}
    whole = config(batch_size=8, **same)
    cut = config(batch_size=2, gradient_accumulation_steps=4, **same)
    policy, reference, scorer = model(seed=1), freeze(model(seed=2)), judge()
    a = gradient(policy, reference, scorer, dataset, whole)
    b = gradient(policy, reference, scorer, dataset, cut, accumulate=4)
    assert (a - b).norm() / a.norm() < 1e-5


def test_gradient_passes_finite_differences(dataset):
    c = config(kl_beta=0.2, objective="plain")
    policy, reference = model(seed=1, scale=4.0).double(), freeze(model(seed=2)).double()
    rollouts = with_reference(sampled(policy, dataset, c), reference, c.temperature, 4, NO_CAST)
    rollouts.mask, rollouts.advantage = rollouts.mask.double(), torch.randn(len(rollouts.target), 1).double()
    weight = token_weights(rollouts.mask, "sum", 1)
    value = lambda: rollout_loss(policy, rollouts, weight, c, c.kl_beta, on_policy=False)[0]
    value().backward()
    for name, p in policy.named_parameters():
        direction, h = torch.randn_like(p), 1e-6
        with torch.no_grad():
            p.add_(h * direction)
            up = value()
            p.sub_(2 * h * direction)
            down = value()
            p.add_(h * direction)
        slope, claimed = (up - down) / (2 * h), (p.grad * direction).sum()
        assert abs(claimed) > 1e-6 and abs(slope - claimed) < 1e-4 * abs(claimed) + 1e-7, name


def test_kl_gradient_depends_on_the_reference(dataset):
    c = config(kl_beta=1.0)
    policy, scorer = model(seed=1), lambda _: whole(torch.zeros(c.batch_size, c.group_size))
    itself = gradient(policy, freeze(copy.deepcopy(policy)), scorer, dataset, c)
    one = gradient(policy, freeze(model(seed=2)), scorer, dataset, c)
    other = gradient(policy, freeze(model(seed=3)), scorer, dataset, c)
    assert itself.norm() < 1e-6, "no pull where policy = reference"
    assert one.norm() > 1e-3 and (one - other).norm() > 1e-3


def test_raising_kl_beta_keeps_the_policy_nearer(dataset):
    distances = []
    for kl_beta in (0.0001, 0.1, 10.0):
        c = config(kl_beta=kl_beta, learning_rate=3e-3)
        policy = model(seed=1, scale=4.0)
        reference, optimizers = freeze(copy.deepcopy(policy)), build_optimizers(policy, c)
        for number in range(20):
            metrics = step(policy, reference, judge(), dataset, c, number, optimizers=optimizers)
        distances.append(metrics["mean_kl"])
    assert distances[0] > distances[1] > distances[2] > 0


def test_reference_and_judge_are_bitwise_unchanged(dataset):
    c = config()
    policy, scorer = model(), judge()
    reference = freeze(copy.deepcopy(policy))
    before = [copy.deepcopy(m.state_dict()) for m in (policy, reference, scorer)]
    optimizers = build_optimizers(policy, c)
    for number in range(5):
        step(policy, reference, scorer, dataset, c, number, optimizers=optimizers)
    changed = [any(not torch.equal(x, y) for x, y in zip(m.state_dict().values(), b.values(), strict=True))
               for m, b in zip((policy, reference, scorer), before, strict=True)]
    assert changed == [True, False, False]


def test_groups_of_equal_rewards_are_counted_and_cost_no_backward(dataset):
    c = config(kl_beta=0.0)
    policy = CountingModel(model())
    fixed = torch.rand(c.batch_size, c.group_size)
    fixed[0], fixed[2] = 0.5, 0.25
    metrics = step(policy, None, lambda _: whole(fixed), dataset, c)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert policy.rows == c.batch_size + c.batch_size // 2, "sampling reads all inputs, training the other half"
    assert "mean_kl" not in metrics

    fixed[:] = 1.0
    before = copy.deepcopy(policy.state_dict())
    metrics = step(policy, None, lambda _: whole(fixed), dataset, config(kl_beta=0.0, weight_decay=0.0))
    assert metrics["frac_reward_zero_std"] == 1 and metrics["grad_norm"] == 0
    assert all(torch.equal(x, y) for x, y in zip(policy.state_dict().values(), before.values(), strict=True))


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(dataset):
    c, policy = config(), model()
    before = copy.deepcopy(policy.state_dict())
    bad = torch.full((c.batch_size, c.group_size), 0.5)
    bad[0, 0] = float("inf")
    assert step(policy, freeze(copy.deepcopy(policy)), lambda _: whole(bad), dataset, c)["skipped_steps"] == 1
    assert all(torch.equal(x, y) for x, y in zip(policy.state_dict().values(), before.values(), strict=True))


def test_a_bandit_with_a_known_optimum_is_solved(dataset):
    """The reward is the share of hidden places filled with 'e': the best policy writes nothing else."""
    e = TOKENIZER.encode("e")[0]

    def share_of_e(rollouts):
        return whole((((rollouts.target == e) * rollouts.mask).sum(1) / rollouts.mask.sum(1)).view(-1, 8))

    for objective in OBJECTIVES:
        c = config(objective=objective, kl_beta=0.0, learning_rate=3e-2, batch_size=8, group_size=8)
        policy = model(scale=1.0)
        optimizers = build_optimizers(policy, c)
        for number in range(80):
            metrics = step(policy, None, share_of_e, dataset, c, number, optimizers=optimizers)
        assert metrics["mean_reward"] > 0.95, objective


def test_credit_of_a_token_is_the_log_odds_near_it(dataset):
    c, scorer = config(credit_window=3), judge()
    rollouts = sampled(model(), dataset, c)
    reward, credit, _ = rewards(c, scorer)(rollouts)
    odds = scorer(rollouts.tokens).clamp(-6.9, 6.9)
    torch.testing.assert_close(reward.flatten(), odds.sigmoid().mean(1), rtol=1e-4, atol=1e-4)
    for n in range(len(rollouts.target)):
        for m in range(credit.shape[2]):
            t = int(rollouts.position[n // c.group_size, m])
            near = odds[n, max(0, t - 3) : t + 4]
            torch.testing.assert_close(credit.flatten(0, 1)[n, m], near.mean(), rtol=1e-2, atol=1e-2)
    everywhere = rewards(config(credit_window=c.block_size), scorer)(rollouts)[1]
    torch.testing.assert_close(everywhere, everywhere[..., :1].expand_as(everywhere))


def test_unique_completions_by_hand():
    target = torch.tensor([[1, 2], [1, 2], [1, 3], [4, 9], [4, 8], [5, 0]])
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 1], [1, 0], [1, 0], [1, 0]])
    assert unique_completions(target, mask, 3).tolist() == [2, 2]
