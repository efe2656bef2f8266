"""Checks your loss on the test vectors: names the objective that it is, or its mistake.

python grpo/tools/check_loss.py mine.py:loss --objective=dapo --clip_high=0.28

tests/vectors/README.md has the arguments of the function; --help after it lists the settings.
"""

import functools
import inspect
import itertools
import json
import math
import pathlib
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch.nn.functional import pad

from core.config import load_config, run_config_file
from core.errors import Mistake, UsageError, definition, others, run_script
from core.settings.setting import Settings, check_value, shown
from grpo.losses import (
    AVERAGES, KL_ESTIMATORS, OBJECTIVES, SURROGATES, check_estimator, check_row, estimate_kl, k2, k3)

VECTORS = ROOT / "tests" / "vectors"
SETS = "whole", "truncated", "micro_batches", "ranks"
TOLERANCE = 1e-5  # relative, of a gradient; a loss in float32 passes
SCALES = {-1: "wrong sign", 0.25: "1 / G of the right gradient"}  # G is 4
CONVENTIONS = {"masked completions", "k1 times the ratio"}  # named, but not wrong
CAP = 3.0  # of a ratio; every other between the largest ratios of the vectors has the same gradient
PPO = {"clip_low": 0.2, "clip_high": 0.2}  # bounds that every objective may have
LOWER, UPPER = (0.1, 0.2, 0.3, 1.0), (0.1, 0.2, 0.25, 0.28, 0.3, 0.4, 1.0, 2.0, 4.0)  # bounds of others, to be named
BETAS = 0.01, 0.1, 0.2, 0.5, 1.0  # of dro, likewise


@dataclass(frozen=True)
class CheckConfig(Settings):
    objective: Annotated[str | None, OBJECTIVES] = None  # what the loss is meant to be; None: any objective
    kl: str | None = None  # its estimator of the KL: none, k2, k3 or yours; None: any or no KL
    kl_beta: Annotated[float, "(0, inf)"] = 0.04  # weight of the KL
    clip_low: Annotated[float, "(0, inf)"] | None = None
        # the ratio is at least 1 - clip_low; None: the objective's own, or 0.2
    clip_high: Annotated[float, "(0, inf)"] | None = None
        # the ratio is at most 1 + clip_high; None: the objective's own, or 0.2


class Weight(NamedTuple):
    """The factors of tokens before they are summed."""
    average: str | None  # a name in AVERAGES; None: they are the same for all
    faults: set          # what is wrong with it


class Term(NamedTuple):
    """A term of a loss, of the policy or of the KL."""
    what: object             # a row of OBJECTIVES with its numbers, or the estimators of a KL
    faults: set              # what is wrong with it
    gradients: torch.Tensor  # (W, T) with respect to logp of all steps, under each of the weights


class Verdict(NamedTuple):
    """An explanation of a gradient."""
    rank: tuple    # the lowest of several verdicts is the best
    names: list    # of objectives
    row: object    # of OBJECTIVES, with its numbers
    average: str   # a name in AVERAGES
    kl: str        # its estimators, "none" or "unknown"
    faults: list


def load_step(name):
    """A step of the vectors: its inputs as tensors, the micro-batches of all its ranks in one list."""
    step = SimpleNamespace(**json.loads((VECTORS / "v2" / f"{name}.json").read_text()))
    for key in ("logp", "old_logp", "ref_logp", "mask"):
        setattr(step, key, torch.tensor(getattr(step, key), dtype=torch.float64))        # (N, M)
    step.A = torch.tensor(step.advantages[step.advantage], dtype=torch.float64)[:, None]  # (N, 1)
    step.parts = list(itertools.chain(*step.parts))
    step.logp.requires_grad_()
    return step


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


def masks(mask):
    """Pairs of a fault and the tokens that are counted (N, M); the first is right."""
    after, before = pad(mask, (1, -1)), pad(mask, (-1, 1))  # moved by a token; what leaves the tensor is lost
    return [
        ("", mask),
        ("padding", torch.ones_like(mask)),
        ("the mask is shifted", after),
        ("the first token is left out", mask * after),
        ("the last token is left out", mask * before)]


def normaliser(mask, average, L):
    """The divisor of the tokens of an average (N, 1), in tensors whose elements are all summed."""
    length = mask.sum(1, keepdim=True)
    one = torch.ones_like(length)
    N = mask.any(1).sum().clamp(min=1) * one
    if average == "sum":
        return N
    if average == "sequence":
        return N * length.clamp(min=1)
    if average == "token":
        return mask.sum().clamp(min=1) * one
    assert average == "constant", average
    return N * L


