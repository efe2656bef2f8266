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
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch

from core.config import load_config, run_config_file
from core.errors import Mistake, UsageError, definition, others, run_script
from core.settings.setting import Settings, setting, shown
from grpo.losses import AVERAGES, OBJECTIVES, SURROGATES, k2, k3

VECTORS = ROOT / "tests" / "vectors"
SETS = "whole", "truncated", "micro_batches", "ranks"
TOLERANCE = 1e-5  # relative, of a gradient; a loss in float32 passes
SCALES = {-1: "wrong sign", 0.25: "1 / G of the right gradient"}  # G is 4
CONVENTIONS = {"masked completions", "k1 times the ratio"}  # named, but not wrong
CAP = 3.0  # of a ratio; every other that the largest ratios of the vectors pass has the same gradient
COMMON = 0.2, 0.2  # PPO's bounds, which every objective may have
OTHER_BOUNDS = list(itertools.product((0.1, 0.2, 0.3, 1.0), (0.1, 0.2, 0.28, 0.3, 0.4, 1.0, 2.0, 4.0)))
OTHER_BOUNDS.append((1 - math.exp(-0.2), math.exp(0.2) - 1))  # log r is clipped at 0.2
OTHER_BETAS = 0.01, 0.1, 0.2, 0.5, 1.0  # of dro


class CheckConfig(Settings):
    objective: str | None = setting(None, "what the loss is meant to be; None: any objective", OBJECTIVES)
    kl: str | None = setting(None, "its estimator of the KL; None: any or no KL", ("none", "k2", "k3"))
    kl_beta: float = setting(0.04, "weight of the KL", "(0, inf)")
    clip_low: float | None = setting(
        None, "the ratio is at least 1 - clip_low; None: the objective's own, or 0.2", "(0, inf)")
    clip_high: float | None = setting(
        None, "the ratio is at most 1 + clip_high; None: the objective's own, or 0.2", "(0, inf)")


class Weight(NamedTuple):
    """What the tokens are multiplied by before they are summed."""
    average: str | None  # a name in AVERAGES; None: it is the same for all
    faults: set          # what is wrong with it


class Term(NamedTuple):
    """A term of a loss, of the policy or of the KL."""
    key: tuple               # what it is: a surrogate with its ratio, bounds and constants, or the estimators of a KL
    faults: set              # what is wrong with it
    gradients: torch.Tensor  # (W, T) with respect to logp of all steps, under each of the weights


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


def shifted(mask, by):
    """The mask moved by a token; what leaves the tensor is lost. (N, M) -> (N, M)"""
    moved = torch.zeros_like(mask)
    if by > 0:
        moved[:, 1:] = mask[:, :-1]
    else:
        moved[:, :-1] = mask[:, 1:]
    return moved


def masks(mask):
    """Pairs of a fault and the tokens that are counted (N, M); the first is right."""
    return [
        ("", mask),
        ("padding", torch.ones_like(mask)),
        ("the mask is shifted", shifted(mask, 1)),
        ("the first token is left out", mask * shifted(mask, 1)),
        ("the last token is left out", mask * shifted(mask, -1))]


def normaliser(mask, average, L):
    """What a token of an average is divided by, (N, 1) or a number, in tensors of which all is summed."""
    N = mask.any(1).sum().clamp(min=1)
    if average == "sum":
        return N
    if average == "sequence":
        return N * mask.sum(1, keepdim=True).clamp(min=1)
    if average == "token":
        return mask.sum().clamp(min=1)
    assert average == "constant", average
    return N * L


def normalisers(mask, parts, average, L):
    """Pairs of a fault and what a token is divided by, (N, 1) or a number; the first is right."""
    right = normaliser(mask, average, L)
    of_part = torch.cat([normaliser(mask[rows], average, L).expand(len(rows), 1) for rows in parts])
    found = [
        ("", right),
        ("mean of means", of_part * len(parts)),
        ("a mean for each micro-batch, added up", of_part)]
    if average != "token":
        found.append(("masked completions", right / mask.any(1).sum() * len(mask)))
    return found


def weights_of(step):
    """Pairs of a Weight and its values (N, M); the first of an average is right."""
    found = []
    for fault, counted in masks(step.mask):
        divisors = [(average, *pair) for average in AVERAGES
                    for mask in ([counted] if fault == "" else [counted, step.mask])
                    for pair in normalisers(mask, step.parts, average, step.max_tokens)]
        divisors += [
            (None, "a sum", len(step.parts)),
            (None, "a sum", 1),
            (None, "divided by the size of the padded tensor", step.mask.numel()),
            (None, "divided by the size of the padded tensor", step.mask.any(1).sum() * step.mask.shape[1])]
        for average, other, divisor in divisors:
            found.append((Weight(average, {fault, other} - {""}), counted / divisor))
    return found


