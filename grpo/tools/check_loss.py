"""Checks your loss on the test vectors: names its objective, or its mistake.

python grpo/tools/check_loss.py mine.py:loss --objective=dapo --clip_high=0.28

tests/vectors/README.md has the arguments of the function; --help after it lists the settings.

A loss is minus the mean of a policy term, plus kl_beta times the mean of a KL. So the checker makes the gradient of
every published term, and of every term with a known mistake, under every way to average tokens. It then looks for pairs
of a policy term and a KL that combine to your gradient, and reports the pair with the fewest mistakes. Only gradients
are compared: a loss may differ by a constant.
"""

import functools
import itertools
import json
import math
import operator
import pathlib
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from torch.nn.functional import pad

from core.config import load_config, run_config_file
from core.errors import Mistake, UsageError, definition, others, parameters_of, run_script
from core.settings.setting import Settings, check_value, shown
from grpo.losses import (
    AVERAGES, KL_ESTIMATORS, OBJECTIVES, SURROGATES, Objective, check_estimator, check_row, estimate_kl, k2, k3)
from grpo.rollout import join

VECTORS = ROOT / "tests" / "vectors"
SETS = "whole", "truncated", "micro_batches", "ranks"
TOLERANCE = 1e-5  # relative, of a gradient; a loss in float32 passes
SCALES = {-1: "wrong sign", 0.25: "1 / G of the right gradient"}  # G is 4
CONVENTIONS = {"masked completions", "k1 times the ratio"}  # named, but not mistakes
# A cap on the ratio. The vectors have ratios up to 2.8 and from 7.3, and any cap between gives the same gradient
CAP = 3.0

# Numbers in common use, so that a loss is recognised even if it does not have the objective's own numbers
LOWER = 0.1, 0.2, 0.3, 1.0
UPPER = 0.1, 0.2, 0.25, 0.28, 0.3, 0.4, 1.0, 2.0, 4.0
OF_LOG_RATIO = 1 - math.exp(-0.2), math.exp(0.2) - 1  # of a log-ratio that is clipped to 0.2
BOUNDS = [*itertools.product(LOWER, UPPER), OF_LOG_RATIO]
BETAS = 0.01, 0.1, 0.2, 0.5, 1.0  # of dro


@dataclass(frozen=True)
class CheckConfig(Settings):
    objective: Annotated[str | None, OBJECTIVES] = None  # the intended objective of the loss; None: any objective
    kl: str | None = None  # its estimator of the KL: none, k2, k3 or yours; None: any or no KL
    kl_beta: Annotated[float, "(0, inf)"] = 0.04  # weight of the KL
    clip_low: Annotated[float, "(0, inf)"] | None = None
        # the ratio is at least 1 - clip_low; None: the objective's own, or 0.2
    clip_high: Annotated[float, "(0, inf)"] | None = None
        # the ratio is at most 1 + clip_high; None: the objective's own, or 0.2


class Weight(NamedTuple):
    """A way to average the terms of tokens: a factor for each."""
    average: str | None  # a name in AVERAGES; None: a sum, or a division by the padded size, instead of any average
    faults: set
    mask_is_correct: bool


class PolicyTerm(NamedTuple):
    """A term that a loss raises, without its KL."""
    row: Objective  # with its bounds and constants
    names: set      # of the objectives that have these bounds and constants; empty for other numbers in common use
    faults: set


class KLTerm(NamedTuple):
    """An estimate of the KL."""
    estimator: str  # its name; "k2, k3", because these have the same gradient; "none"
    faults: set


class KnownGradients(NamedTuple):
    """The gradients that may make up the gradient of a loss, with respect to the T log-probabilities of all steps."""
    steps: list           # of the vectors
    objectives: dict      # {name: row} of OBJECTIVES that are considered
    weights: list         # W Weights
    terms: list           # I PolicyTerms
    gradients: Tensor     # (W, I, T) of each term under each weight
    kls: list             # J KLTerms; the first is no KL
    kl_gradients: Tensor  # (W, J, T)


