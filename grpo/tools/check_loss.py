"""Runs your loss on the test vectors and names the objective that it is, or what is wrong with it.

python grpo/tools/check_loss.py mine.py:loss --objective=dapo --clip_high=0.28

tests/vectors/README.md has the arguments of the function.
"""

import inspect
import itertools
import json
import pathlib
import sys
from dataclasses import replace
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch

from core.config import UsageError, load_config, run_config_file
from core.settings.script import run_script
from core.settings.setting import Settings, setting, shown
from core.settings.user_code import UserCodeError, naming_line_of
from grpo.losses import AVERAGES, KL_ESTIMATORS, OBJECTIVES, k2, k3, policy_loss, token_weights

VECTORS = ROOT / "tests" / "vectors"
SETS = "whole", "truncated", "micro_batches", "ranks"
TOLERANCE = 1e-5  # relative, of a gradient; a loss in float32 passes
SCALES = {-1.0: "wrong sign", 0.25: "1 / G of the right gradient"}  # G is 4


class CheckConfig(Settings):
    objective: str | None = setting(None, "what the loss is meant to be; None: any objective", tuple(OBJECTIVES))
    kl: str | None = setting(None, "its estimator of the KL; None: any or no KL", ("none", *KL_ESTIMATORS))
    kl_beta: float = setting(0.04, "weight of the KL", "(0, inf)")
    clip_low: float = setting(0.2, "the ratio is at least 1 - clip_low", "(0, inf)")
    clip_high: float = setting(0.2, "the ratio is at most 1 + clip_high", "(0, inf)")


def load_step(name):
    """A step of the vectors: its inputs as tensors, the micro-batches of all its ranks in one list."""
    step = SimpleNamespace(**json.loads((VECTORS / f"{name}.json").read_text()))
    step.A = step.advantages[step.advantage]
    for key in ("logp", "old_logp", "ref_logp", "mask", "A"):
        setattr(step, key, torch.tensor(getattr(step, key), dtype=torch.float64))        # (N, M), A: (N,)
    step.A, step.parts = step.A[:, None], list(itertools.chain(*step.parts))
    step.logp.requires_grad_()
    return step


def loss_on(step, function, shape):
    """The loss of the user's function on a step; shape: of the advantages."""
    totals = {"total_tokens": step.mask.sum(), "total_completions": step.mask.any(1).sum()}
    known, named = totals | {"max_tokens": step.max_tokens}, inspect.signature(function).parameters
    shares, loss = 1 if totals.keys() & named else len(step.parts), 0.0
    for rows in step.parts:
        tensors = step.logp, step.old_logp, step.ref_logp, step.A.view(shape), step.mask
        part = function(*(x[rows] for x in tensors), **{key: known[key] for key in known if key in named})
        if not isinstance(part, torch.Tensor) or part.numel() != 1 or not part.requires_grad or not part.isfinite():
            raise ValueError(f"it returned {shown(part)}; return a finite scalar tensor that depends on logp")
        loss = loss + part.double().sum() / shares
    return loss


def weights(step, average):
    """{fault: the weights of tokens (N, M)}; the first is right."""
    right, ones, L = token_weights(step.mask, average, step.max_tokens), torch.ones_like(step.mask), step.max_tokens
    parts = [token_weights(step.mask[rows], average, L) for rows in step.parts]
    return {"": right, "padding": token_weights(ones, average, L), "mean of means": torch.cat(parts) / len(parts),
            "masked completions": right * step.mask.any(1).double().mean(),
            "divided by the size of the padded tensor": step.mask / step.mask.numel()}


def policy_losses(step, c):
    """Triples ((average, objectives), faults, loss without KL)."""
    logp, old, A = step.logp, step.old_logp, step.A
    for case in step.expected:
        average, names = case["average"], case["objectives"]
        if case["kl"] != "none" or c.objective not in (None, *names):
            continue
        row = replace(OBJECTIVES[names[0]], clip_low=c.clip_low, clip_high=c.clip_high)
        unclipped = replace(row, clip_low=1e9, clip_high=1e9)
        key = average, ", ".join(names)
        for fault, weight in weights(step, average).items():
            yield key, (fault, ""), policy_loss(logp, old, A, weight, row)[0]
            if row.surrogate == "clip":
                up, down = (policy_loss(logp, old, A.abs(), weight * sign, row)[0] for sign in (A > 0, A < 0))
                yield key, (fault, "mirrored clip"), up - down
                yield key, (fault, "no clip"), policy_loss(logp, old, A, weight, unclipped)[0]
                yield key, (fault, "no ratio"), policy_loss(logp, logp.detach(), A, weight, row)[0]


def kl_losses(step, c):
    """Triples ((average, estimator), faults, weighted KL)."""
    logp, ref, log_ratio = step.logp, step.ref_logp, step.logp - step.old_logp
    r, length = log_ratio.exp(), step.mask.sum(1, keepdim=True).clamp(min=1)
    s = ((log_ratio * step.mask).sum(1, keepdim=True) / length).exp()                    # (N, 1)
    terms = {("none", ""): 0.0 * logp,
             ("k3", ""): r * k3(logp, ref), ("k2", ""): r.detach() * k2(logp, ref),
             ("k3", "k3 without ratio"): k3(logp, ref), ("k2", "k2 without ratio"): k2(logp, ref),
             ("k3", "k1 as a loss"): logp - ref, ("k3", "reversed KL"): k3(ref, logp),
             ("k3", "sequence ratio in the KL"): s * k3(logp, ref)}
    for average in AVERAGES:
        for denominator, weight in weights(step, average).items():
            for (estimator, fault), term in terms.items():
                if c.kl in (None, estimator):
                    yield (average, estimator), (denominator, fault), (term * weight).sum()