def ratios_of_tokens(step):
    """Pairs of faults and the ratio of each token, (N, M); the first is right."""
    r = (step.logp - step.old_logp).exp()
    to_reference = (step.logp - step.ref_logp).exp()
    return [
        (set(), r),
        ({"inverted ratio"}, 1 / r),
        ({"ratio to the reference"}, to_reference),
        ({"ratio to the reference", "inverted ratio"}, 1 / to_reference)]


def ratios_of_sequences(step):
    """Pairs of faults and the ratio of each sequence, (N, 1); the first is right."""
    found = []
    length = step.mask.sum(1, keepdim=True).clamp(min=1)
    for to_reference, other in (set(), step.old_logp), ({"ratio to the reference"}, step.ref_logp):
        log_ratio = (step.logp - other) * step.mask                                      # (N, M)
        mean = log_ratio.sum(1, keepdim=True) / length
        r = (step.logp - other).exp()
        found += [
            (to_reference, mean.exp()),
            (to_reference | {"inverted ratio"}, (-mean).exp()),
            (to_reference | {"product of the ratios"}, log_ratio.sum(1, keepdim=True).exp()),
            (to_reference | {"mean of the ratios"}, (r * step.mask).sum(1, keepdim=True) / length),
            (to_reference | {"padding in the ratio of the sequence"}, log_ratio.mean(1, keepdim=True).exp()),
            (to_reference | {"padding in the ratio of the sequence"}, (step.logp - other).mean(1, keepdim=True).exp())]
    return found


def surrogates(step, row, r):
    """Pairs of a fault and what is raised, (N, 1 or M), of an objective with the ratio r; the first is right."""
    A, logp = step.A, step.logp
    surrogate = SURROGATES[row.surrogate]
    right = surrogate(r, row.clip_low, row.clip_high, logp, A, **row.constants)
    found = [("", right)]
    if row.clip_low is not None:
        found.append(("no clip", surrogate(r, math.inf, math.inf, logp, A, **row.constants)))
    if row.surrogate == "detached_ratio":
        found.append(("gradient through the weight", r.clamp(1 - row.clip_low, 1 + row.clip_high) * A * logp))
    if row.surrogate == "probability_mask":
        moved = logp.exp() * (1 - 1 / r)                                                 # p - p_old
        far = (moved > row.clip_high) | (moved < -row.clip_low)
        found.append(("masked on both sides", (r * A).masked_fill(far, 0.0)))
    if row.surrogate == "sigmoid_gate":
        tau = torch.full_like(A, row.constants["tau_neg"]).masked_fill(A > 0, row.constants["tau_pos"])
        found.append(("no 4 / tau", right * tau / 4))
    if row.surrogate == "clip":
        clipped = r.clamp(1 - row.clip_low, 1 + row.clip_high) * A
        larger = torch.max(r * A, clipped)
        found += [
            ("mirrored clip", torch.where(A < 0, larger, right)),
            ("max in place of min", larger),
            ("no min", clipped),
            ("dual clip", torch.where(A < 0, torch.max(right, CAP * A), right)),
            ("a cap in place of the clip", r.clamp(max=CAP) * A)]
    return found


def policy_terms(step, row):
    """Pairs of faults and what is raised, (N, 1 or M), of an objective; the first is right."""
    found = []
    ratios = ratios_of_sequences(step) if row.ratio == "sequence" else ratios_of_tokens(step)
    for faults, r in ratios:
        for fault, term in surrogates(step, row, r):
            found.append((faults | {fault} - {""}, term))
    found.append(({"no ratio"}, step.A * step.logp))
    r = ratios[0][1]
    for fault, A in ("only positive advantages", step.A.clamp(min=0)), ("the sign of the advantage", step.A.sign()):
        changed = SimpleNamespace(A=A, logp=step.logp)
        found.append(({fault}, surrogates(changed, row, r)[0][1]))
    return found


