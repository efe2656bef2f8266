"""The page about a run: valid, safe and complete."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from grpo.report import page as page_module
from grpo.report.page import read_metrics, write_report
from tests.tiny import ROOT, jsonl

HIDDEN = "\x00\x1b\u202e\ud800"
EVIL = f"<script>alert(1)</script><!-- </td></table></script><style> &lt; \"'{HIDDEN}"
SHOWN = EVIL.removesuffix(HIDDEN) + len(HIDDEN) * "\ufffd"


def steps(count, slope=0.01):
    """Records of a run of so many steps, with an evaluation at its start and its end."""
    evaluation = lambda step: {"step": step, "eval/judge": 0.5 + slope * step, "eval/kl": slope * step,
                               "eval/reward/a": 1.0}
    training = [{"step": i, "loss": slope * i, "mean_reward": 0.5 + slope * i, "reward/a": 0.25 * i, "lr": 1e-3, "noise": i % 2 * 1e-9, "tiny": i * 1e-7,
                 "time/collect": 0.25, "time/train": 0.5 + i / count} for i in range(1, count + 1)]
    return [evaluation(0), *training, evaluation(count)]


def sample(step, **more):
    texts = {"problem": "a_c__", "truth": "abc\nd", "best": "abcxd", "worst": "axc\nd"}
    return {"step": step, **texts, "best_score": 0.75, "worst_score": -1.5,
            "filled": dict.fromkeys(texts, [[1, 2], [3, 5]])} | more


class Page:
    """The page of a run with these records, read as strictly as XML: it has no script, allows none and loads nothing.

    tables: rows of texts; marks: (class, text) of what was filled in; headings, phases: texts; headline, its titles
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
        self.phases = [span.text for span in root.iterfind(".//figcaption/span")]
        self.text, self.titles = "".join(root.itertext()), [x.get("title") for x in root.iterfind(".//div/div")]
        self.headline = ["".join(box.itertext()) for box in root.iterfind(".//div/div[@title]")]
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
                             "Seconds of a step by phase", "Never changed", "Settings",
                             "Machine, versions, command"]
    assert page.tables[0] == [["metric", "before", "step 6", "change"], ["judge", "0.5000", "-", ""],
                              ["kl", "0.0000", "-", ""], ["reward/a", "1.0000", "-", ""],
                              ["reward/b", "-", "0.7500", ""]], "what was not measured is no older number"
    assert page.tables[-2] == [["setting", "value", "default", "set in"], ["seed", "3", "1", "command line"],
                               ["stop", "['a']", "None", "config/a.py"]]
    assert page.tables[-1] == [["command", "python grpo/train_grpo.py"]]
    assert "running, or not ended properly: at step 9 when this page was written" in page.html
    assert "eval/reward/a 1, lr 0.00100, noise 5.00e-10\n" in page.text
    parts = {part.split("</h2>")[0]: re.findall("<figcaption[^>]*>([^ ]+) ", part) for part in page.html.split("<h2>")[1:]}
    assert parts["Held out"] == ["eval/judge", "eval/kl", "eval/reward/b"]
    assert parts["Rewards"] == ["mean_reward", "reward/a"] and parts["Training"] == ["loss", "tiny"]
    assert page.phases == ["collect 0.250", "train 1.12"]


def test_what_was_filled_in_is_marked_by_the_verdict_of_the_reward_and_not_by_the_stored_solution(page_of):
    board, hidden = "3142\n2431\n4213\n1324\n", [[0, 2], [6, 7]]
    texts = {"problem": "__42\n2_31\n4213\n1324\n", "truth": "1342\n2431\n4213\n1324\n", "best": board, "worst": board}
    record = {"step": 1, **texts, "best_score": 2.0, "worst_score": 0.5, "best_right": True, "worst_right": False,
              "filled": dict.fromkeys(texts, hidden)}
    page = page_of(steps(4), [record, sample(1, extra={"n": 1}, other={}, hint=None)])
    assert page.marks[4:8] == [("right", "31"), ("right", "4"), ("wrong", "31"), ("wrong", "4")]
    assert [row[0] for row in page.tables[1][2:]] == ["best 2 right", "worst 0.500 wrong"]
    assert page.marks[-4:] == [("filled", "b"), ("filled", "xd"), ("filled", "x"), ("filled", "\nd")]
    assert page.tables[2] == [["problem", "a_c__"], ["truth", "abc\nd"], ["best 0.750", "abcxd"], ["worst -1.50", "axc\nd"],
                              ["extra", "{'n': 1}"]]


