"""The page of a run shows the numbers of metrics.jsonl, and texts stay text; the table over seeds."""

import json
import math
import random
import re
import statistics
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from core.errors import Mistake
from grpo.grpo_config import GRPOConfig
from grpo.report.page import draw_curves, write_report
from grpo.report.paired import paired, student_quantile
from grpo.tools import report
from tests.tiny import jsonl

HIDDEN = "\x00\x1b\u202e\ud800"
EVIL = f"<script>alert(1)</script><!-- </td></table></script><style> &lt; \"'{HIDDEN}"
SHOWN = EVIL.removesuffix(HIDDEN) + len(HIDDEN) * "\ufffd"


@pytest.fixture
def page_of(tmp_path):
    """(records, samples, settings, first start, last start) -> (HTML, root, [[cells of a row] of each table]) of a
    page, read as XML"""
    def made(records, samples=(), saved=(), first=(), **start):
        jsonl(tmp_path / "metrics.jsonl", *records)
        jsonl(tmp_path / "samples.jsonl", *samples)
        first = {"step": 7, "end": {}} | dict(first)
        (tmp_path / "config.json").write_text(json.dumps(dict(saved) | {"starts": [first, start]}))
        with open(write_report(str(tmp_path)), encoding="utf-8") as f:
            html = f.read()
        root = ElementTree.fromstring(re.sub("<style>.*?</style>", "", html, count=1, flags=re.DOTALL))
        tables = []
        for table in root.iter("table"):
            tables.append([["".join(cell.itertext()) for cell in row] for row in table.iter("tr")])
        return html, root, tables
    return made


def numbers_of(svg, kind="raw"):
    """The points of a curve as [[step, number]], by the labels of its axes. kind: raw, or line, its running mean"""
    path = svg.find(f"path[@class='{kind}']").get("d")
    found = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]
    labels = {"x": [], "y": []}
    for label in svg.findall("text")[1:]:  # the first names the axis
        side = label.get("class") or "x"
        labels[side].append((float(label.get(side)), float(label.text)))
    axes = []
    for places, ((a, low), *_, (b, high)) in zip(zip(*found, strict=True), labels.values(), strict=True):
        axes.append([low + (place - a) / (b - a) * (high - low) for place in places])
    return [list(point) for point in zip(*axes, strict=True)]


def test_numbers_too_large_to_draw_are_gaps(page_of):
    records = [{"step": step, "loss": x} for step, x in enumerate((1.0, 1.7e308, -1.7e308, 2.0))]
    path = page_of(records)[1].find(".//path[@class='raw']").get("d")
    assert path.count("h0") == 2


@pytest.mark.parametrize("numbers", [[0.1, 0.9, 0.4, 0.5], [-3e-5, 2e-5, 0.0, 1e-5], [2e4, 1.2e4, 1.7e4, 1.5e4]])
def test_the_numbers_on_a_page_are_those_of_metrics_jsonl(page_of, numbers):
    steps = (1, 100, 250, 320)
    records = [{"step": 0, "eval/a": 0.5, "eval/b": 1.0},
               *({"step": step, "loss": x, "lr": 1e-3} for step, x in zip(steps, numbers, strict=True)),
               {"step": 320, "eval/a": 0.75, "eval/c": 2.0}]
    html, root, tables = page_of(records)
    charts = {figure[0].text.strip(): numbers_of(figure[1]) for figure in root.iter("figure")}
    assert tables[0][1:] == [["a", "0.5000", "0.7500", "+0.2500"], ["b", "1.0000", "-", ""], ["c", "-", "2.0000", ""]]
    assert charts.keys() == {"eval/a", "loss"} and "lr 0.0010" in html
    span = max(numbers) - min(numbers)
    for (step, x), at, number in zip(charts["loss"], steps, numbers, strict=True):
        assert step == pytest.approx(at, abs=1) and x == pytest.approx(number, abs=span / 100)


def curve(root, metric, kind="raw"):
    """The steps and the numbers of the curve of a metric on a page."""
    figure, = (figure for figure in root.iter("figure") if figure[0].text.strip() == metric)
    return zip(*numbers_of(figure[1], kind), strict=True)


