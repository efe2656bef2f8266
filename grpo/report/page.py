"""report.html and curves.png of a run. The page loads nothing and has no script; texts are escaped."""

import math
import os
import statistics
from html import escape
from pathlib import Path

import numpy as np

from core.errors import Mistake, others
from core.files import (
    CONFIG, METRICS, REPORT, SAMPLES, each_metrics, each_record, read_object, replacing, starts_of, writing)
from core.logger import format_number, visible
from core.run import now, without_home
from grpo.evaluation.samples import compared, evaluations, format_reward, held_out

STEPS = 500     # most steps in a chart, so that the page of a long run stays small
LARGEST = 1e300
SETS = 12       # most evaluations with samples: the first and the latest
LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a chart of 320 x 156
PARTS = {"eval": "Held out", "time": "Seconds of a step by phase"}
HEADLINE = {  # these held-out metrics, and the rewards
    "greedy_accuracy": "share of prompts whose greedy completion is correct",
    "sampled_accuracy": "share of correct completions, sampled as in training",
    "pass_at_k": "share of prompts with a correct one among the sampled completions",
    "judge": "mean score by the judge of the reward",
    "gold_judge": "mean score by a judge that no policy was trained against",
    "word_validity": "share of the words with a masked character that are filled in as a known word",
    "words_recovered": "share of the words with a masked character that are filled in as the true word",
    "token_accuracy": "share of masked tokens filled with the true one"}


def write_report(folder, evaluated=None):
    """Writes report.html of the run in a folder. Returns its path; raises Mistake without a run.
    evaluated: the evaluations of its buffer; None: those of metrics.jsonl"""
    records = read_metrics(Path(folder, METRICS))
    if evaluated is not None:
        training = [record for record in records if not held_out(record)]
        records = sorted([*training, *evaluated], key=lambda record: record["step"])
    config, start = Path(folder, CONFIG), {}
    if config.exists():
        starts = starts_of(read_object(config, config, "delete it"), config)
        start = starts[-1] if starts else {}
    status = f"running, or not ended properly: at step {records[-1]['step']} when this page was written, {now()}"
    if end := start.pop("end", {}):
        why = f": {end['why']}" if end["why"] else ""
        status = f"{end['ended']} at step {end['step']}, {end['time']}{why}"
    settings = [private((key, *about.values())) for key, about in start.pop("settings", {}).items()]
    parts = {"Held out, before and after": before_and_after(evaluations(records)), "Held out": "",
             "Samples": samples(Path(folder, SAMPLES)), **curves(records),
             "Settings": table(("setting", "value", "default", "set in"), settings),
             "Machine, versions, command": table((), map(private, start.items()))}
    template, style = (Path(__file__).with_name(f"report.{kind}").read_text() for kind in ("html", "css"))
    page = template.format(
        style=style, name=text(os.path.basename(without_home(os.path.abspath(folder)))), status=text(status),
        body="".join(f"<section><h2>{name}</h2>\n{x}</section>\n" for name, x in parts.items() if x))
    path = os.path.join(folder, REPORT)
    with replacing(path) as new, open(new, "w", encoding="utf-8", errors="replace") as f:
        f.write(page)
    return path


def read_metrics(path):
    """The records of a metrics.jsonl: all evaluations, and every n-th of the others, some STEPS in all."""
    count = sum(1 for _ in each_metrics(path))
    if not count:
        raise Mistake(f"{path} holds no metrics; name the out_dir of a run")
    every = 1 + count // STEPS
    return [r for i, r in enumerate(each_metrics(path), 1) if (count - i) % every == 0 or evaluations([r])]


def curves(records):
    """{part of the page: a chart for each of its metrics}"""
    parts, constant = dict.fromkeys(("Held out", "Rewards", "Training", "Seconds of a step by phase"), ""), []
    for metric in dict.fromkeys(name for record in records for name in record if name != "step"):
        points = [(record["step"], drawable(record[metric])) for record in records if metric in record]
        values = [y for _, y in points]
        part = "Rewards" if "reward" in metric else "Training"
        part = PARTS.get(metric.split("/")[0], part)
        if None not in values and is_flat(values):
            constant.append(f"{text(metric)} {format_number(values[-1])}")
        else:
            parts[part] += chart(metric, records[-1]["step"], points)
    return parts | {"Constant, up to rounding": f"<p>{', '.join(constant)}</p>" if constant else ""}


