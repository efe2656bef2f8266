"""Runs your loss on the test vectors and names the objective that it is, or what is wrong with it.

python grpo/tools/check_loss.py mine.py:loss
python grpo/tools/check_loss.py mine.py:loss --objective=dapo --kl=k3 --clip_high=0.28

tests/vectors/README.md has the arguments of the function, and what was found.
"""

import inspect
import itertools
import json
import math
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

SETS = "whole", "truncated", "micro_batches", "ranks"
TOLERANCE = 1e-5  # relative, of a gradient; a loss in float32 passes
MIRRORED = "the clip is mirrored where A < 0, as by torch.where(A >= 0, min, max): take the min for both signs"
NO_RATIO = "the ratio to the sampler is missing (-A log p): right only in the first step on new rollouts"
MEANS = "a mean of means: micro-batches with few tokens count too much; divide by total_tokens, those of the step"
TRUNCATED = "completions that are masked out count in the denominator: the others lose weight"
PADDING = "padding is counted: multiply by the mask before every sum, and divide by sums of the mask"
SIZE = "divided by the size of the padded tensor, as .mean() does"
SUMMED = "summed over completions, not divided by their number: the gradient grows with the batch"
SCALES = {-1.0: "the sign is wrong: what is better than its group becomes less likely",
          0.25: "divided by the group size once too often: the gradient is 1 / G of the right one"}


class CheckConfig(Settings):
    objective: str | None = setting(None, "what the loss is meant to be; None: any objective", tuple(OBJECTIVES))
    kl: str | None = setting(None, "its estimator of the KL; None: any or no KL", ("none", *KL_ESTIMATORS))
    kl_beta: float = setting(0.04, "weight of the KL", "(0, inf)")
    clip_low: float = setting(0.2, "the ratio is at least 1 - clip_low", "(0, inf)")
    clip_high: float = setting(0.2, "the ratio is at most 1 + clip_high", "(0, inf)")


def load_step(name):
    """A step of the vectors: its inputs as tensors, the micro-batches of all its ranks in one list."""
    step = SimpleNamespace(**json.loads((ROOT / "tests/vectors" / f"{name}.json").read_text()))
    for key in ("logp", "old_logp", "ref_logp", "mask"):
        setattr(step, key, torch.tensor(getattr(step, key), dtype=torch.float64))        # (N, M)
    step.A = torch.tensor(step.advantages[step.advantage], dtype=torch.float64)[:, None]
    step.parts = list(itertools.chain(*step.parts))
    step.logp.requires_grad_()
    return step


def run_on(step, function, shape):
    """The loss of the user's function on a step, and its gradient (N M,). Raises UserCodeError."""
    known = {"total_tokens": step.mask.sum(), "total_completions": step.mask.any(1).sum(), "max_tokens": step.max_tokens}
    keywords = {key: known[key] for key in inspect.signature(function).parameters if key in known}
    summed = "total_tokens" in keywords or "total_completions" in keywords
    loss = 0.0
    with naming_line_of(function):
        for rows in step.parts:
            tensors = step.logp, step.old_logp, step.ref_logp, step.A.view(shape), step.mask
            part = function(*(x[rows] for x in tensors), **keywords)
            if not isinstance(part, torch.Tensor) or part.numel() != 1 or not part.requires_grad:
                raise ValueError(f"it returned {shown(part)}; return a scalar tensor that depends on logp")
            loss = loss + part.double().sum() / (1 if summed else len(step.parts))
        gradient = torch.autograd.grad(loss, step.logp)[0].flatten()
        if not (loss.isfinite() and gradient.isfinite().all() and gradient.any()):
            raise ValueError("its loss or gradient is 0, NaN or infinite; all inputs are finite")
    return loss.detach(), gradient


def weights(step, average):
    """{fault: the weights of tokens (N, M)}; the first is right."""
    right, ones, L = token_weights(step.mask, average, step.max_tokens), torch.ones_like(step.mask), step.max_tokens
    means = torch.cat([token_weights(step.mask[rows], average, L) for rows in step.parts]) / len(step.parts)
    return {"": right, PADDING: token_weights(ones, average, L), MEANS: means,
            TRUNCATED: right * step.mask.any(1).double().mean(),
            SIZE: step.mask / step.mask.numel(), SUMMED: step.mask / len(step.parts)}


def policy_losses(step, c):
    """Triples ((average, objectives), faults, loss without KL); these objectives differ in other things alone."""
    logp, old, A, families = step.logp, step.old_logp, step.A, {}
    for name, row in OBJECTIVES.items():
        families.setdefault((row.average, row.ratio, row.surrogate), []).append(name)
    for (average, _, surrogate), names in families.items():
        if c.objective not in (None, *names):
            continue
        row = replace(OBJECTIVES[names[0]], clip_low=c.clip_low, clip_high=c.clip_high)
        unclipped = replace(row, clip_low=math.inf, clip_high=math.inf)
        key = average, ", ".join(names)
        for fault, weight in weights(step, average).items():
            yield key, (fault, ""), policy_loss(logp, old, A, weight, row)[0]
            if surrogate == "clip":
                up, down = (policy_loss(logp, old, A.abs(), weight * sign, row)[0] for sign in (A > 0, A < 0))
                yield key, (fault, MIRRORED), up - down
                yield key, (fault, NO_RATIO), policy_loss(logp, logp.detach(), A, weight, row)[0]
                yield key, (fault, "the ratio is not clipped"), policy_loss(logp, old, A, weight, unclipped)[0]