class Verdict(NamedTuple):
    """An explanation of a gradient."""
    rank: tuple       # lower is better
    names: list       # of objectives
    term: PolicyTerm
    average: str      # a name in AVERAGES
    kl: str           # the estimator of a KLTerm, or "unknown"
    faults: list


BY_RANK = operator.attrgetter("rank")


# The steps of the vectors

def load_step(name):
    """A step of the vectors: its inputs as tensors, the micro-batches of all its ranks in one list."""
    path = VECTORS / "v2" / f"{name}.json"
    values = json.loads(path.read_text())
    for key in ("logp", "old_logp", "ref_logp", "mask"):
        values[key] = torch.tensor(values[key], dtype=torch.float64)                     # (N, M)
    step = SimpleNamespace(**values)
    kind = step.advantage
    advantage = torch.tensor(step.advantages[kind], dtype=torch.float64)                 # (N,)
    step.A = advantage[:, None]
    step.inside = torch.ones_like(step.mask)  # 1.0 on padding too, but 0 on padding from joining steps
    step.parts = list(itertools.chain(*step.parts))
    step.logp.requires_grad_()
    return step


def loss_on(step, function):
    """The loss of the user's function on a step."""
    called = function
    if isinstance(function, torch.nn.Module):
        called = function.forward  # the parameters of its __call__ have no names
    parameters = parameters_of(called, "the function")
    given = {}
    if "total_tokens" in parameters:
        given["total_tokens"] = step.mask.sum()
    if "total_completions" in parameters:
        given["total_completions"] = step.mask.any(1).sum()
    adds_up = bool(given)  # a function that divides by a total of the step returns a part of its loss
    if "max_tokens" in parameters:
        given["max_tokens"] = step.max_tokens
    inputs = (
        step.logp,
        step.old_logp,
        step.ref_logp,
        step.A[:, 0],
        step.mask)
    loss = 0.0
    for rows in step.parts:
        inputs_of_part = [x[rows] for x in inputs]
        with others("it failed", "correct it", definition(function)):
            part = function(*inputs_of_part, **given)
        is_scalar = isinstance(part, Tensor) and part.numel() == 1
        if not is_scalar or not part.requires_grad:
            raise Mistake(f"{definition(function)}: it returned {shown(part)}; return a scalar tensor that depends on "
                          "logp")
        loss = loss + part.double().sum()
    if adds_up:
        return loss
    return loss / len(step.parts)


# Ways to average

def masks(mask):
    """Yields faults and a mask of the tokens that are counted (N, M); the first is correct."""
    later = pad(mask, (1, -1))  # moved by a token; what leaves the tensor is lost
    earlier = pad(mask, (-1, 1))
    yield set(), mask
    yield {"padding"}, torch.ones_like(mask)
    yield {"the mask is shifted"}, later
    yield {"the first token is left out"}, mask * later
    yield {"the last token is left out"}, mask * earlier


def divisor(mask, average, L):
    """The divisor (N, 1) or () of the terms of tokens that makes their sum over the step this average.

    mask: (N, M) of the tokens that are counted; L: max_tokens
    grpo/losses.py has the same, but its token_weights has no divisor where the mask is 0, and a loss with a mistake may
    count tokens there.
    """
    length = mask.sum(1, keepdim=True)                                                   # (N, 1)
    N = mask.any(1).sum().clamp(min=1)
    if average == "sum":
        return N
    if average == "sequence":
        return N * length.clamp(min=1)
    if average == "token":
        return length.sum().clamp(min=1)
    assert average == "constant", average
    return N * L


