"""Samples for people to read, and helpers for the evaluations of both kinds of generator."""

import json
import os
from itertools import pairwise

from core.files.whole_files import writing
from core.logger import format_number
from core.run.names import SAMPLES
from core.run.terminal import highlight

SHOWN = 3              # problems of an evaluation that are shown as samples
TEXTS = ("problem", "best", "worst")
BOARD = 24             # characters of a line at most for texts of several lines to be shown side by side
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


def verdicts(rewards, values, best, worst):
    """Whether the best and the worst completion, given by their numbers, have the highest value of the run's success
    reward; nothing about a completion that it skipped, or if there is none. values: {name: (N,)}"""
    if rewards is None or rewards.success not in values:
        return {}
    right = rewards.right(values)
    return {f"{name}_right": bool(right[i]) for name, i in (("best", best), ("worst", worst)) if not right[i].isnan()}


def format_samples(records, color, completions):
    """The lines of samples for the console.

    records: [{"problem", "best", "worst", "best_score", "worst_score"}], and in fill-in "mask": for each
    text, which of its characters were filled in
    color: whether filled-in characters are coloured
    completions: of each problem
    """
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        texts = [record[name] for name in TEXTS]
        masks = [record["mask"][name] if "mask" in record else [0] * len(record[name]) for name in TEXTS]
        coloured = [color and name != "problem" for name in TEXTS]
        scores = [record.get(f"{name}_score") for name in TEXTS]
        scores = ["" if score is None else format_number(score) for score in scores]
        if is_board(texts):
            titles = [f"{name} {score}".rstrip() for name, score in zip(TEXTS, scores, strict=True)]
            lines += side_by_side(titles, texts, masks, coloured)
            continue
        for name, score, text, mask, on in zip(TEXTS, scores, texts, masks, coloured, strict=True):
            lines.append(f"  {name:<8}{score:>7} | {highlight(text, mask, on)}")
    return "\n".join(lines)


def is_board(texts):
    """Whether texts have the same number of lines, several, and all of them short."""
    lines = [text.split("\n") for text in texts]
    longest = max(len(line) for text in lines for line in text)
    return len({len(text) for text in lines}) == 1 and len(lines[0]) > 1 and longest <= BOARD


def side_by_side(titles, texts, masks, coloured):
    """Lines of texts in columns. masks: for each text, which characters were filled in; coloured: whether it shows"""
    columns = []
    for title, text, mask, on in zip(titles, texts, masks, coloured, strict=True):
        lines = text.split("\n")
        width = max(len(title), *map(len, lines))
        column, start = [title.ljust(width)], 0
        for line in lines:
            column.append(highlight(line, mask[start : start + len(line)], on) + " " * (width - len(line)))
            start += len(line) + 1
        columns.append(column)
    rows = ["   ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return [f"  {row}" for row in rows if row]


def append_samples(out_dir, step, records):
    """Adds samples to <out_dir>/samples.jsonl. A mask becomes "filled": {text: [[first, end], ...]}, the stretches of
    characters that were masked."""
    path = os.path.join(out_dir, SAMPLES)
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
    names = list(dict.fromkeys((*before, *after)))
    wide = max(20, *(len(name.removeprefix("eval/")) + 1 for name in names)) if names else 20
    lines = [f"  {'held-out':<{wide}}{'before':>9}{'after':>9}{'change':>9}"]
    for name in names:
        pair = before.get(name), after.get(name)
        cells = [*map(format_number, pair), change(*pair)]
        lines.append(f"  {name.removeprefix('eval/'):<{wide}}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def change(before, after):
    """after - before with its sign; "" if one of them was not measured."""
    if before is None or after is None:
        return ""
    difference = round(after - before, 4) + 0.0  # no -0.0
    return f"{difference:+.4f}" if abs(difference) < 1e6 else f"{difference:+.2g}"