def kl_terms(step):
    """Triples (estimators, faults, KL of each token (N, M)). k2 and k3 have the same gradient."""
    logp, old, ref = step.logp, step.old_logp, step.ref_logp
    r = ratios_of_tokens(step)[0][1]
    s = ratios_of_sequences(step)[0][1]
    length = step.mask.sum(1, keepdim=True).clamp(min=1)
    mean, ref_mean = ((x * step.mask).sum(1, keepdim=True) / length for x in (logp, ref))
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
        ("k2, k3", {"KL of means"}, k3(mean, ref_mean)),
        ("k2, k3", {"KL of means", "reversed KL"}, k3(ref_mean, mean)),
        ("k2, k3", {"sequence ratio in the KL"}, s * k3(logp, ref))]


def surrogate_of(row):
    """What tells two rows of OBJECTIVES apart beside advantage and average."""
    return row.ratio, row.surrogate, row.clip_low, row.clip_high, *row.constants.items()


def numbers_of(row):
    """The bounds and constants of a row, as a text."""
    numbers = {"clip_low": row.clip_low, "clip_high": row.clip_high} | row.constants
    return ", ".join(f"{key} {value:.4g}" for key, value in numbers.items() if value is not None)


def meant(row, c):
    """The variants of a row that are right: with the bounds that the settings give, else with its own and PPO's."""
    if row.clip_low is None:
        return [row]
    given = {"clip_low": c.clip_low, "clip_high": c.clip_high}
    given = {key: value for key, value in given.items() if value is not None}
    if given:
        return [replace(row, **given)]
    common = replace(row, clip_low=COMMON[0], clip_high=COMMON[1])
    return [row] if row == common else [row, common]


def others_of(row):
    """Variants of a row with numbers that are in use elsewhere."""
    if row.surrogate == "log_ratio_penalty":
        return [replace(row, constants={"beta": beta}) for beta in OTHER_BETAS]
    if row.clip_low is None:
        return []
    return [row] + [replace(row, clip_low=low, clip_high=high) for low, high in OTHER_BOUNDS]


class Candidate:
    """A surrogate with its numbers: the objectives that it may be, by their average."""

    def __init__(self, row):
        self.row = row
        self.meant = {}   # {average: names of objectives that have these numbers}
        self.others = {}  # {average: names of objectives that have other numbers}

    def identity(self, average):
        """The names of objectives that a loss with this average may be, and what is wrong with it."""
        numbers = numbers_of(self.row)
        other = f"{numbers}: if they are meant, set --clip_low and --clip_high"
        if self.row.constants:
            other = f"{numbers}: if meant, replace the row of OBJECTIVES in a config behind the function"
        if average in self.meant:
            return self.meant[average], set()
        if average in self.others:
            return self.others[average], {other}
        of_all = self.meant or self.others
        faults = set()
        if average is not None:
            faults.add(f"the average is {average!r}")
        if not self.meant:
            faults.add(other)
        return [name for names in of_all.values() for name in names], faults


def candidates_of(c):
    """{what surrogate_of returns: a Candidate}"""
    found = {}
    if c.objective and OBJECTIVES[c.objective].clip_low is None and (c.clip_low or c.clip_high):
        raise UsageError(f"objective={c.objective!r} clips nothing: leave --clip_low and --clip_high out")
    for name, row in OBJECTIVES.items():
        if c.objective not in (None, name):
            continue
        right = meant(row, c)
        for variant in right:
            candidate = found.setdefault(surrogate_of(variant), Candidate(variant))
            candidate.meant.setdefault(row.average, []).append(name)
        for variant in others_of(row):
            candidate = found.setdefault(surrogate_of(variant), Candidate(variant))
            candidate.others.setdefault(row.average, []).append(name)
    return found


def gradients(values, weights, steps):
    """The gradients of the weighted sums of a term under each of the weights, (W, T).

    values: the term on each step, (N, 1 or M); weights: on each step (W, N, M)
    """
    found = []
    for value, weight, step in zip(values, weights, steps, strict=True):
        N, M = step.logp.shape
        # a completion's term depends on its own tokens alone, so one backward pass reads a token of every completion
        of_one_token = torch.eye(M, dtype=torch.float64)[:, None].expand(M, N, M)
        jacobian = torch.autograd.grad(value.expand(N, M), step.logp, of_one_token, retain_graph=True,
                                       is_grads_batched=True)[0]                         # (M, N, M)
        found.append(torch.einsum("wnt,tnu->wnu", weight, jacobian).flatten(1))
    return torch.cat(found, 1)


