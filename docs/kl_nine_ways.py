"""Nine ways in which published code writes the KL term, and the gradient that each has in expectation.

python docs/kl_nine_ways.py

The policy is a table of logits, so every completion can be listed: an expectation is a sum over all of them, each with
its probability, and nothing is estimated. docs/kl.md explains the table that this prints.
"""

import itertools
from types import SimpleNamespace

import torch


# The nine ways: the loss of each token (S, L). x.logp, x.old, x.ref: (S, L) log-probability of the token under the
# policy, the policy before its first step, and the reference; x.p, x.q: (S, L, V) all those of policy and reference

def exact(x):
    return (x.p.exp() * (x.p - x.q)).sum(-1)


def k1(x):
    return x.logp - x.ref


def k2(x):
    return (x.logp - x.ref).square() / 2


def k3(x):
    log_ratio = (x.ref - x.logp).clamp(-20, 20)
    return log_ratio.exp() - log_ratio - 1


def ratio(x):
    return (x.logp - x.old).exp()


def sequence_ratio(x):
    return (x.logp - x.old).mean(1, keepdim=True).exp()


def k1_in_reward(x):
    """The policy gradient of the reward -k1 of a completion, without a baseline."""
    return ratio(x) * (x.old - x.ref).sum(1, keepdim=True)


WAYS = {"exact": exact, "r k3": lambda x: ratio(x) * k3(x), "sg(r) k2": lambda x: ratio(x).detach() * k2(x),
        "k1 in the reward": k1_in_reward, "k2": k2, "k3": k3, "s k3": lambda x: sequence_ratio(x) * k3(x), "k1": k1,
        "-k3": lambda x: -k3(x)}


# The expectation. A table of logits is (L, V, V): position, token before it, next token

def look_up(table, tokens):
    """The log-probabilities that a table gives at each place of completions (S, L): (S, L, V)."""
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0))                         # (S, L)
    return table[torch.arange(tokens.shape[1]), before].log_softmax(-1)


def pick(logp, tokens):
    """Those of the tokens themselves: (S, L, V) -> (S, L)."""
    return logp.gather(-1, tokens[..., None])[..., 0]


def colder(logp, temperature=0.8, top_p=0.9):
    """The distribution of a sampler with these settings, which the loss does not know of."""
    p, order = (logp / temperature).softmax(-1).sort(-1, descending=True)
    p = p * (p.cumsum(-1) - p < top_p)
    return torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True)).log()


def expected_gradient(way, policy, old, reference, sampler=None):
    """The gradient of a way's loss over all completions that the sampler can write with the logits `old`."""
    policy = policy.detach().requires_grad_()
    L, _, V = policy.shape
    tokens = torch.tensor(list(itertools.product(range(V), repeat=L)))               # (S, L)
    p, o, q = (look_up(table, tokens) for table in (policy, old, reference))
    x = SimpleNamespace(p=p, q=q, logp=pick(p, tokens), old=pick(o, tokens), ref=pick(q, tokens))
    if way == "the KL of completions":
        loss = x.logp.sum(1).exp() * (x.logp - x.ref).sum(1)                         # (S,)
    else:
        drawn = sampler(o) if sampler else o                                         # (S, L, V)
        loss = pick(drawn, tokens).sum(1).exp() * way(x).sum(1)                      # (S,)
    return torch.autograd.grad(loss.sum(), policy)[0]


def compare(way, *tables):
    """Cosine with the true gradient, None if there is no gradient; and relative error. The true gradient is that of the
    exact KL of each token; for the KL in the reward, that of the KL of whole completions."""
    truth = "the KL of completions" if way is k1_in_reward else exact
    found, true = expected_gradient(way, *tables), expected_gradient(truth, *tables)
    error = float((found - true).norm() / true.norm())
    if found.norm() < 1e-12:
        return None, error
    return float((found * true).sum() / found.norm() / true.norm()), error


def run(way, policy, reference, sampler=None, steps=500, rate=4.0):
    """(entropy, KL to the reference) of a single token where steps on this loss alone end, without any reward."""
    for _ in range(steps):
        policy = policy - rate * expected_gradient(way, policy, policy, reference, sampler)
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    return float(-(p.exp() * p).sum()), float((p.exp() * (p - q)).sum())


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 3, 4, 4)                                      # completions of 3 tokens out of 4
    old = policy + 0.5 * torch.randn_like(policy)
    torch.manual_seed(0)
    goal = 2 * torch.randn(1, 1, 50)                                                 # one token out of 50
    start = goal + 0.5 * torch.randn_like(goal)
    print("| loss | cosine | error | older: cosine | error | colder: cosine | ends at: entropy | KL "
          "| colder: entropy | KL |")
    print("|" + "---|" * 10)
    for name, way in WAYS.items():
        numbers = [*compare(way, policy, policy, reference), *compare(way, policy, old, reference),
                   compare(way, policy, policy, reference, colder)[0]]
        numbers += [*run(way, start, goal), *run(way, start, goal, colder)]
        print(f"| {name} |", " | ".join("-" if x is None else f"{x:.3f}" for x in numbers), "|")
    for name, table in (("start", start), ("reference", goal), ("uniform", 0 * goal)):
        print("{}: entropy {:.3f}, KL {:.3f}".format(name, *run(exact, table, goal, steps=0)))


if __name__ == "__main__":
    main()