def test_the_page_of_a_long_run_has_every_evaluation_and_the_last_step(page_of):
    records = [{"step": step, "loss": float(step)} for step in range(1, 1704)]
    at = (0, 3, 500, 1501)
    records += [{"step": step, "eval/a": step / 7} for step in at]
    _, root, _ = page_of(sorted(records, key=lambda record: record["step"]))
    steps, values = curve(root, "eval/a")
    assert steps == pytest.approx(at, abs=2) and values == pytest.approx([step / 7 for step in at], abs=2)
    steps, values = curve(root, "loss")
    assert 250 < len(steps) < 600 and steps[-1] == pytest.approx(1703, abs=2)
    assert values == pytest.approx(steps, abs=5)


def test_the_line_of_a_curve_is_the_mean_of_the_numbers_around_each(page_of):
    random.seed(3)
    numbers = [random.gauss(0, 1) for _ in range(160)]
    numbers[50] = None
    _, root, _ = page_of([{"step": step, "loss": x} for step, x in enumerate(numbers)])
    expected = []
    for i in range(160):  # up to a fortieth of the curve to each side
        near = [numbers[j] for j in range(160) if abs(i - j) <= 4 and numbers[j] is not None]
        if i != 50:
            expected.append(sum(near) / len(near))
    _, found = curve(root, "loss", "line")
    assert found == pytest.approx(expected, abs=0.05)


def test_colours_of_rewards_are_their_standard_deviations_above_the_mean_of_the_group(page_of):
    random.seed(1)
    for _ in range(5):
        rewards = [round(random.gauss(0, 1) ** 3, 3) for _ in range(6)] + [None]
        group = [{"text": "a", "reward": x} for x in rewards]
        _, root, _ = page_of([{"step": 1, "loss": 0.0}], [{"step": 1, "problem": "?", "group": group}])
        scored = [min(rewards[:6]) if x is None else x for x in rewards]
        mean, sd = statistics.fmean(scored), statistics.pstdev(scored)
        levels = [max(-2, min(2, round((x - mean) / sd))) for x in scored]
        found = [span.get("class") for span in root.iterfind(".//td[1]//span")]
        assert found == [f"a{level}" for level in levels] and len(set(levels)) > 2


def test_a_page_shows_the_samples_of_the_first_and_of_the_latest_evaluations(page_of):
    group = [{"text": "a", "reward": 1.0}]
    samples = [{"step": 10 * i, "problem": str(j), "group": group} for i in range(20) for j in range(2)]
    _, root, tables = page_of([{"step": 1, "loss": 0.0}], samples)
    found = [(details[0].text, details.get("open")) for details in root.iter("details")]
    assert [step for step, _ in found] == ["step 0", *(f"step {10 * i}" for i in range(9, 20))]
    assert [is_open is not None for _, is_open in found] == [False] * 11 + [True]
    assert [table[0] for table in tables[:2]] == [["problem", "0"], ["problem", "1"]]


def test_groups_of_training_are_apart_and_answers_of_an_environment_are_marked(page_of):
    turns = [["one", f"two {EVIL}", 0.5], ["three", [{"role": "user", "content": "four"}], 0], ["five", None, None]]
    episode = {"text": "a", "reward": 1.0, "rewards": {"environment": 1.0}, "turns": turns}
    samples = [{"step": 0, "problem": "a", "group": [episode]},
               {"step": 1, "split": "train", "problem": "b", "group": [episode | {"rewards": {"c": 2.0, "d": None}}]}]
    _, root, tables = page_of([{"step": 1, "loss": 0.0}], samples)
    found = [(details[0].text, details.get("open")) for details in root.iter("details")]
    assert found == [("step 0", ""), ("training, step 1", None)]
    answers = [span.text for span in root.iter("span") if span.get("class") == "answer"]
    assert answers == [f" [two {SHOWN}] ", " [four] "] * 2
    (_, (_, first)), (_, (_, second)) = tables[:2]
    assert first == f"one [two {SHOWN}] three [four] five" and second == f"{first} c: 2.0000 d: skipped"