def normalisers(mask, step):
    """Triples of an average, its faults and the divisor of tokens, (N, 1) or a number."""
    parts, N, rows = len(step.parts), mask.any(1).sum(), len(mask)
    added_up = "a mean for each micro-batch, added up"
    found = [
        (None, {"a sum"}, parts),
        (None, {"a sum"}, 1),
        (None, {"divided by the size of the padded tensor"}, mask.numel()),
        (None, {"divided by the size of the padded tensor"}, mask.numel() / rows * N)]
    for average in AVERAGES:
        right = normaliser(mask, average, step.max_tokens)
        of_part = torch.cat([normaliser(mask[part], average, step.max_tokens) for part in step.parts])
        found += [
            (average, set(), right),
            (average, {"mean of means"}, of_part * parts),
            (average, {added_up}, of_part)]
        if average != "token":
            per_row = right / N
            found += [
                (average, {"masked completions"}, per_row * rows),
                (average, {"masked completions", added_up}, per_row * rows / parts)]
    return found


def weights_of(step):
    """Pairs of a Weight and its factors (N, M); first those of the right mask."""
    found = []
    for fault, counted in masks(step.mask):
        for divisors in [counted] if counted is step.mask else [counted, step.mask]:
            for average, faults, divisor in normalisers(divisors, step):
                found.append((Weight(average, {fault} - {""} | faults), counted / divisor))
    return found


def mean(x, mask):
    """The mean over the tokens of each completion, (N, M) -> (N, 1)."""
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def ratios(step, kind):
    """Pairs of faults and the ratio, (N, M) of tokens or (N, 1) of sequences; the first is right. kind: in RATIOS"""
    found = []
    for fault, other in ("", step.old_logp), ("ratio to the reference", step.ref_logp):
        log_r = step.logp - other                                                        # (N, M)
        if kind == "token":
            right, others = log_r, []
        else:
            right = mean(log_r, step.mask)
            masked = log_r * step.mask
            others = [
                ("product of the ratios", masked.sum(1, keepdim=True)),
                ("mean of the ratios", mean(log_r.exp(), step.mask).clamp(min=1e-9).log()),
                ("padding in the ratio of the sequence", masked.mean(1, keepdim=True)),
                ("padding in the ratio of the sequence", log_r.mean(1, keepdim=True))]
        for another, x in [("", right), ("inverted ratio", -right), *others]:
            found.append(({fault, another} - {""}, x.exp()))
    return found


def surrogates(step, row, r):
    """Pairs of a fault and what is raised, (N, 1 or M), by an objective with the ratio r; the first is right."""
    A, logp = step.A, step.logp
    low, high, constants = row.clip_low, row.clip_high, row.constants
    surrogate = SURROGATES[row.surrogate]
    right = surrogate(r, low, high, logp, A, **constants)
    found = [
        ("", right),
        ("no ratio", A * logp),
        ("only positive advantages", right * (A > 0))]
    if low is not None:
        found.append(("no clip", surrogate(r, math.inf, math.inf, logp, A, **constants)))
        clipped = r.clamp(1 - low, 1 + high) * A
    if row.surrogate == "detached_ratio":
        found.append(("gradient through the weight", clipped * logp))
    if row.surrogate == "probability_mask":
        moved = logp.exp() * (1 - 1 / r)                                                 # p - p_old
        found.append(("masked on both sides", r * A * (moved <= high) * (moved >= -low)))
    if row.surrogate == "sigmoid_gate":
        tau = torch.full_like(A, constants["tau_neg"]).masked_fill(A > 0, constants["tau_pos"])
        found.append(("no 4 / tau", right * tau / 4))
    if row.surrogate == "clip":
        larger = torch.max(r * A, clipped)
        found += [
            ("mirrored clip", torch.where(A < 0, larger, right)),
            ("max in place of min", larger),
            ("no min", clipped),
            ("dual clip", torch.where(A < 0, torch.max(right, CAP * A), right)),
            ("a cap in place of the clip", r.clamp(max=CAP) * A)]
    return found


def policy_terms(step, row):
    """Pairs of faults and what is raised, (N, 1 or M), by an objective; the first is right."""
    found = []
    for faults, r in ratios(step, row.ratio):
        for fault, term in surrogates(step, row, r):
            found.append((faults | {fault} - {""}, term))
    return found


