"""report.html and curves.png of a run. The page loads nothing and has no script; texts are escaped."""

import functools
import itertools
import math
import os
import re
import statistics
from html import escape
from pathlib import Path

import numpy as np

from core.files import CONFIG, METRICS, REPORT, SAMPLES, each_record, read_object, replacing, writing
from core.logger import visible
from core.start import now, without_home
from grpo.evaluation.samples import compared, evaluations, held_out

STEPS = 500     # most steps in a chart, so that the page of a long run stays small
SETS = 12       # most evaluations with samples: the first and the latest
LONGEST = 4000  # most characters of a sample
NARROW = 11     # most characters in a line of texts that stand beside each other
LEGEND = ('<p>Sampled: <span class="right">right</span>, <span class="wrong">wrong</span> by the reward, '
          '<span class="filled">without its verdict</span>; rewards <span class="a2">above</span> and '
          '<span class="a-2">below</span> the mean of their group</p>\n')
LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a chart of 320 x 156
MEANINGS = Path(__file__).parents[2] / "docs" / "metrics.md"
UP_IS_GOOD = ("eval/sampled_accuracy", "eval/greedy_accuracy", "eval/pass_at_k", "eval/word_validity",
              "eval/words_recovered", "eval/reward/<name>", "eval/gold_judge", "eval/judge", "eval/token_accuracy")


def write_report(folder):
    """Writes report.html of the run in a folder. Returns its path; raises FileNotFoundError without a run."""
    records = read_metrics(Path(folder, METRICS))
    config, start = Path(folder, CONFIG), {}
    if config.exists():
        start = (read_object(config, config, "delete it").get("starts") or [{}])[-1]
    end, status = start.pop("end", {}), ""
    if end:
        why = f": {end['why']}" if end["why"] else ""
        status = f"{end['ended']} at step {end['step']}, {end['time']}{why}"
    elif start:
        last = records[-1]["step"]
        status = f"running, or not ended properly: at step {last} when this page was written, {now()}"
    settings = start.pop("settings", {})
    rewards = zip(*(settings.get(key, {}).get("value", []) for key in ("reward_functions", "reward_weights")))
    lowered = [f"eval/reward/{name}" for name, weight in rewards if weight < 0]
    parts = {"Held out, before and after": before_and_after(evaluations(records), lowered), "Held out": "",
             "Samples": samples(Path(folder, SAMPLES)), **curves(records)}
    rows = [private((key, *about.values())) for key, about in settings.items()]
    parts["Settings"] = table(("setting", "value", "default", "set in"), rows)
    parts["Machine, versions, command"] = table((), [private(row) for row in start.items()])
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
    count = sum(1 for _ in each_record(path))
    if not count:
        raise FileNotFoundError(f"{path} holds no metrics; name the out_dir of a run")
    every = 1 + count // STEPS
    return [r for i, r in enumerate(each_record(path), 1) if (count - i) % every == 0 or evaluations([r])]


def curves(records):
    """{part of the page: a chart for each of its metrics}"""
    parts = dict.fromkeys(("Held out", "Rewards", "Training"), "")
    timed = [record for record in records if "time/train" in record]
    constant, last = [], records[-1]["step"]
    for metric in dict.fromkeys(name for record in records for name in record):
        if metric == "step" or metric.startswith("time/"):
            continue
        points = [(record["step"], record[metric]) for record in records if metric in record]
        values = [y for _, y in points]
        part = "Rewards" if "reward" in metric else "Training"
        if metric.startswith("eval/"):
            part = "Held out"
        if None not in values and is_flat(values):
            constant.append(f"<span {tooltip(metric)}>{text(metric)} {digits(statistics.fmean(values))}</span>")
        else:
            parts[part] += chart(metric, last, points)
    return parts | {"Seconds of a step by phase": stacked(last, timed),
                    "Never changed": f"<p>{', '.join(constant)}</p>" if constant else ""}


def is_flat(values):
    """Tells whether finite numbers differ by rounding alone, or by less than a curve can show."""
    low, high = min(values), max(values)
    return high - low <= max(1e-7, 1e-3 * max(-low, high))


def before_and_after(records, lowered):
    """Metrics of the first and the last evaluation, "" if they are one; lowered: those that the run makes smaller."""
    if len(records) < 2:
        return ""
    first, last = held_out(records[0]), held_out(records[-1])
    boxes = ""
    for counts in UP_IS_GOOD:
        for name, x in first.items():
            y = last.get(name)
            if documented(name) == counts and None not in (x, y):
                before, after = digits(x), digits(y)
                verdict = "better" if (y > x) != (name in lowered) else "worse"
                if before == after:
                    verdict = "equal"
                boxes += (f'<div {tooltip(name)}>{text(name.removeprefix("eval/"))} <b>{before} → {after}</b> '
                          f'<span class="{verdict}">{verdict}</span></div>')
    rows = [(text(name), *numbers) for name, *numbers in compared(first, last)]
    lines = table(("metric", "before", f"step {records[-1]['step']}", "change"), rows, "numbers")
    return f'<div class="headline">{boxes}</div>\n{lines}'


