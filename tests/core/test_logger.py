"""Metrics on the console and in metrics.jsonl, and the estimated time."""

import json
from types import SimpleNamespace

import pytest

from core import logger as logger_module
from core.logger import WIDTH, Logger, folded, highlight
from tests.tiny import read_records


def test_metrics_survive_a_crash_and_a_resume(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss",))
    logger.start()
    for step in (1, 2, 3):
        logger.log(step, {"loss": step / 8, "other": 5})
    with open(logger.path, "a") as f:
        f.write('{"step": 4, "lo')
    logger.start(2)
    logger.log(3, {"loss": 0.5})
    assert [json.loads(x) for x in open(logger.path)] == [
        {"step": 1, "loss": 0.125, "other": 5}, {"step": 2, "loss": 0.25, "other": 5}, {"step": 3, "loss": 0.5}]
    lines = capsys.readouterr().out.rstrip().split("\n")
    assert lines[0].split() == ["step", "loss", "eta"] and lines[1].split()[:2] == ["1", "0.1250"]
    assert len(lines) == 5 and len(set(map(len, lines))) == 1, "one line of names, then aligned numbers"


def test_numbers_that_are_not_finite_are_logged_as_valid_json_and_what_was_not_measured_is_a_dash(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss", "grad_norm", "entropy"))
    logger.start()
    logger.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
    record = json.loads(open(logger.path).read(), parse_constant=pytest.fail)
    assert record == {"step": 1, "loss": None, "grad_norm": None}
    assert capsys.readouterr().out.split("\n")[1].split()[:4] == ["1", "nan", "inf", "-"]


def test_what_is_said_is_kept_and_appended_when_the_run_goes_on(tmp_path):
    for times in (1, 2):
        logger = Logger(str(tmp_path), 2, ("loss",))
        logger.say("\033[1;32mgreen\033[0m")
        assert (tmp_path / "console.log").read_text() == times * "green\n"


def test_the_time_left_is_that_of_steps_as_slow_as_those_of_this_process(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logger_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    logger = Logger(str(tmp_path), 200, ("loss",))
    logger.start(100)
    now[0] += 500  # an evaluation
    logger.restart_clock()
    assert logger.eta(100) == "-"
    now[0] += 30
    assert logger.eta(110) == "04:30" and logger.eta(101) == "49:30" and logger.eta(200) == "00:00"
    now[0] += 3600
    assert logger.eta(110) == "9:04:30"


def test_trackers_see_the_records_before_later_ones_are_dropped(tmp_path):
    logger, seen = Logger(str(tmp_path), 10, ("loss",)), []
    for step in (1, 2, 3):
        logger.log(step, {"loss": 1.0}, show=False)
    logger.trackers = SimpleNamespace(start=lambda step, records: seen.extend(r["step"] for r in records))
    logger.start(2)
    assert seen == [1, 2, 3] and [r["step"] for r in read_records(logger.path)] == [1, 2]


def test_a_long_line_becomes_several_that_fit_and_lose_no_word():
    long = "name  " + " ".join(f"word-{i}" for i in range(60))
    first, *rest = folded([long, "  short"])
    assert rest.pop() == "  short" and len(rest) > 3 and first.startswith("name  word-0 ")
    assert all(len(line) <= WIDTH and line.startswith("    word") for line in rest) and len(first) <= WIDTH
    assert " ".join([first, *rest]).split() == long.split()


def test_a_text_is_shown_on_one_line_with_its_sampled_characters_coloured():
    assert highlight("a\nbc", [0, 0, 1, 1], color=False) == "a\u21b5bc"
    assert highlight("a\nbc", [0, 0, 1, 0], color=True) == "a\u21b5\033[1;32mb\033[0mc"
    assert highlight("ab", [0, 1], color=True) == "a\033[1;32mb\033[0m"


@pytest.mark.parametrize("text, shown", [
    ("a\n\x1b[2J\r\x00b", "a\u21b5\ufffd[2J\ufffd\ufffdb"), ("é 漢 🙂 \u0301\u00a0", "é 漢 🙂 \u0301\u00a0"),
    *[(f"a{character}b", "a\ufffdb") for character in "\u202e\u200b\ud800"]])
def test_characters_that_a_terminal_obeys_or_does_not_show_are_replaced(text, shown):
    assert highlight(text, [0] * len(text), color=False) == shown
