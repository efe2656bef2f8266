"""report.html and curves.png of a run.

The page loads nothing from the network. It has no script and allows none; texts are escaped.
"""

import math
import os
from html import escape
from pathlib import Path

from core.files import CONFIG, METRICS, REPORT, SAMPLES, each_record, read_object, replacing, writing
from core.logger import visible
from core.start import now, without_home
from grpo.evaluation.samples import compared, evaluations

STEPS = 1000    # most steps in a chart, so that the page of a long run stays small
SETS = 50       # most evaluations with samples: the first and the latest
LONGEST = 4000  # most characters of a sample
LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a chart of 320 x 144
LEAST_HEIGHT, LEAST_SHARE = 1e-6, 1e-3      # of a chart's axis, and as a share of its numbers; less is rounding
COLUMNS = 4                                 # of curves.png
LEGEND = ('<p>Filled in: <span class="right">right</span>, <span class="wrong">wrong</span> by the reward, '
          '<span class="filled">without its verdict</span></p>\n')
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{name}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<style>{style}</style></head><body><h1>{name}</h1>
{status}<p>The axis of a curve spans its values: it begins at 0 only where they do.</p>
{body}</body></html>
"""


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
    parts = {"Held out, before and after": before_and_after(evaluations(records)), "Held out": "",
             "Samples": samples(Path(folder, SAMPLES)), **curves(records)}
    settings = start.pop("settings", {})
    rows = [(text(key), *map(private, about.values())) for key, about in settings.items()]
    parts["Settings"] = table(("setting", "value", "default", "set in"), rows)
    parts["Machine, versions, command"] = table((), [(text(key), private(value)) for key, value in start.items()])
    page = PAGE.format(name=text(os.path.basename(without_home(os.path.abspath(folder)))),
                       style=Path(__file__).with_name("report.css").read_text(),
                       status=f'<p class="status">{text(status)}</p>\n' if status else "",
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
    parts = dict.fromkeys(("Held out", "Rewards", "Training", "Seconds of a step by phase"), "")
    constant = []
    for metric in dict.fromkeys(name for record in records for name in record if name != "step"):
        points = [(record["step"], record[metric]) for record in records if metric in record]
        values = {y for _, y in points}
        if len(values) == 1 and None not in values:
            constant.append(f"{text(metric)} {values.pop():.5g}")
        else:
            parts[part_of(metric)] += chart(metric, records[-1]["step"], points)
    return parts | {"Never changed": f"<p>{', '.join(constant)}</p>" if constant else ""}


def part_of(metric):
    """The part of the page that has the chart of a metric."""
    if metric.startswith("eval/"):
        return "Held out"
    if metric.startswith("time/"):
        return "Seconds of a step by phase"
    return "Rewards" if metric.startswith("reward/") or metric in ("mean_reward", "std_reward") else "Training"


def before_and_after(records):
    """A table of the first and the last evaluation."""
    if not records:
        return ""
    ends = [{name: x for name, x in records[i].items() if name.startswith("eval/")} for i in (0, -1)]
    rows = [(text(name), *numbers) for name, *numbers in compared(*ends)]
    return table(("metric", "before", f"step {records[-1]['step']}", "change"), rows, "numbers")


def table(head, rows, kind="texts"):
    """An HTML table of cells of HTML; "" without rows."""
    lines = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>"] if head else []
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
    body = "\n".join(lines)
    return f'<table class="{kind}"><tbody>{body}</tbody></table>\n' if rows else ""


def private(value):
    """A setting as HTML, without the user's name."""
    return text(without_home(str(value)))


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
    rows = []
    for key, value in record.items():
        if key in ("step", "filled") or key.endswith(("_score", "_right")) or value in (None, {}):
            continue
        words, score, right = [key], record.get(f"{key}_score"), record.get(f"{key}_right")
        if score is not None:
            words.append(f"{score:.5g}")
        if right is not None:
            words.append("right" if right else "wrong")
        rows.append((text(" ".join(words)), marked(key, record)))
    return table((), rows, "samples")


def marked(key, record):
    """A text of a sample as HTML, up to LONGEST characters, with marks on what was filled in."""
    value, verdict = str(record[key]), {True: "right", False: "wrong", None: "filled"}[record.get(f"{key}_right")]
    html, start = "", 0
    for first, end in record.get("filled", {}).get(key, ()):
        if first < LONGEST:
            html += f'{text(value[start:first])}<span class="{verdict}">{text(value[first:end])}</span>'
            start = end
    html += text(value[start:LONGEST])
    left = len(value) - LONGEST
    return f"{html} <em>and {left} characters</em>" if left > 0 else html


def chart(title, last, points):
    """A curve over the steps 0 to last, as inline SVG. What was not finite is a gap and a mark on the axis.

    points: [(step, number, or None if it was not finite)]
    """
    last = max(last, 1)
    finite = [y for _, y in points if y is not None] or [0.0]
    low, high = min(finite), max(finite)
    least = max(LEAST_HEIGHT, LEAST_SHARE * max(-low, high))
    missing = max(0.0, least - (high - low))
    low, high = low - missing / 2, high + missing / 2

    def across(step):
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}"

    def down(y):
        return f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"

    marks, line, inside = "", "", False
    for y in ticks(low, high):
        marks += f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/>'
        marks += f'<text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.9g}</text>'
    for step in ticks(0, last):
        marks += f'<text x="{across(step)}" y="{BOTTOM + 9}">{step:g}</text>'
    for step, y in points:
        if y is None:
            marks += f'<circle cx="{across(step)}" cy="{BOTTOM}" r="2.2"/>'
        elif inside:
            line += f"L{across(step)} {down(y)}"
        else:
            line += f"M{across(step)} {down(y)}h0"  # h0 shows a point alone
        inside = y is not None
    latest = "not finite" if points[-1][1] is None else f"{points[-1][1]:.5g}"
    return (f'<figure><figcaption>{text(title)} <b>{latest}</b></figcaption><svg viewBox="0 0 320 144" role="img" '
            f'aria-label="{text(title)}">{marks}<path class="line" d="{line}"/></svg></figure>\n')


def ticks(low, high):
    """Two to five round numbers between low and high."""
    size = 10 ** math.floor(math.log10((high - low) / 2))
    size *= max(k for k in (1, 2, 5) if 2 * k * size <= (high - low) * 1.000001)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def text(value):
    """A value as HTML: escaped, without invisible characters."""
    return escape(visible(str(value), kept="\t\n"))


def draw_curves(runs, path):
    """Draws curves.png: a panel for each held-out metric, with a line for each run. All axes begin at 0 or below.

    runs: {label: records of metrics.jsonl with held-out metrics}; path: of the picture
    """
    from matplotlib.figure import Figure  # here, because it takes a second
    records = [record for found in runs.values() for record in found]
    names = dict.fromkeys(name for record in records for name in record if name.startswith("eval/"))
    rows = math.ceil(len(names) / COLUMNS)
    figure = Figure(figsize=(4 * min(COLUMNS, len(names)), 3 * rows))
    for place, name in enumerate(names, 1):
        axis = figure.add_subplot(rows, min(COLUMNS, len(names)), place)
        for label, found in runs.items():
            measured = [(record["step"], record[name]) for record in found if name in record]
            axis.plot([step for step, _ in measured], [y for _, y in measured], marker=".", label=label)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0), max(high, LEAST_HEIGHT))
        axis.set_title(name.removeprefix("eval/").replace("_", " "))
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        figure.axes[0].legend(fontsize=8)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=150)