def test_curves_are_means_over_runs_with_a_band_of_one_standard_deviation(monkeypatch):
    drawn, steps = [], [0, 10, 30]
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **settings: drawn.append(figure))
    rng = np.random.default_rng(0)
    runs = [[{"step": step, "eval/a": rng.random(), "eval/b": rng.random()} for step in steps] for _ in range(3)]
    for some in (runs, runs[:1]):
        draw_curves(some, "unwritten.png")
        for axis, name in zip(drawn.pop().axes, ("eval/a", "eval/b"), strict=True):
            values = [[run[i][name] for run in some] for i in range(3)]
            mean = [statistics.mean(x) for x in values]
            sd = [statistics.stdev(x) if len(x) > 1 else 0.0 for x in values]
            line, start = axis.lines
            assert list(line.get_xdata()) == steps and list(line.get_ydata()) == pytest.approx(mean)
            assert set(start.get_ydata()) == {line.get_ydata()[0]}
            band, = axis.collections
            x, y = band.get_paths()[0].vertices.T
            for i, step in enumerate(steps):
                ends = y[x == step]
                assert (ends.min(), ends.max()) == pytest.approx((mean[i] - sd[i], mean[i] + sd[i]))


def test_tokens_of_a_group_have_the_colours_of_their_rewards_and_the_headline_has_both_ends(page_of):
    group = [{"text": "ab", "reward": 7.0, "filled": [[0, 1], [1, 2]], "credit": [x, 1.0]} for x in (3.0, 0.0, -3.0)]
    ends = [{"step": step, "eval/sampled_accuracy": x} for step, x in ((0, 0.33789), (3, 0.92999))]
    _, root, _ = page_of(ends, [{"step": 3, "problem": "__", "answer": "ab", "group": group}])
    assert ["".join(box.itertext()) for box in root.iterfind(".//div/div")] == ["sampled_accuracy 0.3379 → 0.9300"]
    assert [mark.get("class") for mark in root.iterfind(".//td[2]//span")] == ["a2", "a0", "a0", "a0", "a-2", "a0"]


def test_samples_of_earlier_versions_and_what_was_skipped_or_infinite_are_shown(page_of):
    group = [{"text": "a", "reward": "inf", "rewards": {"one": "inf", "two": 1.0}}, {"text": "b", "reward": 1},
             {"text": "c", "reward": None, "rewards": {"one": None, "two": -0.5}}]
    _, root, tables = page_of([{"step": 1, "loss": 0.0}], [{"step": 1, "problem": "?", "group": group}])
    assert tables[0][1:] == [["inf", "a one: inf two: 1.0000"], ["1.0000", "b"],
                             ["skipped", "c one: skipped two: -0.5000"]]
    assert [mark.get("class") for mark in root.iterfind(".//td[1]//span")] == ["a0"] * 3


