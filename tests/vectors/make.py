"""Writes the test vectors of v2/: losses by loops from the papers, without anything of grpo/ or core/.

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
    low: float | None = 0.2   # bounds of the ratio; None: there are none
    high: float | None = 0.2
    constants: dict = {}


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
    "sapo": Row("group_std", "sequence", surrogate="sigmoid_gate", low=None, high=None,
                constants={"tau_pos": 1.0, "tau_neg": 1.05}),
    "dro": Row("group_mean", "token", surrogate="log_ratio_penalty", low=None, high=None, constants={"beta": 0.05}),
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
                        "gdpo": c[i] / (centred_std + 1e-4),  # of normalised rewards
                        "max_rl": c[i] * G / sum(row) if any(row) else 0.0,
                        "step": (r - mean) / (step_std + 1e-4)}[name])
    return out


def kl_by_hand(estimator, logp, old, ref):
    """The KL term of a sampled token: k2 has the KL's gradient, k3 only with that of its weight, the ratio."""
    x, ratio = ref - logp, torch.exp(logp - old)
    return ratio.detach() * x * x / 2 if estimator == "k2" else ratio * (torch.exp(x) - x - 1)


def term_by_hand(row, r, A, logp, old):
    """What a token adds to the objective. r: its ratio, or that of its sequence"""
    if row.surrogate == "sigmoid_gate":
        tau = row.constants["tau_pos"] if A > 0 else row.constants["tau_neg"]
        return 4 / tau / (1 + torch.exp(-tau * (r - 1))) * A
    if row.surrogate == "log_ratio_penalty":
        return A * logp - row.constants["beta"] / 2 * (logp - old) ** 2
    if row.surrogate == "probability_mask":
        moved = (torch.exp(logp) - torch.exp(old)).item()
        return r * A * (moved <= row.high if A > 0 else moved >= -row.low)
    clipped = torch.clamp(r, 1 - row.low, 1 + row.high)
    if row.surrogate == "detached_ratio":
        return clipped.detach() * A * logp
    assert row.surrogate == "clip", f"no formula for {row.surrogate}"
    return torch.minimum(r * A, clipped * A)


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
            term = term_by_hand(row, r, A, logp[i, t], old[i, t])
            if kl:
                term = term - kl_beta * kl(i, t)
            loss = loss - term * (share / length if row.average == "sequence" else share)
    return loss


# Ratios beside bounds that are in use, each of one completion, so that other bounds give another gradient
NEAR_UPPER = 1.13, 1.18, 1.21, 1.235, 1.265, 1.29, 1.4, 2.5, 1.0                    # of a token where A > 0
NEAR_LOWER = 0.95, 0.87, 0.83, 0.81, 0.79, 0.765, 0.735, 0.71, 0.65, 0.4, 1.0       # of a token where A < 0
SEQUENCE_UPPER = 3.5e-4, 4.5e-4, 1e-3, 2.2e-3, 2.7e-3, 0.1, 0.21, 0.29, 0.0         # s - 1, likewise
SEQUENCE_LOWER = 2.5e-4, 3.5e-4, 1e-3, 1.8e-3, 2.2e-3, 0.1, 0.15, 0.19, 0.21, 0.3, 0.0  # 1 - s


def log_ratios(g, member, alone, near):
    """The logarithms of the ratios of a completion's tokens: two of a group are far from 1, two near a bound.

    alone: if far, it has one token, whose ratio is then that of the sequence; near: the ratio of its first token, and
    that of the sequence
    """
    if member < 2 and alone:
        return [2.0]
    length, moved = g.randint(2, 5), g.gauss(0, 0.2)
    found = [moved + g.gauss(0, 0.4) for _ in range(length)]
    if member < 2:
        found[:2] = 2.0, -2.0
    elif near:
        found[0] = math.log(near[0])
        missing = length * math.log(near[1]) - sum(found)
        found[1:] = [move + missing / (length - 1) for move in found[1:]]
    return found