def drawable(value):
    """A number of a curve; None where it is not finite, or so large that a sum of such numbers would not be."""
    return value if isinstance(value, (int, float)) and abs(value) < LARGEST else None


def is_flat(values):
    """Tells whether finite numbers differ by rounding alone, or by less than a curve can show."""
    low, high = min(values), max(values)
    return high - low <= max(1e-7, 1e-3 * max(-low, high))


def before_and_after(records):
    """Metrics of the first and the last evaluation, "" if they are one."""
    if len(records) < 2:
        return ""
    rows, boxes = compared(held_out(records[0]), held_out(records[-1])), ""
    for name, first, last, change in rows:
        if change and (name in HEADLINE or name.startswith("reward/")):
            boxes += f'<div title="{HEADLINE.get(name, "")}">{text(name)} <b>{first} → {last}</b></div>'
    head = ("metric", "before", f"step {records[-1]['step']}", "change")
    lines = table(head, [map(text, row) for row in rows], "numbers")
    return f'<div class="headline">{boxes}</div>\n{lines}'


def table(head, rows, kind="texts"):
    """An HTML table of cells of HTML; "" without rows."""
    lines = [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
    if not lines:
        return ""
    if head:
        lines.insert(0, f"<tr><th>{'</th><th>'.join(head)}</th></tr>")
    body = "\n".join(lines)
    return f'<table class="{kind}"><tbody>{body}</tbody></table>\n'


def private(row):
    """Values as HTML, without the user's name."""
    return [text(without_home(str(value))) for value in row]


def text(value):
    """A value as HTML: escaped, without invisible characters."""
    return escape(visible(str(value), kept="\t\n"))


def samples(path):
    """The samples of evaluations; the latest are unfolded."""
    by_step = {}
    for record in each_record(path):
        if record["step"] not in by_step and len(by_step) == SETS:
            del by_step[list(by_step)[1]]
        if not is_sample(record):
            raise Mistake(f"{path}, step {record['step']}: a line is no sample; delete it")
        by_step.setdefault(record["step"], []).append(record)
    html = ""
    for step, records in by_step.items():
        opened = ' open=""' if step == list(by_step)[-1] else ""
        tables = "".join(map(sample_table, records))
        html += f"<details{opened}><summary>step {step}</summary>\n{tables}</details>\n"
    return html


def is_sample(record):
    """True for a record with a group of texts and rewards."""
    group = record.get("group")
    if not isinstance(group, list) or not all(isinstance(about, dict) for about in group):
        return False
    rewards = [about.get("reward", "") for about in group]
    for about in group:
        values = about.get("rewards", {})
        rewards += values.values() if isinstance(values, dict) else [""]
    texts = [about.get("text") for about in group]
    numbers = all(x in (None, "inf", "-inf") or type(x) in (int, float) for x in rewards)
    return numbers and all(isinstance(x, str) for x in texts)


def sample_table(sample):
    """A problem and its completions, from the best to the worst."""
    group = sample["group"]
    rows = [(key, text(sample[key])) for key in ("problem", "answer") if key in sample]
    rewards = [drawable(about["reward"]) for about in group]
    unknown = min((x for x in rewards if x is not None), default=0.0)  # the colour of one that was skipped
    of_rewards = levels([[unknown if x is None else x] for x in rewards])
    of_tokens = levels([about.get("credit", []) for about in group])
    for about, (level,), marks in zip(group, of_rewards, of_tokens, strict=True):
        title = f'<span class="{level}">{format_reward(about["reward"])}</span>'
        if "right" in about:
            title += " right" if about["right"] else " wrong"
        values = [f" <em>{text(name)}: {format_reward(x)}</em>" for name, x in about.get("rewards", {}).items()]
        rows.append((title, marked(about, marks) + "".join(values)))
    return table((), rows, "samples")


def levels(rows):
    """The colours of numbers, a row for each completion: standard deviations above the group's mean in the column."""
    over = np.array(rows) - np.mean(rows, 0)                                         # (G, K)
    steps = over / ((over.std() if over.size else 0.0) or 1.0)
    return [[f"a{level}" for level in row] for row in steps.round().clip(-2, 2).astype(int)]


def marked(about, marks):
    """A completion as HTML with marks on what was filled in: the tokens' rewards, or whether it is right."""
    value, kind = about["text"], {True: "right", False: "wrong", None: "filled"}[about.get("right")]
    html, start, title = "", 0, ""
    for i, (first, end) in enumerate(about.get("filled", ())):
        if marks:
            kind, title = marks[i], f' title="reward {format_number(about["credit"][i])}"'
        html += f'{text(value[start:first])}<span class="{kind}"{title}>{text(value[first:end])}</span>'
        start = end
    return html + text(value[start:])


def smoothed(points):
    """Running means of the numbers of a curve, [(step, number or None)]."""
    reach, means = len(points) // 40, []  # points to each side
    for i, (step, y) in enumerate(points):
        near = [x for _, x in points[max(0, i - reach) : i + reach + 1] if x is not None]
        means.append((step, y if y is None else statistics.fmean(near)))
    return means


def chart(metric, last, points):
    """The running mean of a metric over its faint numbers, at the steps 0 to last, as inline SVG.
    points: [(step, number or None)]; None, which was not finite, is a gap"""
    layers, last = {"raw": points, "line": smoothed(points)}, max(last, 1)
    numbers = [y for _, y in points if y is not None] or [0.0]
    room = 0.5 if is_flat(numbers) else 0.0
    low, high = min(numbers) - room, max(numbers) + room

    def across(step):
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}"

    def down(y):
        return f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"

    svg = f'<text class="axis" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 21}">step</text>'
    for y in ticks(low, high):
        svg += f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/>'
        svg += f'<text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.9g}</text>'
    for step in ticks(0, last):
        svg += f'<text x="{across(step)}" y="{BOTTOM + 9}">{step:g}</text>'
    for kind, layer in layers.items():
        line, before = "", None
        for step, y in layer:
            if y is not None:
                line += f"{'M' if before is None else 'L'}{across(step)} {down(y)}h0"  # h0 shows a point alone
            before = y
        svg += f'<path class="{kind}" d="{line}"/>'
    latest = "not finite" if points[-1][1] is None else format_number(layers["line"][-1][1])
    return (f'<figure><figcaption>{text(metric)} <b>{latest}</b></figcaption>'
            f'<svg viewBox="0 0 320 156" role="img" aria-label="{text(metric)}">{svg}</svg></figure>\n')


