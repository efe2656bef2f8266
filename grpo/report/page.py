"""A page about one run, or several side by side, that opens without a network. Model text is escaped, and the page
allows no script but its own, which it names by its hash."""

import base64
import hashlib
import os
from pathlib import Path

from core.files.whole_files import replacing
from core.logger import format_number
from core.run.names import REPORT
from core.run.start import now, without_home
from grpo.evaluation.samples import ENVIRONMENT, TEXTS, change, is_board
from grpo.report.chart import COLORS, chart, short, text
from grpo.report.run_files import Run, names_of

LONGEST = 4000  # characters of a sample's text at most
ABOUT = ("_score", "_right")  # end the names of what is known about a text
JUDGED = 'filled in, by the reward: <mark class="right">right</mark> <mark class="wrong">wrong</mark>'
ANSWERED = 'text turn by turn, <span class="answer">&gt; what the environment answered</span>'
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src '{hash}'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<style>{style}</style></head><body><h1>{heading}</h1>
{status}<p>The axis of a curve spans its values: it begins at 0 only where they do.</p>
{body}<script>{script}</script></body></html>
"""


def write_report(*folders, path=None):
    """Writes a page about the runs in these folders, by default <first folder>/report.html. Returns its path."""
    runs = [Run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    path = path or os.path.join(folders[0], REPORT)
    style, script = (Path(__file__).with_name(name).read_text() for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    titles = [f'<b class="c{i % COLORS}">{text(run.name)}</b>' for i, run in enumerate(runs)]
    body = "".join(f"<section><h2>{name}</h2>\n{part}</section>\n" for name, part in sections(runs, titles) if part)
    with replacing(path) as new, open(new, "w", encoding="utf-8", errors="replace") as f:
        f.write(PAGE.format(title=", ".join(text(run.name) for run in runs), heading=" ".join(titles), style=style,
                            script=script, hash=f"sha256-{digest}", status=status(runs), body=body))
    return path


def status(runs):
    """A paragraph on how each run ended, when, and why."""
    lines = []
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        if run.end:
            why = f": {run.end['why']}" if run.end["why"] else ""
            lines.append(f"{name}{run.end['ended']} at step {run.end['step']}, {run.end['time']}{why}")
        elif run.start:
            lines.append(f"{name}running, or not ended properly: at step {run.last} when this page was written, "
                         f"{now()}")
    return f'<p class="status">{"<br/>".join(map(text, lines))}</p>\n' if lines else ""


def sections(runs, titles):
    """(heading, HTML) of each part of the page; "" for what the runs do not have."""
    parts = {"Held out": [], "Rewards": [], "Training": [], "Seconds of a step by phase": []}
    held_out, constant = [], []
    for metric in dict.fromkeys(name for run in runs for name in run.curves if name != "step"):
        if metric.startswith("eval/"):
            held_out.append(metric)
        values = {y for run in runs for _, y in run.curves.get(metric, ())}
        if len(values) == 1 and None not in values:
            constant.append(f"{text(metric)} {short(*values)}")
        else:
            parts[part_of(metric)].append(metric)
    yield "Held out, before and after", before_and_after(runs, titles, held_out)
    yield "Held out", curves(runs, parts.pop("Held out"))
    yield "Samples", samples(runs[0].samples) if len(runs) == 1 else ""
    for part, metrics in parts.items():
        yield part, curves(runs, metrics)
    yield "Never changed", f"<p>{', '.join(constant)}</p>" if constant else ""
    yield "Settings", settings(runs, titles)
    yield "Machine, versions, command", machine(runs, titles)


def part_of(metric):
    """The part of the page that shows the curve of a metric."""
    if metric.startswith("eval/"):
        return "Held out"
    if metric.startswith("time/"):
        return "Seconds of a step by phase"
    if metric.startswith("reward/") or metric in ("mean_reward", "std_reward"):
        return "Rewards"
    return "Training"


def curves(runs, metrics):
    """A chart for each metric, with a line for each run that has it."""
    last = max(run.last for run in runs)
    charts = []
    for metric in metrics:
        lines = [(i, run.curves[metric]) for i, run in enumerate(runs) if metric in run.curves]
        charts.append(chart(metric, last, lines))
    return "".join(charts)


def machine(runs, titles):
    """A table of the latest start of each run."""
    keys = dict.fromkeys(key for run in runs for key in run.start if key != "settings")
    return table(("", *titles), [(text(key), *(private(run.start.get(key, "")) for run in runs)) for key in keys])


def table(head, rows, kind="texts"):
    """An HTML table; "" without rows."""
    if not rows:
        return ""
    body = "".join(table_row(cells, "td") for cells in rows)
    return f'<table class="{kind}"><thead>{table_row(head, "th")}</thead>\n<tbody>{body}</tbody></table>\n'


def table_row(cells, tag):
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>\n"


def before_and_after(runs, titles, metrics):
    """A table of the first and the last evaluation of each run."""
    head = titles
    if len(runs) == 1 and metrics:
        head = ("before", f"step {runs[0].evaluations[-1]['step']}", "change")
    rows = []
    for metric in metrics:
        row = [text(metric.removeprefix("eval/"))]
        for run in runs:
            before, after = (run.evaluations[i].get(metric) if run.evaluations else None for i in (0, -1))
            cells = (format_number(before), format_number(after), change(before, after))
            row += cells if len(runs) == 1 else [f"{cells[0]} → {cells[1]}<br/>{cells[2]}"]
        rows.append(row)
    return table(("metric", *head), rows, "numbers")


def samples(by_step):
    """The samples of evaluations; the script shows one evaluation at a time, at first the last."""
    if not by_step:
        return ""
    last = list(by_step)[-1]
    parts = ['<p class="slider"><button type="button">previous</button><input type="range" aria-label="step"/>'
             f'<button type="button">next</button> step <output>{last}</output></p>\n']
    for step, records in by_step.items():
        hidden = "" if step == last else ' hidden=""'
        parts.append(f'<div class="set" data-step="{step}"{hidden}>\n{"".join(map(sample_table, records))}</div>\n')
    return "".join(parts)


def sample_table(record):
    """The texts of a sample, boards side by side."""
    rows = []
    for key, value in record.items():
        if key in ("step", "filled") or key.endswith((*ABOUT, "_turns")) or value in (None, {}):
            continue
        rows.append((label(key, record), marked(key, record)))
    legend = JUDGED if "filled" in record and "best_right" in record else "text"
    if "best_turns" in record:
        legend = ANSWERED
    board = is_board([str(record.get(name, "")) for name in TEXTS])
    return table(("", legend), rows, "samples board" if board else "samples")


def label(key, record):
    """The name of a row of a sample, with its reward and the reward's verdict."""
    score, right = (record.get(f"{key}{about}") for about in ABOUT)
    words = [key]
    if score is not None:
        words.append(short(score))
    if right is not None:
        words.append("right" if right else "wrong")
    return text(" ".join(words))


