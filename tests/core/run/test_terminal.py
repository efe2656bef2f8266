"""Text on a terminal: lines that fit, and what others wrote."""

import pytest

from core.run.terminal import WIDTH, folded, highlight


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
