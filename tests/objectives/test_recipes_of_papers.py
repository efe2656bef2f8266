"""The settings of recent papers give the papers' losses, written as loops over tokens, in float64."""

from statistics import mean, stdev

import pytest
import torch

from grpo.grpo_training_step import with_advantage
from grpo.losses import OBJECTIVES, token_weights
from grpo.rewards import Scored
from grpo.shaping import drop_equal, normalised
from tests.tiny import config, loss_of, one_process
from tests.objectives.tables import MAX_TOKENS, G, M, N, P, table_rollouts

EPS = 1e-4
RECIPES = {  # those of docs/algorithm.md
    "GSPO-token": {"objective": "gspo", "judge_checkpoint": "j", "credit_window": 2},
    "LUSPO": {"objective": "luspo"},
    "GDPO": {"objective": "bnpo", "advantage": "gdpo"},
    "GPG": {"objective": "bnpo", "advantage": "group_mean", "zero_std": "drop"},
    "MaxRL": {"objective": "dr_grpo", "advantage": "max_rl"},
    "DPPO": {"objective": "dppo", "ratio_to": "sampler"},
}


def clipped(r, A, low, high):
    return torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)


def of_groups(reward, advantage):
    """The advantages of all completions, group after group; advantage: (reward, rewards of the group) -> number."""
    return [advantage(r, group) for group in reward for r in group]


# Each takes the log-probabilities of the tokens of each completion, now and under the policy of before (of the sampler,
# for DPPO), and the rewards, and gives the loss.

def gspo_token(logp, old, credit):
    loss = 0.0
    for i, (new, before) in enumerate(zip(logp, old, strict=True)):
        s = torch.exp(torch.mean(new - before)).detach()
        for t in range(len(new)):
            group = credit[i // G]
            seen = [float(group[j][t]) for j in range(G) if t < len(logp[i // G * G + j])]
            std = stdev(seen) if len(seen) > 1 else 0.0
            A = (float(group[i % G][t]) - mean(seen)) / (std + EPS)
            s_t = s * torch.exp(new[t]) / torch.exp(new[t]).detach()
            loss = loss - clipped(s_t, A, 3e-4, 4e-4) / len(new) / N
    return loss


def luspo(logp, old, reward):
    A, loss = of_groups(reward, lambda r, group: (r - mean(group)) / (stdev(group) + EPS)), 0.0
    for i in range(N):
        s = torch.exp(torch.mean(logp[i] - old[i]))
        loss = loss - len(logp[i]) * clipped(s, A[i], 2e-3, 2.5e-3) / N
    return loss


def ppo_over_all_tokens(logp, old, A):
    tokens = sum(map(len, logp))
    return -sum(clipped(torch.exp(logp[i] - old[i]), A[i], 0.2, 0.2).sum() for i in range(N)) / tokens


def gdpo(logp, old, rewards):
    """rewards: the table of each reward."""
    each = [of_groups(table, lambda r, group: (r - mean(group)) / (stdev(group) + EPS)) for table in rewards]
    summed = [sum(parts) for parts in zip(*each, strict=True)]
    return ppo_over_all_tokens(logp, old, [(x - mean(summed)) / (stdev(summed) + EPS) for x in summed])


def gpg(logp, old, reward):
    """Its alpha, here the tokens of all groups over those of groups with different rewards, and log p without ratio."""
    A = of_groups(reward, lambda r, group: r - mean(group))
    useful = sum(len(x) for i, x in enumerate(logp) if len(set(reward[i // G])) > 1)
    tokens = sum(map(len, logp))
    return -tokens / useful * sum(A[i] * logp[i].sum() for i in range(N)) / tokens


def max_rl(logp, old, reward):
    A = of_groups(reward, lambda r, group: (r - mean(group)) / mean(group) if any(group) else 0.0)
    return -sum(clipped(torch.exp(logp[i] - old[i]), A[i], 0.2, 0.2).sum() for i in range(N)) / N / MAX_TOKENS


def dppo(logp, old, reward):
    A, loss = of_groups(reward, lambda r, group: r - mean(group)), 0.0
    for i in range(N):
        for t in range(len(logp[i])):
            p, q = float(logp[i][t].detach().exp()), float(old[i][t].exp())
            if not (p - q > 0.15 and A[i] > 0 or q - p > 0.15 and A[i] < 0):
                loss = loss - torch.exp(logp[i][t] - old[i][t]) * A[i] / N / MAX_TOKENS
    return loss


@pytest.mark.parametrize("paper, formula", [
    ("GSPO-token", gspo_token), ("LUSPO", luspo), ("GDPO", gdpo), ("GPG", gpg),
    ("MaxRL", max_rl), ("DPPO", dppo)])
def test_a_recipe_gives_the_gradient_of_the_papers_formula(paper, formula):
    c = config(kl_beta=0.0, batch_size=16, group_size=G, max_new_tokens=MAX_TOKENS, **RECIPES[paper])
    policy, rollouts, _, reward = table_rollouts()
    policy.logits.data *= 2  # larger probabilities, so that some of them move by more than DPPO's bound
    twin, old = policy.logits.detach().clone().requires_grad_(), rollouts.old_logp
    scored, of_formula = Scored(reward), reward.tolist()
    if paper == "GSPO-token":
        of_formula = torch.rand(P, G, M, dtype=torch.float64)
        scored = Scored(reward, of_formula)
    if paper == "GDPO":
        tables_of = torch.stack((reward, 100 * torch.rand(P, G, dtype=torch.float64)))
        of_formula = tables_of.tolist()
        scored = Scored(reward, sum(normalised(table, G) for table in tables_of.flatten(1)).view(P, G, 1))
    if paper in ("GPG", "MaxRL"):
        reward = torch.tensor([[1.0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.float64)
        scored, of_formula = Scored(reward), reward.tolist()
    kept = rollouts
    if c.zero_std == "drop":
        kept, scored = drop_equal(rollouts, scored)
    kept = with_advantage(kept, scored, c.baseline, one_process())
    weight = token_weights(kept.train_mask, OBJECTIVES[c.objective].average, MAX_TOKENS)
    loss, sums = loss_of(policy, kept, weight, c, on_policy=paper == "GPG")
    loss.backward()

    logp = twin.log_softmax(-1).gather(-1, rollouts.target[..., None])[..., 0]
    lengths = rollouts.mask.sum(1).long().tolist()
    by_hand = formula([x[:n] for x, n in zip(logp, lengths)], [x[:n] for x, n in zip(old, lengths)], of_formula)
    by_hand.backward()
    torch.testing.assert_close(policy.logits.grad, twin.grad)
    if paper != "GPG":
        torch.testing.assert_close(loss, by_hand)
        assert sums["clip_fraction"][0] > 0
