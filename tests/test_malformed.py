"""Malformed inputs of every kind end in their documented error: a few of those that tests/malformed.py reads."""

import fractions

import pytest

from tests.malformed import KINDS, Failed, Slow, check, ending


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_inputs_end_in_their_documented_error(kind, tmp_path):
    ends = check(kind, str(tmp_path), 60)
    assert sum(ends.values()) >= 60 and ends.total() > ends["accepted"]


@pytest.mark.parametrize("error", [KeyError("a"), ValueError("two\nlines"), ValueError(""), Slow("too long")])
def test_another_end_is_a_failure(error):
    def read(value):
        raise error

    with pytest.raises(Failed):
        ending(read, "input")


def test_a_documented_error_of_a_library_is_a_failure_for_a_script_prints_its_traceback():
    with pytest.raises(Failed, match="ValueError of .*fractions.py: Invalid literal for Fraction"):
        ending(fractions.Fraction, "x")
