"""The page about runs: valid, safe, complete, and working in a browser if one is installed."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from grpo.report import run_files
from grpo.report.page import write_report
from tests.tiny import jsonl

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HIDDEN = "\x00\x1b\u202e\ud800"
EVIL = f"<script>alert(1)</script><!-- </td></table></script><style> &lt; \"'{HIDDEN}"


def steps(count, slope=0.01):
    """Records of a run of so many steps, with an evaluation at its start and its end."""
    evaluation = lambda step: {"step": step, "eval/judge": 0.5 + slope * step, "eval/kl": slope * step,
                               "eval/reward/a": 1.0}
    training = [{"step": i, "loss": slope * i, "mean_reward": 0.5 + slope * i, "reward/a": 0.25 * i, "lr": 1e-3,
                 "time/collect": 0.25, "time/train": 0.5 + i / count} for i in range(1, count + 1)]
    return [evaluation(0), *training, evaluation(count)]


def write_run(folder, records=None, samples=(), config=None, **start):
    folder.mkdir()
    jsonl(folder / "metrics.jsonl", *(steps(4) if records is None else records))
    jsonl(folder / "samples.jsonl", *samples)
    starts = {"starts": [{"step": 0} | start]} if start else {}
    if config is not None or start:
        (folder / "config.json").write_text(json.dumps((config or {}) | starts))
    return str(folder)


def sample(step, **more):
    texts = {"problem": "a_c__", "truth": "abc\nd", "best": "abcxd", "worst": "axc\nd"}
    return {"step": step, **texts, "best_score": 0.75, "worst_score": -1.5,
            "filled": dict.fromkeys(texts, [[1, 2], [3, 5]])} | more


class Page:
    """A page, read as strictly as XML, in which no attribute loads or runs anything.

    tables: rows of texts; marks: (class, text); scripts, headings: texts
    """

    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            self.html = f.read()
        assert self.html.startswith("<!DOCTYPE html>\n")
        self.scripts = re.findall("<script>(.*?)</script>", self.html, re.DOTALL)
        root = ElementTree.fromstring(re.sub(r"<(style|script)>.*?</\1>", "", self.html, flags=re.DOTALL))
        attributes = {name for element in root.iter() for name in element.attrib}
        assert not any(name.startswith("on") or name in ("src", "href", "style", "action") for name in attributes)
        self.headings = [element.text for element in root.iter() if element.tag in ("h2", "summary")]
        self.marks = [(mark.get("class"), mark.text) for mark in root.iter("mark")]
        self.tables = [[["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
                       for table in root.iter("table")]


def page_of(tmp_path, *arguments, **settings):
    return Page(write_report(write_run(tmp_path / "run", *arguments, **settings)))


def test_a_run_has_all_parts_and_its_numbers_and_settings_are_in_the_tables(tmp_path):
    settings = {"seed": {"value": 3, "default": 1, "set in": "command line"},
                "stop": {"value": ["a"], "default": None, "set in": "config/a.py"}}
    records = [*steps(4), {"step": 5, "eval/reward/b": 0.5, "eval/judge": None}, {"step": 6, "eval/reward/b": 0.75},
               {"step": 9, "loss": 0.1}]
    page = page_of(tmp_path, records, [sample(0), sample(4)], {"seed": 3, "stop": ["a"]}, settings=settings,
                   time="2030-01-02 03:04 UTC", command="python grpo/train_grpo.py")
    assert page.headings == ["Held out, before and after", "Held out", "Samples", "Rewards", "Training",
                             "Seconds of a step by phase", "Never changed", "Settings",
                             "Machine, versions, command"]
    assert page.tables[0] == [["metric", "before", "step 6", "change"], ["judge", "0.5000", "-", ""],
                              ["kl", "0.0000", "-", ""], ["reward/a", "1.0000", "-", ""],
                              ["reward/b", "-", "0.7500", ""]], "what was not measured is no older number"
    assert page.tables[-2] == [["setting", "value", "default", "set in"], ["seed", "3", "1", "command line"],
                               ["stop", "['a']", "None", "config/a.py"]]
    assert page.tables[-1] == [["", "run"], ["step", "0"], ["time", "2030-01-02 03:04 UTC"],
                               ["command", "python grpo/train_grpo.py"]]
    html = page.html
    assert "running, or not ended properly: at step 9 when this page was written" in html
    assert "<p>eval/reward/a 1, lr 0.001, time/collect 0.25</p>" in html
    parts = {part.split("</h2>")[0]: re.findall("<figcaption>([^ ]+) ", part) for part in html.split("<h2>")[1:]}
    assert parts["Held out"] == ["eval/judge", "eval/kl", "eval/reward/b"]
    assert parts["Rewards"] == ["mean_reward", "reward/a"] and parts["Training"] == ["loss"]
    assert parts["Seconds of a step by phase"] == ["time/train"]


def test_what_was_filled_in_is_marked_by_the_verdict_of_the_reward_and_not_by_the_stored_solution(tmp_path):
    board, hidden = "3142\n2431\n4213\n1324\n", [[0, 2], [6, 7]]
    texts = {"problem": "__42\n2_31\n4213\n1324\n", "truth": "1342\n2431\n4213\n1324\n", "best": board, "worst": board}
    record = {"step": 1, **texts, "best_score": 2.0, "worst_score": 0.5, "best_right": True, "worst_right": False,
              "filled": dict.fromkeys(texts, hidden)}
    page = page_of(tmp_path, None, [record, sample(1)])
    verdicts = [("right", "31"), ("right", "4"), ("wrong", "31"), ("wrong", "4")]
    assert page.marks[:2] == [("right", "right"), ("wrong", "wrong")] and page.marks[6:10] == verdicts
    assert [row[0] for row in page.tables[1][3:]] == ["best 2 right", "worst 0.5 wrong"]
    assert '<table class="samples board">' in page.html
    assert page.marks[-4:] == [("filled", "b"), ("filled", "xd"), ("filled", "x"), ("filled", "\nd")]
    assert page.tables[2] == [["", "text"], ["problem", "a_c__"], ["truth", "abc\nd"], ["best 0.75", "abcxd"],
                              ["worst -1.5", "axc\nd"]]


def test_a_sample_of_several_turns_tells_answers_of_the_environment_apart(tmp_path):
    turns = [["policy", "43\n"], ["environment", EVIL], ["policy", "> 5\n"]]
    record = {"step": 2, "problem": "1-9:", "best": f"43\n{EVIL}> 5\n", "worst": "99", "best_score": 1, "best_turns": turns,
              "worst_turns": [["policy", "99"]]}
    page = page_of(tmp_path, None, [record, sample(2)])
    shown = EVIL.removesuffix(HIDDEN) + len(HIDDEN) * "\ufffd"
    assert page.tables[1] == [["", "text turn by turn, > what the environment answered"], ["problem", "1-9:"],
                              ["best 1", f"43\n> {shown}> 5\n"], ["worst", "99"]]
    divisions = ElementTree.fromstring(re.search("<td>(<div>43.*?)</td>", page.html, re.DOTALL)[0]).findall("div")
    assert [(x.get("class"), x.text) for x in divisions] == [(None, "43\n"), ("answer", f"> {shown}"), (None, "> 5\n")]
    assert "answer" not in str(page.tables[2]), "of a sample of one turn nothing changes"


def test_an_episode_is_shown_up_to_a_limit(tmp_path):
    turns = [["policy", "a" * 3000], ["environment", "b" * 3000], ["policy", "c" * 3000]]
    record = {"step": 2, "problem": "1-9:", "best": "x", "best_turns": turns}
    assert page_of(tmp_path, None, [record]).tables[1][2][1] == "a" * 3000 + "> " + "b" * 1000 + " and 5000 characters"


def test_samples_of_prompts_show_all_that_the_record_holds(tmp_path):
    record = {"step": 2, "problem": "1+1=", "answer": "2", "best": "2", "worst": "", "best_score": 1, "worst_score": 0,
              "best_extra": {"n": 1}, "worst_extra": {}, "hint": None}
    assert page_of(tmp_path, None, [record]).tables[1] == [
        ["", "text"], ["problem", "1+1="], ["answer", "2"], ["best 1", "2"], ["worst 0", ""],
        ["best_extra", "{'n': 1}"]]


def test_whatever_a_model_writes_stays_text(tmp_path):
    shown = EVIL.removesuffix(HIDDEN) + len(HIDDEN) * "\ufffd"
    record = dict.fromkeys(("problem", "best", "worst", EVIL), EVIL) | {"step": 1, "filled": {"best": [[3, 60]]}}
    records = [*steps(2), {"step": 2, EVIL: 1.0, f"time/{EVIL}": 1.0, "time/train": 1.0}]
    page = page_of(tmp_path, records, [record], {EVIL: EVIL}, command=EVIL, settings={
        EVIL: {"value": EVIL, "default": EVIL, "set in": EVIL}})
    assert [row[1] for row in page.tables[1][1:]] == [shown] * 4 and page.tables[1][-1][0] == shown
    assert page.tables[-1][2] == ["command", shown] and [shown] * 4 in page.tables[-2]
    assert len(page.scripts) == 1 and page.scripts[0].startswith('"use strict"')


def test_the_only_script_is_the_one_whose_hash_the_page_allows_and_nothing_is_loaded(tmp_path):
    page = page_of(tmp_path, None, [sample(1)])
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in page.html
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|eval\(|innerHTML", page.html)


def test_a_name_of_the_user_is_in_no_path_but_samples_are_shown_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written = f"cd {tmp_path}/x"
    out_dir = {"value": str(tmp_path / "run"), "default": None, "set in": "command line"}
    page = page_of(tmp_path, None, [{"step": 1, "best": written}], command=f"--a={tmp_path}",
                   settings={"out_dir": out_dir})
    assert page.tables[1][1] == ["best", written]
    html = page.html.replace(written, "")
    assert str(tmp_path) not in html and "~/run" in html and "--a=~<" in html


def test_the_size_is_bounded(tmp_path):
    long = sample(0, best="x" * 5000, filled={})
    small, large = (write_run(tmp_path / name, steps(count), [long | {"step": i} for i in range(count // 10)])
                    for name, count in (("small", 1000), ("large", 6000)))
    short, page = (Page(write_report(folder)).html for folder in (small, large))
    assert len(page) < 1.2 * len(short) < 720_000
    shown = [int(step) for step in re.findall('data-step="([0-9]+)"', page)]
    assert shown == [0, *range(600 - run_files.SETS + 1, 600)] and "and 1000 characters" in page


@pytest.mark.parametrize("records", [steps(4)[:1], steps(4)[1:-1], [{"step": 1, "loss": None}]])
def test_a_run_has_a_page_from_its_first_record_on(tmp_path, records):
    page = page_of(tmp_path, records)
    assert "Samples" not in page.headings and "Settings" not in page.headings


def test_several_runs_are_side_by_side_with_the_settings_in_which_they_differ(tmp_path):
    a = write_run(tmp_path / "a", config={"seed": 1, "lr": 1.0, "only": 2}, samples=[sample(1)], torch="1")
    b = write_run(tmp_path / "b", [*steps(8, 0.02), {"step": 8, "mine": 1.0}, {"step": 8, "mine": 2.0}], torch="1",
                  config={"seed": 2, "lr": 1.0}, python="3")
    path = str(tmp_path / "both.html")
    assert write_report(a, b, path=path) == path
    page = Page(path)
    assert "Samples" not in page.headings
    assert page.tables[0][:2] == [["metric", "a", "b"],
                                  ["judge", "0.5000 → 0.5400+0.0400", "0.5000 → 0.6600+0.1600"]]
    assert page.tables[1:] == [[["setting", "a", "b"], ["seed", "1", "2"], ["only", "2", "None"]],
                               [["", "a", "b"], ["step", "0", "0"], ["torch", "1", "1"], ["python", "", "3"]]]
    colors = lambda name: re.findall('class="(c.)"', re.search(f"<figcaption>{name} .*?</figcaption>", page.html)[0])
    assert colors("loss") == ["c0", "c1"] and colors("mine") == ["c1"], "a run has one color in all charts"
    assert '<b class="c0">a</b> <b class="c1">b</b></h1>' in page.html and page.html.count("<title>a, b</title>") == 1


# In a browser


@pytest.fixture
def browse(tmp_path):
    """browse(page, script, width): the title that a script, added to a copy of the page in a frame of this width, gives
    to the window, and what the console of the browser has. Skips where no browser is installed."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"no browser is installed (one of {', '.join(BROWSERS)})")

    def run(page, script, width=1000, *flags):
        copy = tmp_path / "copy.html"
        inner = page.replace("</body>", f"<script>{script}</script></body>")
        copy.write_text(f'<!DOCTYPE html><title>nothing</title><iframe width={width} height=900 srcdoc="'
                        f'{html.escape(inner)}"></iframe>', encoding="utf-8")
        done = subprocess.run([binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
                               "--hide-scrollbars", *flags, copy.as_uri()], capture_output=True, text=True, timeout=60)
        title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
        assert title, done.stderr
        return html.unescape(title[1]), [line for line in done.stderr.split("\n") if "CONSOLE" in line]
    return run