def added_estimators():
    """The names of the estimators that a config has added to KL_ESTIMATORS."""
    return [name for name, estimator in KL_ESTIMATORS.items() if estimator is not None and name not in ("k2", "k3")]


def kl_terms(step):
    """Triples (estimators, faults, KL of each token (N, M)). k2 and k3 have the same gradient."""
    logp, old, ref = step.logp, step.old_logp, step.ref_logp
    r = (logp - old).exp()
    s = ratios(step, "sequence")[0][1]
    means = mean(logp, step.mask), mean(ref, step.mask)
    return [
        ("none", set(), 0.0 * logp),
        ("none", {"KL to the policy that sampled"}, k2(logp, old)),
        ("none", {"KL to the policy that sampled"}, k3(logp, old)),
        ("none", {"entropy of the sampled tokens"}, logp.exp() * logp),
        ("k2, k3", set(), r * k3(logp, ref)),
        ("k2, k3", {"k3 without ratio"}, k3(logp, ref)),
        ("k2, k3", {"k2 without ratio"}, k2(logp, ref)),
        ("k2, k3", {"k3 with a detached ratio"}, r.detach() * k3(logp, ref)),
        ("k2, k3", {"k2 with the gradient of the ratio"}, r * k2(logp, ref)),
        ("k2, k3", {"k1 times the ratio"}, r * (logp - ref)),
        ("k2, k3", {"k1 as a loss"}, logp - ref),
        ("k2, k3", {"k1 as a loss"}, r.detach() * (logp - ref)),
        ("k2, k3", {"absolute KL"}, (logp - ref).abs()),
        ("k2, k3", {"reversed KL"}, k3(ref, logp)),
        ("k2, k3", {"reversed KL"}, r * k3(ref, logp)),
        ("k2, k3", {"KL of means"}, k3(*means)),
        ("k2, k3", {"KL of means", "reversed KL"}, k3(*means[::-1])),
        ("k2, k3", {"sequence ratio in the KL"}, s * k3(logp, ref)),
        *((name, set(), estimate_kl(name, logp, ref, r)) for name in added_estimators())]


def numbers_of(row):
    """The bounds and constants of a row, as a text."""
    numbers = {"clip_low": row.clip_low, "clip_high": row.clip_high} | row.constants
    return ", ".join(f"{key} {value:.4g}" for key, value in numbers.items() if value is not None)


def meant(row, c):
    """The variants of a row that are right: with the bounds that the settings give, else with its own and PPO's."""
    if row.clip_low is None:
        return [row]
    given = {key: value for key in PPO if (value := vars(c)[key]) is not None}
    return [replace(row, **given)] if given else [row, replace(row, **PPO)]


def others_of(row):
    """Variants of a row with numbers that are in use elsewhere."""
    if row.surrogate == "log_ratio_penalty":
        return [replace(row, constants={"beta": beta}) for beta in BETAS]
    if row.clip_low is None:
        return []
    bounds = [*itertools.product(LOWER, UPPER), (1 - math.exp(-0.2), math.exp(0.2) - 1)]  # the last: those of log r
    return [row] + [replace(row, clip_low=low, clip_high=high) for low, high in bounds]


def family(row):
    """The part of a row that a gradient shows, without its average."""
    return row.ratio, row.surrogate, numbers_of(row)


def asked(c):
    """The rows of OBJECTIVES that the settings ask for, {name: row}."""
    if c.objective is None:
        return OBJECTIVES
    row = OBJECTIVES[c.objective]
    if row.clip_low is None and (c.clip_low or c.clip_high):
        raise UsageError(f"objective={c.objective!r} clips nothing: leave --clip_low and --clip_high out")
    return {c.objective: row}


def identity(row, average, c):
    """The names of objectives that a loss with a ratio, surrogate and numbers may be, and what is wrong with it."""
    alike = {name: own for name, own in asked(c).items() if family(own)[:2] == family(row)[:2]}
    found = {name: own for name, own in alike.items() if average in (None, own.average)}
    faults = set() if found else {f"the average is {average!r}"}
    found = found or alike
    right = [name for name, own in found.items() if family(row) in map(family, meant(own, c))]
    if not right and row.constants:
        faults.add(f"{numbers_of(row)}: if meant, set them in a config after the function, as the row's constants")
    elif not right:
        faults.add(f"{numbers_of(row)}: if meant, set --clip_low and --clip_high")
    return right or list(found), faults


