"""Samples for people to read: how they are chosen, shown and kept; metrics before and after training."""

import itertools
import json
import os
import re
from operator import itemgetter

from core.files import SAMPLES, writing
from core.logger import WIDTH, format_number, highlight
from grpo.rollout import REWARD

SHOWN = 3              # problems of an evaluation that are shown as samples
ROOM = WIDTH - 22      # characters of a text that is shown on one line, behind its title


def best_and_worst(policy, rollouts, total, rewards, values, log, answer="answer"):
    """The first SHOWN problems with their best and worst completions, and what is known about these (reward, whether it
    is correct, what rewards logged): [(record, {"best": n, "worst": n})], n numbers of completions.

    total: (N,) the reward that orders completions; values: {name of a reward: (N,)}; rewards: a Rewards, log: its Log,
    or None; answer: the record's name for the answer. A completion that the success reward skipped is neither correct
    nor wrong.
    """
    texts, G = rollouts.texts, rollouts.group_size
    total = total.nan_to_num(0.0).cpu()
    right = None
    if rewards is not None and rewards.success in values:
        right = rewards.right(values)
    found = []
    for first in range(0, len(total), G)[:SHOWN]:
        of_group = total[first : first + G]
        best, worst = of_group.argmax(), of_group.argmin()
        numbers = {"best": first + int(best), "worst": first + int(worst)}
        prompt = texts.columns.get("prompt", texts.prompts)[first]  # as the record has it, without the template
        record = {"problem": prompt if isinstance(prompt, str) else prompt[-1]["content"]}
        if "answer" in texts.columns:
            record[answer] = texts.columns["answer"][first]
        for name, n in numbers.items():
            record[name] = texts.completions[n]
            if REWARD in texts.columns:
                record[name] = turn_by_turn(policy.tokenizer, rollouts, n)
            record[f"{name}_score"] = round(float(total[n]), 4)
            if right is not None and not right[n].isnan():
                record[f"{name}_right"] = bool(right[n])
            if log is not None and log.columns:
                record[f"{name}_extra"] = {column: x[n] for column, x in log.columns.items()}
        found.append((record, numbers))
    return found


def turn_by_turn(tokenizer, rollouts, n):
    """The text of completion n, in which each answer of the environment stands on a line of its own behind a >."""
    ids = rollouts.texts.completion_ids[n]
    chosen = rollouts.mask[n, : len(ids)].tolist()
    turns = []
    for own, part in itertools.groupby(zip(chosen, ids, strict=True), key=itemgetter(0)):
        text = tokenizer.decode([token for _, token in part]).strip("\n")
        turns.append(text if own else f"> {text}")
    return "\n".join(turns)


def format_samples(records, color, completions):
    """The lines of samples for the console.

    records: those of best_and_worst, in fill-in with "mask": for each text, which of its characters were filled in
    color: whether these are coloured, except in the problem itself; completions: of each problem
    """
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        lines.append(f"  {'problem':<15} | {shortened(record, 'problem', False)}")
        shown = {"best": "best", "worst": "worst"}
        if record["best_score"] == record["worst_score"]:  # one completion stands for all
            shown = {"best": "equal"}
        for name, word in shown.items():
            score = format_number(record[f"{name}_score"])
            lines.append(f"  {word:<8}{score:>7} | {shortened(record, name, color)}")
    return "\n".join(lines)


def shortened(record, name, color):
    """A text of a sample on one line; of one that is longer than ROOM its beginning and end."""
    text = record[name]
    mask = record.get("mask", {}).get(name, [0] * len(text))
    if len(text) <= ROOM:
        return highlight(text, mask, color)
    half = (ROOM - 5) // 2
    return highlight(text[:half], mask[:half], color) + " ... " + highlight(text[-half:], mask[-half:], color)


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
    rows = compared(before, after)
    width = max([20, *(len(row[0]) + 1 for row in rows)])
    lines = [f"  {name:<{width}}{first:>9}{last:>9}{change:>9}"
             for name, first, last, change in [("held-out", "before", "after", "change"), *rows]]
    return "\n".join(lines)


def compared(before, after):
    """[(metric, before, after, change)] of held-out metrics, as texts; no change of one that was not measured twice."""
    rows = []
    for name in dict.fromkeys((*before, *after)):
        first, last, change = before.get(name), after.get(name), ""
        if first is not None and last is not None:
            difference = round(last - first, 4) + 0.0  # no -0.0
            change = f"{difference:+.4f}" if abs(difference) < 1e6 else f"{difference:+.2g}"
        rows.append((name.removeprefix("eval/"), format_number(first), format_number(last), change))
    return rows


def evaluations(records):
    """The records of metrics.jsonl that have held-out metrics."""
    return [record for record in records if any(name.startswith("eval/") for name in record)]