def divisors(mask, step):
    """Yields an average, its faults and the divisor of the terms of tokens: (N, 1), () or a number."""
    micro_batches = len(step.parts)
    rows, columns = mask.shape
    N = mask.any(1).sum()
    yield None, {"a sum"}, micro_batches
    yield None, {"a sum"}, 1
    yield None, {"divided by the size of the padded tensor"}, rows * columns
    yield None, {"divided by the size of the padded tensor"}, N * columns
    for average in AVERAGES:
        of_step = divisor(mask, average, step.max_tokens)
        of_parts = torch.empty_like(step.A)                                              # (N, 1)
        for part in step.parts:
            of_parts[part] = divisor(mask[part], average, step.max_tokens).double()
        yield average, set(), of_step
        yield average, {"mean of means"}, of_parts * micro_batches
        yield average, {"a mean for each micro-batch, added up"}, of_parts
        if average != "token":
            of_all_rows = of_step / N * rows  # N counts completions with a token in the loss, rows counts all
            yield average, {"masked completions"}, of_all_rows
            of_all_rows = of_all_rows / micro_batches
            yield average, {"masked completions", "a mean for each micro-batch, added up"}, of_all_rows


def weights_of(step):
    """The Weights of a step and their factors (N, W, M)."""
    weights, factors = [], []
    for faults, counted in masks(step.mask):
        masks_of_divisor = [counted]
        if faults:  # the tokens may be counted correctly where the loss divides by their number
            masks_of_divisor.append(step.mask)
        for mask in masks_of_divisor:
            for average, more, size in divisors(mask, step):
                weight = Weight(average, faults | more, mask_is_correct=not faults)
                weights.append(weight)
                factors.append(counted / size)
    return weights, torch.stack(factors, 1)


# Terms of the policy

def mean(x, mask):
    """The mean over the tokens of each completion, (N, M) -> (N, 1)."""
    total = (x * mask).sum(1, keepdim=True)
    length = mask.sum(1, keepdim=True)
    return total / length.clamp(min=1)


def ratios(step, kind):
    """Yields faults and the ratio, (N, M) of tokens or (N, 1) of sequences; the first is correct. kind: in RATIOS"""
    bases = (set(), step.old_logp), ({"ratio to the reference"}, step.ref_logp)
    for faults, base in bases:
        of_tokens = step.logp - base                                                     # (N, M)
        log_ratio = of_tokens
        if kind == "sequence":
            log_ratio = mean(of_tokens, step.mask)
        yield faults, log_ratio.exp()
        yield faults | {"inverted ratio"}, (-log_ratio).exp()
        if kind == "sequence":
            masked = of_tokens * step.mask
            yield faults | {"product of the ratios"}, masked.sum(1, keepdim=True).exp()
            arithmetic_mean = mean(of_tokens.exp(), step.mask)
            # It is 0 without a token in the loss, and a surrogate may take its logarithm or divide by it
            yield faults | {"mean of the ratios"}, arithmetic_mean.clamp(min=1e-9)
            yield faults | {"padding in the ratio of the sequence"}, mean(masked, step.inside).exp()
            yield faults | {"padding in the ratio of the sequence"}, mean(of_tokens, step.inside).exp()


def surrogate(step, row, r):
    """The term that an objective with the ratio r raises, (N, 1 or M)."""
    function = SURROGATES[row.surrogate]
    return function(r, row.clip_low, row.clip_high, step.logp, step.A, **row.constants)


def faulty_surrogates(step, row, r, correct):
    """Yields a fault and the term that an objective then raises, (N, 1 or M).

    r: the ratio, with or without a fault of its own; correct: the term with this ratio and no other fault
    """
    A = step.A
    logp = step.logp
    low = row.clip_low
    high = row.clip_high
    yield "no ratio", A * logp
    yield "only positive advantages", correct * (A > 0)
    if low is not None:
        unbounded = replace(row, clip_low=math.inf, clip_high=math.inf)
        yield "no clip", surrogate(step, unbounded, r)
    if row.surrogate == "detached_ratio":
        yield "gradient through the weight", r.clamp(1 - low, 1 + high) * A * logp
    elif row.surrogate == "probability_mask":
        moved = logp.exp() * (1 - 1 / r)                                                 # p - p_old
        is_near = (moved <= high) & (moved >= -low)
        yield "masked on both sides", r * A * is_near
    elif row.surrogate == "sigmoid_gate":
        tau = torch.full_like(A, row.constants["tau_neg"])
        tau[A > 0] = row.constants["tau_pos"]
        yield "no 4 / tau", correct * tau / 4
    elif row.surrogate == "clip":
        clipped = r.clamp(1 - low, 1 + high) * A
        larger = torch.max(r * A, clipped)
        yield "mirrored clip", torch.where(A < 0, larger, correct)
        yield "max in place of min", larger
        yield "no min", clipped
        capped = torch.max(correct, CAP * A)
        yield "dual clip", torch.where(A < 0, capped, correct)
        yield "a cap in place of the clip", r.clamp(max=CAP) * A


