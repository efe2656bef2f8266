"""Samples for people to read, and helpers for the evaluations of both kinds of generator."""

import json
import os
from itertools import pairwise

from core.logger import highlight
from core.whole_files import writing

SHOWN = 3              # problems of an evaluation that are shown as samples
LOGGED = "logged by "  # begins the name of a sum of what a reward logged


def reward_sums(values):
    """Sums and counts of rewards, for means over the completions that each scored. values: {name: (N,)}, NaN where a
    reward skipped the completion."""
    return ({f"reward/{name}": x.nansum() for name, x in values.items()}
            | {f"count of reward/{name}": (~x.isnan()).sum() for name, x in values.items()})


def log_sums(log):
    """Sums and counts of the metrics that rewards logged, under names that no other metric has."""
    return ({f"{LOGGED}{name}": total for name, (total, _) in log.metrics.items()}
            | {f"count of {LOGGED}{name}": count for name, (_, count) in log.metrics.items()})


def under_own_names(metrics):
    """Metrics, those of log_sums under the names that the rewards gave them. Raises ValueError if another has one."""
    out = {name: x for name, x in metrics.items() if not name.startswith(LOGGED)}
    for name in metrics.keys() - out.keys():
        own = name.removeprefix(LOGGED)
        if own in out:
            raise ValueError(f"log_metric({own!r}, ...): the held-out metrics have one of this name; give it another")
        out[own] = metrics[name]
    return out


def extra_columns(log, best, worst):
    """What rewards logged with log_extra about the best and the worst completion, given by their numbers.
    log: a Log (grpo/reward_functions/registry.py), or None if no reward was asked"""
    return {"best_extra": log.extra(best), "worst_extra": log.extra(worst)} if log and log.columns else {}


def format_samples(records, color):
    """The lines of samples for the console.

    records: [{"problem", "best", "worst", "best_score", "worst_score"}], and in fill-in "mask": for each
    text, which of its characters were filled in
    color: whether filled-in characters are coloured
    """
    lines = []
    for r in records:
        for name in ("problem", "best", "worst"):
            score = r.get(f"{name}_score")
            filled = r["mask"][name] if "mask" in r else [0] * len(r[name])
            shown = highlight(r[name], filled, color and name != "problem")
            lines.append(f"  {name:<8}{'' if score is None else f'{score:.3f}':>7} | {shown}")
    return "\n".join(lines)


def append_samples(out_dir, step, records):
    """Adds samples to <out_dir>/samples.jsonl. A mask becomes "filled": {text: [[first, end], ...]}, the stretches of
    characters that were masked."""
    path = os.path.join(out_dir, "samples.jsonl")
    with writing(path), open(path, "a") as f:
        for record in records:
            kept = {key: value for key, value in record.items() if key != "mask"}
            if "mask" in record:
                kept["filled"] = {name: spans(mask) for name, mask in record["mask"].items()}
            f.write(json.dumps({"step": step, **kept}, default=str) + "\n")


def spans(mask):
    """[[first, end]] of the stretches of a list in which it is true."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *mask, False])) if bool(a) != bool(b)]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def comparison_table(before, after):
    """A table of held-out metrics before and after training, one line for each metric."""
    lines = [f"  {'held-out':<20}{'before':>9}{'after':>9}{'change':>9}"]
    for name in before:
        if name in after:
            lines.append(f"  {name.removeprefix('eval/'):<20}{before[name]:>9.4f}{after[name]:>9.4f}"
                         f"{after[name] - before[name]:>+9.4f}")
    return "\n".join(lines)
