"""The tables and pages over runs."""

import pytest

from grpo.tools import report
from tests.tiny import jsonl


def write_run(folder, before, after):
    folder.mkdir()
    records = [{"step": 0, "eval/x": before, "eval/kl": 0.0}, {"step": 1, "loss": 1.0},
               {"step": 1, "eval/x": after, "eval/kl": 0.5}]
    jsonl(folder / "metrics.jsonl", *records)
    return str(folder)


@pytest.mark.parametrize(("figures", "row"), [
    ([(0.1, 0.4), (0.2, 0.3), (0.3, 0.2)], "| x | 0.2000 | 0.3000 | +0.1000 ± 0.2000 | -0.1000 | 2/3 |"),
    ([(0.1, 0.4)], "| x | 0.1000 | 0.4000 | +0.3000 ± 0.0000 | +0.3000 | 1/1 |"),
    ([(0.1, 0.4), (0.2, None)], "| x | - | - | - | - | - |")])
def test_the_table_over_seeds_holds_means_deviations_and_the_least_change(tmp_path, capsys, monkeypatch, figures, row):
    drawn = []
    monkeypatch.setattr(report, "draw_curves", lambda runs, path: drawn.extend([*runs, path]))
    report.main(["seeds", *(write_run(tmp_path / f"r{i}", *pair) for i, pair in enumerate(figures)), "--picture=p.png"])
    rows = capsys.readouterr().out.split("\n")[2:-1]
    assert rows[0] == row and rows[1].startswith("| kl | 0.0000 | 0.5000 | +0.5000 ± 0.0000")
    assert drawn == [*(f"r{i}" for i in range(len(figures))), "p.png"]


def test_pages_are_in_the_folder_of_a_run_or_where_the_command_says(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = write_run(tmp_path / "a", 0.25, 0.5), write_run(tmp_path / "b", 0.5, 0.25)
    report.main(["compare", a, b, "--page=mine.html"])
    report.main(["compare", a, b])
    report.main(["html", a])
    assert capsys.readouterr().out == f"mine.html\ncompare.html\n{a}/report.html\n"
    for name in ("mine.html", "compare.html"):
        assert "0.5000 \u2192 0.2500" in (tmp_path / name).read_text()
    assert "<td>+0.2500</td>" in (tmp_path / "a" / "report.html").read_text()


@pytest.mark.parametrize("argv, message", [
    ([], "seeds FOLDER"), (["seeds"], "seeds FOLDER"), (["speeds", "out"], "seeds FOLDER"),
    (["html", "a", "b"], "seeds FOLDER"),
    (["compare", "a", "--pages=b"], "seeds FOLDER"), (["html", "none"], "metrics.jsonl holds no metrics"),
    (["seeds", "short"], "short/metrics.jsonl does not hold a finished run")])
def test_a_report_that_cannot_be_is_refused(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").mkdir()
    jsonl(tmp_path / "short" / "metrics.jsonl", {"step": 0, "eval/x": 0.5})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        report.main(argv)