def policy_terms(step, row):
    """Yields faults and the term that an objective raises, (N, 1 or M); the first is correct."""
    for faults, r in ratios(step, row.ratio):
        correct = surrogate(step, row, r)
        yield faults, correct
        for fault, raised in faulty_surrogates(step, row, r, correct):
            yield faults | {fault}, raised


# Estimates of the KL

def added_estimators():
    """The names of the estimators that a config has added to KL_ESTIMATORS."""
    return sorted(KL_ESTIMATORS.keys() - {"exact", "k2", "k3"})


def kl_terms(step):
    """Yields an estimator, its faults and the KL of each token (N, M); the first is no KL."""
    logp = step.logp
    old = step.old_logp
    ref = step.ref_logp
    r = (logp - old).exp()
    of_sequence = mean(logp - old, step.mask).exp()
    mean_logp = mean(logp, step.mask)
    mean_ref = mean(ref, step.mask)
    yield "none", set(), 0.0 * logp
    yield "none", {"KL to the policy that sampled"}, k2(logp, old)
    yield "none", {"KL to the policy that sampled"}, k3(logp, old)
    yield "none", {"entropy of the sampled tokens"}, logp.exp() * logp
    yield "k2, k3", set(), r * k3(logp, ref)
    yield "k2, k3", {"k3 without ratio"}, k3(logp, ref)
    yield "k2, k3", {"k2 without ratio"}, k2(logp, ref)
    yield "k2, k3", {"k3 with a detached ratio"}, r.detach() * k3(logp, ref)
    yield "k2, k3", {"k2 with the gradient of the ratio"}, r * k2(logp, ref)
    yield "k2, k3", {"k1 times the ratio"}, r * (logp - ref)
    yield "k2, k3", {"k1 as a loss"}, logp - ref
    yield "k2, k3", {"k1 as a loss"}, r.detach() * (logp - ref)
    yield "k2, k3", {"absolute KL"}, (logp - ref).abs()
    yield "k2, k3", {"reversed KL"}, k3(ref, logp)
    yield "k2, k3", {"reversed KL"}, r * k3(ref, logp)
    yield "k2, k3", {"KL of means"}, k3(mean_logp, mean_ref)
    yield "k2, k3", {"KL of means", "reversed KL"}, k3(mean_ref, mean_logp)
    yield "k2, k3", {"sequence ratio in the KL"}, of_sequence * k3(logp, ref)
    for name in added_estimators():
        check_estimator(name)
        yield name, set(), estimate_kl(name, logp, ref, r)


# Objectives and their numbers

def numbers_of(row):
    """The bounds and constants of a row, as a text."""
    numbers = {"clip_low": row.clip_low, "clip_high": row.clip_high, **row.constants}
    texts = []
    for name, number in numbers.items():
        if number is not None:
            texts.append(f"{name} {number:.4g}")
    return ", ".join(texts)


def family(row):
    """The part of a row that determines the gradient of its term."""
    return row.ratio, row.surrogate, numbers_of(row)


def correct_variants(row, c):
    """Yields a row with the bounds of the settings, or else with its own and with PPO's."""
    if row.clip_low is None:
        yield row
        return
    low = c.clip_low or row.clip_low
    high = c.clip_high or row.clip_high
    yield replace(row, clip_low=low, clip_high=high)  # the first of equally good variants is named
    if c.clip_low is None and c.clip_high is None:
        yield replace(row, clip_low=0.2, clip_high=0.2)


