"""report.html and curves.png of a run. The page loads nothing and has no script; texts are escaped."""

import itertools
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
from grpo.evaluation.samples import compared, evaluations, format_reward, held_out, with_answers
from grpo.grpo_config import PRESETS

STEPS = 500  # most steps in a chart, so that the page of a long run stays small
LARGEST = 1e300
HELD_OUT, SPEED = "Held out", "Speed"  # parts of the page
MOST_SAMPLED = 12  # evaluations whose samples are shown: the first and the latest
LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a chart of 320 x 156
LEAST_SPAN = 0.02  # of an axis, as a share of its numbers, so that it does not draw noise large
# The held-out metrics at the top of the page, besides the rewards. Its first line has the first that the run measured
HEADLINE = {
    "sampled_accuracy": "share of correct completions, sampled as in training",
    "greedy_accuracy": "share of prompts whose greedy completion is correct",
    "pass_at_k": "share of prompts with a correct one among the sampled completions",
    "word_validity": "share of the words with a masked character that are filled in as a known word",
    "words_recovered": "share of the words with a masked character that are filled in as the true word",
    "gold_judge": "mean score by a judge that no policy was trained against",
    "judge": "mean score by the judge of the reward",
    "token_accuracy": "share of masked tokens filled with the true one",
    "mean_reward": "mean of the weighted sum of rewards"}
# The settings that a reader looks for first, changed or not
IMPORTANT = """
    generator_checkpoint lora_rank dataset task_type reward_functions reward_weights environment judge_checkpoint
    batch_size group_size max_new_tokens temperature top_p objective advantage kl_beta teacher_checkpoint ppo_epochs
    minibatches gradient_accumulation_steps max_iters optimizer learning_rate eval_problems eval_completions keep_best
    seed""".split()


def write_report(folder, evaluated=None):
    """Writes report.html of the run in a folder. Returns its path; raises Mistake without a run.

    evaluated: the evaluations of its buffer; None: the evaluations of metrics.jsonl
    """
    records = read_metrics(Path(folder, METRICS))
    if evaluated is not None:
        records = [record for record in records if not held_out(record)]
        records = sorted(records + evaluated, key=lambda record: record["step"])
    saved, starts = saved_run(Path(folder, CONFIG))
    status = status_of(starts[-1].get("end", {}), records[-1]["step"])
    body = ""
    for heading, html in sections(folder, records, saved, starts[-1]):
        if html:
            body += f"<section><h2>{heading}</h2>\n{html}</section>\n"
    shown_folder = without_home(os.path.abspath(folder))
    name = os.path.basename(shown_folder)
    template = Path(__file__).with_name("report.html").read_text()
    style = Path(__file__).with_name("report.css").read_text()
    page = template.format(
        style=style,
        name=text(name),
        summary="\n".join(summary(saved, starts, records)),
        status=text(status),
        body=body)
    path = os.path.join(folder, REPORT)
    with replacing(path) as new, open(new, "w", encoding="utf-8", errors="replace") as f:
        f.write(page)
    return path


def sections(folder, records, saved, start):
    """Yields the heading and the HTML of each section.

    saved: the settings of the run; start: the record of its last start
    """
    shown, bars, errors = samples(Path(folder, SAMPLES))
    charts = curves(records, errors)
    yield "Held out, before and after", before_and_after(evaluations(records), saved.get("keep_best"))
    yield HELD_OUT, charts.pop(HELD_OUT)
    yield "Completions of the last evaluation", bars
    yield "Samples", shown
    for heading, html in charts.items():
        if heading == SPEED and html:
            html = folded("tokens per second, seconds of a step by phase", f'<div class="charts">{html}</div>')
        yield heading, html
    settings = settings_table(saved, start.get("settings", {}))
    yield "Settings: first those that matter most, and in bold all that were changed", settings
    machine = [private(pair) for pair in start.items() if pair[0] not in ("settings", "end")]
    yield "Machine, versions, command", table((), machine)