def ticks(low, high):
    """Two to five round numbers between low and high."""
    size = 10 ** math.floor(math.log10((high - low) / 2))
    size *= max(k for k in (1, 2, 5) if 2 * k * size <= (high - low) * 1.000001)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def draw_curves(runs, path):
    """Draws a panel for each held-out metric: its mean over runs, a band of one standard deviation, and a dashed line
    at the start. runs: [records of metrics.jsonl with held-out metrics, at the same steps]; path: of the picture"""
    from matplotlib.figure import Figure  # here, because it takes a second
    names, steps = list(held_out(runs[0][0])), [record["step"] for record in runs[0]]
    columns, rows = min(4, len(names)), -(-len(names) // 4)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="tight")
    for place, name in enumerate(names, 1):
        y = np.array([[record.get(name) for record in run] for run in runs], dtype=float)  # (runs, steps)
        y[np.isinf(y)] = np.nan  # the evaluations of a buffer may be infinite
        mean, sd = y.mean(0), y.std(0, ddof=len(runs) > 1)
        axis = figure.add_subplot(rows, columns, place, xlabel="step")
        title = name.removeprefix("eval/").replace("_", " ")
        axis.set_title(visible(title), parse_math=False)  # a $ in a name begins no formula
        axis.plot(steps, mean, marker=".")
        axis.fill_between(steps, mean - sd, mean + sd, alpha=0.3)
        axis.axhline(mean[0], color="gray", linestyle="--", linewidth=1)
        axis.grid(alpha=0.3)
    remedy = "end its name in .png, .svg or .pdf"
    # Warnings are about letters that the font lacks
    with others(f"{path} could not be drawn", remedy, quiet=True), writing(path):
        figure.savefig(path, dpi=100)
