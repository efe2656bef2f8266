"""How time and memory grow: exponents, what fits, the tables and the picture."""

import json
import re

import pytest

from grpo.benchmarks.growth import AXES, Growth, GrowthConfig, draw
from tests.tiny import run_script


def power_law(axis="length", sizes=(64, 128, 256, 512), time=1.5, memory=2.0, process=300.0):
    """Growth by these exponents from 1 second and 100 MB at 64."""
    growth = Growth(axis, process)
    growth.sizes = list(sizes)
    growth.points = [{"seconds": (x / 64) ** time, "tokens": 10.0, "megabytes": process + 100 * (x / 64) ** memory}
                     for x in sizes]
    return growth


def test_the_exponent_is_that_of_a_power_law():
    growth = power_law()
    assert growth.exponent("seconds") == 1.5 and growth.exponent("megabytes") == 2.0


def test_the_exponent_is_that_of_the_upper_half():
    growth = power_law(time=1.0)
    growth.points[0]["seconds"] = 50.0
    assert growth.exponent("seconds") == 1.0


def test_memory_that_does_not_grow_has_no_exponent():
    growth = power_law(memory=0.0)
    growth.points[-1]["megabytes"] = growth.process
    assert growth.exponent("megabytes") is None and growth.fits(10**6) == "512 (measured), and more"


@pytest.mark.parametrize("megabytes, words", [
    (350, "less than 64 (measured)"), (700, "128, not 256 (measured)"), (6000, "256, not 512 (measured)"),
    (300 + 100 * 20**2, "1,300 (extrapolated)"),  # 20 times 64, in two digits
    (10**9, "over 51,000 (extrapolated)")])       # not more than 100 times the largest
def test_what_fits_is_measured_within_the_sizes_and_extrapolated_beyond(megabytes, words):
    assert power_law().fits(megabytes) == words


def test_an_extrapolation_assumes_at_least_linear_growth():
    assert power_law(memory=0.5).fits(300 + 10 * 100 * 8**0.5) == "5,100 (extrapolated)"  # 10 times 512


def test_the_table_has_a_row_for_each_size():
    rows = list(power_law().lines())
    assert rows[0].startswith("| tokens of a completion | seconds") and rows[2] == "| 64 | 1 | 10 | 400 |"
    assert rows[-1] == "| exponent, upper half | 1.5 | | 2.0 |" and len(rows) == 7


def test_the_picture_has_a_row_for_time_and_one_for_memory_each_on_one_scale(tmp_path, monkeypatch):
    from matplotlib import pyplot as plt
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    draw({"length": power_law(), "model": power_law("model", (10**5, 10**6))}, str(tmp_path / "growth.png"))
    monkeypatch.undo()
    assert (tmp_path / "growth.png").read_bytes()[1:4] == b"PNG"
    panels = kept[0].axes
    assert len(panels) == 4 and panels[0].get_ylim() == panels[1].get_ylim() != panels[2].get_ylim()
    assert panels[2].get_ylim() == panels[3].get_ylim() and panels[3].get_xlabel() == "parameters of the layers"
    assert list(panels[0].get_lines()[0].get_ydata()) == [p["seconds"] for p in power_law().points]
    assert [float(y) for y in panels[0].get_lines()[1].get_ydata()] == [1.0, 2.0, 4.0, 8.0], "in proportion to 1 second"
    assert panels[0].get_title() == "exponent 1.5"
    plt.close(kept[0])


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="axes: 'width' is not one of group_size, length, model, vocabulary, ranks"):
        GrowthConfig(axes="length,width")


@pytest.mark.parametrize("settings, message", [
    ({"batch_size": 1}, "batch_size=1 must be even"), ({"batch_size": 7}, "batch_size=7 must be even"),
    ({"warmup": -3}, "warmup=-3 must be at least 0"), ({"n_head": 3}, "n_embd=128 must be a multiple"),
    ({"picture": "no/such/folder/growth.png"}, "the folder no/such/folder does not exist")])
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GrowthConfig(**settings)


def test_one_rank_can_have_an_odd_number_of_prompts():
    assert GrowthConfig(axes="length", batch_size=7).picture is None


@pytest.mark.slow
def test_the_benchmark_prints_a_table_for_each_axis_and_one_json_object(tmp_path):
    done = run_script("grpo/tools/bench.py", "growth", "--axes=group_size,ranks", "--points=2", "--steps=1",
                      "--warmup=0", "--n_layer=1", "--n_head=2", "--n_embd=16", "--batch_size=2",
                      "--completion_length=8", f"--picture={tmp_path}/growth.png")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    assert set(result) == {"group_size_time_exponent", "group_size_memory_exponent", "two_ranks"}
    assert done.stdout.count("\n| 2 |") == done.stdout.count("\n| 4 |") == 1 and len(AXES["group_size"]) > 2
    assert (tmp_path / "growth.png").exists()
    assert re.search(r"on the one, \d+ MB and \d+ MB on the two", done.stdout)