def marked(key, record):
    """A text of a sample in which what was filled in is marked, in the color of the reward's verdict if it has one."""
    if f"{key}_turns" in record:
        return in_turns(record[f"{key}_turns"])
    value, kind = str(record[key]), {True: "right", False: "wrong", None: "filled"}[record.get(f"{key}_right")]
    html, start = "", 0
    for first, end in record.get("filled", {}).get(key, ()):
        html += f'{text(value[start:first])}<mark class="{kind}">{text(value[first:end])}</mark>'
        start = end
    html += text(value[start:LONGEST])
    return html + rest(len(value))


def in_turns(turns):
    """A text of a sample as a block for each turn; before an answer of the environment stands a >."""
    html, length = "", 0
    for writer, words in turns:
        start = "<div>"
        if writer == ENVIRONMENT:
            start = '<div class="answer">&gt; '
        if length < LONGEST:
            html += f"{start}{text(words[: LONGEST - length])}</div>"
        length += len(words)
    return html + rest(length)


def rest(length):
    """Tells how many characters of a text of this length are not shown."""
    return f" <em>and {length - LONGEST} characters</em>" if length > LONGEST else ""


def private(value):
    """A setting as HTML, without the user's name."""
    return text(without_home(str(value)))


def settings(runs, titles):
    """One run's settings that differ from the defaults, or those in which several runs differ."""
    if len(runs) == 1:
        changed = runs[0].start.get("settings", {})
        return table(("setting", "value", "default", "set in"), [
            (text(key), *map(private, about.values())) for key, about in changed.items()])
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [private(run.config.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append((text(key), *values))
    return table(("setting", *titles), rows)