def common_variants(row):
    """Yields a row with its own bounds and with numbers in common use."""
    if row.surrogate == "log_ratio_penalty":
        for beta in BETAS:
            yield replace(row, constants={"beta": beta})
    if row.clip_low is not None:
        yield row
        for low, high in BOUNDS:
            yield replace(row, clip_low=low, clip_high=high)


def chosen_objectives(c):
    """{name: row} of the OBJECTIVES that the settings allow."""
    if c.objective is None:
        return OBJECTIVES
    row = OBJECTIVES[c.objective]
    if row.clip_low is None and (c.clip_low or c.clip_high):
        raise UsageError(f"objective={c.objective!r} clips nothing: leave --clip_low and --clip_high out")
    return {c.objective: row}


# The gradients that a loss is compared with

def weighted_gradients(terms, factors, logp):
    """The gradients of the weighted sum of each term under each of the weights, (W, terms, T).

    terms: (N, 1 or M) each; factors: (W, N, M); logp: (N, M)
    """
    found = []
    for term in terms:
        gradient, = torch.autograd.grad(
            term.expand_as(logp),
            logp,
            factors,
            retain_graph=True,  # for the other terms
            is_grads_batched=True)                                                       # (W, N, M)
        found.append(gradient.flatten(1))
    return torch.stack(found, 1)


@functools.cache
def known_gradients(c):
    """The KnownGradients of the objectives that the settings allow."""
    steps = [load_step(name) for name in SETS]
    for step in steps:
        weights, step.factors = weights_of(step)
    # All steps are joined into one, so that a term is differentiated once. Shorter completions get padding that the
    # user's function does not see; `inside` is 0 there
    joined = join([vars(step) for step in steps])
    step = SimpleNamespace(**joined)
    factors = step.factors.transpose(0, 1)                                               # (W, N, M)

    objectives = chosen_objectives(c)
    variants = {}  # {family: row}
    names = defaultdict(set)  # {family: the objectives that have these numbers}
    for name, row in objectives.items():
        check_row(name)
        for variant in correct_variants(row, c):
            variants.setdefault(family(variant), variant)
            names[family(variant)].add(name)
        for variant in common_variants(row):
            variants.setdefault(family(variant), variant)

    terms, losses = [], []
    for key, row in variants.items():
        for faults, raised in policy_terms(step, row):
            # Numbers in common use are tried as the only mistake of a term; with more, most losses could be explained
            if names[key] or not faults:
                terms.append(PolicyTerm(row, names[key], faults))
                losses.append(-raised)

    kls, penalties = [], []
    for estimator, faults, kl in kl_terms(step):
        kls.append(KLTerm(estimator, faults))
        penalties.append(kl)
    gradients = weighted_gradients(losses, factors, step.logp)
    kl_gradients = weighted_gradients(penalties, factors, step.logp)
    return KnownGradients(
        steps=steps,
        objectives=objectives,
        weights=weights,
        terms=terms,
        gradients=gradients,
        kls=kls,
        kl_gradients=kl_gradients)


# Explanations of a gradient

def fits(g, P, K):
    """Yields (i, j, a, b) where a P[i] + b K[j] is the gradient g. g: (T,); P: (I, T); K: (J, T)

    Least squares with two unknowns, for all pairs at once. The normal equations are
        a <p, p> + b <p, k> = <p, g>
        a <p, k> + b <k, k> = <k, g>
    """
    pp = P.square().sum(1)[:, None]                                                      # (I, 1)
    kk = K.square().sum(1).clamp(min=1e-30)                                              # (J,) 0 without a KL
    pk = P @ K.T                                                                         # (I, J)
    pg = (P @ g)[:, None]
    kg = K @ g
    determinant = pp * kk - pk**2
    a = (kk * pg - pk * kg) / determinant
    b = (pp * kg - pk * pg) / determinant
    size = g @ g
    squared_error = size - a * pg - b * kg
    # A difference of squares, in which half of the digits cancel, finds the candidates; their error is then measured
    candidates = (squared_error <= TOLERANCE * size).nonzero()
    for i, j in candidates.tolist():
        x = a[i, j].item()
        y = b[i, j].item()
        error = g - x * P[i] - y * K[j]
        if error.norm() <= TOLERANCE * g.norm():
            yield i, j, x, y


