"""Pictures of runs."""

import math

import pytest

from grpo.report import plots

RECORDS = [{"step": 0, "eval/judge": 0.2, "eval/kl": 0.0}, {"step": 1, "loss": 1.0},
           {"step": 2, "eval/judge": 0.3, "eval/kl": 0.5, "eval/reward/mine": -1.0}]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, kept open."""
    kept = []
    monkeypatch.setattr(plots.plt, "close", kept.append)
    yield kept
    monkeypatch.undo()
    for figure in kept:
        plots.plt.close(figure)


def lines_of(axis):
    return {line.get_label(): list(zip(*(map(float, x) for x in line.get_data()), strict=True))
            for line in axis.get_lines()}


def test_curves_have_a_panel_for_each_metric_and_a_line_for_each_run(tmp_path, figures):
    plots.draw_curves({"a": RECORDS, "b": [{"step": 0, "eval/judge": 0.1}]}, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    panels = {axis.get_title(): lines_of(axis) for axis in figures[0].axes if axis.get_title()}
    assert panels == {"judge": {"a": [(0, 0.2), (2, 0.3)], "b": [(0, 0.1)]}, "kl": {"a": [(0, 0.0), (2, 0.5)], "b": []},
                      "reward/mine": {"a": [(2, -1.0)], "b": []}}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10, 17])
def test_there_are_as_many_panels_as_metrics(tmp_path, figures, count):
    names = [f"eval/reward/r{i}" for i in range(count)]
    plots.draw_curves({"": [dict.fromkeys(names, 0.5) | {"step": 0}]}, str(tmp_path / "c.png"))
    assert [axis.get_title() for axis in figures[0].axes] == [name.removeprefix("eval/") for name in names]
    assert sum(axis.get_xlabel() == "optimizer step" for axis in figures[0].axes) == max(
        axis.get_subplotspec().get_gridspec().ncols for axis in figures[0].axes)


def test_no_axis_is_cut_and_shares_have_the_same(tmp_path, figures):
    values = {"judge": [0.78, 0.85], "token_accuracy": [0.39, 0.44], "ngram_bits": [5.4, 4.4], "reward/a": [-1.5, -0.5]}
    records = [{"step": i} | {f"eval/{name}": pair[i] for name, pair in values.items()} for i in (0, 1)]
    plots.draw_curves({"": records}, str(tmp_path / "c.png"))
    ends = {axis.get_title(): axis.get_ylim() for axis in figures[0].axes}
    assert ends["judge"] == ends["token accuracy"] == (-0.05, 1.05)
    assert ends["ngram bits"] == pytest.approx((-0.27, 5.67)) and ends["reward/a"] == pytest.approx((-1.575, 0.075))


def test_rounding_does_not_fill_a_panel_and_what_is_not_finite_is_a_gap(tmp_path, figures):
    records = [{"step": i, "eval/kl": x, "eval/reward/a": None} for i, x in enumerate((0.0, 1e-8, None, -1e-8))]
    plots.draw_curves({"": records}, str(tmp_path / "c.png"))
    low, high = figures[0].axes[0].get_ylim()
    assert high - low >= 1e-6
    numbers = figures[0].axes[0].get_lines()[0].get_ydata()
    assert [float(y) for y in numbers] == pytest.approx([0.0, 1e-8, math.nan, -1e-8], nan_ok=True)


def test_temperatures_are_drawn_as_quality_against_diversity(tmp_path, figures):
    points = [(t, {"token_accuracy": t / 2, "word_validity": t / 4, "entropy": t}) for t in (0.2, 0.4)]
    plots.draw_temperatures({"before": points, "after": points[:1]}, str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").exists() and len(figures[0].axes) == 3
    assert lines_of(figures[0].axes[0]) == {"before": [(0.1, 0.05), (0.2, 0.1)], "after": [(0.1, 0.05)]}
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["0.2", "0.4", "0.2", "0.2"]
    assert "(0.2, 0.4)" in figures[0].get_suptitle() and "do not begin at 0" in figures[0].get_suptitle()


def test_temperatures_of_a_text_without_words_show_its_first_reward(tmp_path, figures):
    metrics = {"token_accuracy": 0.5, "entropy": 1.0, "reward/boards": 0.3, "reward/units": 0.6}
    plots.draw_temperatures({"before": [(1.0, metrics)]}, str(tmp_path / "t.png"))
    assert [axis.get_ylabel() for axis in figures[0].axes] == ["reward/boards", "reward/boards", "token accuracy"]


def test_a_curve_over_seconds_has_the_time_of_the_steps_before_each_evaluation():
    records = [{"step": 0, "eval/judge": 0.1}, {"step": 1, "time/train": 2.0, "time/reward": 1.0},
               {"step": 2, "time/train": 0.5}, {"step": 2, "eval/judge": 0.3}, {"step": 3, "time/train": 4.0}]
    assert plots.seconds_of_steps(records) == {0: 0.0, 1: 3.0, 2: 3.5, 3: 7.5}