def settings_table(saved, changed):
    """A table of the IMPORTANT settings, and of those that were changed, in bold."""
    rows = []
    for key in dict.fromkeys((*IMPORTANT, *changed)):
        if key in changed:
            name, *cells = private((key, *changed[key].values()))
            rows.append((f"<b>{name}</b>", *cells))
        elif key in saved:
            rows.append(private((key, saved[key], saved[key], "")))
    return table(("setting", "value", "default", "set in"), rows)


def summary(saved, starts, records):
    """Yields the parts of the first line, which says what was trained, as HTML: those that the run has recorded."""
    teacher = saved.get("teacher_checkpoint")
    rewards = saved.get("reward_functions") or ()
    if not rewards and not teacher:
        rewards = PRESETS.get(saved.get("task_type"), ())
    facts = {
        "model": saved.get("generator_checkpoint"),
        "parameters": starts[-1].get("parameters"),
        "data": saved.get("dataset"),
        "teacher": teacher,
        "rewards": ", ".join(map(str, rewards)),
        "objective": saved.get("objective"),
        "steps": records[-1]["step"],
        "minutes": minutes(starts)}
    facts |= headline(evaluations(records), saved.get("keep_best"))
    for fact in facts.items():
        if all(fact):
            name, value = private(fact)
            yield f"<span>{name} <b>{value}</b></span>"


def minutes(starts):
    """The minutes of a run over all its starts; None if one has not recorded its end or its seconds."""
    seconds = [drawable(start.get("end", {}).get("seconds")) for start in starts]
    if None not in seconds:
        return f"{sum(seconds) / 60:.1f}"


def headline(records, keep_best):
    """{metric: its change in words} of the first of HEADLINE that was measured and did not choose the best model.

    keep_best: the logged name of the metric that did, or None
    """
    rows = changes(records)
    for name in HEADLINE:
        for metric, before, after, change in rows:
            if metric == name and change and f"eval/{name}" != keep_best:
                return {name: f"{before} → {after}"}
    return {}


def read_metrics(path):
    """Reads a metrics.jsonl: the records of all evaluations, and every n-th other record, about STEPS in total."""
    count = sum(1 for _ in each_metrics(path))
    if not count:
        raise Mistake(f"{path} holds no metrics; name the out_dir of a run")
    every = 1 + count // STEPS
    records = []
    for number, record in enumerate(each_metrics(path), 1):
        is_nth = (count - number) % every == 0  # counted from the end, so that the last step is there
        if is_nth or held_out(record):
            records.append(record)
    return records


def saved_run(path):
    """The settings and the starts of a run in its config.json; {} and an empty start without one."""
    saved = read_object(path, path, "delete it") if path.exists() else {}
    starts = starts_of(saved, path)
    return saved, starts or [{}]


def status_of(end, step):
    """The status of a run in words. end: the record of its end, {} without one; step: the latest step"""
    if not end:
        return f"running, or not ended properly: at step {step} when this page was written, {now()}"
    status = f"{end['ended']} at step {end['step']}, {end['time']}"
    if end["why"]:
        status += f": {end['why']}"
    return status


def curves(records, errors):
    """{part of the page: a chart for each of its metrics}

    errors: as in samples
    """
    parts = {
        HELD_OUT: "",
        "Rewards": "",
        "Training": "",
        SPEED: ""}
    metrics = dict.fromkeys(itertools.chain(*records))  # each name once, in the order of the first values
    del metrics["step"]
    last = records[-1]["step"]
    constant = []
    for metric in metrics:
        having = [record for record in records if metric in record]
        values = [drawable(record[metric]) for record in having]
        if None not in values and is_flat(values):
            constant.append(f"{text(metric)} {format_number(values[-1])}")
        else:
            part = part_of(metric)
            steps = [record["step"] for record in having]
            of_steps = []
            if part == HELD_OUT:
                name = metric.removeprefix("eval/")
                of_steps = [drawable(errors.get(step, {}).get(name)) or 0.0 for step in steps]
            parts[part] += chart(metric, steps, values, last, of_steps)
    if constant:
        parts["Constant, up to rounding"] = f"<p>{', '.join(constant)}</p>"
    return parts


