"""Pictures of runs."""

import statistics

import pytest
from matplotlib.figure import Figure

from grpo.report import page


def test_a_picture_has_a_panel_for_each_metric_that_changes_with_mean_deviation_and_start(tmp_path, monkeypatch):
    values = {"judge": [(0.78, 0.8), (0.85, 0.95)], "reward/a_b": [(-1.5, -1.5), (None, 1.0), (-0.5, -0.5)],
              "lost": [(None, None)], "flat": [(3.0, 3.0 + 1e-9), (3.0, 3.0)]}
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: (figures.append(figure), save(figure, path, dpi=dpi)))
    runs = [[{"step": i, f"eval/{name}": pair[run]} for name, pairs in values.items() for i, pair in enumerate(pairs)]
            for run in (0, 1)]
    page.draw_curves(runs, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    axes = {axis.get_title(): axis for axis in figures[0].axes}
    assert list(axes) == ["judge", "reward/a b", "lost"]
    mean, before = axes["judge"].get_lines()
    assert list(mean.get_ydata()) == pytest.approx([0.79, 0.9]) and list(before.get_ydata()) == pytest.approx([0.79] * 2)
    band = axes["judge"].collections[0].get_paths()[0].vertices
    for step, pair in enumerate(values["judge"]):
        edges = [y for x, y in band if x == step]
        sd = statistics.stdev(pair)
        assert [min(edges), max(edges)] == pytest.approx([statistics.mean(pair) - sd, statistics.mean(pair) + sd])
    found = axes["reward/a b"].get_lines()[0].get_ydata()
    assert list(found) == pytest.approx([-1.5, float("nan"), -0.5], nan_ok=True), "what was not finite is a gap"
    page.draw_curves([runs[0][-1:]], str(tmp_path / "short.png"))
    assert [axis.get_title() for axis in figures[1].axes] == ["flat"]
