"""Malformed inputs of every kind end in their documented error: a few of those that tests/malformed.py reads."""

import pytest

from tests import malformed
from tests.malformed import KINDS, Failed, Slow, check, ending


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_inputs_end_in_their_documented_error(kind, tmp_path):
    ends = check(kind, str(tmp_path), 25)
    assert sum(ends.values()) >= 25 and ends.total() > ends["accepted"]


@pytest.mark.parametrize("error", [KeyError("a"), ValueError("two\nlines"), ValueError(""), UnicodeEncodeError(
    "utf-8", "x", 0, 1, "why"), IndexError("3"), Slow("too long"), MemoryError()])
def test_another_end_is_a_failure(error):
    def read(value):
        raise error

    with pytest.raises(Failed):
        ending(read, "input")


def test_an_input_that_takes_too_long_is_a_failure(monkeypatch):
    monkeypatch.setattr(malformed, "SECONDS", 0.05)
    with pytest.raises(Failed, match="Slow: more than 0.05 seconds"):
        ending(lambda value: [None for _ in iter(int, 1)], "input")
