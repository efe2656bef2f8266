"""Checks your loss on the test vectors: names the objective that it is, or its mistake.

python grpo/tools/check_loss.py mine.py:loss --objective=dapo --clip_high=0.28

tests/vectors/README.md has the arguments of the function; --help after it lists the settings.
"""

import contextlib
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
from grpo.losses import AVERAGES, KL_ESTIMATORS, OBJECTIVES, SURROGATES, k2, k3, token_weights

VECTORS = ROOT / "tests" / "vectors"
SETS = "whole", "truncated", "micro_batches", "ranks"
TOLERANCE = 1e-5  # relative, of a gradient; a loss in float32 passes
SCALES = {1: "", -1: "wrong sign", 0.25: "1 / G of the right gradient"}  # G is 4
KL_SCALES = {1: "", -1: "wrong sign of the KL"}
SHAPES = {"(N,)": (-1,), "(N, 1)": (-1, 1)}


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
    known = totals | {"max_tokens": step.max_tokens}
    named = inspect.signature(getattr(function, "forward", function)).parameters  # forward: of a torch.nn.Module
    shares, loss = 1 if totals.keys() & named else len(step.parts), 0.0
    for rows in step.parts:
        tensors = step.logp, step.old_logp, step.ref_logp, step.A.view(shape), step.mask
        part = function(*(x[rows] for x in tensors), **{key: known[key] for key in known if key in named})
        if not isinstance(part, torch.Tensor) or part.numel() != 1 or not part.requires_grad:
            raise ValueError(f"it returned {shown(part)}; return a scalar tensor that depends on logp")
        loss = loss + part.double().sum() / shares
    return loss


def losses_of(function, steps):
    """{shape of the advantage: gradients and losses}; a function for one shape may fail on the other."""
    def run(shape):
        with naming_line_of(function):
            return numbers(steps, lambda step: [("", (), loss_on(step, function, SHAPES[shape]))])[1][0]

    found = {}
    for shape in SHAPES:
        with contextlib.suppress(UserCodeError):
            found[shape] = run(shape)
    return found or {"(N, 1)": run("(N, 1)")}  # raises again


def weights(step, average):
    """Pairs of a fault and the weights of tokens (N, M); the first is right."""
    mask, L, parts = step.mask, step.max_tokens, len(step.parts)
    right, ones, N = token_weights(mask, average, L), torch.ones_like(mask), mask.any(1).sum()
    length = mask.sum(1, keepdim=True).clamp(min=1)
    denominator = {"sum": N, "sequence": N * length, "token": mask.sum(), "constant": N * L}[average]
    return [("", right), ("padding", ones / denominator), ("padding", ones / ones.numel()),
            ("padding", token_weights(ones, average, L)),
            ("mean of means", torch.cat([token_weights(mask[rows], average, L) for rows in step.parts]) / parts),
            ("masked completions", right * mask.any(1).double().mean()), ("a sum", mask / parts),
            ("divided by the size of the padded tensor", mask / mask.numel())]


def ratios(step):
    """The ratio of each token (N, M), of each sequence (N, 1), and that of a sequence with its padding."""
    log_ratio = step.logp - step.old_logp                                                # (N, M)
    mean = (log_ratio * step.mask).sum(1, keepdim=True) / step.mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp(), mean.exp(), log_ratio.mean(1, keepdim=True).exp()


def policy_terms(step, row):
    """{fault: what is to be raised, (N, 1 or M)} of an objective; the first is right."""
    of_token, of_sequence, padded = ratios(step)
    r = of_sequence if row.ratio == "sequence" else of_token
    surrogate, rest = SURROGATES[row.surrogate], (row.clip_low, row.clip_high, step.logp, step.A)
    terms = {"": surrogate(r, *rest)}
    if row.ratio == "sequence":
        terms["padding"] = surrogate(padded, *rest)
    if row.surrogate == "clip":
        unclipped, clipped = r * step.A, r.clamp(1 - row.clip_low, 1 + row.clip_high) * step.A
        terms["mirrored clip"] = torch.where(step.A < 0, torch.max(unclipped, clipped), terms[""])
        terms["no clip"] = unclipped
        if row.ratio == "token":
            terms["no ratio"] = step.logp * step.A
    return terms


