"""Writes the test vectors of this folder: losses by loops from the papers, without anything of grpo/ or core/.

python tests/vectors/make.py
"""

import json
import math
import pathlib
import random
from typing import NamedTuple

import torch

HERE = pathlib.Path(__file__).parent
GROUP, MAX_TOKENS, KL_BETA = 4, 8, 0.04
ADVANTAGES = "group_std", "group_mean", "leave_one_out", "batch_std", "max_rl", "step"


class Row(NamedTuple):
    """An objective as its paper has it."""
    advantage: str
    average: str
    ratio: str = "token"
    surrogate: str = "clip"
    low: float = 0.2
    high: float = 0.2


PAPERS = {
    "grpo": Row("group_std", "sequence"),
    "dr_grpo": Row("group_mean", "constant"),
    "drgrpo": Row("group_mean", "constant"),
    "dapo": Row("group_std", "token", high=0.28),
    "bnpo": Row("group_std", "token"),
    "gspo": Row("group_std", "sequence", "sequence", low=3e-4, high=4e-4),
    "luspo": Row("group_std", "sum", "sequence", low=2e-3, high=2.5e-3),
    "dppo": Row("group_mean", "constant", surrogate="probability_mask", low=0.15, high=0.15),
    "cispo": Row("group_std", "token", surrogate="detached_ratio", low=1.0, high=4.0),
    "rloo": Row("leave_one_out", "sum"),
    "reinforce++": Row("step", "token"),
    "reinforce++_baseline": Row("batch_std", "token"),
    "plain": Row("batch_std", "sum")}


def advantage_by_hand(name, reward):
    """The advantages of P groups of G rewards, one after another, as a list. reward: P lists of G."""
    out, P, G = [], len(reward), len(reward[0])
    centred = [[r - sum(row) / G for r in row] for row in reward]
    centred_std = math.sqrt(sum(c * c for row in centred for c in row) / (P * G - 1))
    mean = sum(map(sum, reward)) / (P * G)
    step_std = math.sqrt(sum((r - mean) ** 2 for row in reward for r in row) / (P * G - 1))
    for row, c in zip(reward, centred, strict=True):
        std = math.sqrt(sum(x * x for x in c) / (G - 1))
        for i, r in enumerate(row):
            others = [x for j, x in enumerate(row) if j != i]
            out.append({"group_std": c[i] / (std + 1e-4), "group_mean": c[i],
                        "leave_one_out": r - sum(others) / (G - 1), "batch_std": c[i] / (centred_std + 1e-4),
                        "max_rl": c[i] * G / sum(row) if any(row) else 0.0,
                        "step": (r - mean) / (step_std + 1e-4)}[name])
    return out


def kl_by_hand(estimator, logp, old, ref):
    """The KL term of a sampled token: k2 has the KL's gradient, k3 only with that of its weight, the ratio."""
    x, ratio = ref - logp, torch.exp(logp - old)
    return ratio.detach() * x * x / 2 if estimator == "k2" else ratio * (torch.exp(x) - x - 1)


def loss_by_hand(row, logp, old, advantage, lengths, max_tokens, kl=None, kl_beta=KL_BETA):
    """The loss of a step, token by token, differentiable in logp.

    logp, old: (N, M); advantage, lengths: of each completion, 0 tokens: it is not in the loss
    kl: a function of a completion and a position, its KL term; None: without a KL
    """
    loss, counted = 0.0, [i for i, length in enumerate(lengths) if length]
    share = {"sequence": 1 / len(counted), "sum": 1 / len(counted), "constant": 1 / len(counted) / max_tokens,
             "token": 1 / sum(lengths)}[row.average]
    for i in counted:
        A, length = advantage[i], lengths[i]
        ratios = [torch.exp(logp[i, t] - old[i, t]) for t in range(length)]
        if row.ratio == "sequence":
            ratios = [torch.exp(sum(logp[i, t] - old[i, t] for t in range(length)) / length)] * length
        for t, r in enumerate(ratios):
            clipped = torch.clamp(r, 1 - row.low, 1 + row.high)
            if row.surrogate == "detached_ratio":
                term = clipped.detach() * A * logp[i, t]
            elif row.surrogate == "probability_mask":
                moved = (torch.exp(logp[i, t]) - torch.exp(old[i, t])).item()
                term = r * A * (moved <= row.high if A > 0 else moved >= -row.low)
            else:
                assert row.surrogate == "clip", f"no formula for {row.surrogate}"
                term = torch.minimum(r * A, clipped * A)
            if kl:
                term = term - kl_beta * kl(i, t)
            loss = loss - term * (share / length if row.average == "sequence" else share)
    return loss


def below_0(x):
    return round(min(x, -0.01), 6)


