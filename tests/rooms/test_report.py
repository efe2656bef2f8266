"""The page about a run is valid, safe and complete; its charts show what was logged; tables and pictures over seeds."""

import json
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from grpo.report import page as page_module
from grpo.report.page import BOTTOM, LEFT, RIGHT, TOP, chart, draw_curves, read_metrics, text, write_report
from grpo.tools import report
from tests.tiny import jsonl

HIDDEN = "\x00\x1b\u202e\ud800"
EVIL = f"<script>alert(1)</script><!-- </td></table></script><style> &lt; \"'{HIDDEN}"
SHOWN = EVIL.removesuffix(HIDDEN) + len(HIDDEN) * "\ufffd"


def steps(count, slope=0.01):
    """Records of a run of so many steps, with an evaluation at its start and its end."""
    def evaluation(step):
        return {"step": step, "eval/judge": 0.5 + slope * step, "eval/kl": slope * step, "eval/reward/a": 1.0}

    training = []
    for i in range(1, count + 1):
        training.append({"step": i, "loss": slope * i, "mean_reward": 0.5 + slope * i, "lr": 1e-3, "tiny": i * 1e-7,
                         "noise": i % 2 * 1e-9, "time/collect": 0.25, "time/train": 0.5 + i / count})
    return [evaluation(0), *training, evaluation(count)]


def sample(step, *texts, **more):
    group = [{"text": text, "reward": 1.0 - i} for i, text in enumerate(texts or ("abcxd", "axc\nd"))]
    return {"step": step, "problem": "a_c__", "answer": "abc\nd", "group": group} | more


