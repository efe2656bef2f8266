"""Pictures of runs."""

import math

import pytest

from grpo.report import plots


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
    records = [{"step": 0, "eval/judge": 0.2, "eval/kl": 0.0}, {"step": 1, "loss": 1.0},
               {"step": 2, "eval/judge": 0.3, "eval/kl": 0.5, "eval/reward/mine": -1.0}]
    plots.draw_curves({"a": records, "b": [{"step": 0, "eval/judge": 0.1}]}, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {axis.get_title(): lines_of(axis) for axis in figures[0].axes} == {
        "judge": {"a": [(0, 0.2), (2, 0.3)], "b": [(0, 0.1)]}, "kl": {"a": [(0, 0.0), (2, 0.5)], "b": []},
        "reward/mine": {"a": [(2, -1.0)], "b": []}}


@pytest.mark.parametrize("count", [1, 5])
def test_no_axis_is_cut_rounding_does_not_fill_a_panel_and_what_is_not_finite_is_a_gap(tmp_path, figures, count):
    values = {"judge": [0.78, 0.85, None], "reward/a": [-1.5, -0.5, -1.0], "kl": [0.0, 1e-8, -1e-8],
              "lost": [None, None, None], "entropy": [5.0, 6.0, 7.0]}
    metrics = list(values)[:count]
    records = [{"step": i} | {f"eval/{name}": values[name][i] for name in metrics} for i in range(3)]
    plots.draw_curves({"": records}, str(tmp_path / "c.png"))
    axes = {axis.get_title(): axis for axis in figures[0].axes}
    assert list(axes) == metrics
    for axis in axes.values():
        low, high = axis.get_ylim()
        assert low <= 0 < high and high >= 1e-6
    drawn = [float(y) for y in axes["judge"].get_lines()[0].get_ydata(orig=False)]
    assert drawn == pytest.approx([0.78, 0.85, math.nan], nan_ok=True)


@pytest.mark.parametrize("good", ["word_validity", "reward/boards"])
def test_temperatures_are_drawn_as_quality_against_diversity(tmp_path, figures, good):
    points = [(t, {"token_accuracy": t / 2, good: t / 4, "reward/units": 0.6, "entropy": t}) for t in (0.2, 0.4)]
    plots.draw_temperatures({"before": points, "after": points[:1]}, str(tmp_path / "t.png"))
    first, *others = figures[0].axes
    assert [axis.get_ylabel() for axis in (first, *others)] == [good.replace("_", " ")] * 2 + ["token accuracy"]
    assert lines_of(first) == {"before": [(0.1, 0.05), (0.2, 0.1)], "after": [(0.1, 0.05)]}
    assert [text.get_text() for text in first.texts] == ["0.2", "0.4", "0.2", "0.2"]