def inputs(seed, parts, width=5, truncated=()):
    """A step: rewards, log-probabilities of tokens on both sides of the clipping range, completions of unequal length.

    parts: for each rank, for each of its micro-batches, the rows
    """
    g = random.Random(seed)
    step = {"max_tokens": MAX_TOKENS, "parts": parts, "reward": [], "advantage": "group_std",
            "logp": [], "old_logp": [], "ref_logp": [], "mask": [], "truncated": []}
    for i in range(sum(len(rows) for rank in parts for rows in rank)):
        length, moved = width if i in truncated else g.randint(1, 5), g.gauss(0, 0.2)
        old = [below_0(math.log(g.uniform(0.05, 0.95))) for _ in range(length)]
        logp = [below_0(x + moved + g.gauss(0, 0.4)) for x in old]
        ref = [below_0(x + g.gauss(0, 0.6)) for x in logp]
        padding = width - length  # its numbers change the loss of a function that counts it
        step["reward"].append(round(g.random(), 3))
        step["logp"].append(logp + [-5.0] * padding)
        step["old_logp"].append(old + [-8.0] * padding)
        step["ref_logp"].append(ref + [-2.0] * padding)
        step["mask"].append([float(i not in truncated)] * length + [0.0] * padding)
        step["truncated"].append(i in truncated)
    return step


def groups(*numbers):
    """The rows of these groups."""
    return [GROUP * number + i for number in numbers for i in range(GROUP)]


def with_expected(step):
    """The inputs, every advantage by its name, and the loss and gradient of every family."""
    reward = [step["reward"][i:i + GROUP] for i in range(0, len(step["reward"]), GROUP)]
    step["advantages"] = {name: advantage_by_hand(name, reward) for name in ADVANTAGES}
    lengths = [int(sum(mask)) for mask in step["mask"]]
    old, ref = (torch.tensor(step[key], dtype=torch.float64) for key in ("old_logp", "ref_logp"))
    families = {}
    for name, row in PAPERS.items():
        families.setdefault(row[1:4], []).append(name)
    step["expected"] = []
    for (average, ratio, surrogate), names in families.items():
        for estimator in ("none", "k2", "k3"):
            logp = torch.tensor(step["logp"], dtype=torch.float64, requires_grad=True)
            kl = None if estimator == "none" else lambda i, t: kl_by_hand(estimator, logp[i, t], old[i, t], ref[i, t])
            row = Row(step["advantage"], average, ratio, surrogate)
            loss = loss_by_hand(row, logp, old, step["advantages"][row.advantage], lengths, MAX_TOKENS, kl)
            loss.backward()
            step["expected"].append({
                "objectives": names, "average": average, "ratio": ratio, "surrogate": surrogate, "kl": estimator,
                "clip_low": row.low, "clip_high": row.high, "kl_beta": KL_BETA, "loss": loss.item(),
                "gradient": logp.grad.tolist()})
    return step


def vectors():
    """{name of a file: its content}"""
    ranks = inputs(6, [[groups(0), groups(1)], [groups(2), groups(3)]])
    ranks["reward"][-GROUP:] = [0.0] * GROUP  # a group of equal rewards
    steps = {"whole": inputs(0, [[groups(0, 1, 2)]]),
             "truncated": inputs(10, [[groups(0, 1, 2)]], width=MAX_TOKENS, truncated=(1, 6, 7)),
             "micro_batches": inputs(41, [[groups(0), groups(1)]], truncated=(5,)), "ranks": ranks}
    return {name: with_expected(step) for name, step in steps.items()}


def kept(made, stored):
    """What was made, but what is stored where that is equal up to rounding: the last bits depend on the processor."""
    if isinstance(made, dict) and isinstance(stored, dict):
        return {key: kept(value, stored.get(key)) for key, value in made.items()}
    if isinstance(made, list) and isinstance(stored, list) and len(made) == len(stored):
        return [kept(x, other) for x, other in zip(made, stored)]
    if isinstance(made, float) and isinstance(stored, float) and math.isclose(made, stored, abs_tol=1e-14):
        return stored
    return made


def family(case):
    return case["average"], case["ratio"], case["surrogate"], case["kl"]


def main():
    for name, step in vectors().items():
        stored = json.loads((HERE / f"{name}.json").read_text())
        cases = {family(case): case for case in stored.pop("expected")}
        expected = [kept(case, cases.get(family(case))) for case in step.pop("expected")]
        step = kept(step, stored) | {"expected": expected}
        *lines, last = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in step.items()]
        last = last.replace("}, {", "},\n  {")
        (HERE / f"{name}.json").write_text("{\n" + ",\n".join([*lines, last]) + "\n}\n")


if __name__ == "__main__":
    main()