def part_of(metric):
    """The part of the page for the chart of a metric."""
    if metric.startswith("eval/"):
        return HELD_OUT
    if metric.startswith("time/") or metric == "tokens_per_second":
        return SPEED
    if "reward" in metric:
        return "Rewards"
    return "Training"


def drawable(value):
    """A number of a curve; None if it is not finite, or so large that a sum of such numbers would be infinite."""
    if isinstance(value, (int, float)) and abs(value) < LARGEST:
        return value
    return None


def is_flat(values):
    """True for finite numbers that differ by rounding only, or by less than a curve can show."""
    low, high = min(values), max(values)
    return high - low <= max(1e-7, 1e-3 * max(-low, high))


def changes(records):
    """[(metric, before, after, change)] from the first to the last evaluation, as texts; [] if there is only one."""
    if len(records) < 2:
        return []
    return compared(held_out(records[0]), held_out(records[-1]))


def before_and_after(records, keep_best):
    """The metrics of the first and the last evaluation; "" if there is only one. keep_best: as in headline"""
    boxes = ""
    rows = []
    for row in changes(records):
        name, before, after, change = row
        cells = [text(value) for value in row]
        if f"eval/{name}" == keep_best:
            cells[0] += " <em>chose the best model: do not report this one</em>"
        rows.append(cells)
        if change and (name in HEADLINE or name.startswith("reward/")):
            title = HEADLINE.get(name, "")
            boxes += f'<div title="{title}">{cells[0]} <b>{before} → {after}</b></div>'
    if not rows:
        return ""
    head = "metric", "before", f"step {records[-1]['step']}", "change"
    return f'<div class="headline">{boxes}</div>\n{table(head, rows, "numbers")}'


def table(head, rows, kind="texts"):
    """An HTML table of cells of HTML; "" without rows."""
    if not rows:
        return ""
    lines = []
    if head:
        lines.append(f"<tr><th>{'</th><th>'.join(head)}</th></tr>")
    for row in rows:
        lines.append(f"<tr><td>{'</td><td>'.join(row)}</td></tr>")
    body = "\n".join(lines)
    return f'<table class="{kind}"><tbody>{body}</tbody></table>\n'


def private(row):
    """Values as HTML, without the user's name."""
    return [text(without_home(str(value))) for value in row]


def text(value):
    """A value as HTML: escaped, without invisible characters."""
    return escape(visible(str(value), kept="\t\n"))


def samples(path):
    """The samples of evaluations, of which the latest are unfolded, and of training; the histograms of the last
    evaluation; {step: {held-out metric: its standard error, None if it is not known}}."""
    by_title = {}
    latest = ""
    bars = ""
    errors = {}
    for record in each_record(path):
        step = record["step"]
        if not is_sample(record):
            raise Mistake(f"{path}, step {step}: a line is no sample; delete it")
        if "standard_errors" in record:  # the first sample of an evaluation
            errors[step] = record["standard_errors"]
            charts = [histogram(name, **about) for name, about in record["histograms"].items()]
            bars = "".join(charts)
        title = f"step {step}"
        if record.get("split") == "train":
            title = f"training, {title}"
        else:
            latest = title
        if title not in by_title and len(by_title) == MOST_SAMPLED:
            _, second, *_ = by_title
            del by_title[second]
        tables = by_title.get(title, "")
        by_title[title] = tables + sample_table(record)
    html = ""
    for title, tables in by_title.items():
        is_open = ' open=""' if title == latest else ""
        html += folded(title, tables, is_open)
    return html, bars, errors


def folded(title, html, is_open=""):
    """HTML that is shown after a click on its title, or at once with is_open."""
    return f"<details{is_open}><summary>{title}</summary>\n{html}</details>\n"


def is_sample(record):
    """True for a record with a group of completions."""
    group = record.get("group")
    return isinstance(group, list) and all(map(is_completion, group))


