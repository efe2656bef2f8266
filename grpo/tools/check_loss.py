"""Checks your loss on the test vectors: names the objective that it is, or its mistake.

python grpo/tools/check_loss.py mine.py:loss --objective=dapo --clip_high=0.28

tests/vectors/README.md has the arguments of the function; --help after it lists the settings.
"""

import inspect
import itertools
import json
import pathlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch

from core.config import load_config, run_config_file
from core.errors import Mistake, UsageError, definition, others, run_script
from core.settings.setting import Settings, setting, shown
from grpo.losses import AVERAGES, OBJECTIVES, SURROGATES, k2, k3, token_weights

VECTORS = ROOT / "tests" / "vectors"
SETS = "whole", "truncated", "micro_batches", "ranks"
TOLERANCE = 1e-5  # relative, of a gradient; a loss in float32 passes
SCALES = {-1: "wrong sign", 0.25: "1 / G of the right gradient"}  # G is 4


class CheckConfig(Settings):
    objective: str | None = setting(None, "what the loss is meant to be; None: any objective", tuple(OBJECTIVES))
    kl: str | None = setting(None, "its estimator of the KL; None: any or no KL", ("none", "k2", "k3"))
    kl_beta: float = setting(0.04, "weight of the KL", "(0, inf)")
    clip_low: float = setting(0.2, "the ratio is at least 1 - clip_low", "(0, inf)")
    clip_high: float = setting(0.2, "the ratio is at most 1 + clip_high", "(0, inf)")


class Term(NamedTuple):
    """A term of a loss, of the policy or of the KL, on all steps."""
    average: str            # a name in AVERAGES
    name: str               # its objectives, or the estimators of its KL
    faults: set             # what is wrong with it
    gradient: torch.Tensor  # (T,) with respect to logp, of all steps


def load_step(name):
    """A step of the vectors: its inputs as tensors, the micro-batches of all its ranks in one list."""
    step = SimpleNamespace(**json.loads((VECTORS / f"{name}.json").read_text()))
    for key in ("logp", "old_logp", "ref_logp", "mask"):
        setattr(step, key, torch.tensor(getattr(step, key), dtype=torch.float64))        # (N, M)
    step.A = torch.tensor(step.advantages[step.advantage], dtype=torch.float64)[:, None]  # (N, 1)
    step.parts = list(itertools.chain(*step.parts))
    step.logp.requires_grad_()
    return step


def measured(losses, steps):
    """The gradients of a loss, one after another (T,); losses: on each step."""
    gradients = []
    for loss, step in zip(losses, steps, strict=True):
        gradients.append(torch.autograd.grad(loss, step.logp, retain_graph=True)[0].flatten())
    return torch.cat(gradients)


def loss_on(step, function):
    """The loss of the user's function on a step."""
    totals = {"total_tokens": step.mask.sum(), "total_completions": step.mask.any(1).sum()}
    with others("its parameters cannot be read", "write it in Python", definition(function)):
        named = inspect.signature(getattr(function, "forward", function)).parameters  # forward: of a torch.nn.Module
    given = {key: x for key, x in (totals | {"max_tokens": step.max_tokens}).items() if key in named}
    loss = 0.0
    for rows in step.parts:
        tensors = step.logp, step.old_logp, step.ref_logp, step.A[:, 0], step.mask
        with others("it failed", "correct it", definition(function)):
            part = function(*(x[rows] for x in tensors), **given)
        if not isinstance(part, torch.Tensor) or part.numel() != 1 or not part.requires_grad:
            raise Mistake(f"{definition(function)}: it returned {shown(part)}; return a scalar tensor that depends on "
                          "logp")
        loss = loss + part.double().sum()
    return loss if given.keys() & totals.keys() else loss / len(step.parts)