def numbers(steps, losses_of):
    """The keys and faults of all formulas; their gradients and losses on all steps, one after another."""
    found = []
    for step in steps:
        *names, losses = zip(*losses_of(step), strict=True)
        gradients = [torch.autograd.grad(loss, step.logp, retain_graph=True)[0].flatten() for loss in losses]
        found.append(torch.cat([torch.stack(gradients), torch.stack(losses).detach().view(-1, 1)], 1))
    return list(zip(*names, strict=True)), torch.cat(found, 1)


def explanations(mine, policies, P, kls, K, tokens, beta):
    """(faults, .., distance, i, j, their names) of every a P + b K with my gradient, and of the right P + beta K."""
    p, k, g = P[:, tokens], K[:, tokens], mine[tokens]
    pp, kk, pk = p.square().sum(1, keepdim=True), k.square().sum(1).clamp(min=1e-30), p @ k.T
    pg, kg, gg = (p @ g)[:, None], k @ g, g @ g  # least squares for all pairs, (policies, KLs)
    a, b = (kk * pg - pk * kg) / (pp * kk - pk**2), (pp * kg - pk * pg) / (pp * kk - pk**2)
    fits = (gg - a * pg - b * kg < TOLERANCE**2 * gg) & (a.abs() > TOLERANCE)
    for i, j in itertools.product(range(len(P)), range(len(K))):
        ((own, _), of_policy), ((average, estimator), of_kl) = policies[i], kls[j]
        found = {*of_policy, *of_kl, "" if average == own else f"the average of the KL is '{average}'"} - {""}
        if fits[i, j]:
            scale, kl_scale = round(a[i, j].item(), 4), round((b / a)[i, j].item() / beta, 3)
            if scale != 1:
                found.add(SCALES.get(scale, f"the gradient is {scale:g} times the right one"))
            if estimator != "none" and kl_scale != 1:
                found.add("wrong sign of the KL" if kl_scale == -1 else f"kl_beta is {kl_scale * beta:g}")
            distance = (mine - a[i, j] * P[i] - b[i, j] * K[j]).norm().item()  # of the losses, as the gradient fits
            yield len(found), scale not in SCALES, distance, i, j, sorted(found)
        elif not found:
            yield 99, True, (mine - P[i] - beta * K[j]).norm().item(), i, j, ["no known fault explains it"]


def main(argv):
    """Prints the nearest objective, how far each step is from it, and why; exit code 1 unless it is right."""
    path, _, name = "".join(argv[:1]).rpartition(":")
    if not path:
        raise UsageError("python grpo/tools/check_loss.py FILE.py:FUNCTION [--objective=grpo] [--kl=k3]")
    c = load_config(CheckConfig, argv[1:])[0]
    function, steps = run_config_file(path).get(name), [load_step(x) for x in SETS]
    if not callable(function):
        raise ValueError(f"{path} has no function {name}; name one that it defines")

    def run(shape):
        with naming_line_of(function):
            return numbers(steps, lambda step: [("", (), loss_on(step, function, shape))])[1][0]

    try:  # most code for (N, 1) fails on (N,); code for (N,) may compute nonsense on (N, 1)
        shape, mine = "(N,)", run((-1,))
    except UserCodeError:
        shape, mine = "(N, 1)", run((-1, 1))
    if not mine.isfinite().all():
        raise ValueError(f"{argv[0]}: its gradient is NaN or infinite; mask before exp, log or a division")
    sizes = [step.logp.numel() + 1 for step in steps]
    tokens = torch.cat([torch.arange(size) < size - 1 for size in sizes])
    policies, P = numbers(steps, lambda step: policy_losses(step, c))
    kls, K = numbers(steps, lambda step: kl_losses(step, c))
    *_, i, j, faults = min(explanations(mine, policies, P, kls, K, tokens, c.kl_beta))
    (average, objectives), (_, estimator) = policies[i][0], kls[j][0]
    i, j = policies.index((policies[i][0], ("", ""))), kls.index(((average, estimator), ("", "")))
    print(f"{'nearest' if faults else 'right'}: {objectives}; KL: {estimator}; advantage {shape}; relative errors:")
    for name, x, right in zip(SETS, mine.split(sizes), (P[i] + c.kl_beta * K[j]).split(sizes), strict=True):
        apart = (x - right).abs()
        of_gradient, of_loss = apart[:-1].norm() / right[:-1].norm(), apart[-1] / right[-1].abs()
        note = ": the same gradient, another value" if of_gradient < TOLERANCE < of_loss else ""
        print(f"  {name:14} gradient {of_gradient:.0e}, loss {of_loss:.0e}{note}")
    meanings = json.loads((VECTORS / "faults.json").read_text())
    for fault in faults:
        print(f"- {fault}: {meanings[fault]}" if fault in meanings else f"- {fault}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    run_script(main)