def kl_losses(step, c):
    """Triples ((average, estimator), faults, weighted KL)."""
    logp, ref, log_ratio = step.logp, step.ref_logp, step.logp - step.old_logp
    r, length = log_ratio.exp(), step.mask.sum(1, keepdim=True).clamp(min=1)
    s = ((log_ratio * step.mask).sum(1, keepdim=True) / length).exp()                    # (N, 1)
    terms = (("k2", "", r.detach() * k2(logp, ref)),
             ("k2", "k2 without the ratio: right only in the first step on new rollouts", k2(logp, ref)),
             ("k3", "", r * k3(logp, ref)),
             ("k3", "k3 without the ratio: its gradient is not that of the KL, in no step", k3(logp, ref)),
             ("k3", "k3's ratio is detached: its gradient is not that of the KL", r.detach() * k3(logp, ref)),
             ("k3", "the sequence ratio multiplied into the KL: take each token's own", s * k3(logp, ref)),
             ("k3", "the KL of the other direction: policy and reference are exchanged", k3(ref, logp)),
             ("k3", "log p - log p_ref (k1) as a loss: its expected gradient is 0, it is no KL", logp - ref))
    if c.kl in (None, "none"):
        yield ("", "none"), ("", ""), 0.0 * logp.sum()
    for average in AVERAGES:
        for denominator, weight in weights(step, average).items():
            for estimator, fault, term in terms:
                if c.kl in (None, estimator):
                    yield (average, estimator), (denominator, fault), (term * weight).sum()


def numbers(steps, losses_of):
    """Of every formula: key and faults, losses of the steps (formulas, steps), gradients (formulas, tokens)."""
    values, gradients = [], []
    for step in steps:
        *names, losses = zip(*losses_of(step), strict=True)
        values.append(torch.stack(losses).detach())
        rows = [torch.autograd.grad(loss, step.logp, retain_graph=True)[0].flatten() for loss in losses]
        gradients.append(torch.stack(rows))
    return list(zip(*names, strict=True)), torch.stack(values, 1), torch.cat(gradients, 1)


def explanations(gradient, policies, P, kls, K, beta):
    """(number of faults, distance, i, j, faults) of every a P + b K that is the gradient, and of the right P + beta K."""
    pp, kk, pk = P.square().sum(1, keepdim=True), K.square().sum(1).clamp(min=1e-30), P @ K.T
    pg, kg, gg = (P @ gradient)[:, None], K @ gradient, gradient @ gradient
    a, b = (kk * pg - pk * kg) / (pp * kk - pk**2), (pp * kg - pk * pg) / (pp * kk - pk**2)
    for i, j in itertools.product(range(len(P)), range(len(K))):
        ((own, _), of_policy), ((average, estimator), of_kl) = policies[i], kls[j]
        found = {*of_policy, *of_kl, "" if average in ("", own) else f"the average of the KL is '{average}'"} - {""}
        if gg - a[i, j] * pg[i] - b[i, j] * kg[j] < TOLERANCE**2 * gg:
            scale, kl_scale = round(a[i, j].item(), 4), round((b / a)[i, j].item() / beta, 3)
            if scale != 1:
                found.add(SCALES.get(scale, f"the gradient is {scale:g} times the right one"))
            if estimator != "none" and kl_scale != 1:
                found.add("the sign of the KL is wrong" if kl_scale == -1 else f"kl_beta is {kl_scale * beta:g} in it")
            yield len(found), scale not in SCALES, i, j, sorted(found)
        elif not found:
            yield 99, (gradient - P[i] - beta * K[j]).norm().item(), i, j, ["no known fault explains it"]


def compare(steps, losses, gradient, c):
    """Prints which objective the loss is, or is nearest to. Returns what is wrong with it."""
    policies, P_loss, P = numbers(steps, lambda step: policy_losses(step, c))
    kls, K_loss, K = numbers(steps, lambda step: kl_losses(step, c))
    *_, i, j, faults = min(explanations(gradient, policies, P, kls, K, c.kl_beta))
    (average, objectives), estimator = policies[i][0], kls[j][0][1]
    i = policies.index(((average, objectives), ("", "")))
    j = kls.index((("" if estimator == "none" else average, estimator), ("", "")))
    print(f"{'nearest' if faults else 'right'}: {objectives}; KL: {estimator}; relative errors:")
    apart = lambda x, right: f"{((x - right).norm() / right.norm()).item():.0e}"
    parts = [step.logp.numel() for step in steps]
    of_steps = gradient.split(parts), (P[i] + c.kl_beta * K[j]).split(parts), losses, P_loss[i] + c.kl_beta * K_loss[j]
    for name, found, right, loss, right_loss in zip(SETS, *of_steps, strict=True):
        print(f"  {name:14} gradient {apart(found, right)}, loss {apart(loss, right_loss)}")
    return faults


def main(argv):
    path, _, name = argv[0].rpartition(":") if argv else ("", "", "")
    if not path:
        raise UsageError("python grpo/tools/check_loss.py FILE.py:FUNCTION [--objective=grpo] [--kl=k3]")
    c = load_config(CheckConfig, argv[1:])[0]
    function = run_config_file(path).get(name)
    if not callable(function):
        raise ValueError(f"{path} has no function {name}; name one that it defines")
    steps = [load_step(x) for x in SETS]
    try:  # most code for (N, 1) fails on (N,); code for (N,) may compute nonsense on (N, 1)
        shape, runs = "(N,)", [run_on(step, function, (-1,)) for step in steps]
    except UserCodeError:
        shape, runs = "(N, 1)", [run_on(step, function, (-1, 1)) for step in steps]
    losses, gradients = zip(*runs, strict=True)
    print(f"{argv[0]}, advantage {shape}")
    if faults := compare(steps, losses, torch.cat(gradients), c):
        print("\n".join(f"- {fault}" for fault in faults))
        raise SystemExit(1)


if __name__ == "__main__":
    run_script(main)
