"""The rows of the comparisons with the usual step."""

import pytest

from grpo.benchmarks.comparison import row


@pytest.mark.parametrize("naive, shared", [(6.0, 1.5), (1.5, 6.0)])
def test_a_row_has_both_sides_and_how_many_times_one_is_the_other(capsys, naive, shared):
    row("seconds", naive, shared, 2)
    assert capsys.readouterr().out.split() == ["seconds", f"{naive:.2f}", f"{shared:.2f}", "4.00"]