def is_completion(record):
    """True for the record of a completion: its text, its rewards and, in an environment, its turns."""
    if not isinstance(record, dict):
        return False
    match {"rewards": {}, "turns": []} | record:
        case {"text": str(), "reward": reward, "rewards": dict(values), "turns": list(turns)}:
            rewards = reward, *values.values()
            return all(map(is_reward, rewards)) and all(map(is_turn, turns))
    return False


def is_reward(value):
    """True for a reward as samples.jsonl has it."""
    return value in (None, "inf", "-inf") or isinstance(value, (int, float))


def is_turn(turn):
    """True for a text, an answer and a reward."""
    from core.records import are_messages  # here: a run without turns needs none of it
    match turn:
        case [str(), answer, _]:
            return answer is None or isinstance(answer, str) or are_messages(answer)
    return False


def sample_table(sample):
    """A problem and its completions, from the best to the worst."""
    group = sample["group"]
    rows = []
    for key in ("problem", "answer"):
        if key in sample:
            rows.append((key, text(sample[key])))
    rewards = [drawable(completion["reward"]) for completion in group]
    known = [reward for reward in rewards if reward is not None]
    lowest = min(known, default=0.0)
    shown = [lowest if reward is None else reward for reward in rewards]  # a skipped one has the lowest colour
    of_rewards = colours(np.reshape(shown, (-1, 1)))
    of_tokens = colours([completion.get("credit", []) for completion in group])
    for completion, (colour,), marks in zip(group, of_rewards, of_tokens, strict=True):
        title = f'<span class="{colour}">{format_reward(completion["reward"])}</span>'
        if "right" in completion:
            title += f" {verdict(completion)}"
        html = marked(completion, marks)
        values = completion.get("rewards", {})
        if len(values) > 1:
            for name, value in values.items():
                html += f" <em>{text(name)}: {format_reward(value)}</em>"
        rows.append((title, html))
    return table((), rows, "samples")


def verdict(completion):
    """The class of a completion: correct, wrong, or filled if its record does not say."""
    if "right" not in completion:
        return "filled"
    return "correct" if completion["right"] else "wrong"


def colours(numbers):
    """The colour of each number of G completions, by standard deviations above the mean of its column.

    numbers: (G, K) K numbers of each completion
    """
    above = np.array(numbers) - np.mean(numbers, 0)                                  # (G, K)
    if above.any():
        above /= above.std()
    levels = above.round().clip(-2, 2).astype(int)
    return [[f"a{level}" for level in row] for row in levels]


def marked(completion, marks):
    """A completion as HTML with its sampled tokens marked by their rewards or, without any, by its verdict; or with an
    environment's answers in grey."""
    value, answers = with_answers(completion)
    kind = "answer" if answers else verdict(completion)
    title = ""
    html = ""
    start = 0
    for i, (first, end) in enumerate(completion.get("filled", answers)):
        if marks:
            kind = marks[i]
            title = f' title="reward {format_number(completion["credit"][i])}"'
        html += text(value[start:first])
        html += f'<span class="{kind}"{title}>{text(value[first:end])}</span>'
        start = end
    return html + text(value[start:])


def smoothed(values):
    """Running means of the numbers of a curve; None, a gap, stays."""
    reach = len(values) // 40  # points on each side
    means = []
    for i, y in enumerate(values):
        if y is not None:
            near = values[max(0, i - reach) : i + reach + 1]
            y = statistics.fmean(x for x in near if x is not None)
        means.append(y)
    return means


def limits(low, high):
    """The ends of an axis for numbers from low to high."""
    middle = (low + high) / 2
    reach = max(high - low, LEAST_SPAN * abs(middle)) / 2 or 0.5
    return middle - reach, middle + reach


