"""Pictures of runs."""

import statistics

import pytest
from matplotlib.figure import Figure

from grpo.report import page


def test_a_picture_has_a_panel_for_each_metric_that_changes_with_mean_deviation_and_start(tmp_path, monkeypatch):
    values = {"judge": [(0.78, 0.8), (0.85, 0.95)], "reward/a_b": [(-1.5, None), (-0.5, -0.5)], "flat": [(3.0, 3.0 + 1e-9)]}
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: (figures.append(figure), save(figure, path, dpi=dpi)))
    runs = [[{"step": i, f"eval/{name}": pair[run]} for name, pairs in values.items() for i, pair in enumerate(pairs)]
            for run in (0, 1)]
    page.draw_curves(runs, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    judge, reward = figures[0].axes
    assert (judge.get_title(), reward.get_title()) == ("judge", "reward/a b")
    mean, before = (line.get_ydata() for line in judge.get_lines())
    assert list(mean) == pytest.approx([0.79, 0.9]) and list(before) == pytest.approx([0.79] * 2)
    edges = judge.collections[0].get_datalim(judge.transData)
    assert (edges.y0, edges.y1) == pytest.approx((0.79 - statistics.stdev(values["judge"][0]), 0.9 + statistics.stdev(values["judge"][1])))
    assert list(reward.get_lines()[0].get_ydata()) == pytest.approx([float("nan"), -0.5], nan_ok=True)
