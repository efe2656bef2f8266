"""Every kind of training still gives the numbers that were recorded."""

import pytest

from tests.golden.golden import JOBS, compare

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", JOBS)
def test_a_run_gives_the_recorded_numbers(name, tmp_path):
    if name.startswith("llama"):
        pytest.importorskip("transformers")
    if name == "ray":
        pytest.importorskip("ray")
    assert compare(name, str(tmp_path)) == []
