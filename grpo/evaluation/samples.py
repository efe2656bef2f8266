"""Samples for people to read: how they are chosen, shown and kept; metrics before and after training."""

import json
import os
import re

from core.files.whole_files import writing
from core.logger import format_number
from core.run.names import SAMPLES
from core.run.terminal import highlight

SHOWN = 3              # problems of an evaluation that are shown as samples
TEXTS = ("problem", "best", "worst")
BOARD = 24             # characters of a line at most for texts of several lines to be shown side by side


def best_and_worst(total, rewards, values, log):
    """The numbers {"best": n, "worst": n} of the completions with the highest and the lowest reward, and what a sample
    says about them (reward, whether it is correct, what rewards logged), for each of the first SHOWN problems.

    total: (P, G); values: {name of a reward: (N,)}; rewards: a Rewards, log: its Log, or None
    A completion that the success reward skipped is neither correct nor wrong.
    """
    G, found = total.shape[1], []
    right = None
    if rewards is not None and rewards.success in values:
        right = rewards.right(values)
    for i, of_group in enumerate(total[:SHOWN]):
        numbers = {"best": i * G + int(of_group.argmax()), "worst": i * G + int(of_group.argmin())}
        facts = {}
        for name, n in numbers.items():
            facts[f"{name}_score"] = round(float(total.flatten()[n]), 4)
            if right is not None and not right[n].isnan():
                facts[f"{name}_right"] = bool(right[n])
            if log is not None and log.columns:
                facts[f"{name}_extra"] = log.extra(n)
        found.append((numbers, facts))
    return found


def format_samples(records, color, completions):
    """The lines of samples for the console.

    records: [{"problem", "best", "worst", "best_score", "worst_score"}], and in fill-in "mask": for each
    text, which of its characters were filled in
    color: whether filled-in characters are coloured, except in the problem itself
    completions: of each problem
    """
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        board = is_board([record[name] for name in TEXTS])
        columns = []
        for name in TEXTS:
            mask = record["mask"][name] if "mask" in record else [0] * len(record[name])
            score = format_number(record[f"{name}_score"]) if f"{name}_score" in record else ""
            green = color and name != "problem"
            if board:
                columns.append(column(f"{name} {score}".rstrip(), record[name], mask, green))
            else:
                lines.append(f"  {name:<8}{score:>7} | {highlight(record[name], mask, green)}")
        for row in zip(*columns, strict=True):
            lines.append("  " + "   ".join(row).rstrip())
    return "\n".join(line for line in lines if line.strip())


def column(title, text, mask, color):
    """A title and the lines of a text, all of the same width. mask: which of its characters are coloured"""
    lines = text.split("\n")
    width = max(len(title), *map(len, lines))
    shown = [title.ljust(width)]
    start = 0
    for line in lines:
        shown.append(highlight(line, mask[start : start + len(line)], color) + " " * (width - len(line)))
        start += len(line) + 1
    return shown


def is_board(texts):
    """True if texts have the same number of lines, several, and all of them short."""
    lines = [text.split("\n") for text in texts]
    longest = max(len(line) for text in lines for line in text)
    return len({len(text) for text in lines}) == 1 and len(lines[0]) > 1 and longest <= BOARD


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
    text = "".join("1" if inside else "0" for inside in mask)
    return [list(match.span()) for match in re.finditer("1+", text)]


def comparison_table(before, after):
    """A table of held-out metrics before and after training, one line for each metric."""
    names = list(dict.fromkeys((*before, *after)))
    shown = {name: name.removeprefix("eval/") for name in names}
    width = max([20, *(len(text) + 1 for text in shown.values())])
    lines = [f"  {'held-out':<{width}}{'before':>9}{'after':>9}{'change':>9}"]
    for name in names:
        first, last = before.get(name), after.get(name)
        cells = (format_number(first), format_number(last), change(first, last))
        lines.append(f"  {shown[name]:<{width}}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def change(before, after):
    """after - before with its sign; "" if one of them was not measured."""
    if before is None or after is None:
        return ""
    difference = round(after - before, 4) + 0.0  # no -0.0
    return f"{difference:+.4f}" if abs(difference) < 1e6 else f"{difference:+.2g}"
