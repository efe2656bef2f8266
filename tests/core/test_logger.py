"""Metrics on the console and in metrics.jsonl, and the estimated time."""

import json

import pytest

from core.logger import Logger, highlight


def test_metrics_survive_a_crash_and_a_resume(tmp_path):
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


def test_numbers_that_are_not_finite_are_logged_as_valid_json_and_what_was_not_measured_is_a_dash(tmp_path, capsys):
    logger = Logger(str(tmp_path), 10, ("loss", "grad_norm", "entropy"))
    logger.start()
    logger.log(1, {"loss": float("nan"), "grad_norm": float("inf")})
    record = json.loads(open(logger.path).read(), parse_constant=pytest.fail)
    assert record == {"step": 1, "loss": None, "grad_norm": None}
    assert capsys.readouterr().out.split("\n")[1].split()[:4] == ["1", "nan", "inf", "-"]


@pytest.mark.parametrize("text, shown", [
    ("a\n\x1b[2J\r\x00b", "a\u21b5\ufffd[2J\ufffd\ufffdb"), ("é 漢 🙂 \u0301\u00a0", "é 漢 🙂 \u0301\u00a0"),
    *[(f"a{character}b", "a\ufffdb") for character in "\u202e\u200b\ud800"]])
def test_characters_that_a_terminal_obeys_or_does_not_show_are_replaced(text, shown):
    assert highlight(text, [], color=False) == shown
