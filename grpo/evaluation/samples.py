"""Samples for people to read: how they are chosen, shown and kept; metrics before and after training."""

import json
import os

from core.files.whole_files import writing
from core.logger import format_number
from core.run.names import SAMPLES
from core.run.terminal import highlight

SHOWN = 3              # problems of an evaluation that are shown as samples
TEXTS = ("problem", "best", "worst")
BOARD = 24             # characters of a line at most for texts of several lines to be shown side by side


def best_and_worst(total):
    """The numbers {"best": n, "worst": n} of the completions with the highest and the lowest reward, for each of the
    first SHOWN problems. total: (P, G)"""
    G = total.shape[1]
    return [{"best": i * G + int(rewards.argmax()), "worst": i * G + int(rewards.argmin())}
            for i, rewards in enumerate(total[:SHOWN])]


def facts_of(numbers, total, rewards, values, log):
    """What a sample says about its best and worst completion: reward, whether it is correct, what rewards logged.

    numbers: {"best": n, "worst": n}; values: {name of a reward: (N,)}; rewards: a Rewards, log: its Log, or None
    A completion that the success reward skipped is neither correct nor wrong.
    """
    facts = {}
    for name, n in numbers.items():
        facts[f"{name}_score"] = round(float(total.flatten()[n]), 4)
    if rewards is not None and rewards.success in values:
        right = rewards.right(values)
        for name, n in numbers.items():
            if not right[n].isnan():
                facts[f"{name}_right"] = bool(right[n])
    if log is not None and log.columns:
        for name, n in numbers.items():
            facts[f"{name}_extra"] = log.extra(n)
    return facts


def format_samples(records, color, completions):
    """The lines of samples for the console.

    records: [{"problem", "best", "worst", "best_score", "worst_score"}], and in fill-in "mask": for each
    text, which of its characters were filled in
    color: whether filled-in characters are coloured
    completions: of each problem
    """
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        texts = [Text(name, record, color) for name in TEXTS]
        if is_board([text.text for text in texts]):
            lines += side_by_side(texts)
        else:
            lines += [f"  {text.name:<8}{text.score:>7} | {text.highlighted()}" for text in texts]
    return "\n".join(lines)


class Text:
    """A text of a sample with its reward; what was filled in is coloured, except in the problem itself."""

    def __init__(self, name, record, color):
        self.name, self.text = name, record[name]
        self.mask = record["mask"][name] if "mask" in record else [0] * len(self.text)
        self.score = format_number(record[f"{name}_score"]) if f"{name}_score" in record else ""
        self.color = color and name != "problem"

    def highlighted(self):
        return highlight(self.text, self.mask, self.color)

    def column(self):
        """Its title and its lines, all of the same width."""
        title = f"{self.name} {self.score}".rstrip()
        lines = self.text.split("\n")
        width = max(len(title), *map(len, lines))
        column = [title.ljust(width)]
        start = 0
        for line in lines:
            shown = highlight(line, self.mask[start : start + len(line)], self.color)
            column.append(shown + " " * (width - len(line)))
            start += len(line) + 1
        return column


def is_board(texts):
    """Whether texts have the same number of lines, several, and all of them short."""
    lines = [text.split("\n") for text in texts]
    longest = max(len(line) for text in lines for line in text)
    return len({len(text) for text in lines}) == 1 and len(lines[0]) > 1 and longest <= BOARD


def side_by_side(texts):
    """Lines of texts in columns."""
    rows = ["   ".join(row).rstrip() for row in zip(*(text.column() for text in texts), strict=True)]
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
    found = []
    for i, inside in enumerate(mask):
        if not inside:
            continue
        if found and found[-1][1] == i:
            found[-1][1] = i + 1
        else:
            found.append([i, i + 1])
    return found


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