class Page:
    """The page of a run with these records, read as strictly as XML: it has no script, allows none and loads nothing.

    tables: rows of texts; marks: (class, text) of what was filled in; headings, headline: texts
    """

    def __init__(self, folder, records, samples=(), **start):
        folder.mkdir()
        jsonl(folder / "metrics.jsonl", *records)
        jsonl(folder / "samples.jsonl", *samples)
        if start:
            (folder / "config.json").write_text(json.dumps({"seed": 3, "starts": [{"step": 7, "end": {}}, start]}))
        with open(write_report(str(folder)), encoding="utf-8") as f:
            self.html = f.read()
        assert self.html.startswith("<!DOCTYPE html>\n")
        root = ElementTree.fromstring(re.sub("<style>.*?</style>", "", self.html, count=1, flags=re.DOTALL))
        assert "default-src 'none'; style-src 'unsafe-inline'" == root.find("head/meta[@http-equiv]").get("content")
        assert not {"script", "style", "link", "img", "iframe", "form"} & {element.tag for element in root.iter()}
        attributes = {name for element in root.iter() for name in element.attrib}
        assert not any(name.startswith("on") or name in ("src", "href", "style", "action") for name in attributes)
        self.text = "".join(root.itertext())
        self.headline = ["".join(box.itertext()) for box in root.iterfind(".//div/div")]
        self.headings = [element.text for element in root.iter("h2")]
        self.marks = [(mark.get("class"), mark.text) for mark in root.iterfind(".//td[2]//span")]
        self.tables = [[["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
                       for table in root.iter("table")]


@pytest.fixture
def page_of(tmp_path):
    return lambda *arguments, **start: Page(tmp_path / "run", *arguments, **start)


def test_a_run_has_all_parts_and_its_numbers_and_settings_are_in_the_tables(page_of):
    settings = {"seed": {"value": 3, "default": 1, "set in": "command line"},
                "stop": {"value": ["a"], "default": None, "set in": "config/a.py"}}
    records = [*steps(4), {"step": 5, "eval/reward/b": 0.5, "eval/judge": None}, {"step": 6, "eval/reward/b": 0.75},
               {"step": 9, "loss": 0.1}]
    page = page_of(records, [sample(0), sample(4)], settings=settings, command="python grpo/train_grpo.py")
    assert page.headings == ["Held out, before and after", "Held out", "Samples", "Rewards", "Training",
                             "Seconds of a step by phase", "Never changed", "Settings", "Machine, versions, command"]
    assert page.tables[0] == [["metric", "before", "step 6", "change"], ["judge", "0.5000", "-", ""],
                              ["kl", "0.0000", "-", ""], ["reward/a", "1.0000", "-", ""],
                              ["reward/b", "-", "0.7500", ""]], "what was not measured is no older number"
    assert page.tables[-2] == [["setting", "value", "default", "set in"], ["seed", "3", "1", "command line"],
                               ["stop", "['a']", "None", "config/a.py"]]
    assert page.tables[-1] == [["command", "python grpo/train_grpo.py"]] and "at step 9" in page.html
    parts = {part.split("</h2>")[0]: re.findall("<figcaption>([^ ]+) ", part) for part in page.html.split("<h2>")[1:]}
    assert parts["Held out"] == ["eval/judge", "eval/kl", "eval/reward/b"] and parts["Rewards"] == ["mean_reward"]
    assert parts["Training"] == ["loss", "tiny"] and parts["Seconds of a step by phase"] == ["time/train"]
    assert "eval/reward/a 1.0000, lr 0.0010, noise 0.0000, time/collect 0.2500" in page.text


def test_what_was_filled_in_has_the_colour_of_its_verdict_or_of_its_reward_and_the_headline_has_both_ends(page_of):
    ends = [{"step": step, "eval/kl": step, "eval/reward/b": -step, "eval/sampled_accuracy": x}
            for step, x in ((0, 0.33789), (3, 0.92999))]
    judged = [{"text": "31\n42", "reward": 2.0, "right": True, "filled": [[0, 2], [3, 4]]},
              {"text": "13\n42", "reward": 0.5, "right": False, "filled": [[0, 1]], "logged": {"n": 1}}]
    group = [{"text": "ab", "reward": 7.0, "filled": [[0, 1], [1, 2]], "credit": [x, 1.0]} for x in (3.0, 0.0, -3.0)]
    page = page_of(ends, [sample(3, group=judged), sample(3, group=group)])
    assert page.headline == ["reward/b 0 → -3", "sampled_accuracy 0.3379 → 0.9300"]
    assert page.marks[:3] == [("right", "31"), ("right", "4"), ("wrong", "1")]
    assert page.tables[1] == [["problem", "a_c__"], ["answer", "abc\nd"], ["2.0000 right", "31\n42"],
                              ["0.5000 wrong", "13\n42 n: 1"]]
    assert [kind for kind, _ in page.marks[3:]] == ["a2", "a0", "a0", "a0", "a-2", "a0"]
    assert 'title="reward -3.0000"' in page.html


def test_whatever_a_model_writes_stays_text_and_no_script_runs_and_nothing_is_loaded(page_of):
    group = [{"text": EVIL, "reward": 1.0, "filled": [[3, 60]], "logged": {EVIL: EVIL}}]
    records = [*steps(2), {"step": 2, EVIL: 1.0, f"time/{EVIL}": 1.0, "time/train": 1.0, f"eval/{EVIL}": None}]
    page = page_of(records, [sample(1, problem=EVIL, answer=EVIL, group=group)], command=EVIL,
                   settings={EVIL: {"value": EVIL, "default": EVIL, "set in": EVIL}})
    assert [row[1] for row in page.tables[1]] == [SHOWN, SHOWN, f"{SHOWN} {SHOWN}: {SHOWN}"]
    assert page.tables[-1] == [["command", SHOWN]] and [SHOWN] * 4 in page.tables[-2]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.html)
    assert text("a\u202eb\u200b\r\n\x85") == "a\ufffdb\ufffd\ufffd\n\ufffd" and text("é 漢 🙂") == "é 漢 🙂"


def test_a_name_of_the_user_is_in_no_path_but_samples_are_shown_as_they_were_written(page_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written = f"cd {tmp_path}/x"
    out_dir = {"value": str(tmp_path / "run"), "default": None, "set in": "command line"}
    page = page_of(steps(4), [sample(1, written)], command=f"--a={tmp_path}", settings={"out_dir": out_dir})
    assert page.tables[1][-1] == ["1.0000", written]
    html = page.html.replace(written, "")
    assert str(tmp_path) not in html and "~/run" in html and "--a=~<" in html


def test_of_a_long_run_all_evaluations_the_last_step_and_a_few_samples_are_shown(page_of, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "STEPS", 10)
    page = page_of([{"step": i, "loss" if i % 9 else "eval/x": float(i)} for i in range(95)], map(sample, range(60)))
    shown = [int(step) for step in re.findall("<summary>step ([0-9]+)", page.html)]
    assert shown == [0, *range(60 - page_module.SETS + 1, 60)]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as f:
        f.write('{"step": 95, "lo')  # the run is writing, or was ended
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "eval/x" in r] == list(range(0, 95, 9))
    kept = [r["step"] for r in records if "loss" in r]
    assert kept[-1] == 94 and len(kept) <= 10 and {b - a for a, b in zip(kept, kept[1:])} <= {10, 20}


# Charts


def svg_of(figure):
    return ElementTree.fromstring(figure).find("svg")


def line_of(svg):
    """The path of the curve, and [(x, y)] of its points."""
    path = svg.find("path[@class='line']").get("d")
    return path, [tuple(map(float, pair)) for pair in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]


def scales(svg):
    """(x -> step, y -> number), from two labels of each axis."""
    marks = {"x": [], "y": []}
    for label in svg.findall("text")[1:]:  # the first names the axis
        side = label.get("class") or "x"
        marks[side].append((float(label.get(side)), float(label.text)))

    def scale(found):
        (a, low), (b, high) = found[0], found[-1]
        return lambda place: low + (place - a) / (b - a) * (high - low)
    return scale(marks["x"]), scale(marks["y"])


@pytest.mark.parametrize("numbers", [[0.1, 0.9, 0.4, 0.5], [-3e-5, 2e-5, 0.0, 1e-5], [20000.0, 12000.5, 17000.0, 1.5e4],
                                     [5.0] * 4, [0.0] * 4])
def test_a_point_is_where_the_labels_of_the_axes_say(numbers):
    points = list(zip((0, 100, 250, 320), numbers, strict=True))
    svg = svg_of(chart("x", 320, points))
    step_at, number_at = scales(svg)
    _, found = line_of(svg)
    span = (max(numbers) - min(numbers)) or abs(numbers[0]) or 1.0
    assert [step_at(x) for x, _ in found] == pytest.approx([step for step, _ in points], abs=1)
    assert [number_at(y) for _, y in found] == pytest.approx(numbers, abs=span / 100)
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in found)


