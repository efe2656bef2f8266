"""Pictures of runs."""

import math

import pytest
from matplotlib.figure import Figure

from grpo.report import page


def test_curves_have_a_panel_for_each_metric_and_a_line_for_each_run_and_no_axis_is_cut(tmp_path, monkeypatch):
    values = {"judge": [0.78, None, 0.85], "small": [0.0, 1e-8], "reward/mine": [-1.5, -0.5], "lost": [None], "a_b": [0.5]}
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: (figures.append(figure), save(figure, path, dpi=dpi)))
    records = [{"step": i, f"eval/{name}": y} for name, numbers in values.items() for i, y in enumerate(numbers)]
    page.draw_curves({"a": records, "b": records[:1]}, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title() for axis in figures[0].axes] == ["judge", "small", "reward/mine", "lost", "a b"]
    for axis, numbers in zip(figures[0].axes, values.values(), strict=True):
        found = [float(y) for y in axis.get_lines()[0].get_ydata(orig=False)]
        assert found == pytest.approx([math.nan if x is None else x for x in numbers], nan_ok=True)
        low, high = axis.get_ylim()
        assert low <= 0 < high and high >= 1e-6, "rounding does not fill a panel"
    assert [len(axis.get_lines()[1].get_xdata()) for axis in figures[0].axes] == [1, 0, 0, 0, 0]
