"""Malformed settings, prompts and model files end in their documented error: a few of what tests/malformed.py reads."""

import pytest

from tests.malformed import KINDS, check


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_inputs_end_in_their_documented_error(kind, tmp_path):
    ends = check(kind, str(tmp_path), 60)
    assert sum(ends.values()) >= 60 and ends.total() > ends["accepted"]