def fits(g, P, K):
    """Yields (w, i, j, a, b) where a times P[w, i] and b times K[w, j] have the gradient g.

    g: (T,); P: (W, I, T); K: (W, J, T)
    """
    pp = P.square().sum(2)[:, :, None]                                                   # (W, I, 1)
    kk = K.square().sum(2)[:, None].clamp(min=1e-30)                                     # (W, 1, J)
    pk = P @ K.mT                                                                        # (W, I, J)
    pg = (P @ g)[:, :, None]
    kg = (K @ g)[:, None]
    determinant = pp * kk - pk**2
    a = (kk * pg - pk * kg) / determinant  # least squares for all pairs
    b = (pp * kg - pk * pg) / determinant
    error = g @ g - a * pg - b * kg
    for w, i, j in (error <= TOLERANCE * (g @ g)).nonzero().tolist():
        factors = a[w, i, j], b[w, i, j]
        left = g - factors[0] * P[w, i] - factors[1] * K[w, j]  # the difference of squares above cancels
        if left.norm() <= TOLERANCE * g.norm():
            yield w, i, j, factors[0].item(), factors[1].item()


def faults_of_scales(kl, a, b, beta):
    """What is wrong with a loss that is a times a policy's term and b times a KL's."""
    faults = set()
    scale = round(a, 4)
    if scale != 1:
        faults.add(SCALES.get(scale, f"the gradient is {scale:g} times the right one"))
    kl_scale = round(b / abs(a) / beta, 3)
    if kl.key != "none" and kl_scale == -1:
        faults.add("wrong sign of the KL")
    elif kl.key != "none" and kl_scale != 1:
        faults.add(f"kl_beta is {kl_scale * beta:g}: if it should be, set --kl_beta")
    return faults


class Verdict(NamedTuple):
    """What a loss may be."""
    rank: tuple       # the lowest of several verdicts is the best
    names: list       # of objectives
    term: Term        # of the policy
    average: str
    kl: str           # its estimators, "none" or "unknown"
    faults: list


def pairs(g, terms, kls, weights):
    """Yields (term, its weight, KL, its weight, a, b) where a times the term and b times the KL have the gradient g.

    Both have the same weight, or each has one that is right but for one fault.
    """
    P = torch.stack([term.gradients for term in terms], 1)                               # (W, I, T)
    K = torch.stack([kl.gradients for kl in kls], 1)                                     # (W, J, T)
    for w, i, j, a, b in fits(g, P, K):
        yield terms[i], weights[w], kls[j], weights[w], a, b
    simple = [w for w, weight in enumerate(weights) if len(weight.faults) <= 1]
    crossed = K[simple].flatten(0, 1)                                                    # (simple * J, T)
    for w in simple:
        for _, i, j, a, b in fits(g, P[w][None], crossed[None]):
            yield terms[i], weights[w], kls[j % len(kls)], weights[simple[j // len(kls)]], a, b


def explanations(g, terms, kls, weights, candidates, beta):
    """Yields the Verdicts that explain the gradient g (T,)."""
    if len(g) and not g.any():
        yield nearest(g, terms, weights, candidates)._replace(kl="none", faults=["no policy gradient"])
        return
    for term, weight, kl, kl_weight, a, b in pairs(g, terms, kls, weights):
        faults = term.faults
        if abs(a) < TOLERANCE:
            weight, faults, a = kl_weight, {"no policy gradient"}, 1.0
        names, wrong = candidates[term.key].identity(weight.average)
        faults = faults | wrong | weight.faults | faults_of_scales(kl, a, b, beta)
        if kl.key != "none" or kl.faults:
            faults |= kl.faults | kl_weight.faults
            if kl_weight.average != weight.average:
                faults.add(f"the average of the KL is {kl_weight.average!r}")
        rank = len(faults), round(a, 4) not in (1, *SCALES), bool(kl.faults)
        yield Verdict(rank, names, term, weight.average, kl.key, sorted(faults))


def nearest(g, terms, weights, candidates):
    """The Verdict of a gradient (T,) that nothing explains: the objective whose gradient is nearest, without a KL."""
    found = []
    for term in terms:
        for weight, right in zip(weights, term.gradients, strict=True):
            names, wrong = candidates[term.key].identity(weight.average)
            if not term.faults | weight.faults | wrong:
                distance = (g - right).norm() / (g.norm() + right.norm())
                found.append(Verdict((distance.item(),), names, term, weight.average, "unknown",
                                     ["no known fault explains it"]))
    return min(found, key=lambda verdict: verdict.rank)


def users_function(named):
    """The function that FILE.py:NAME names."""
    path, _, name = named.rpartition(":")
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))  # for what the file imports
    function = run_config_file(path).get(name) if path else None
    if not callable(function):
        raise UsageError(f"{named!r} must be FILE.py:FUNCTION, a function that the file defines")
    return function


