"""Pictures of runs."""

import math

import pytest

from grpo.report import plots


def test_curves_have_a_panel_for_each_metric_and_a_line_for_each_run_and_no_axis_is_cut(tmp_path, monkeypatch):
    nan, values = math.nan, {"judge": [0.78, None, 0.85], "kl": [0.0, 1e-8, -1e-8], "reward/mine": [-1.5, -0.5, -1.0],
                             "lost": [None, None, None], "token_accuracy": [0.5, 0.5, 0.5]}
    figures, close = [], plots.plt.close
    monkeypatch.setattr(plots.plt, "close", lambda figure: (figures.append(figure), close(figure)))
    records = [{"step": i} | {f"eval/{name}": numbers[i] for name, numbers in values.items()} for i in range(3)]
    plots.draw_curves({"a": records, "b": records[:1]}, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.get_title() for axis in figures[0].axes] == ["judge", "kl", "reward/mine", "lost", "token accuracy"]
    for axis, numbers in zip(figures[0].axes, values.values(), strict=True):
        a, b = ([float(y) for y in line.get_ydata(orig=False)] for line in axis.get_lines())
        assert a == pytest.approx([nan if x is None else x for x in numbers], nan_ok=True) and len(b) == 1
        low, high = axis.get_ylim()
        assert low <= 0 < high and high >= 1e-6, "rounding does not fill a panel"