def objectives_of(term, average, known):
    """The names of the objectives that match a term with an average, and the faults of its average and numbers."""
    row = term.row
    same_formula = []
    same_average = []
    for name, other in known.objectives.items():
        if (other.ratio, other.surrogate) == (row.ratio, row.surrogate):
            same_formula.append(name)
            if average in (None, other.average):
                same_average.append(name)
    faults = set()
    names = same_average
    if not names:
        faults.add(f"the average is {average!r}")
        names = same_formula
    same_numbers = [name for name in names if name in term.names]
    if same_numbers:
        return same_numbers, faults
    remedy = "set --clip_low and --clip_high"
    if row.constants:
        remedy = "set them in a config after the function, as the row's constants"
    faults.add(f"{numbers_of(row)}: if meant, {remedy}")
    return names, faults


def faults_of_scales(kl, a, b, beta):
    """The faults of a loss that is a times a policy's term and b times a KL."""
    faults = set()
    scale = round(a, 4)
    if scale != 1:
        faults.add(SCALES.get(scale, f"the gradient is {scale:g} times the right one"))
    if kl.estimator == "none":
        return faults
    kl_scale = round(b / abs(a) / beta, 3)
    if kl_scale == -1:
        faults.add("wrong sign of the KL")
    elif kl_scale != 1:
        faults.add(f"its kl_beta is {kl_scale * beta:g}: if meant, set --kl_beta={kl_scale * beta:g}")
    return faults


def pairs(g, known):
    """Yields (term, its weight, KL, its weight, a, b) where a times the term and b times the KL have the gradient g.

    Both have the same weight, or each has a weight with the correct mask: a loss may average its KL in another way.
    """
    numbered = list(enumerate(known.weights))
    for (w, weight), (v, kl_weight) in itertools.product(numbered, numbered):
        both_correct = weight.mask_is_correct and kl_weight.mask_is_correct
        if v == w or both_correct:
            for i, j, a, b in fits(g, known.gradients[w], known.kl_gradients[v]):
                yield known.terms[i], weight, known.kls[j], kl_weight, a, b


def explanations(g, known, c):
    """Yields the Verdicts that explain the gradient g (T,)."""
    for term, weight, kl, kl_weight, a, b in pairs(g, known):
        has_kl = kl is not known.kls[0]
        if has_kl and abs(b) < TOLERANCE * min(1.0, c.kl_beta):
            continue  # the pair without a KL explains the same
        faults = term.faults | weight.faults
        average = weight.average
        if abs(a) < TOLERANCE:
            if term is not known.terms[0]:
                continue  # the KL is the whole gradient with any term, so only the first term is reported
            faults = {"no policy gradient"} | kl_weight.faults
            average = kl_weight.average
            a = 1.0
        names, wrong = objectives_of(term, average, known)
        faults = faults | wrong | faults_of_scales(kl, a, b, c.kl_beta)
        if c.kl is not None and c.kl not in kl.estimator.split(", "):
            found = "no KL"
            if kl.estimator != "none":
                found = f"a KL ({kl.estimator})"
            faults.add(found)
        if has_kl:
            faults |= kl.faults | kl_weight.faults
            if kl_weight.average != average:
                faults.add(f"the average of the KL is {kl_weight.average!r}")
        is_odd_scale = round(a, 4) not in (1, *SCALES)
        if average is None:
            average = OBJECTIVES[names[0]].average
        yield Verdict(
            rank=(len(faults), is_odd_scale, bool(kl.faults)),
            names=names,
            term=term,
            average=average,
            kl=kl.estimator,
            faults=sorted(faults))


