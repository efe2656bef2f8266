"""Pictures of runs."""

import pytest
from matplotlib.figure import Figure

from grpo.report import page


def test_a_picture_has_a_panel_for_each_metric_that_changes_with_mean_deviation_and_start(monkeypatch):
    values = {"a_judge": [(0.75, 0.85), (0.8, 1.0)], "lost": [(-1.5, None), (-0.5, -0.5)], "flat": [(3.0, 3.0 + 1e-9)]}
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append(figure))
    runs = [[{"step": i, f"eval/{name}": pair[run]} for name, pairs in values.items() for i, pair in enumerate(pairs)]
            for run in (0, 1)]
    page.draw_curves(runs, "curves.png")
    judge, lost = figures[0].axes
    assert (judge.get_title(), lost.get_title()) == ("a judge", "lost")
    mean, before = (line.get_ydata() for line in judge.get_lines())
    assert [*mean, *before] == pytest.approx([0.8, 0.9, 0.8, 0.8])
    band = judge.collections[0].get_datalim(judge.transData)
    assert (band.y0, band.y1) == pytest.approx((0.8 - 0.005**0.5, 0.9 + 0.02**0.5)), "a standard deviation to each side"
    assert list(lost.get_lines()[0].get_ydata()) == pytest.approx([float("nan"), -0.5], nan_ok=True)