def without_policy(page):
    """A page in which the test's own script may run."""
    found = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert found != page
    return found


@pytest.mark.slow
def test_in_a_browser_all_charts_show_their_values_at_the_step_under_the_pointer(tmp_path, browse):
    records = [*steps(40), *({"step": i, "eval/judge": float(i)} for i in (60, 80))]
    page = without_policy(page_of(tmp_path, records).html)
    script = """
    const captions = [...document.querySelectorAll("figcaption")];
    const caption = name => captions.find(f => f.textContent.startsWith(name + " "));
    const values = () => ["loss", "eval/judge", "time/train"].map(name => [...caption(name).querySelectorAll("b")].map(
      b => b.textContent).join(" "));
    const point = (name, step) => {
      const svg = caption(name).parentNode.querySelector("svg"), box = svg.getBoundingClientRect();
      const [left, right, , last] = svg.dataset.plot.split(" ").map(Number);
      const x = box.left + (left + (right - left) * step / last) / 320 * box.width;
      svg.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: box.top + 50, bubbles: true}));
    };
    const seen = [values()];
    for (const [name, step] of [["loss", 7], ["loss", 39], ["eval/judge", 59], ["time/train", -30]]) {
      point(name, step);
      const mark = caption(name).parentNode.querySelector("svg");
      const label = mark.lastChild, box = label.getBBox(), visible = box.y + box.height <= mark.viewBox.baseVal.height;
      const line = mark.querySelector("path:not([class])").getAttribute("d");
      seen.push([...values(), visible && label.textContent, line]);
    }
    caption("time/train").parentNode.querySelector("svg").dispatchEvent(new PointerEvent("pointerleave"));
    seen.push(values());
    top.document.title = JSON.stringify(seen);
    """
    title, console = browse(page, script)
    end = ["0.4", "80", "1.5"]
    x = lambda step: f"M{48 + 264 * step / 80:g} 0V128"
    assert not console
    assert json.loads(title) == [
        end, ["0.07", "0.5", "0.675", "step 7", x(7)], ["0.39", "0.9", "1.475", "step 39", x(39)],
        ["0.4", "60", "1.5", "step 60", x(60)], ["0.01", "0.5", "0.525", "step 1", x(1)], end]