def table(head, rows, kind="texts"):
    """An HTML table of cells of HTML; "" without rows."""
    lines = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>"] if head else []
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
    body = "\n".join(lines)
    return f'<table class="{kind}"><tbody>{body}</tbody></table>\n' if rows else ""


def private(row):
    """Values as HTML, without the user's name."""
    return [text(without_home(str(value))) for value in row]


def text(value):
    """A value as HTML: escaped, without invisible characters."""
    return escape(visible(str(value), kept="\t\n"))


def digits(number):
    """A number with three digits, or all those before its point."""
    whole = number % 1 == 0 or abs(number) >= 1000
    return f"{number:.0f}" if whole and abs(number) < 1e9 else f"{number:#.3g}".rstrip(".")


@functools.cache
def meanings():
    """{metric: what it is}, from docs/metrics.md; some end in <name>."""
    document = MEANINGS.read_text("utf-8") if MEANINGS.exists() else ""
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", document, re.M)
    return {key: about.replace("`", "") for keys, about in reversed(rows) for key in re.findall("`(.+?)`", keys)}


def documented(metric):
    """The name of a metric in docs/metrics.md."""
    return metric if metric in meanings() else f"{os.path.dirname(metric)}/<name>"


def tooltip(metric):
    """The meaning of a metric, as an attribute in HTML."""
    return f'title="{text(meanings().get(documented(metric), ""))}"'


def samples(path):
    """The samples of evaluations; the latest are unfolded."""
    by_step = {}
    for record in each_record(path):
        if record["step"] not in by_step and len(by_step) == SETS:
            del by_step[list(by_step)[1]]
        by_step.setdefault(record["step"], []).append(record)
    html = ""
    for step, records in by_step.items():
        opened = ' open=""' if step == list(by_step)[-1] else ""
        tables = "".join(map(sample_table, records))
        html += f"<details{opened}><summary>step {step}</summary>\n{tables}</details>\n"
    return LEGEND + html if html else ""


def sample_table(record):
    """The texts of a sample."""
    rows, level_of, widest = [], {}, 0
    left_out = ["step", "filled", "group", "credit"]
    if group := record.get("group"):
        level_of = levels({name: [record[f"{name}_score"]] for name in group})
        left_out += ["best", "worst"]  # they are in the group
    for key, value in record.items():
        if key in left_out or key.endswith(("_score", "_right")) or value in (None, {}):
            continue
        words, score, right = [text(key)], record.get(f"{key}_score"), record.get(f"{key}_right")
        if score is not None:
            words.append(f'<span class="{level_of.get(key, [""])[0]}">{digits(score)}</span>')
        if right is not None:
            words.append("right" if right else "wrong")
        rows.append((" ".join(words), marked(key, record)))
        widest = max(widest, *map(len, str(value).split("\n")))
    return table((), rows, "samples" if widest > NARROW else "samples beside")


def levels(rewards):
    """{completion: class of the colour of each of its rewards}, by how many standard deviations it is above the mean of
    the group there. rewards: {completion: [number]} of a group"""
    means = [statistics.fmean(column) for column in zip(*rewards.values(), strict=True)]
    over = {name: [x - mean for x, mean in zip(row, means, strict=True)] for name, row in rewards.items()}
    sd = statistics.pstdev(itertools.chain(*over.values())) or 1.0
    return {name: [f"a{max(-2, min(2, round(x / sd)))}" for x in row] for name, row in over.items()}


def marked(key, record):
    """A text of a sample as HTML, up to LONGEST characters, with marks on what was filled in."""
    value, verdict = str(record[key]), {True: "right", False: "wrong", None: "filled"}[record.get(f"{key}_right")]
    credit = record.get("credit", {})
    level_of = levels(credit) if key in credit else {}
    html, start = "", 0
    for i, (first, end) in enumerate(record.get("filled", {}).get(key, ())):
        if first < LONGEST:
            mark = f'class="{verdict}"'
            if level_of:
                mark = f'class="{level_of[key][i]}" title="reward {digits(credit[key][i])}"'
            html += f"{text(value[start:first])}<span {mark}>{text(value[first:end])}</span>"
            start = end
    html += text(value[start:LONGEST])
    left = len(value) - LONGEST
    return f"{html} <em>and {left} characters</em>" if left > 0 else html


