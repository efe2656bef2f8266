"""Metrics on the console and in metrics.jsonl, and the estimated time."""

import json
from types import SimpleNamespace

import pytest

from core import logger as logger_module
from core.files.json_lines import read_records
from core.logger import Logger


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