def terms_of(steps, candidates, weights, c):
    """The Terms of the policy and of the KL. weights: on each step (W, N, M)"""
    terms = []
    for key, candidate in candidates.items():
        on_steps = [policy_terms(step, candidate.row) for step in steps]
        for same in zip(*on_steps, strict=True):
            faults, values = same[0][0], [value for _, value in same]
            if candidate.meant or not faults:
                terms.append(Term(key, faults, -gradients(values, weights, steps)))
    kls = []
    for same in zip(*(kl_terms(step) for step in steps), strict=True):
        estimators, faults, _ = same[0]
        if c.kl is None or c.kl in estimators:
            kls.append(Term(estimators, faults, gradients([value for *_, value in same], weights, steps)))
    return terms, kls


class Known(NamedTuple):
    """What a loss is compared with."""
    steps: list
    weights: list       # W Weights
    candidates: dict    # what candidates_of returns
    terms: list         # Terms of the policy
    kls: list           # Terms of the KL


@functools.cache
def known_losses(c):
    """The Known of a CheckConfig."""
    steps = [load_step(name) for name in SETS]
    of_steps = [weights_of(step) for step in steps]
    weights = [weight for weight, _ in of_steps[0]]
    values = [torch.stack([value for _, value in of_step]) for of_step in of_steps]
    candidates = candidates_of(c)
    return Known(steps, weights, candidates, *terms_of(steps, candidates, values, c))


def at(finite, terms):
    """The Terms with gradients at some places alone. finite: (T,) bool"""
    return [term._replace(gradients=term.gradients[:, finite]) for term in terms]


def verdict_on(gradient, known, beta):
    """The best Verdict on a gradient (T,). What is not finite is left out, and said."""
    finite = gradient.isfinite()
    g = gradient[finite]
    terms = at(finite, known.terms)
    found = explanations(g, terms, at(finite, known.kls), known.weights, known.candidates, beta)
    verdict = min(found, key=lambda x: x.rank, default=None)
    if finite.all():
        return verdict or nearest(g, terms, known.weights, known.candidates)
    if verdict is None:
        return nearest(g, terms, known.weights, known.candidates)._replace(faults=["not finite"])
    return verdict._replace(faults=[*verdict.faults, "not finite"])


def right_gradient(verdict, known, beta):
    """The gradient (T,) of the objective of a verdict, with the KL that it names."""
    average = verdict.average or OBJECTIVES[verdict.names[0]].average
    w = known.weights.index(Weight(average, set()))
    key = verdict.term.key
    right = next(term for term in known.terms if term.key == key and not term.faults).gradients[w]
    for kl in known.kls:
        if kl.key == verdict.kl and not kl.faults:
            return right + beta * kl.gradients[w]
    return right


def main(argv):
    """Prints the nearest objective, how far each step is from it, and why; exit code 1 unless it is right."""
    c = load_config(CheckConfig, argv[1:])[0]
    function = users_function("".join(argv[:1]))
    known = known_losses(c)
    with others("its gradient cannot be taken", "correct it", definition(function)):
        of_steps = [torch.autograd.grad(loss_on(step, function), step.logp)[0] for step in known.steps]
    gradient = torch.cat([g.flatten() for g in of_steps])
    verdict = verdict_on(gradient, known, c.kl_beta)
    is_right = CONVENTIONS.issuperset(verdict.faults)
    word = "right" if is_right else "nearest"
    names = ", ".join(verdict.names)
    numbers = numbers_of(known.candidates[verdict.term.key].row)
    print(f"{word}: {names} ({numbers}); KL: {verdict.kl}; relative errors of the gradient:")
    sizes = [g.numel() for g in of_steps]
    right = right_gradient(verdict, known, c.kl_beta)
    for name, g, r in zip(SETS, gradient.split(sizes), right.split(sizes), strict=True):
        print(f"  {name:14} {(g - r).norm() / r.norm():.0e}")
    meanings = json.loads((VECTORS / "faults.json").read_text())
    for fault in verdict.faults:
        print(f"- {fault}: {meanings[fault]}" if fault in meanings else f"- {fault}")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    run_script(main)