def policy_losses(step, c):
    """Triples ((average, objectives), faults, loss without KL)."""
    for case in step.expected:
        average, names = case["average"], case["objectives"]
        if case["kl"] == "none" and c.objective in (None, *names):
            row = replace(OBJECTIVES[names[0]], clip_low=c.clip_low, clip_high=c.clip_high)
            for fault, weight in weights(step, average):
                for other, term in policy_terms(step, row).items():
                    yield (average, ", ".join(names)), (fault, other), -(term * weight).sum()


def kl_losses(step, c):
    """Triples ((average, estimator), faults, weighted KL)."""
    logp, ref = step.logp, step.ref_logp
    r, s, _ = ratios(step)
    terms = {("none", ""): 0.0 * logp,
             ("k3", ""): r * k3(logp, ref), ("k2", ""): r.detach() * k2(logp, ref),
             ("k3", "k3 without ratio"): k3(logp, ref), ("k2", "k2 without ratio"): k2(logp, ref),
             ("k3", "k3 with a detached ratio"): r.detach() * k3(logp, ref), ("k3", "k1 as a loss"): logp - ref,
             ("k3", "reversed KL"): k3(ref, logp), ("k3", "sequence ratio in the KL"): s * k3(logp, ref)}
    for average in AVERAGES:
        for denominator, weight in weights(step, average):
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
    """(faults, .., distance, i, j, their names) of every a P + b K with my gradient."""
    p, k, g = P[:, tokens], K[:, tokens], mine[tokens]
    pp, kk, pk = p.square().sum(1, keepdim=True), k.square().sum(1).clamp(min=1e-30), p @ k.T
    pg, kg, gg = (p @ g)[:, None], k @ g, g @ g  # least squares for all pairs, (policies, KLs)
    A, B = (kk * pg - pk * kg) / (pp * kk - pk**2), (pp * kg - pk * pg) / (pp * kk - pk**2)
    for i, j in (gg - A * pg - B * kg <= TOLERANCE**2 * gg).nonzero().tolist():
        ((own, _), of_policy), ((average, estimator), of_kl) = policies[i], kls[j]
        a, b = A[i, j], B[i, j]
        if abs(a) < TOLERANCE:
            of_policy, a = ["no policy gradient"], torch.ones(())
        scale, kl_scale = round(a.item(), 4), 1
        if estimator != "none":
            kl_scale = round((b / a.abs()).item() / beta, 3)
        found = {*of_policy, *of_kl, "" if average == own else f"the average of the KL is '{average}'",
                 SCALES.get(scale, f"the gradient is {scale:g} times the right one"),
                 KL_SCALES.get(kl_scale, f"kl_beta is {kl_scale * beta:g}: if it should be, set --kl_beta")} - {""}
        distance = (mine - a * P[i] - b * K[j]).norm().item()  # of the losses, as the gradient fits
        yield len(found), scale not in SCALES, distance, i, j, sorted(found)


def nearest(mine, policies, P, kls, K, beta):
    """The same of every right P + beta K."""
    fault = "no known fault explains it" if mine.isfinite().all() else "not finite"
    for i, j in itertools.product(range(len(P)), range(len(K))):
        ((own, _), of_policy), ((average, _), of_kl) = policies[i], kls[j]
        if own == average and not any(of_policy + of_kl):
            right = P[i] + beta * K[j]
            yield 99, True, ((mine - right).norm() / (mine.norm() + right.norm())).item(), i, j, [fault]


def main(argv):
    """Prints the nearest objective, how far each step is from it, and why; exit code 1 unless it is right."""
    path, _, name = "".join(argv[:1]).rpartition(":")
    c, steps = load_config(CheckConfig, argv[1:])[0], [load_step(x) for x in SETS]
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))  # for what the file imports
    function = run_config_file(path).get(name) if path else None
    if not callable(function):
        raise UsageError(f"{''.join(argv[:1])!r} must be FILE.py:FUNCTION, a function that the file defines")
    sizes = [step.logp.numel() + 1 for step in steps]
    tokens = torch.cat([torch.arange(size) < size - 1 for size in sizes])
    policies, P = numbers(steps, lambda step: policy_losses(step, c))
    kls, K = numbers(steps, lambda step: kl_losses(step, c))
    found = []
    for shape, mine in losses_of(function, steps).items():
        explained = list(explanations(mine, policies, P, kls, K, tokens, c.kl_beta))
        found.append((*min(explained or nearest(mine, policies, P, kls, K, c.kl_beta)), shape, mine))
    *_, i, j, faults, shape, mine = min(found, key=lambda x: x[:3])
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
    sys.exit(bool(faults))


if __name__ == "__main__":
    run_script(main)
