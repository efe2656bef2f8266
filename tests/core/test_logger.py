"""Metrics on the console and in metrics.jsonl, and the estimated time."""

import json
import re

import pytest
from core.files.json_lines import each_record, keep_records, read_records
from core.logger import Logger, duration, format_number
from core.run.terminal import highlight



def test_metrics_survive_a_crash_and_a_resume(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss",))
    logger.start()
    for step in (1, 2, 3):
        logger.log(step, {"loss": step / 8, "other": 5})
    with open(logger.path, "a") as f:
        f.write('{"step": 4, "lo')
    assert [r["step"] for r in read_records(logger.path)] == [1, 2, 3]
    logger.start(2)
    logger.log(3, {"loss": 0.5})
    assert [json.loads(x) for x in open(logger.path)] == [
        {"step": 1, "loss": 0.125, "other": 5}, {"step": 2, "loss": 0.25, "other": 5}, {"step": 3, "loss": 0.5}]
    lines = capsys.readouterr().out.rstrip().split("\n")
    assert lines[0].split() == ["step", "loss", "eta"] and lines[1].split()[:2] == ["1", "0.1250"]
    assert len(lines) == 5 and len(set(map(len, lines))) == 1, "one line of names, then aligned numbers"
    keep_records(logger.path, 0)
    assert read_records(logger.path) == [] == read_records(str(tmp_path / "nowhere"))


def test_numbers_that_are_not_finite_are_logged_as_valid_json(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss", "grad_norm"))
    logger.start()
    logger.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
    record = json.loads(open(logger.path).read(), parse_constant=pytest.fail)
    assert record == {"step": 1, "loss": None, "grad_norm": None}
    assert "nan" in (shown := capsys.readouterr().out) and "inf" in shown


def test_numbers_are_short():
    assert [format_number(x) for x in (3, 1e-5, 0.0, 0.25, 31234.7)] == ["3", "1.0e-05", "0.0000", "0.2500", "31234"]
    assert [format_number(x) for x in (3.4028234663852886e38, -1e300, 10**12)] == ["3.4e+38", "-1e+300", "1e+12"]


def test_what_was_not_measured_is_a_dash(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss", "entropy", "kl"))
    logger._show(1, {"loss": 0.5, "entropy": None})
    assert capsys.readouterr().out.split("\n")[1].split()[:4] == ["1", "0.5000", "-", "-"]


def test_a_text_is_shown_on_one_line_with_its_sampled_characters_coloured():
    assert highlight("a\nbc", [0, 0, 1, 1], color=False) == "a\u21b5bc"
    assert highlight("a\nbc", [0, 0, 1, 0], color=True) == "a\u21b5\033[1;32mb\033[0mc"
    assert highlight("ab", [0, 1], color=True) == "a\033[1;32mb\033[0m"


def seconds(eta):
    units = {"m": 60, "h": 3600, "d": 86400}
    if ":" in eta:
        minutes, rest = eta.split(":")
        return 60 * int(minutes) + int(rest)
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhm])", eta))


@pytest.mark.parametrize("time, text", [(0, "0:00"), (9, "0:09"), (261, "4:21"), (3599, "59:59"), (3600, "1h00m"),
                                        (86399, "23h59m"), (86400, "1d00h"), (33332 * 60 + 22, "23d03h")])
def test_a_time_is_in_minutes_hours_or_days(time, text):
    assert duration(time) == text
    assert 0 <= time - seconds(text) < (3600 if "d" in text else 60 if "h" in text else 1)


def test_what_is_said_is_kept_from_the_start_on_and_appended_when_the_run_goes_on(tmp_path, capsys):
    for times in (1, 2):
        logger = Logger(str(tmp_path), 2, ("loss",))
        logger.say("plan")
        assert (tmp_path / "console.log").exists() is (times == 2), "nothing is written before the run starts"
        logger.start()
        logger.say("\033[1;32mgreen\033[0m")
        logger.close()
        assert (tmp_path / "console.log").read_text() == times * "plan\ngreen\n"


def estimates(folder, total, cost, shown, first=0, before=0.0, evaluation=lambda step: 0.0):
    """{step: the estimate on the console} of a run whose step s takes cost(s) seconds and evaluation(s) after it."""
    now = [0.0]
    logger = Logger(str(folder), total, ("loss",), clock=lambda: now[0])
    logger.start(first)
    now[0] += before
    logger.restart_clock()
    found = {}
    for step in range(first + 1, total + 1):
        now[0] += cost(step)
        found[step] = logger.eta(step)
        if step in shown:
            logger.log(step, {"loss": 1.0})
        now[0] += evaluation(step)
        logger.tick()
    return {step: found[step] for step in shown}


def test_a_slow_first_step_does_not_distort_the_estimate(tmp_path, capsys):
    found = estimates(tmp_path, 200, lambda step: 60.0 if step == 1 else 1.4, (1, 2, 10, 100, 200), before=500.0)
    assert found[1] == "-" and found[200] == "0:00"
    long = estimates(tmp_path, 60, lambda step: 3600.0, (2, 59))
    assert long == {2: "2d10h", 59: "1h00m"}
    for step in (2, 10, 100):
        assert abs(seconds(found[step]) - 1.4 * (200 - step)) <= 1
    lines = [line.split() for line in capsys.readouterr().out.strip().split("\n")]
    assert lines[1][-1] == "-" and lines[2][-1] == found[2] == "4:37", "the second console line is near the truth"


def test_a_resumed_run_leaves_its_own_first_step_out_of_the_estimate(tmp_path):
    found = estimates(tmp_path, 90, lambda step: 60.0 if step == 51 else 2.0, (51, 60), first=50)
    assert found[51] == "-" and abs(seconds(found[60]) - 60) <= 1


def test_a_slow_beginning_is_forgotten(tmp_path):
    found = estimates(tmp_path, 100, lambda step: 30.0 if step <= 10 else 1.0, (20, 40))
    assert abs(seconds(found[40]) - 60) <= 1 and seconds(found[20]) <= 2 * 80 + 2 * 30


def test_evaluations_count_in_the_estimate(tmp_path):
    found = estimates(tmp_path, 100, lambda step: 1.0, (60, 80), evaluation=lambda step: 10.0 * (step % 10 == 0))
    for step, truth in ((60, 40 + 5 * 10), (80, 20 + 3 * 10)):
        assert 0.7 * truth <= seconds(found[step]) <= 1.1 * truth


def test_the_other_ranks_write_nothing(tmp_path, capsys):
    logger = Logger(str(tmp_path / "out"), 10, ("loss",), silent=True)
    logger.start()
    logger.log(1, {"loss": 1.0})
    logger.tick()
    logger.say("hello")
    logger.close()
    assert not (tmp_path / "out").exists() and capsys.readouterr().out == ""


def test_control_characters_of_a_sample_do_not_reach_the_terminal():
    assert highlight("a\n\x1b[2J\r\x00b", [0] * 9, color=False) == "a\u21b5\ufffd[2J\ufffd\ufffdb"


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\u200b", "\u200f", "\ufeff", "\u00ad", "\ud800"])
def test_characters_without_width_or_that_turn_the_writing_around_do_not_reach_the_terminal(character):
    assert highlight(f"a{character}b", [0] * 3, color=False) == "a\ufffdb"
    assert highlight("é 漢 🙂 \u0301\u00a0", [0] * 8, color=False) == "é 漢 🙂 \u0301\u00a0", "what shows stays"


def test_the_estimate_of_a_long_run_keeps_few_times_and_hardly_changes(tmp_path, monkeypatch):
    cost, found = (lambda step: 5.0 if step <= 1000 else 1.0), {}
    for most in (10**9, 100):
        monkeypatch.setattr(Logger, "MOST_TIMES", most)
        found[most] = estimates(tmp_path, 6000, cost, range(2, 6000, 97))
    for step, exact in found[10**9].items():
        assert seconds(found[100][step]) == pytest.approx(seconds(exact), rel=0.05, abs=5), step
    logger = Logger(str(tmp_path), 6000, ("loss",))
    for _ in range(6000):
        logger.tick()
    assert len(logger.ended) <= 100 and logger.done == 6000
    assert {b[0] - a[0] for a, b in zip(logger.ended, logger.ended[1:])} == {64}


def test_records_are_read_one_at_a_time(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\n{"step": 2}\nno JSON\n{"step": 4}')
    found = each_record(str(tmp_path / "metrics.jsonl"))
    assert next(found) == {"step": 1} and next(found) == {"step": 2}
    with pytest.raises(ValueError):
        next(found)
    assert list(each_record(str(tmp_path / "none.jsonl"))) == []


def test_trackers_read_the_records_one_at_a_time_before_later_ones_are_dropped(tmp_path):
    class Reader:
        def start(self, step, records):
            assert iter(records) is records, "no list"
            self.seen = [record["step"] for record in records]

    logger = Logger(str(tmp_path), 10, ("loss",))
    for step in (1, 2, 3):
        logger.log(step, {"loss": 1.0}, show=False)
    logger.trackers = Reader()
    logger.start(2)
    assert logger.trackers.seen == [1, 2, 3] and [r["step"] for r in read_records(logger.path)] == [1, 2]


@pytest.mark.parametrize("line", ["{", "\0\0", "[1]", "null", '{"loss": 1.0}', '{"step": "1"}', "[" * 100_000, "\udcff"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line.encode(errors="surrogateescape") + b'\n{"step": 2}\n')
    for read in (read_records, lambda path: keep_records(path, 2)):
        with pytest.raises(ValueError, match="metrics.jsonl, line 2 is damaged; delete the line") as error:
            read(str(path))
        assert "\n" not in str(error.value)
    assert path.read_bytes().count(b"\n") == 3, "nothing is dropped"