@pytest.mark.slow
def test_in_a_browser_the_slider_and_its_buttons_show_one_evaluation_at_a_time(tmp_path, browse):
    records = [sample(step, problem=f"problem of step {step}") for step in (0, 0, 5, 10)]
    page = without_policy(page_of(tmp_path, None, records).html)
    script = """
    const slider = document.querySelector(".slider"), [previous, range, next] = slider.children, seen = [];
    const look = () => seen.push(slider.innerText.match(/[0-9]+/)[0] + ":" + [...document.querySelectorAll(".samples")]
      .filter(t => t.offsetHeight).map(t => t.innerText.match(/problem of step ([0-9]+)/)[1]));
    look(); next.click(); look(); previous.click(); look(); previous.click(); look(); previous.click(); look();
    range.value = 1; range.dispatchEvent(new Event("input")); look(); next.click(); look();
    top.document.title = seen.join(" ");
    """
    assert browse(page, script) == ("10:10 10:10 5:5 0:0,0 0:0,0 5:5 10:10", [])


@pytest.mark.slow
def test_in_a_browser_a_script_in_a_text_does_not_run_and_would_not_even_if_it_were_not_escaped(tmp_path, browse):
    evil = "<script>top.document.title = 'evil'</script><img src=x onerror=\"top.document.title = 'evil'\">"
    page = page_of(tmp_path, None, [sample(1, best=evil, filled={})]).html
    probe = "top.document.title += [...document.querySelectorAll('td')].filter(t => t.innerText === %s).length"
    assert browse(without_policy(page), probe % json.dumps(evil).replace("/", "\\/")) == ("nothing1", [])
    unescaped = page.replace(html.escape(evil), evil)
    assert unescaped != page
    title, console = browse(unescaped, "")
    assert title == "nothing" and any("Content Security Policy" in line for line in console)
    assert browse(without_policy(unescaped), "")[0] == "evil"
