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
            A, mask = step.A[rows].view(shape), step.mask[rows]
            part = function(step.logp[rows], step.old_logp[rows], step.ref_logp[rows], A, mask, **keywords)
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


def alike(name):
    """The objectives whose loss is the same where the advantages and the clipping range are."""
    kind = lambda row: (row.average, row.ratio, row.surrogate)
    return [other for other, row in OBJECTIVES.items() if kind(row) == kind(OBJECTIVES[name])]


def policy_losses(step, c):
    """Triples (objective, faults, loss without KL). Of objectives that are alike, the first."""
    logp, old, A = step.logp, step.old_logp, step.A
    for name in dict.fromkeys(alike(name)[0] for name in OBJECTIVES):
        row = replace(OBJECTIVES[name], clip_low=c.clip_low, clip_high=c.clip_high)
        unclipped = replace(row, clip_low=math.inf, clip_high=math.inf)
        for fault, weight in weights(step, row.average).items():
            yield name, (fault,), policy_loss(logp, old, A, weight, row)[0]
            if row.surrogate == "clip":
                up, down = (policy_loss(logp, old, A.abs(), weight * sign, row)[0] for sign in (A > 0, A < 0))
                yield name, (fault, MIRRORED), up - down
                yield name, (fault, NO_RATIO), policy_loss(logp, logp.detach(), A, weight, row)[0]
                yield name, (fault, "the ratio is not clipped"), policy_loss(logp, old, A, weight, unclipped)[0]


def kl_losses(step):
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
    yield ("", "none"), (), 0.0 * logp.sum()
    for average in AVERAGES:
        for denominator, weight in weights(step, average).items():
            for estimator, fault, term in terms:
                yield (average, estimator), (denominator, fault), (term * weight).sum()


def numbers(steps, losses_of):
    """Of every formula: key and faults, losses of the steps (formulas, steps), gradients (formulas, tokens)."""
    values, gradients = [], []
    for step in steps:
        *names, losses = zip(*losses_of(step), strict=True)
        values.append(torch.stack(losses).detach())
        gradients.append(torch.stack([
            torch.autograd.grad(loss, step.logp, retain_graph=True)[0].flatten() for loss in losses]))
    return list(zip(*names, strict=True)), torch.stack(values, 1), torch.cat(gradients, 1)


def explanations(gradient, policies, P, kls, K, c):
    """Every a P + b K that is the gradient: (number of faults, True if one has no name, i, j, the faults)."""
    pp, kk, pk = P.square().sum(1, keepdim=True), K.square().sum(1), P @ K.T
    kk[0] = 1.0  # no KL: b is then 0
    pg, kg, gg = (P @ gradient)[:, None], K @ gradient, gradient @ gradient
    a, b = (kk * pg - pk * kg) / (pp * kk - pk**2), (pp * kg - pk * pg) / (pp * kk - pk**2)
    for i, j in (gg - a * pg - b * kg < TOLERANCE**2 * gg).nonzero().tolist():
        (name, of_policy), ((average, estimator), of_kl) = policies[i], kls[j]
        scale, beta = round(a[i, j].item(), 4), round((b / a)[i, j].item() / c.kl_beta, 3)
        found = {*of_policy, *of_kl}
        if scale != 1:
            found.add(SCALES.get(scale, f"the gradient is {scale:g} times the right one"))
        if estimator != "none" and beta != 1:
            found.add("the sign of the KL is wrong" if beta == -1 else f"kl_beta is {beta * c.kl_beta:.4g}")
        if average not in ("", OBJECTIVES[name].average):
            found.add(f"the KL has the average '{average}', the rest '{OBJECTIVES[name].average}'")
        if c.objective not in (None, *alike(name)) or c.kl not in (None, estimator):
            found.add(f"it is {title(name, estimator)}")
        faults = sorted(found - {""})
        yield len(faults), scale not in SCALES, i, j, faults


def title(name, estimator):
    return f"{', '.join(alike(name))}, KL {estimator}"


def compare(steps, losses, gradient, c):
    """Prints what the loss is, and returns what is wrong with it."""
    policies, P_loss, P = numbers(steps, lambda step: policy_losses(step, c))
    kls, K_loss, K = numbers(steps, kl_losses)
    apart = lambda x, right: ((x - right).norm() / right.norm()).item()
    right = {}  # {(objective, KL): (its losses, its gradient)}
    for i, (name, of_policy) in enumerate(policies):
        for j, ((average, estimator), of_kl) in enumerate(kls):
            if average in ("", OBJECTIVES[name].average) and not any(of_policy + of_kl):
                right[name, estimator] = P_loss[i] + c.kl_beta * K_loss[j], P[i] + c.kl_beta * K[j]
    asked = [key for key in right if c.objective in (None, *alike(key[0])) and c.kl in (None, key[1])]
    nearest, faults = min(asked, key=lambda key: apart(gradient, right[key][1])), ["no known fault explains it"]
    if explained := sorted(explanations(gradient, policies, P, kls, K, c)):
        *_, i, j, faults = explained[0]
        if (policies[i][0], kls[j][0][1]) in asked:
            nearest = policies[i][0], kls[j][0][1]
    print("nearest:" if faults else "right:", title(*nearest))
    of_steps = zip(*(x.split([step.logp.numel() for step in steps]) for x in (gradient, right[nearest][1])), strict=True)
    for name, loss, of_loss, pair in zip(SETS, losses, right[nearest][0], of_steps, strict=True):
        print(f"  {name:14} relative error of the gradient {apart(*pair):.0e}, of the loss {apart(loss, of_loss):.0e}")
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