def chart(title, last, points):
    """The running mean of a metric over its faint numbers. points: [(step, number, or None if it was not finite)]"""
    smooth = smoothed(points)
    latest = "not finite" if smooth[-1][1] is None else digits(smooth[-1][1])
    return figure(f"{text(title)} <b>{latest}</b>", title, last, {"raw": points, "line": smooth})


def stacked(last, records):
    """The seconds of each phase, drawn above those of the phases before it; records: those with phases."""
    total = {record["step"]: 0.0 for record in records}
    layers, caption = {"line": list(total.items())}, ""
    for name in dict.fromkeys(name for record in records for name in record if name.startswith("time/")):
        kind = f"phase{len(layers)}"
        seconds = smoothed([(record["step"], record.get(name) or 0.0) for record in records])
        total = {step: total[step] + y for step, y in seconds}
        layers[kind] = list(total.items())
        mean = digits(statistics.fmean(y for _, y in seconds))
        caption += f'<span class="{kind}" {tooltip(name)}>{text(name.removeprefix("time/"))} {mean}</span> '
    return figure(caption, "seconds", last, dict(reversed(layers.items()))) if records else ""


def smoothed(points):
    """Running means of the numbers of a curve, [(step, number or None)]."""
    reach, means = len(points) // 40, []  # points to each side
    for i, (step, y) in enumerate(points):
        near = [x for _, x in points[max(0, i - reach) : i + reach + 1] if x is not None]
        means.append((step, y if y is None else statistics.fmean(near)))
    return means


def figure(caption, label, last, layers):
    """Curves over the steps 0 to last, as inline SVG. What was not finite is a gap and a mark on the axis.

    caption: HTML; label: a metric, or other words; layers: {class: [(step, number or None)]}, filled if of a phase
    """
    last = max(last, 1)
    numbers = [y for points in layers.values() for _, y in points if y is not None] or [0.0]
    room = 0.5 if is_flat(numbers) else 0.0
    low, high = min(numbers) - room, max(numbers) + room

    def across(step):
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}"

    def down(y):
        return f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"

    curves, marks = "", f'<text class="axis" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 21}">step</text>'
    for y in ticks(low, high):
        marks += f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/>'
        marks += f'<text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.9g}</text>'
    for step in ticks(0, last):
        marks += f'<text x="{across(step)}" y="{BOTTOM + 9}">{step:g}</text>'
    for kind, points in layers.items():
        line, inside = "", False
        for step, y in points:
            if y is None and kind == "raw":
                marks += f'<circle cx="{across(step)}" cy="{BOTTOM}" r="2.2"/>'
            elif y is not None:
                place = f"{across(step)} {down(y)}"
                line += f"L{place}" if inside else f"M{place}h0"  # h0 shows a point alone
            inside = y is not None
        if kind.startswith("phase"):
            line += f"V{BOTTOM}H{across(points[0][0])}Z"
        curves += f'<path class="{kind}" d="{line}"/>'
    return (f'<figure {tooltip(label)}><figcaption>{caption}</figcaption><svg viewBox="0 0 320 156" role="img" '
            f'aria-label="{text(label)}">{marks}{curves}</svg></figure>\n')


def ticks(low, high):
    """Two to five round numbers between low and high."""
    size = 10 ** math.floor(math.log10((high - low) / 2))
    size *= max(k for k in (1, 2, 5) if 2 * k * size <= (high - low) * 1.000001)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def draw_curves(runs, path):
    """Draws a panel for each held-out metric that changes: its mean over runs, a band of one standard deviation, and a
    dashed line at the start. runs: [records of metrics.jsonl with held-out metrics]; path: of the picture"""
    from matplotlib.figure import Figure  # here, because it takes a second
    found = {}  # {metric: {step: [number of each run]}}
    for record in itertools.chain(*runs):
        for name, y in held_out(record).items():
            found.setdefault(name, {}).setdefault(record["step"], []).append(math.nan if y is None else y)
    shown = {name: x for name, x in found.items() if not is_flat(sum(x.values(), []))} or found
    columns, rows = min(4, len(shown)), -(-len(shown) // 4)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="tight")
    for place, (name, by_step) in enumerate(shown.items(), 1):
        title = name.removeprefix("eval/").replace("_", " ")
        axis = figure.add_subplot(rows, columns, place, title=title, xlabel="step")
        steps, mean = list(by_step), np.array([np.mean(x) for x in by_step.values()])
        sd = np.array([np.std(x, ddof=len(x) > 1) for x in by_step.values()])
        axis.plot(steps, mean, marker=".")
        axis.fill_between(steps, mean - sd, mean + sd, alpha=0.3)
        axis.axhline(mean[0], color="gray", linestyle="--", linewidth=1)
        axis.grid(alpha=0.3)
    with writing(path):
        figure.savefig(path, dpi=100)