def inputs(seed, parts, bounds, width=5, truncated=()):
    """A step: rewards, log-probabilities of tokens on both sides of the clipping ranges, completions of unequal length.

    parts: for each rank, for each of its micro-batches, the rows
    bounds: yields pairs of ratios near upper and near lower bounds, of a token and of a sequence, for each group
    """
    g = random.Random(seed)
    step = {"version": 2, "max_tokens": MAX_TOKENS, "parts": parts, "reward": [], "advantage": "group_std",
            "logp": [], "old_logp": [], "ref_logp": [], "mask": [], "truncated": []}
    for i in range(sum(len(rows) for rank in parts for rows in rank)):
        group, member = divmod(i, GROUP)
        near = next(bounds[member]) if member >= 2 and i not in truncated else None
        moves = log_ratios(g, member, group == 0, near)
        if i in truncated:
            moves += [g.gauss(0, 0.4) for _ in range(width - len(moves))]
        highest = [math.log(g.uniform(0.05, 0.95)) for _ in moves]
        logp = [round(x + min(move, 0), 6) for x, move in zip(highest, moves)]
        old = [round(x - max(move, 0), 6) for x, move in zip(highest, moves)]
        ref = [round(min(x + g.gauss(0, 0.6), -0.01), 6) for x in logp]
        padding = width - len(moves)  # its numbers change the loss of a function that counts it
        step["reward"].append(round((0.9, 0.1, 0.7, 0.3)[member] + g.uniform(-0.1, 0.1), 3))  # A > 0, < 0, > 0, < 0
        step["logp"].append(logp + [-5.0] * padding)
        step["old_logp"].append(old + [-8.0] * padding)
        step["ref_logp"].append(ref + [-2.0] * padding)
        step["mask"].append([float(i not in truncated)] * len(moves) + [0.0] * padding)
        step["truncated"].append(i in truncated)
    return step


def groups(*numbers):
    """The rows of these groups."""
    return [GROUP * number + i for number in numbers for i in range(GROUP)]


def tensors(step):
    """logp, old_logp and ref_logp of a step, in float64."""
    return (torch.tensor(step[key], dtype=torch.float64) for key in ("logp", "old_logp", "ref_logp"))


def case_of(step, row, estimator):
    """The loss of a step and its gradient. row: with the advantage that the step has; estimator: of the KL, or none"""
    logp, old, ref = tensors(step)
    logp.requires_grad_()
    lengths = [int(sum(mask)) for mask in step["mask"]]
    kl = None if estimator == "none" else lambda i, t: kl_by_hand(estimator, logp[i, t], old[i, t], ref[i, t])
    loss = loss_by_hand(row, logp, old, step["advantages"][row.advantage], lengths, step["max_tokens"], kl)
    loss.backward()
    return {"average": row.average, "ratio": row.ratio, "surrogate": row.surrogate, "kl": estimator,
            "clip_low": row.low, "clip_high": row.high, "kl_beta": KL_BETA, "loss": loss.item(),
            "gradient": logp.grad.tolist()}


def again(step, case):
    """A case of a file, made again from the inputs of the file."""
    row = Row(step["advantage"], case["average"], case["ratio"], case["surrogate"], case["clip_low"],
              case["clip_high"], case.get("constants", {}))
    return case_of(step, row, case["kl"])


def with_expected(step):
    """The inputs, every advantage by its name, and the losses of all objectives with the step's advantage."""
    reward = [step["reward"][i:i + GROUP] for i in range(0, len(step["reward"]), GROUP)]
    step["advantages"] = {name: advantage_by_hand(name, reward) for name in ADVANTAGES}
    equal = []  # pairs of a row and the names of objectives that differ in nothing but the advantage
    for name, row in PAPERS.items():
        row = row._replace(advantage=step["advantage"])
        names = next((names for other, names in equal if other == row), None)
        if names is None:
            equal.append((row, [name]))
        else:
            names.append(name)
    step["expected"] = []
    for row, names in equal:
        for estimator in ("none", "k2", "k3"):
            case = {"objectives": names, "constants": row.constants} | case_of(step, row, estimator)
            step["expected"].append(case)
    return step


def vectors():
    """{name of a file: its content}"""
    upper = ((token, 1 + away) for token, away in zip(NEAR_UPPER, SEQUENCE_UPPER))
    lower = ((token, 1 - away) for token, away in zip(NEAR_LOWER, SEQUENCE_LOWER))
    bounds = {2: upper, 3: lower}
    steps = {"whole": inputs(0, [[groups(0, 1, 2)]], bounds),
             "truncated": inputs(10, [[groups(0, 1, 2)]], bounds, width=MAX_TOKENS, truncated=(2, 6, 7)),
             "micro_batches": inputs(41, [[groups(0), groups(1)]], bounds, truncated=(6,)),
             "ranks": inputs(6, [[groups(0), groups(1)], [groups(2), groups(3)]], bounds)}
    steps["ranks"]["reward"][-GROUP:] = [0.0] * GROUP  # a group of equal rewards
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
    return [case[key] for key in ("average", "ratio", "surrogate", "clip_low", "clip_high", "constants", "kl")]


def main():
    for name, step in vectors().items():
        path = HERE / "v2" / f"{name}.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        cases = {str(family(case)): case for case in stored.pop("expected", [])}
        expected = [kept(case, cases.get(str(family(case)))) for case in step.pop("expected")]
        step = kept(step, stored) | {"expected": expected}
        *lines, last = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in step.items()]
        last = last.replace("}, {", "},\n  {")
        path.write_text("{\n" + ",\n".join([*lines, last]) + "\n}\n")


if __name__ == "__main__":
    main()