def gradients(values, factors, steps):
    """The gradients of the weighted sums of a term under each of the weights, (W, T).

    values: the term on each step, (N, 1 or M); factors: on each step (W, N, M)
    """
    found = []
    for value, weight, step in zip(values, factors, steps, strict=True):
        N, M = step.logp.shape
        # a completion's term depends on its own tokens alone, so one backward pass reads a token of every completion
        one_token = torch.eye(M, dtype=torch.float64)[:, None].expand(M, N, M)
        jacobian, = torch.autograd.grad(value.expand(N, M), step.logp, one_token, retain_graph=True,
                                        is_grads_batched=True)                           # (M, N, M)
        found.append(torch.einsum("wnt,tnu->wnu", weight, jacobian).flatten(1))
    return torch.cat(found, 1)


@functools.cache
def known_losses(c):
    """The steps, the Weights, and the Terms of the policy and of the KL that a loss is compared with."""
    steps = [load_step(name) for name in SETS]
    of_steps = [weights_of(step) for step in steps]
    weights = [weight for weight, _ in of_steps[0]]
    factors = [torch.stack([x for _, x in of_step]) for of_step in of_steps]
    right, others = {}, {}
    for name, row in asked(c).items():
        check_row(name)
        right |= {family(variant): variant for variant in meant(row, c)}
        others |= {family(variant): variant for variant in others_of(row)}
    terms = []
    for key, row in (right | others).items():
        for same in zip(*(policy_terms(step, row) for step in steps), strict=True):
            faults = same[0][0]
            if key in right or not faults:
                values = [-value for _, value in same]
                terms.append(Term(row, faults, gradients(values, factors, steps)))
    for name in added_estimators():
        check_estimator(name)
    kls = []
    for same in zip(*map(kl_terms, steps), strict=True):
        estimators, faults, _ = same[0]
        values = [value for *_, value in same]
        kls.append(Term(estimators, faults, gradients(values, factors, steps)))
    return steps, weights, terms, kls


def fits(g, P, K):
    """Yields (i, j, a, b) where a times P[i] and b times K[j] have the gradient g. g: (T,); P: (I, T); K: (J, T)"""
    pp = P.square().sum(1)[:, None]
    kk = K.square().sum(1).clamp(min=1e-30)
    pk = P @ K.T
    pg = (P @ g)[:, None]
    kg = K @ g
    determinant = pp * kk - pk**2
    a = (kk * pg - pk * kg) / determinant  # least squares for all pairs, (I, J)
    b = (pp * kg - pk * pg) / determinant
    error = g @ g - a * pg - b * kg
    for i, j in (error <= TOLERANCE * (g @ g)).nonzero().tolist():
        x, y = a[i, j].item(), b[i, j].item()
        left = g - x * P[i] - y * K[j]  # the error is a difference of squares, which cancels
        if left.norm() <= TOLERANCE * g.norm():
            yield i, j, x, y


def pairs(g, weights, terms, kls):
    """Yields (term, its weight, KL, its weight, a, b) where a times the term and b times the KL have the gradient g.

    Both have the same weight, or each has one of the right mask.
    """
    P = torch.stack([term.gradients for term in terms], 1)                               # (W, I, T)
    K = torch.stack([kl.gradients for kl in kls], 1)                                     # (W, J, T)
    right_masks = next(w for w, weight in enumerate(weights) if "padding" in weight.faults)
    for w, weight in enumerate(weights):
        others = list(range(right_masks)) if w < right_masks else [w]
        of_kl = list(itertools.product(others, kls))
        for i, j, a, b in fits(g, P[w], K[others].flatten(0, 1)):
            kl_w, kl = of_kl[j]
            yield terms[i], weight, kl, weights[kl_w], a, b


def faults_of_scales(kl, a, b, beta):
    """The faults of a loss that is a times a policy's term and b times a KL's."""
    faults = set()
    scale = round(a, 4)
    if scale != 1:
        faults.add(SCALES.get(scale, f"the gradient is {scale:g} times the right one"))
    kl_scale = round(b / abs(a) / beta, 3)
    if kl.what != "none" and kl_scale == -1:
        faults.add("wrong sign of the KL")
    elif kl.what != "none" and kl_scale != 1:
        faults.add(f"its kl_beta is {kl_scale * beta:g}: if meant, set --kl_beta={kl_scale * beta:g}")
    return faults


