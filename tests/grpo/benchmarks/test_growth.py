"""How time and memory grow: exponents, what fits, the tables and the picture."""

import json
import re

import pytest

from grpo.benchmarks import growth
from grpo.benchmarks.growth import Growth, GrowthConfig, run_growth
from grpo.benchmarks.work import Work


def power_law(time=1.5, memory=2.0, process=300.0):
    """Growth by these exponents from 1 second and 100 MB at 64."""
    sizes = [64, 128, 256, 512]
    points = [{"seconds": (x / 64) ** time, "tokens": 10.0, "megabytes": process + 100 * (x / 64) ** memory}
              for x in sizes]
    return Growth("tokens of a completion", sizes, points, process)


def test_the_exponent_is_that_of_a_power_law_over_the_upper_half():
    found = power_law()
    found.points[0]["seconds"] = 50.0
    assert found.exponent("seconds") == 1.5 and found.exponent("megabytes") == 2.0
    assert power_law(memory=0.0).exponent("megabytes") == 0


@pytest.mark.parametrize("memory, megabytes, words", [
    (2.0, 350, "none, not 64 (measured)"), (2.0, 6000, "256, not 512 (measured)"),
    (2.0, 300 + 100 * 20**2, "1,300 (extrapolated)"),  # 20 times 64
    (0.5, 300 + 10 * 100 * 8**0.5, "5,100 (extrapolated)")])  # 10 times 512: at least in proportion
def test_what_fits_is_measured_within_the_sizes_and_extrapolated_beyond(memory, megabytes, words):
    assert power_law(memory=memory).fits(megabytes) == words


def test_a_table_an_exponent_and_a_picture_of_every_axis(monkeypatch, tmp_path, capsys):
    """With steps whose time and memory grow with the square of the group, and do not depend on anything else."""
    def measure(work, c):
        size = 0 if work is growth.TINY else work.group_size**2
        return {"seconds": size / 4, "tokens": 10.0, "megabytes": 100.0 + size}

    monkeypatch.setattr(growth, "measure", measure)
    run_growth(GrowthConfig(axes="group_size,length", picture=str(tmp_path / "growth.png")))
    out = capsys.readouterr().out.strip().split("\n")
    table = out.index("| completions of a prompt | seconds | tokens per second | peak MB |")
    assert out[table + 2 : table + 4] == ["| 2 | 1 | 10 | 104 |", "| 4 | 4 | 10 | 116 |"]
    assert out[table + 8] == "| exponent, upper half | 2.0 | | 2.0 |"
    assert "| completions of a prompt | 32, not 64 (measured) | 90 (extrapolated) | 160 (extrapolated) |" in out
    assert json.loads(out[-1]) == {"group_size_time_exponent": 2.0, "group_size_memory_exponent": 2.0,
                                   "length_time_exponent": 0.0, "length_memory_exponent": 0.0}
    assert (tmp_path / "growth.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("settings, message", [
    ({"axes": "length,width"}, "axes: 'width' is not one of group_size, length, model, vocabulary, ranks"),
    ({"picture": "no/such/folder/growth.png"}, "the folder no/such/folder does not exist")])
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GrowthConfig(**settings)


@pytest.mark.slow
def test_one_rank_and_two_do_the_same_step(capsys, monkeypatch):
    monkeypatch.setattr(growth, "BASE", Work(n_layer=1, n_head=2, n_embd=16, batch_size=2, completion_length=8))
    run_growth(GrowthConfig(axes="ranks"))
    out = capsys.readouterr().out
    assert re.search(r"times faster; peak memory \d+ MB on the one, \d+ MB and \d+ MB on the two", out)
    assert set(json.loads(out.strip().split("\n")[-1])) == {"two_ranks"}