def chart(metric, steps, values, last, errors=()):
    """The curve of a metric over the steps 0 to last, as inline SVG: its numbers, faint, under their running mean.

    values: the number at each of the steps; None, a gap, where it was not finite
    errors: of evaluations, which are drawn as dots with bars: the standard error at each of the steps, or 0.0
    """
    last = max(last, 1)
    numbers = [y for y in values if y is not None] or [0.0]
    dots = [dot for dot in zip(steps, values, errors, strict=False) if dot[1] is not None]
    for _, y, error in dots:
        numbers += y - error, y + error
    low, high = limits(min(numbers), max(numbers))

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
    means = smoothed(values)
    for kind, layer in (("raw", values), ("line", means)):
        line = ""
        command = "M"
        for step, y in zip(steps, layer, strict=True):
            if y is None:
                command = "M"
            else:
                line += f"{command}{across(step)} {down(y)}h0"  # h0 shows a point between two gaps
                command = "L"
        svg += f'<path class="{kind}" d="{line}"/>'
    for step, y, error in dots:
        svg += f'<path class="error" d="M{across(step)} {down(y - error)}V{down(y + error)}"/>'
        svg += f'<path class="dot" d="M{across(step)} {down(y)}h0"/>'
    latest = "not finite"
    if means[-1] is not None:
        latest = format_number(means[-1])
    return figure(metric, latest, svg)


def histogram(name, low, high, counts):
    """Bars of the counts of numbers in equal parts from low to high, as inline SVG."""
    wide = (RIGHT - LEFT) / len(counts)
    svg = ""
    for i, count in enumerate(counts):
        tall = (BOTTOM - TOP) * count / max(1, *counts)
        svg += f'<rect x="{LEFT + wide * i:.1f}" y="{BOTTOM - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
    for x in ticks(low, high):
        svg += f'<text x="{LEFT + (RIGHT - LEFT) * (x - low) / (high - low):.1f}" y="{BOTTOM + 9}">{x:.9g}</text>'
    return figure(name, f"{sum(counts)} completions", svg)


def figure(title, value, svg):
    """A chart with its title above it. value: the number beside the title"""
    name = text(title)
    return (f'<figure><figcaption>{name} <b>{value}</b></figcaption>'
            f'<svg viewBox="0 0 320 156" role="img" aria-label="{name}">{svg}</svg></figure>\n')


def ticks(low, high):
    """Two to five round numbers between low and high."""
    span = high - low
    power = 10 ** math.floor(math.log10(span / 2))
    size = power
    for factor in (2, 5):
        if 2 * factor * power <= span * 1.000001:  # a little more, for rounding
            size = factor * power
    first = math.ceil(low / size)
    last = math.floor(high / size)
    return [i * size for i in range(first, last + 1)]


def draw_curves(runs, path):
    """Draws a panel for each held-out metric: its mean over runs, a band of one standard deviation, and a dashed line
    at the start.

    runs: for each run its records of held-out metrics, at the same steps; path: the file of the picture
    """
    from matplotlib.figure import Figure  # imported here because it takes a second
    names = list(held_out(runs[0][0]))
    steps = [record["step"] for record in runs[0]]
    columns = min(4, len(names))
    rows = math.ceil(len(names) / 4)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="tight")
    for panel, name in enumerate(names, 1):
        values = []
        for run in runs:
            values.append([record.get(name) for record in run])
        y = np.array(values, dtype=float)                                            # (runs, steps) NaN for None
        y[np.isinf(y)] = np.nan  # the evaluations of a buffer may be infinite
        mean = y.mean(0)
        sd = y.std(0, ddof=len(runs) > 1)
        axis = figure.add_subplot(rows, columns, panel, xlabel="step")
        title = name.removeprefix("eval/").replace("_", " ")
        axis.set_title(visible(title), parse_math=False)  # else a $ in a name begins a formula
        axis.plot(steps, mean, marker=".")
        axis.fill_between(steps, mean - sd, mean + sd, alpha=0.3)
        axis.axhline(mean[0], color="gray", linestyle="--", linewidth=1)
        axis.grid(alpha=0.3)
        axis.set_ylim(limits(*axis.get_ylim()))
    remedy = "end its name in .png, .svg or .pdf"
    # Warnings are about letters that the font lacks
    with others(f"{path} could not be drawn", remedy, quiet=True), writing(path):
        figure.savefig(path, dpi=100)
