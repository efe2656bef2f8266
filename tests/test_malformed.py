"""Malformed inputs of every kind end in their documented error: a few of those that tests/malformed.py reads."""

import fractions

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


def test_a_documented_error_of_a_library_is_a_failure_for_a_script_prints_its_traceback():
    with pytest.raises(Failed, match="ValueError of .*fractions.py: Invalid literal for Fraction"):
        ending(fractions.Fraction, "x")


def test_a_kind_whose_valid_input_is_refused_is_a_failure(monkeypatch, tmp_path):
    kind = malformed.Inputs.tokens
    monkeypatch.setattr(malformed.Inputs, "tokens", lambda inputs: (b"", *kind(inputs)[1:]))
    with pytest.raises(Failed, match="the valid input is refused: .*train.bin"):
        check("tokens", str(tmp_path), 1)


def test_an_input_that_takes_too_long_is_a_failure(monkeypatch):
    monkeypatch.setattr(malformed, "SECONDS", 0.05)
    with pytest.raises(Failed, match="Slow: more than 0.05 seconds"):
        ending(lambda value: [None for _ in iter(int, 1)], "input")