def nearest(g, known, faults):
    """The Verdict on a gradient (T,) that nothing explains: the objective with the nearest gradient, and faults."""
    verdicts = []
    for average in AVERAGES:
        gradients = known.gradients[correct_weight(average, known)]
        for term, gradient in zip(known.terms, gradients, strict=True):
            names, wrong = objectives_of(term, average, known)
            if not wrong and not term.faults:
                difference = (g - gradient).norm()
                distance = difference / (g.norm() + gradient.norm())
                verdict = Verdict(
                    rank=(distance.item(),),
                    names=names,
                    term=term,
                    average=average,
                    kl="unknown",
                    faults=faults)
                verdicts.append(verdict)
    return min(verdicts, key=BY_RANK)


def correct_weight(average, known):
    """The index of the weight with this average and no fault."""
    return known.weights.index(Weight(average, set(), True))


def verdict_on(gradient, known, c):
    """The best Verdict on a gradient (T,). Numbers that are not finite are left out, and reported."""
    finite = gradient.isfinite()
    g = gradient[finite]
    known = known._replace(
        gradients=known.gradients[..., finite],
        kl_gradients=known.kl_gradients[..., finite])
    lost = []
    if not finite.all():
        lost = ["not finite"]
    if g.any():
        verdicts = explanations(g, known, c)
        best = min(verdicts, key=BY_RANK, default=None)
        if best is not None:
            return best._replace(faults=best.faults + lost)
        return nearest(g, known, lost or ["no known fault explains it"])
    if lost:
        return nearest(g, known, lost)
    verdict = nearest(g, known, ["no policy gradient"])
    return verdict._replace(kl="none")


def correct_gradient(verdict, known, beta):
    """The gradient (T,) of the objective of a verdict, with the KL that it names."""
    w = correct_weight(verdict.average, known)
    term = verdict.term._replace(faults=set())
    correct = known.gradients[w, known.terms.index(term)]
    kl = KLTerm(verdict.kl, set())
    if kl in known.kls:
        correct = correct + beta * known.kl_gradients[w, known.kls.index(kl)]
    return correct


# The command

def load_function(named):
    """Loads the function that FILE.py:NAME names."""
    path, _, name = named.rpartition(":")
    folder = pathlib.Path(path).resolve().parent
    sys.path.insert(0, str(folder))  # for the imports of the file
    function = run_config_file(path).get(name) if path else None
    if not callable(function):
        raise UsageError(f"{named!r} must be FILE.py:FUNCTION, a function that the file defines")
    return function


def main(argv):
    """Prints the nearest objective, how far each step is from it, and why; exit code 1 unless it is correct."""
    c, origin = load_config(CheckConfig, argv[1:])
    estimators = "none", "k2", "k3", *added_estimators()
    check_value("kl", c.kl, estimators, origin.get("kl", ""))
    named = argv[0] if argv else ""
    function = load_function(named)
    known = known_gradients(c)
    found = []
    with others("its gradient cannot be taken", "correct it", definition(function)):
        for step in known.steps:
            loss = loss_on(step, function)
            gradient, = torch.autograd.grad(loss, step.logp)
            found.append(gradient)
    sizes = [len(gradient) for gradient in found]
    found = join(found)                                                                  # (N, M) of all steps
    verdict = verdict_on(found.flatten(), known, c)
    is_correct = CONVENTIONS.issuperset(verdict.faults)
    word = "correct" if is_correct else "nearest"
    names = ", ".join(verdict.names)
    print(f"{word}: {names} ({numbers_of(verdict.term.row)}); KL: {verdict.kl}; relative errors of the gradient:")
    correct = correct_gradient(verdict, known, c.kl_beta)
    correct = correct.view_as(found)
    steps = zip(SETS, found.split(sizes), correct.split(sizes), strict=True)
    for name, gradient, expected in steps:
        error = (gradient - expected).norm() / expected.norm()
        print(f"  {name:14} {error:.0e}")
    path = VECTORS / "faults.json"
    meanings = json.loads(path.read_text())
    for fault in verdict.faults:
        meaning = ""
        if fault in meanings:
            meaning = f": {meanings[fault]}"
        print(f"- {fault}{meaning}")
    sys.exit(0 if is_correct else 1)


if __name__ == "__main__":
    run_script(main)
