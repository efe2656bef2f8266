"""The page about runs: valid, safe, complete, and working in a browser if one is installed."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from grpo.report import page as report_page
from grpo.report import run_files
from grpo.report.page import write_report
from tests.tiny import jsonl

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
EVIL = "<script>alert(1)</script><!-- </td></table></script><style> &lt; \"'\x00\x1b\u202e"
VOID = {"meta", "br", "input", "path", "circle"}  # elements without an end tag, or that the page closes at once


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
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if start:
        jsonl(folder / "starts.jsonl", {"step": 0} | start)
    return str(folder)


def sample(step, **more):
    texts = {"problem": "a_c__", "truth": "abc\nd", "best": "abcxd", "worst": "axc\nd"}
    return {"step": step, **texts, "best_score": 0.75, "worst_score": -1.5,
            "filled": dict.fromkeys(texts, [[1, 2], [3, 5]])} | more


class Page(HTMLParser):
    """A strict reading: every element is closed in its order, ids are unique, no attribute loads or runs anything.

    tables: rows of texts; marks: (class, text); scripts, headings: texts
    """

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.tables, self.marks, self.scripts, self.headings = [], set(), [], [], [], []
        assert page.startswith("<!DOCTYPE html>\n")
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), (tag, names)
        assert not any(name.startswith("on") or name in ("src", "href", "style", "action") for name in names), names
        if "id" in names:
            assert dict(attributes)["id"] not in self.ids
            self.ids.add(dict(attributes)["id"])
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "mark":
            self.marks.append((dict(attributes)["class"], ""))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        if self.open and self.open[-1] == "mark":
            self.marks[-1] = (self.marks[-1][0], self.marks[-1][1] + data)
        if self.open and self.open[-1] in ("h2", "summary"):
            self.headings.append(data)


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def test_a_run_has_all_parts_and_its_numbers_and_settings_are_in_the_tables(tmp_path):
    settings = {"seed": {"value": 3, "default": 1, "set in": "command line"},
                "stop": {"value": ["a"], "default": None, "set in": "config/a.py"}}
    folder = write_run(tmp_path / "run", samples=[sample(0), sample(4)], config={"seed": 3, "stop": ["a"], "lr": None},
                       settings=settings, time="2030-01-02 03:04 UTC", command="python grpo/train_grpo.py", torch="9.9")
    path = write_report(folder)
    assert path == str(tmp_path / "run" / "report.html")
    page = Page(read(path))
    assert page.headings == ["Held out, before and after", "Held out", "Samples", "Rewards", "Training",
                             "Never changed", "Seconds of a step by phase", "Settings", "all settings",
                             "Machine, versions, command"]
    assert page.tables[0] == [["metric", "before", "step 4", "change"], ["judge", "0.5000", "0.5400", "+0.0400"],
                              ["kl", "0.0000", "0.0400", "+0.0400"], ["reward/a", "1.0000", "1.0000", "+0.0000"]]
    assert page.tables[-3] == [["setting", "value", "default", "set in"], ["seed", "3", "1", "command line"],
                               ["stop", "['a']", "None", "config/a.py"]]
    assert page.tables[-2] == [["setting", "run"], ["seed", "3"], ["stop", "['a']"], ["lr", "None"]]
    assert page.tables[-1] == [["", "run"], ["step", "0"], ["time", "2030-01-02 03:04 UTC"],
                               ["command", "python grpo/train_grpo.py"], ["torch", "9.9"]]
    assert "<p>eval/reward/a 1, lr 0.001</p>" in read(path)


def test_without_a_verdict_what_was_filled_in_is_compared_with_the_text_where_lengths_agree(tmp_path):
    longer = sample(1, best="abcdefg", filled={"best": [[1, 2], [3, 7]]})
    page = Page(read(write_report(write_run(tmp_path / "run", samples=[sample(1), longer]))))
    legend = [("same", "as in the text"), ("other", "differs from the text")]
    masked, truth = [("filled", "_"), ("filled", "__")], [("filled", "b"), ("filled", "\nd")]
    best, worst = [("same", "b"), ("other", "x"), ("same", "d")], [("other", "x"), ("same", "\nd")]
    assert page.marks == legend + masked + truth + best + worst + legend + [("filled", "b"), ("filled", "defg")]
    rows = [["", "filled in: as in the text differs from the text"], ["problem", "a_c__"], ["truth", "abc\nd"],
            ["best 0.75", "abcxd"], ["worst -1.5", "axc\nd"]]
    assert page.tables[1] == rows


def test_what_earned_the_full_reward_is_marked_as_right_also_where_it_is_not_the_stored_solution(tmp_path):
    board, hidden = "3142\n2431\n4213\n1324\n", [[0, 2], [6, 7]]
    texts = {"problem": "__42\n2_31\n4213\n1324\n", "truth": "1342\n2431\n4213\n1324\n", "best": board, "worst": board}
    record = {"step": 1, **texts, "best_score": 2.0, "worst_score": 0.5, "best_right": True, "worst_right": False,
              "filled": dict.fromkeys(texts, hidden)}
    page = Page(read(write_report(write_run(tmp_path / "run", samples=[record]))))
    assert page.marks[:2] == [("right", "right"), ("wrong", "wrong")] and len(page.tables[1]) == 5
    assert page.marks[-4:] == [("right", "31"), ("right", "4"), ("wrong", "31"), ("wrong", "4")]
    assert [row[0] for row in page.tables[1][3:]] == ["best 2 right", "worst 0.5 wrong"]
    assert '<table class="samples board">' in read(tmp_path / "run" / "report.html")


def test_a_reward_of_any_size_is_short(tmp_path):
    large = 3.4028234663852886e38
    records = [{"step": 0, "eval/reward/a": -large}, {"step": 1, "eval/reward/a": large, "reward/a": large}]
    page = read(write_report(write_run(tmp_path / "run", records, [sample(1, best_score=large)])))
    assert Page(page).tables[0][1] == ["reward/a", "-3.4e+38", "3.4e+38", "+6.8e+38"]
    assert "<td>best 3.4028e+38</td>" in page and "3.40282346" not in page and "340282346" not in page


def test_held_out_rewards_are_among_the_held_out_metrics(tmp_path):
    records = [{"step": i, "eval/reward/a": 0.1 * i, "reward/a": 0.2 * i} for i in range(3)]
    page = read(write_report(write_run(tmp_path / "run", records)))
    parts = {part.split("</h2>")[0]: part for part in page.split("<h2>")[1:]}
    assert "<figcaption>eval/reward/a " in parts["Held out"] and "eval/reward/a" not in parts["Rewards"]
    assert "<figcaption>reward/a " in parts["Rewards"]


def test_what_the_last_evaluation_did_not_measure_is_a_dash_and_no_older_number(tmp_path):
    records = [{"step": 0, "eval/a": 0.25}, {"step": 5, "eval/a": 0.5, "eval/b": 1.0}, {"step": 9, "eval/b": 2.0}]
    folder = write_run(tmp_path / "run", records)
    assert Page(read(write_report(folder))).tables[0] == [
        ["metric", "before", "step 9", "change"], ["a", "0.2500", "-", ""], ["b", "-", "2.0000", ""]]


def test_samples_of_prompts_show_all_that_the_record_holds(tmp_path):
    record = {"step": 2, "problem": "1+1=", "answer": "2", "best": "2", "worst": "", "best_score": 1, "worst_score": 0,
              "best_extra": {"n": 1}, "worst_extra": {}, "hint": None}
    page = Page(read(write_report(write_run(tmp_path / "run", samples=[record]))))
    assert page.tables[1] == [["", "text"], ["problem", "1+1="], ["answer", "2"], ["best 1", "2"], ["worst 0", ""],
                              ["best_extra", "{'n': 1}"]]


def test_whatever_a_model_writes_stays_text(tmp_path):
    shown = EVIL.removesuffix("\x00\x1b\u202e") + 3 * "\ufffd"
    record = dict.fromkeys(("problem", "best", "worst", EVIL), EVIL) | {"step": 1, "filled": {"best": [[3, 60]]}}
    records = [*steps(2), {"step": 2, EVIL: 1.0, f"time/{EVIL}": 1.0, "time/train": 1.0}]
    folder = write_run(tmp_path / "run", records, [record], {EVIL: EVIL}, command=EVIL, settings={
        EVIL: {"value": EVIL, "default": EVIL, "set in": EVIL}})
    page = Page(read(write_report(folder)))
    assert [row[1] for row in page.tables[1][1:]] == [shown] * 4 and page.tables[1][-1][0] == shown
    assert page.tables[-1][2] == ["command", shown] and [shown] * 4 in page.tables[-3]
    assert len(page.scripts) == 1 and page.scripts[0].startswith('"use strict"')


def test_the_only_script_is_the_one_whose_hash_the_page_allows_and_nothing_is_loaded(tmp_path):
    page = read(write_report(write_run(tmp_path / "run", samples=[sample(1)])))
    script = Page(page).scripts[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in page
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|eval\(|innerHTML", page)


def test_a_name_of_the_user_is_in_no_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_run(tmp_path / "run", config={"out_dir": str(tmp_path / "run")}, command=f"--a={tmp_path}")
    page = read(write_report(folder))
    assert str(tmp_path) not in page and "~/run" in page and "--a=~<" in page


def test_samples_are_shown_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    page = Page(read(write_report(write_run(tmp_path / "run", samples=[{"step": 1, "best": "cd /home/al/x"}]))))
    assert page.tables[1][1] == ["best", "cd /home/al/x"]


def test_the_heading_of_the_last_evaluation_is_its_step(tmp_path):
    records = [*steps(4), {"step": 5, "loss": 0.1}, {"step": 9, "loss": 0.1}]
    page = Page(read(write_report(write_run(tmp_path / "run", records))))
    assert page.tables[0][0] == ["metric", "before", "step 4", "change"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "out")
    path = write_report(tmp_path / "a" / "out", tmp_path / "b" / "out", path=str(tmp_path / "both.html"))
    assert "<title>a/out, b/out</title>" in read(path) and Page(read(path)).tables[0][0] == ["metric", "a/out", "b/out"]


def test_the_size_is_bounded(tmp_path):
    long = sample(0, best="x" * 5000, filled={})
    small, large = (write_run(tmp_path / name, steps(count), [long | {"step": i} for i in range(count // 10)])
                    for name, count in (("small", 600), ("large", 6000)))
    sizes = [len(read(write_report(folder))) for folder in (small, large)]
    assert sizes[1] < 1.2 * sizes[0] < 500_000
    page = read(tmp_path / "large" / "report.html")
    shown = [int(step) for step in re.findall('data-step="([0-9]+)"', page)]
    assert shown == [0, *range(600 - run_files.SETS + 1, 600)] and "and 1000 characters" in page


def test_lone_surrogates_can_be_written(tmp_path):
    page = read(write_report(write_run(tmp_path / "run", samples=[{"step": 1, "best": "a\ud800b"}])))
    assert Page(page).tables[1][1] == ["best", "a\ufffdb"]


@pytest.mark.parametrize("records", [steps(4)[:1], steps(4)[:2], steps(4)[1:-1], [{"step": 1, "loss": None}],
                                     [{"step": 0, "eval/x": None}, {"step": 9, "eval/x": 1.0, "other": 2}]])
def test_a_run_has_a_page_from_its_first_record_on(tmp_path, records):
    page = Page(read(write_report(write_run(tmp_path / "run", records))))
    assert "Samples" not in page.headings and "Settings" not in page.headings
    assert ("Seconds of a step by phase" in page.headings) == any("time/train" in r for r in records)
    assert ("Never changed" in page.headings) == (records[0].get("loss", 0) is not None)


def test_an_earlier_page_stays_if_writing_fails(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    before = read(write_report(folder))

    def fail(*arguments):
        raise KeyboardInterrupt
    monkeypatch.setattr(report_page, "sections", fail)
    with pytest.raises(KeyboardInterrupt):
        write_report(folder)
    assert read(tmp_path / "run" / "report.html") == before
    assert not [path for path in (tmp_path / "run").iterdir() if path.suffix == ".tmp"]


def test_several_runs_are_side_by_side_with_the_settings_in_which_they_differ(tmp_path):
    a = write_run(tmp_path / "a", config={"seed": 1, "lr": 1.0, "only": 2}, samples=[sample(1)], torch="1")
    b = write_run(tmp_path / "b", [*steps(8, 0.02), {"step": 8, "mine": 1.0}, {"step": 8, "mine": 2.0}], torch="1",
                  config={"seed": 2, "lr": 1.0}, python="3")
    path = str(tmp_path / "both.html")
    assert write_report(a, b, path=path) == path
    page, text = Page(read(path)), read(path)
    assert "Samples" not in page.headings
    assert page.tables[0][:2] == [["metric", "a", "b"],
                                  ["judge", "0.5000 → 0.5400+0.0400", "0.5000 → 0.6600+0.1600"]]
    assert page.tables[1] == [["setting", "a", "b"], ["seed", "1", "2"], ["only", "2", "None"]]
    assert page.tables[-1] == [["", "a", "b"], ["step", "0", "0"], ["torch", "1", "1"], ["python", "", "3"]]
    colors = lambda name: re.findall('class="(c.)"', re.search(f"<figcaption>{name} .*?</figcaption>", text)[0])
    assert colors("loss") == ["c0", "c1"] and colors("mine") == ["c1"], "a run has one color in all charts"
    assert '<b class="c0">a</b> <b class="c1">b</b></h1>' in text and text.count("<title>a, b</title>") == 1


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
    page = without_policy(read(write_report(write_run(tmp_path / "run", records))))
    script = """
    const captions = [...document.querySelectorAll("figcaption")];
    const caption = name => captions.find(f => f.textContent.startsWith(name + " "));
    const values = () => ["loss", "eval/judge", "run"].map(name => [...caption(name).querySelectorAll("b")].map(
      b => b.textContent).join(" "));
    const point = (name, step) => {
      const svg = caption(name).parentNode.querySelector("svg"), box = svg.getBoundingClientRect();
      const [left, right, , last] = svg.dataset.plot.split(" ").map(Number);
      const x = box.left + (left + (right - left) * step / last) / 320 * box.width;
      svg.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: box.top + 50, bubbles: true}));
    };
    const seen = [values()];
    for (const [name, step] of [["loss", 7], ["loss", 39], ["eval/judge", 59], ["run", -30]]) {
      point(name, step);
      const mark = caption(name).parentNode.querySelector("svg");
      const label = mark.lastChild, box = label.getBBox(), visible = box.y + box.height <= mark.viewBox.baseVal.height;
      const line = mark.querySelector("path:not([class])").getAttribute("d");
      seen.push([...values(), visible && label.textContent, line]);
    }
    caption("run").parentNode.querySelector("svg").dispatchEvent(new PointerEvent("pointerleave"));
    seen.push(values());
    top.document.title = JSON.stringify(seen);
    """
    title, console = browse(page, script)
    end = ["0.4", "80", "0.25 1.5"]
    x = lambda step: f"M{48 + 264 * step / 80:g} 0V128"
    assert not console
    assert json.loads(title) == [
        end, ["0.07", "0.5", "0.25 0.675", "step 7", x(7)], ["0.39", "0.9", "0.25 1.475", "step 39", x(39)],
        ["0.4", "60", "0.25 1.5", "step 60", x(60)], ["0.01", "0.5", "0.25 0.525", "step 1", x(1)], end]


@pytest.mark.slow
def test_in_a_browser_the_slider_and_its_buttons_show_one_evaluation_at_a_time(tmp_path, browse):
    records = [sample(step, problem=f"problem of step {step}") for step in (0, 0, 5, 10)]
    page = without_policy(read(write_report(write_run(tmp_path / "run", samples=records))))
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
    page = read(write_report(write_run(tmp_path / "run", samples=[sample(1, best=evil, filled={})])))
    probe = "top.document.title += [...document.querySelectorAll('td')].filter(t => t.innerText === %s).length"
    assert browse(without_policy(page), probe % json.dumps(evil).replace("/", "\\/")) == ("nothing1", [])
    unescaped = page.replace(html.escape(evil), evil)
    assert unescaped != page
    title, console = browse(unescaped, "")
    assert title == "nothing" and any("Content Security Policy" in line for line in console)
    assert browse(without_policy(unescaped), "")[0] == "evil"


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser_the_page_is_readable_light_and_dark_narrow_and_wide(tmp_path, browse, width, dark):
    config = {"generator_checkpoint": "data/" + "long" * 40, "seed": 1}
    folder = write_run(tmp_path / ("run" * 20), samples=[sample(1, best="word " * 300)], config=config, settings={
        key: {"value": value, "default": None, "set in": "config/example.py"} for key, value in config.items()})
    script = """
    const sum = numbers => numbers.slice(0, 3).map(Number).reduce((a, b) => a + b);
    const color = (e, key) => sum(getComputedStyle(e)[key].match(/[0-9]+/g));
    const texts = [...document.querySelectorAll("h2, th, td, b, figcaption, mark")].filter(e => e.offsetHeight);
    const under = e => e.tagName === "MARK" ? color(e, "backgroundColor") : color(document.body, "backgroundColor");
    const figures = [...document.querySelectorAll("figure")].map(f => f.getBoundingClientRect());
    top.document.title = JSON.stringify({inner: innerWidth, scroll: document.documentElement.scrollWidth,
      background: color(document.body, "backgroundColor"),
      contrast: Math.min(...texts.map(e => Math.abs(color(e, "color") - under(e)))),
      columns: new Set(figures.map(f => f.left)).size, figure: Math.min(...figures.map(f => f.width))});
    """
    title, console = browse(without_policy(read(write_report(folder))), script, width, *["--force-dark-mode"] * dark)
    found = json.loads(title)
    assert not console and found["inner"] == width and found["scroll"] <= width
    assert found["background"] < 120 if dark else found["background"] == 3 * 255
    assert found["contrast"] > 200 and found["figure"] > 280
    assert found["columns"] == 1 if width == 360 else found["columns"] > 1