def explanations(g, weights, terms, kls, c):
    """Yields the Verdicts that explain the gradient g (T,)."""
    for term, weight, kl, kl_weight, a, b in pairs(g, weights, terms, kls):
        faults = term.faults
        has_kl = kl.what != "none" or bool(kl.faults)
        if has_kl and abs(b) < TOLERANCE * min(1.0, c.kl_beta):
            continue  # the same without a KL
        if abs(a) < TOLERANCE:
            if term is not terms[0]:
                continue  # the same is true of every term
            weight, faults, a = kl_weight, {"no policy gradient"}, 1.0
        names, wrong = identity(term.what, weight.average, c)
        faults = faults | wrong | weight.faults | faults_of_scales(kl, a, b, c.kl_beta)
        if c.kl is not None and c.kl not in kl.what.split(", "):
            faults = faults | {"no KL" if kl.what == "none" else f"a KL ({kl.what})"}
        if has_kl:
            faults |= kl.faults | kl_weight.faults
            if kl_weight.average != weight.average:
                faults.add(f"the average of the KL is {kl_weight.average!r}")
        rank = len(faults), round(a, 4) not in (1, *SCALES), bool(kl.faults)
        average = weight.average or OBJECTIVES[names[0]].average
        yield Verdict(rank, names, term.what, average, kl.what, sorted(faults))


def nearest(g, weights, terms, c, fault):
    """The Verdict that a gradient (T,) that nothing explains has a fault: the objective whose gradient is nearest."""
    found = []
    for term, average in itertools.product(terms, AVERAGES):
        if term.faults:
            continue
        names, wrong = identity(term.what, average, c)
        if not wrong:
            right = term.gradients[weights.index(Weight(average, set()))]
            rank = ((g - right).norm() / (g.norm() + right.norm())).item(),
            found.append(Verdict(rank, names, term.what, average, "unknown", [fault]))
    return min(found, key=lambda verdict: verdict.rank)


def verdict_on(gradient, weights, terms, kls, c):
    """The best Verdict on a gradient (T,). What is not finite is left out, and said."""
    finite = gradient.isfinite()
    g = gradient[finite]
    terms, kls = ([x._replace(gradients=x.gradients[:, finite]) for x in some] for some in (terms, kls))
    if not g.any() and not finite.all():
        return nearest(g, weights, terms, c, "not finite")
    if not g.any():
        return nearest(g, weights, terms, c, "no policy gradient")._replace(kl="none")
    verdict = min(explanations(g, weights, terms, kls, c), key=lambda x: x.rank, default=None)
    if finite.all():
        return verdict or nearest(g, weights, terms, c, "no known fault explains it")
    if verdict is None:
        return nearest(g, weights, terms, c, "not finite")
    return verdict._replace(faults=[*verdict.faults, "not finite"])


def right_gradient(verdict, weights, terms, kls, beta):
    """The gradient (T,) of the objective of a verdict, with the KL that it names."""
    w = weights.index(Weight(verdict.average, set()))
    right, = (x.gradients[w] for x in terms if x.what is verdict.row and not x.faults)
    for kl in kls:
        if kl.what == verdict.kl and not kl.faults:
            right = right + beta * kl.gradients[w]
    return right


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
    c, origin = load_config(CheckConfig, argv[1:])
    check_value("kl", c.kl, ("none", "k2", "k3", *added_estimators()), origin.get("kl", ""))
    function = users_function("".join(argv[:1]))
    steps, weights, terms, kls = known_losses(c)
    with others("its gradient cannot be taken", "correct it", definition(function)):
        of_steps = [torch.autograd.grad(loss_on(step, function), step.logp)[0].flatten() for step in steps]
    verdict = verdict_on(torch.cat(of_steps), weights, terms, kls, c)
    is_right = CONVENTIONS.issuperset(verdict.faults)
    word = "right" if is_right else "nearest"
    names, numbers = ", ".join(verdict.names), numbers_of(verdict.row)
    print(f"{word}: {names} ({numbers}); KL: {verdict.kl}; relative errors of the gradient:")
    sizes = [len(g) for g in of_steps]
    right = right_gradient(verdict, weights, terms, kls, c.kl_beta).split(sizes)
    for name, g, r in zip(SETS, of_steps, right, strict=True):
        print(f"  {name:14} {(g - r).norm() / r.norm():.0e}")
    meanings = json.loads((VECTORS / "faults.json").read_text())
    for fault in verdict.faults:
        print(f"- {fault}: {meanings[fault]}" if fault in meanings else f"- {fault}")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    run_script(main)