def weights(step, average):
    """Pairs of a fault and the weights of tokens (N, M); the first is right."""
    mask, L, parts = step.mask, step.max_tokens, len(step.parts)
    ones = torch.ones_like(mask)
    N = mask.any(1).sum()
    length = mask.sum(1, keepdim=True).clamp(min=1)
    denominator = {"sum": N, "sequence": N * length, "token": mask.sum(), "constant": N * L}[average]
    right = token_weights(mask, average, L)
    of_parts = [token_weights(mask[rows], average, L) for rows in step.parts]
    return [
        ("", right),
        ("padding", ones / denominator),
        ("padding", token_weights(ones, average, L)),
        ("mean of means", torch.cat(of_parts) / parts),
        ("masked completions", right * mask.any(1).double().mean()),
        ("a sum", mask / parts),
        ("divided by the size of the padded tensor", mask / mask.numel())]


def ratios(step, other):
    """The ratio of each token (N, M), and of each sequence (N, 1), to another policy. other: its logp, (N, M)"""
    log_ratio = step.logp - other                                                        # (N, M)
    mean = (log_ratio * step.mask).sum(1, keepdim=True) / step.mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp(), mean.exp()


def policy_terms(step, row):
    """{fault: what is to be raised, (N, 1 or M)} of an objective; that of no fault, "", is right."""
    terms = {}
    for fault, other in ("ratio to the reference", step.ref_logp), ("", step.old_logp):
        of_token, of_sequence = ratios(step, other)
        r = of_sequence if row.ratio == "sequence" else of_token
        terms[fault] = SURROGATES[row.surrogate](r, row.clip_low, row.clip_high, step.logp, step.A)
    if row.surrogate == "clip":
        clipped = r.clamp(1 - row.clip_low, 1 + row.clip_high) * step.A
        terms["mirrored clip"] = torch.where(step.A < 0, torch.max(r * step.A, clipped), terms[""])
        terms["no clip"] = r * step.A
        if row.ratio == "token":
            terms["no ratio"] = step.logp * step.A
    return terms


def policy_losses(step, c):
    """Yields (average, objectives, faults, loss without KL)."""
    for case in step.expected:
        average, names = case["average"], case["objectives"]
        if case["kl"] == "none" and c.objective in (None, *names):
            row = replace(OBJECTIVES[names[0]], clip_low=c.clip_low, clip_high=c.clip_high)
            terms = policy_terms(step, row)
            for (fault, weight), other in itertools.product(weights(step, average), terms):
                yield average, ", ".join(names), {fault, other}, -(terms[other] * weight).sum()


def kl_losses(step, c):
    """Yields (average, estimators, faults, weighted KL). k2 and k3 have the same gradient."""
    logp, ref = step.logp, step.ref_logp
    r, s = ratios(step, step.old_logp)
    terms = [
        ("none", "", 0.0 * logp),
        ("k2, k3", "", r * k3(logp, ref)),
        ("k2, k3", "k3 without ratio", k3(logp, ref)),
        ("k2, k3", "k2 without ratio", k2(logp, ref)),
        ("k2, k3", "k3 with a detached ratio", r.detach() * k3(logp, ref)),
        ("k2, k3", "k1 as a loss", logp - ref),
        ("k2, k3", "reversed KL", k3(ref, logp)),
        ("k2, k3", "sequence ratio in the KL", s * k3(logp, ref))]
    for average in AVERAGES:
        for (fault, weight), (estimators, other, term) in itertools.product(weights(step, average), terms):
            if c.kl is None or c.kl in estimators:
                yield average, estimators, {fault, other}, (term * weight).sum()


def terms_of(losses_of, steps, c):
    """The Terms of a generator of losses on a step."""
    found = []
    for same in zip(*(losses_of(step, c) for step in steps), strict=True):
        average, name, faults, _ = same[0]
        found.append(Term(average, name, faults - {""}, measured([loss for *_, loss in same], steps)))
    return found