def test_what_is_not_finite_is_a_gap():
    svg = svg_of(chart("x", 5, [(1, None), (2, 1.0), (3, 2.0), (4, None), (5, 3.0)]))
    assert re.sub("[^ML]", "", line_of(svg)[0]) == "MLM"
    alone = chart("<b>&", 5, [(1, None)])
    assert line_of(svg_of(alone))[0] == "" and "&lt;b&gt;&amp; <b>not finite</b>" in alone


# Over seeds


def test_a_picture_has_a_panel_for_each_metric_with_mean_deviation_and_start(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append(figure))
    draw_curves([[{"step": 0, "eval/a_judge": 0.75}, {"step": 1, "eval/a_judge": 0.85}],
                 [{"step": 0, "eval/a_judge": 0.8}, {"step": 1, "eval/a_judge": 1.0}]], "curves.png")
    judge, = figures[0].axes
    mean, before = (line.get_ydata() for line in judge.get_lines())
    assert [*mean, *before] == pytest.approx([0.775, 0.925, 0.775, 0.775]) and judge.get_title() == "a judge"
    band = judge.collections[0].get_datalim(judge.transData)
    assert (band.y0, band.y1) == pytest.approx((0.775 - 0.05 / 2**0.5, 0.925 + 0.15 / 2**0.5)), "one to each side"


def write_run(folder, before, after):
    folder.mkdir()
    records = [{"step": 0, "eval/x": before, "eval/kl": 0.0}, {"step": 1, "loss": 1.0},
               {"step": 1, "eval/x": after, "eval/kl": 0.5}]
    jsonl(folder / "metrics.jsonl", *records)
    return str(folder)


@pytest.mark.parametrize(("figures", "row"), [
    ([(0.1, 0.4), (0.2, 0.3), (0.3, 0.2)], "| x | 0.2000 | 0.3000 | +0.1000 ± 0.2000 | -0.1000 | 2/3 |"),
    ([(0.1, 0.4)], "| x | 0.1000 | 0.4000 | +0.3000 ± 0.0000 | +0.3000 | 1/1 |"),
    ([(0.1, 0.4), (0.2, None)], "| x | - | - | - | - | - |")])
def test_the_table_over_seeds_holds_means_deviations_and_the_least_change(tmp_path, capsys, monkeypatch, figures, row):
    drawn = []
    monkeypatch.setattr(report, "draw_curves", lambda runs, path: drawn.extend([len(runs), path]))
    report.main(["seeds", *(write_run(tmp_path / f"r{i}", *pair) for i, pair in enumerate(figures)), "--picture=p.png"])
    rows = capsys.readouterr().out.split("\n")[2:-1]
    assert rows[0] == row and rows[1].startswith("| kl | 0.0000 | 0.5000 | +0.5000 ± 0.0000")
    assert drawn == [len(figures), "p.png"]
