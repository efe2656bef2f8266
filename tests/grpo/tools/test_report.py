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
    monkeypatch.setattr(report, "draw_curves", lambda runs, path: drawn.extend([len(runs), path]))
    report.main(["seeds", *(write_run(tmp_path / f"r{i}", *pair) for i, pair in enumerate(figures)), "--picture=p.png"])
    rows = capsys.readouterr().out.split("\n")[2:-1]
    assert rows[0] == row and rows[1].startswith("| kl | 0.0000 | 0.5000 | +0.5000 ± 0.0000")
    assert drawn == [len(figures), "p.png"]


def test_the_page_is_in_the_folder_of_its_run(tmp_path, capsys):
    folder = write_run(tmp_path / "a", 0.25, 0.5)
    report.main(["html", folder])
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert "<td>+0.2500</td>" in (tmp_path / "a" / "report.html").read_text()


@pytest.mark.parametrize("argv, message", [
    *((argv.split(), "seeds FOLDER") for argv in ("", "seeds", "speeds out", "html a b", "html a --picture=b")),
    (["html", "none"], "metrics.jsonl holds no metrics"),
    (["html", "damaged"], "metrics.jsonl, line 2 is not JSON"),
    (["seeds", "short"], "short/metrics.jsonl does not hold a finished run")])
def test_a_report_that_cannot_be_is_refused(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in (("short", b'{"step": 0, "eval/x": 0.5}\n'), ("damaged", b'{"step": 1}\n{"step": \xff}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        report.main(argv)