def fits(g, policies, kls):
    """Yields (policy, KL, a, b) where a times one and b times the other have the gradient g, (T,)."""
    P = torch.stack([term.gradient for term in policies])
    K = torch.stack([term.gradient for term in kls])
    pp = P.square().sum(1, keepdim=True)
    kk = K.square().sum(1).clamp(min=1e-30)
    pk, pg, kg = P @ K.T, (P @ g)[:, None], K @ g
    a = (kk * pg - pk * kg) / (pp * kk - pk**2)  # least squares for all pairs, (policies, KLs)
    b = (pp * kg - pk * pg) / (pp * kk - pk**2)
    error = g @ g - a * pg - b * kg
    for i, j in (error <= TOLERANCE**2 * (g @ g)).nonzero().tolist():
        yield policies[i], kls[j], a[i, j].item(), b[i, j].item()


def faults_of(policy, kl, a, b, beta):
    """The faults of a times a policy's term plus b times a KL's."""
    faults = policy.faults | kl.faults
    if kl.average != policy.average:
        faults.add(f"the average of the KL is '{kl.average}'")
    if (scale := round(a, 4)) != 1:
        faults.add(SCALES.get(scale, f"the gradient is {scale:g} times the right one"))
    kl_scale = round(b / abs(a) / beta, 3)
    if kl.name != "none" and kl_scale != 1:
        other = f"kl_beta is {kl_scale * beta:g}: if it should be, set --kl_beta"
        faults.add("wrong sign of the KL" if kl_scale == -1 else other)
    return sorted(faults)


def explanations(gradient, policies, kls, beta):
    """Yields (rank, policy, KL, faults) of all that may explain a gradient; the lowest rank is the best."""
    explained = False
    for policy, kl, a, b in fits(gradient, policies, kls):
        explained = True
        if abs(a) < TOLERANCE:
            policy, a = policy._replace(faults={"no policy gradient"}), 1.0
        faults = faults_of(policy, kl, a, b, beta)
        yield (len(faults), round(a, 4) not in (1, *SCALES), 0.0), policy, kl, faults
    if not explained:
        fault = "no known fault explains it" if gradient.isfinite().all() else "not finite"
        for policy, kl in itertools.product(policies, kls):
            if policy.average == kl.average and not policy.faults | kl.faults:
                right = policy.gradient + beta * kl.gradient
                distance = (gradient - right).norm() / (gradient.norm() + right.norm())
                yield (99, True, distance.item()), policy, kl, [fault]


def users_function(named):
    """The function that FILE.py:NAME names."""
    path, _, name = named.rpartition(":")
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))  # for what the file imports
    function = run_config_file(path).get(name) if path else None
    if not callable(function):
        raise UsageError(f"{named!r} must be FILE.py:FUNCTION, a function that the file defines")
    return function


def main(argv):
    """Prints the nearest objective, how far each step is from it, and why; exit code 1 unless it is right."""
    c, steps = load_config(CheckConfig, argv[1:])[0], [load_step(x) for x in SETS]
    function = users_function("".join(argv[:1]))
    with others("its gradient cannot be taken", "correct it", definition(function)):
        gradient = measured([loss_on(step, function) for step in steps], steps)
    policies, kls = terms_of(policy_losses, steps, c), terms_of(kl_losses, steps, c)
    _, policy, kl, faults = min(explanations(gradient, policies, kls, c.kl_beta), key=lambda x: x[0])
    policy = next(x for x in policies if x[:2] == policy[:2] and not x.faults)
    kl = next(x for x in kls if x[:2] == (policy.average, kl.name))
    verdict = "nearest" if faults else "right"
    print(f"{verdict}: {policy.name}; KL: {kl.name}; relative errors of the gradient:")
    sizes = [step.logp.numel() for step in steps]
    right = policy.gradient + c.kl_beta * kl.gradient
    for name, g, r in zip(SETS, gradient.split(sizes), right.split(sizes), strict=True):
        print(f"  {name:14} {(g - r).norm() / r.norm():.0e}")
    meanings = json.loads((VECTORS / "faults.json").read_text())
    for fault in faults:
        print(f"- {fault}: {meanings[fault]}" if fault in meanings else f"- {fault}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    run_script(main)
