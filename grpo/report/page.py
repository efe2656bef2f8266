"""report.html and curves.png of a run. The page loads nothing and has no script; texts are escaped."""

import os
from html import escape
from pathlib import Path

import numpy as np

from core.files import CONFIG, METRICS, REPORT, SAMPLES, each_record, read_object, replacing, writing
from core.logger import format_number, visible
from core.start import now, without_home
from grpo.evaluation.samples import compared, evaluations, held_out

STEPS = 500     # most steps in a chart, so that the page of a long run stays small
SETS = 12       # most evaluations with samples: the first and the latest
LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a chart of 320 x 156
PARTS = {"eval": "Held out", "time": "Seconds of a step by phase"}


def write_report(folder):
    """Writes report.html of the run in a folder. Returns its path; raises FileNotFoundError without metrics."""
    records = read_metrics(Path(folder, METRICS))
    config, start = Path(folder, CONFIG), {}
    if config.exists():
        start = (read_object(config, config, "delete it").get("starts") or [{}])[-1]
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
    count = sum(1 for _ in each_record(path))
    if not count:
        raise FileNotFoundError(f"{path} holds no metrics")
    every = 1 + count // STEPS
    return [r for i, r in enumerate(each_record(path), 1) if (count - i) % every == 0 or evaluations([r])]


def curves(records):
    """{part of the page: a chart for each of its metrics}"""
    parts, constant = dict.fromkeys(("Held out", "Rewards", "Training", "Seconds of a step by phase"), ""), []
    for metric in dict.fromkeys(name for record in records for name in record if name != "step"):
        points = [(record["step"], record[metric]) for record in records if metric in record]
        values = [y for _, y in points]
        part = "Rewards" if "reward" in metric else "Training"
        part = PARTS.get(metric.split("/")[0], part)
        if None not in values and is_flat(values):
            constant.append(f"{text(metric)} {format_number(values[-1])}")
        else:
            parts[part] += chart(metric, records[-1]["step"], points)
    return parts | {"Never changed": f"<p>{', '.join(constant)}</p>" if constant else ""}


def is_flat(values):
    """Tells whether finite numbers differ by rounding alone, or by less than a curve can show."""
    low, high = min(values), max(values)
    return high - low <= max(1e-7, 1e-3 * max(-low, high))


def before_and_after(records):
    """Metrics of the first and the last evaluation, "" if they are one."""
    if len(records) < 2:
        return ""
    rows = compared(held_out(records[0]), held_out(records[-1]))
    head = ("metric", "before", f"step {records[-1]['step']}", "change")
    return table(head, [map(text, row) for row in rows], "numbers")


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
        by_step.setdefault(record["step"], []).append(record)
    html = ""
    for step, records in by_step.items():
        opened = ' open=""' if step == list(by_step)[-1] else ""
        tables = "".join(map(sample_table, records))
        html += f"<details{opened}><summary>step {step}</summary>\n{tables}</details>\n"
    return html


def sample_table(sample):
    """A problem and its completions, from the best to the worst."""
    rows = [(key, text(sample[key])) for key in ("problem", "answer") if key in sample]
    for about in sample["group"]:
        verdict = {True: "right", False: "wrong"}.get(about.get("right"), "")
        logged = [f" <em>{text(name)}: {text(value)}</em>" for name, value in about.get("logged", {}).items()]
        rows.append((f"{format_number(about['reward'])} {verdict}", marked(about, verdict) + "".join(logged)))
    return table((), rows, "samples")


def marked(about, verdict):
    """The text of a completion as HTML, with marks on what was filled in."""
    value, html, start = about["text"], "", 0
    for first, end in about.get("filled", ()):
        html += f'{text(value[start:first])}<span class="{verdict or "filled"}">{text(value[first:end])}</span>'
        start = end
    return html + text(value[start:])


def chart(metric, last, points):
    """A metric at the steps 0 to last, as inline SVG.

    points: [(step, number or None)]; None, which was not finite, is a gap
    """
    last = max(last, 1)
    numbers = [y for _, y in points if y is not None] or [0.0]
    room = 0.5 if is_flat(numbers) else 0.0
    low, high = min(numbers) - room, max(numbers) + room

    def across(step):
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}"

    def down(y):
        return f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"

    svg = f'<text class="axis" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 21}">step</text>'
    for y in (low, high):
        svg += f'<text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.4g}</text>'
    for step in (0, last):
        svg += f'<text x="{across(step)}" y="{BOTTOM + 9}">{step}</text>'
    line, before = "", None
    for step, y in points:
        if y is not None:
            line += f"{'M' if before is None else 'L'}{across(step)} {down(y)}h0"  # h0 shows a point alone
        before = y
    svg += f'<path class="line" d="{line}"/>'
    latest = "not finite" if before is None else format_number(before)
    return (f'<figure><figcaption>{text(metric)} <b>{latest}</b></figcaption>'
            f'<svg viewBox="0 0 320 156" role="img" aria-label="{text(metric)}">{svg}</svg></figure>\n')


def draw_curves(runs, path):
    """Draws a panel for each held-out metric: its mean over runs, a band of one standard deviation, and a dashed line
    at the start. runs: [records of metrics.jsonl with held-out metrics, at the same steps]; path: of the picture"""
    from matplotlib.figure import Figure  # here, because it takes a second
    names, steps = list(held_out(runs[0][0])), [record["step"] for record in runs[0]]
    columns, rows = min(4, len(names)), -(-len(names) // 4)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="tight")
    for place, name in enumerate(names, 1):
        y = np.array([[record.get(name) for record in run] for run in runs], dtype=float)  # (runs, steps)
        mean, sd = y.mean(0), y.std(0, ddof=len(runs) > 1)
        title = name.removeprefix("eval/").replace("_", " ")
        axis = figure.add_subplot(rows, columns, place, title=title, xlabel="step")
        axis.plot(steps, mean, marker=".")
        axis.fill_between(steps, mean - sd, mean + sd, alpha=0.3)
        axis.axhline(mean[0], color="gray", linestyle="--", linewidth=1)
        axis.grid(alpha=0.3)
    with writing(path):
        figure.savefig(path, dpi=100)
