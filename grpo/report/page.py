"""report.html: a page about a run that opens without a network. It has no script and allows none; texts are escaped."""

import os
from pathlib import Path

from core.files import CONFIG, METRICS, REPORT, SAMPLES, each_record, read_object, replacing
from core.start import now, without_home
from grpo.evaluation.samples import compared, evaluations
from grpo.report.chart import chart, text

STEPS = 1000    # steps that are shown at most, so that the page of a long run is as small as a short one's
SETS = 50       # evaluations whose samples are shown at most: the first and the latest
LONGEST = 4000  # characters of a sample's text at most
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
    """Writes report.html about the run in a folder. Returns its path; raises FileNotFoundError without a run."""
    records = read_metrics(Path(folder, METRICS))
    config, start = Path(folder, CONFIG), {}
    if config.exists():
        start = (read_object(config, config, "delete it").get("starts") or [{}])[-1]
    end = start.pop("end", {})
    status = ""
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
    """The records of a metrics.jsonl: all evaluations, and of more than STEPS records every second, third, ... one."""
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
    """The part of the page that shows the curve of a metric."""
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
    """The samples of evaluations, of which the last are open."""
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