def test_the_headline_says_what_is_better_and_a_group_has_the_colours_of_its_rewards(page_of):
    names = ["1 of 3", "2 of 3", "3 of 3"]
    group = {"group": names, "credit": {names[0]: [3.0, 1.0], names[1]: [0.0, 1.0], names[2]: [-3.0, 1.0]}}
    group |= dict.fromkeys(names, "ab") | {f"{name}_score": 7.0 for name in names}
    ends = [{"step": step, "eval/kl": step, "eval/judge": 0.25 + step / 1e5, "eval/reward/b": -step,
             "eval/reward/long": 1234.5 - step, "eval/sampled_accuracy": x} for step, x in ((0, 0.33789), (3, 0.92999))]
    settings = {"reward_functions": {"value": ["b", "long"]}, "reward_weights": {"value": [1.0, -0.5]}}
    page = page_of(ends, [sample(3, **group, filled=dict.fromkeys(names, [[0, 1], [1, 2]]))], settings=settings)
    assert page.headline == ["sampled_accuracy 0.338 → 0.930 better", "reward/b 0 → -3 worse",
                             "reward/long 1234 → 1232 better", "judge 0.250 → 0.250 equal"]
    meanings = Path(ROOT, "docs/metrics.md").read_text("utf-8").replace("`", "")
    assert all(title and title in meanings for title in page.titles)
    assert [row[0] for row in page.tables[1]] == ["problem", "truth", *(f"{name} 7" for name in names)]
    assert [kind for kind, _ in page.marks] == ["a2", "a0", "a0", "a0", "a-2", "a0"]
    assert 'title="reward -3"' in page.html


def test_whatever_a_model_writes_stays_text_and_no_script_runs_and_nothing_is_loaded(page_of):
    record = dict.fromkeys(("problem", "best", "worst", EVIL), EVIL) | {"step": 1, "filled": {"best": [[3, 60]]}}
    records = [*steps(2), {"step": 2, EVIL: 1.0, f"time/{EVIL}": 1.0, "time/train": 1.0, f"eval/{EVIL}": None}]
    page = page_of(records, [record], command=EVIL, settings={EVIL: {"value": EVIL, "default": EVIL, "set in": EVIL}})
    assert [row[1] for row in page.tables[1]] == [SHOWN] * 4 and page.tables[1][-1][0] == SHOWN
    assert page.tables[-1] == [["command", SHOWN]] and [SHOWN] * 4 in page.tables[-2]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.html)


def test_a_name_of_the_user_is_in_no_path_but_samples_are_shown_as_they_were_written(page_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written = f"cd {tmp_path}/x"
    out_dir = {"value": str(tmp_path / "run"), "default": None, "set in": "command line"}
    page = page_of(steps(4), [{"step": 1, "best": written}], command=f"--a={tmp_path}", settings={"out_dir": out_dir})
    assert page.tables[1] == [["best", written]]
    html = page.html.replace(written, "")
    assert str(tmp_path) not in html and "~/run" in html and "--a=~<" in html


def test_the_size_is_bounded(tmp_path):
    long = sample(0, best="x" * 5000, filled={})
    short, page = (Page(tmp_path / str(count), steps(count), [long | {"step": i} for i in range(count // 10)]).html
                   for count in (1000, 6000))
    assert len(page) < 1.2 * len(short) < 720_000
    shown = [int(step) for step in re.findall("<summary>step ([0-9]+)", page)]
    assert shown == [0, *range(600 - page_module.SETS + 1, 600)] and "and 1000 characters" in page


def test_of_a_long_run_all_evaluations_and_the_last_step_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "STEPS", 10)
    jsonl(tmp_path / "metrics.jsonl", *({"step": i, "loss" if i % 9 else "eval/x": float(i)} for i in range(95)))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 95, "lo')  # the run is writing, or was ended
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if "eval/x" in r] == list(range(0, 95, 9))
    kept = [r["step"] for r in records if "loss" in r]
    assert kept[-1] == 94 and len(kept) <= 10 and {b - a for a, b in zip(kept, kept[1:])} <= {10, 20}


@pytest.mark.parametrize("records", [steps(4)[:1], steps(4)[1:-1], [{"step": 1, "loss": None}]])
def test_a_run_has_a_page_from_its_first_record_on(page_of, records):
    page = page_of(records)
    assert not {"Held out, before and after", "Samples", "Settings"} & set(page.headings)