def test_curves_leave_out_what_is_infinite(tmp_path, recwarn):
    evaluated = [{"step": step, "eval/x": x, "eval/y": 1.0} for step, x in enumerate((math.inf, 0.5, -math.inf))]
    draw_curves([evaluated], str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 0 and not recwarn.list


SAVED = {"generator_checkpoint": "data/sums/model", "dataset": "sums", "task_type": "fill_in", "reward_functions": [],
         "objective": "dapo", "kl_beta": 0.25, "seed": 7, "teacher_checkpoint": None, "group_size": 4}
ENDS = [{"step": 0, "eval/judge": 0.25, "eval/word_validity": 0.5}, {"step": 30, "eval/judge": 0.75, "eval/loss": 1.0,
                                                                    "eval/word_validity": 0.625}]


def ended(**more):
    return {"end": {"ended": "finished", "step": 30, "time": "now", "why": None} | more}


def first_line(root):
    return ["".join(part.itertext()) for part in root.iterfind(".//p[@class='summary']/span")]


@pytest.mark.parametrize(("changes", "facts"), [
    ({}, ["rewards judge"]), ({"reward_functions": ["a", "b"]}, ["rewards a, b"]),
    ({"teacher_checkpoint": "t"}, ["teacher t"]), ({"teacher_checkpoint": "t", "reward_functions": ["a"]},
                                                   ["teacher t", "rewards a"])])
def test_the_first_line_of_a_page_says_what_was_trained(page_of, changes, facts):
    _, root, _ = page_of(ENDS, (), SAVED | changes, ended(seconds=90.0), **ended(seconds=60), parameters="1.5 M")
    assert first_line(root) == [
        "model data/sums/model", "parameters 1.5 M", "data sums", *facts, "objective dapo", "steps 30", "minutes 2.5",
        "word_validity 0.5000 \u2192 0.6250"]


@pytest.mark.parametrize("first, last", [({}, ended(seconds=60)), (ended(), ended(seconds=60)), (ended(seconds=60), {}),
                                         (ended(seconds="x"), ended(seconds=60))])
def test_a_page_says_no_minutes_if_a_start_has_not_recorded_them(page_of, first, last):
    _, root, _ = page_of(ENDS[1:], (), {}, first, **last)
    assert first_line(root) == ["steps 30"]


def test_the_metric_that_chose_the_model_is_marked_and_not_claimed_in_the_first_line(page_of):
    usual, *_ = page_of(ENDS, (), SAVED | {"keep_best": None})
    _, root, tables = page_of(ENDS, (), SAVED | {"keep_best": "eval/word_validity"})
    assert first_line(root)[-1] == "judge 0.2500 \u2192 0.7500"
    marked = {row[0].partition(" ")[0] for row in tables[0][1:] if " " in row[0]}
    assert marked == {"word_validity"} and len(root.findall(".//table[1]//em")) == 1 and "<em>" not in usual


def test_settings_that_matter_are_on_the_page_changed_or_not(page_of):
    changed = {"kl_beta": {"value": 0.25, "default": 0.1, "set in": "a.py"},
               "top_k": {"value": 3, "default": 0, "set in": "b.py"}}
    _, root, (*_, rows, machine) = page_of(ENDS[:1], (), SAVED | {"top_k": 3}, settings=changed, torch="2", numpy="3")
    rows = {key: cells for key, *cells in rows}
    assert rows["kl_beta"] == ["0.25", "0.1", "a.py"] and rows["top_k"] == ["3", "0", "b.py"]
    assert rows["seed"] == ["7", "7", ""] and rows["objective"] == ["dapo", "dapo", ""]
    assert [bold.text for bold in root.iterfind(".//td/b")] == ["kl_beta", "top_k"]
    assert machine == [["torch", "2"], ["numpy", "3"]]


def test_dots_bars_and_histograms_show_what_the_evaluations_measured(page_of):
    values, errors = (0.2, 0.5, 0.4), (0.1, None, 0.05)
    counts = [4, 0, 1, 2]
    records = [{"step": 10 * i, "eval/a": x, "a": x, "time/all": x} for i, x in enumerate(values)]
    histogram = {"low": -1.0, "high": 3.0, "counts": counts}
    nothing = {"low": 0.0, "high": 1.0, "counts": [0] * 4}  # all completions were skipped
    group = [{"text": "a", "reward": 1.0}]
    samples = [{"step": 10 * i, "problem": "?", "group": group, "standard_errors": {"a": x},
                "histograms": {"reward": histogram, "nothing": nothing}} for i, x in enumerate(errors)]
    _, root, _ = page_of(records, samples)
    charts = {figure[0].text.strip(): figure[1] for figure in root.iter("figure")}
    assert not charts["a"].findall("path[@class='dot']"), "the curve of training has no dots"
    points = numbers_of(charts["eval/a"])
    assert [x for _, x in points] == pytest.approx(values, abs=2e-3)
    line = charts["eval/a"].find("path[@class='raw']").get("d")
    places = [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", line)]
    scale = (values[1] - values[0]) / (places[0] - places[1])  # of a pixel
    for path, y, error in zip(charts["eval/a"].findall("path[@class='error']"), places, errors, strict=True):
        _, low, high = map(float, re.findall(r"[-\d.]+", path.get("d")))
        assert (low - y) * scale == pytest.approx((y - high) * scale, abs=2e-3) == pytest.approx(error or 0.0, abs=2e-3)
    bars = [float(bar.get("height")) for bar in charts["reward"].findall("rect")]
    assert bars == pytest.approx([120 * count / 4 for count in counts], abs=0.1)
    assert {bar.get("height") for bar in charts["nothing"].findall("rect")} == {"0.0"}
    labels = {float(label.text): float(label.get("x")) for label in charts["reward"].findall("text")}
    left, width = (float(charts["reward"].find("rect").get(key)) for key in ("x", "width"))
    assert labels[0] == pytest.approx(left + width, abs=0.2) and labels[2] == pytest.approx(left + 3 * width, abs=0.2)
    folded, = (details for details in root.iter("details") if details.find("div") is not None)
    assert [figure[0].text.strip() for figure in folded.iter("figure")] == ["time/all"]


def test_a_curve_that_hardly_moves_does_not_fill_its_axis(monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **settings: drawn.append(figure))
    values = {"flat": (3.995, 4.002), "zero": (0.0, 0.0), "low": (-1.0, -1.001), "moves": (0.5, 0.6)}
    draw_curves([[{"step": i} | {f"eval/{name}": x[i] for name, x in values.items()} for i in range(2)]], "no.png")
    for axis, (name, (first, last)) in zip(drawn.pop().axes, values.items(), strict=True):
        low, high = axis.get_ylim()
        assert low < min(first, last) and high > max(first, last)
        share = abs(last - first) / (high - low)
        assert share > 0.8 if name == "moves" else share < 0.1


def test_whatever_a_model_writes_stays_text_and_no_script_runs_and_nothing_is_loaded(page_of):
    group = [{"text": EVIL, "reward": 1.0, "filled": [[3, 60]], "rewards": {EVIL: 0.25, "b": None}}]
    records = [{"step": 1, EVIL: 1.0, f"time/{EVIL}": 1.0}, {"step": 2, EVIL: 2.0, f"eval/{EVIL}": None}]
    html, root, tables = page_of(records, [{"step": 1, "problem": EVIL, "answer": EVIL, "group": group}], command=EVIL,
                                 settings={EVIL: {"value": EVIL, "default": EVIL, "set in": EVIL}})
    assert [row[1] for row in tables[0]] == [SHOWN, SHOWN, f"{SHOWN} {SHOWN}: 0.2500 b: skipped"]
    assert tables[-1] == [["command", SHOWN]] and [SHOWN] * 4 in tables[-2]
    assert "default-src 'none'; style-src 'unsafe-inline'" == root.find("head/meta[@http-equiv]").get("content")
    assert not {"script", "style", "link", "img", "iframe", "form"} & {element.tag for element in root.iter()}
    attributes = {name for element in root.iter() for name in element.attrib}
    assert not any(name.startswith("on") or name in ("src", "href", "style", "action") for name in attributes)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)


def run_folder(folder, seed, figures, name="x", **settings):
    """Makes the folder of a run whose held-out metric had the figures at the steps 0, 1, ...; returns its path."""
    folder.mkdir()
    jsonl(folder / "metrics.jsonl", *({"step": step, f"eval/{name}": x} for step, x in enumerate(figures)))
    start = {"ranks": settings.pop("ranks", 1)}
    saved = {"seed": seed, "out_dir": str(folder), "starts": [start]} | settings
    (folder / "config.json").write_text(json.dumps(saved))
    return str(folder)


@pytest.mark.parametrize(("name", "figures", "row"), [
    ("x", [(0.1, 0.4), (0.2, 0.3), (0.3, 0.2)],
     "| x | 0.2000 | 0.3000 | +0.1000 ± 0.2000 | -0.3968 to +0.5968 | -0.1000 | 2/3 |"),
    ("x", [(0.1, 0.4), (0.2, None)], "| x | - | - | - | - | - | - |"),
    ("$a^$\u6f22" + HIDDEN, [(0.1, None)], "| $a^$\u6f22" + "\ufffd" * len(HIDDEN) + " | - | - | - | - | - | - |")])
def test_the_table_over_seeds_holds_means_deviations_and_the_least_change(
        tmp_path, capsys, recwarn, name, figures, row):
    folders = []
    for i, (before, after) in enumerate(figures):
        folders.append(run_folder(tmp_path / f"seed{i}", i, [before, after], name))
    report.main(["seeds", *folders, f"--picture={tmp_path}/p.png"])
    assert capsys.readouterr().out.split("\n")[2] == row and (tmp_path / "p.png").stat().st_size > 1000
    assert not recwarn.list


# Two-sided, from the tables of Student's t in textbooks
@pytest.mark.parametrize(("level", "freedom", "t"), [
    (0.95, 1, 12.7062), (0.95, 2, 4.302653), (0.95, 4, 2.776445), (0.95, 9, 2.262157), (0.95, 30, 2.042272),
    (0.95, 120, 1.979930), (0.90, 4, 2.131847), (0.99, 4, 4.604095), (0.999, 3, 12.9240)])
def test_the_quantiles_of_student_s_t_are_those_of_the_tables(level, freedom, t):
    assert student_quantile(level, freedom) == pytest.approx(t, rel=1e-6, abs=5e-5 if t > 12 else 0)


def test_the_interval_of_paired_differences_contains_the_true_mean_as_often_as_its_level_says():
    rng = random.Random(1)
    for level in (0.8, 0.95):
        hits = 0
        for _ in range(200):
            problems = [rng.gauss(0, 5) for _ in range(3)]  # what a pair has in common cancels out
            a = [x + rng.gauss(0.3, 1) for x in problems]
            b = [x + rng.gauss(0, 1) for x in problems]
            _, low, high = paired(a, b, level)
            hits += low <= 0.3 <= high
        assert abs(hits / 200 - level) < 4 * (level * (1 - level) / 200) ** 0.5


def test_two_sets_of_runs_are_compared_by_seed_at_their_last_step(tmp_path, capsys):
    """The differences are .1, .3 and .2 whatever the order: their mean is .2, their standard error .1 / sqrt(3)."""
    a = [run_folder(tmp_path / f"a{seed}", seed, [0.9, x]) for seed, x in ((1, 0.5), (2, 0.9), (3, 0.7))]
    b = [run_folder(tmp_path / f"b{seed}", seed, [0.1, 0.1, x][-2:]) for seed, x in ((3, 0.5), (1, 0.4), (2, 0.6))]
    report.main(["seeds", *a, "--against", *b])
    out = capsys.readouterr().out
    reach = 4.302653 * 0.1 / 3**0.5
    interval = f"{0.2 - reach:+.4f} to {0.2 + reach:+.4f}"
    assert f"| x | 0.5000 | 0.7000 | +0.2000 ± 0.1000 | {interval} | +0.1000 | 3/3 |\n" in out
    report.main(["seeds", a[0], "--against", b[1]])
    out = capsys.readouterr().out
    assert "| x | 0.4000 | 0.5000 | +0.1000 ± 0.0000 | - | +0.1000 | 1/1 |\n" in out, "a single pair has no interval"


@pytest.mark.parametrize("others", [
    {"seed": 2}, {"figures": [0.1, 0.2, 0.3]}, {"figures": []}, {"seed": 1, "twice": True}], ids=str)
def test_sets_without_pairs_are_not_compared(tmp_path, others):
    twice = others.pop("twice", False)
    a = run_folder(tmp_path / "a", 1, [0.1, 0.2])
    b = run_folder(tmp_path / "b", **{"seed": 1, "figures": [0.1, 0.2]} | others)
    with pytest.raises(Mistake):
        report.main(["seeds", a, *[b] * twice, "--against", b])


def test_settings_that_differ_within_and_between_sets_are_named(tmp_path, capsys):
    def told(*arguments):
        report.main(["seeds", *arguments])
        return [line for line in capsys.readouterr().out.split("\n") if "->" in line]

    same, other, twin = (run_folder(tmp_path / name, seed, [0.1, 0.2], **settings) for name, seed, settings in (
        ("one", 1, {}), ("two", 2, {"objective": "dapo", "ranks": 2}), ("three", 2, {"kl_beta": GRPOConfig.kl_beta})))
    assert told(same, twin) == [], "a setting that an earlier version lacks has its default"
    within, = told(same, other)
    assert {"objective", "dapo", "ranks"} <= set(re.findall(r"\w+", within)) and "seed" not in within
    between, = told(twin, "--against", other)
    told_between = set(re.findall(r"(\w+) '?(\w+)'? -> '?(\w+)", between))
    assert {("ranks", "1", "2"), ("objective", "grpo", "dapo")} <= told_between
    first, _ = told(same, other, "--against", same, twin)
    assert "dapo" in first
