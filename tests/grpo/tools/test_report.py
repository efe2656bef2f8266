"""The tables over runs and over temperatures."""

import json

import pytest

from grpo.tools import report
from tests.tiny import jsonl, judge, model, same, save


def write_run(folder, before, after):
    folder.mkdir()
    records = [{"step": 0, "eval/x": before, "eval/kl": 0.0}, {"step": 1, "loss": 1.0},
               {"step": 1, "eval/x": after, "eval/kl": 0.5}]
    jsonl(folder / "metrics.jsonl", *records)
    return str(folder)


def test_the_table_over_seeds_holds_means_deviations_and_the_least_change(tmp_path, capsys):
    figures = {"a": (0.1, 0.4), "b": (0.2, 0.3), "c": (0.3, 0.2)}
    runs = [write_run(tmp_path / name, *pair) for name, pair in figures.items()]
    report.main(["seeds", *runs, "--over=seconds", f"--picture={tmp_path / 'p.png'}"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.split("\n")[2:-1]]
    assert rows == [["x", "0.2000", "0.3000", "+0.1000 ± 0.2000", "-0.1000", "2/3"],
                    ["kl", "0.0000", "0.5000", "+0.5000 ± 0.0000", "+0.5000", "3/3"]]
    assert (tmp_path / "p.png").exists()


def test_the_legend_of_a_run_is_its_folders_name_alone(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "draw_curves", lambda runs, *_: drawn.extend(runs))
    report.main(["seeds", *(write_run(tmp_path / name, 0.1, 0.4) for name in ("a", "b")), "--picture=p.png"])
    assert drawn == ["a", "b"]


def test_a_metric_that_a_run_did_not_measure_is_a_dash(tmp_path, capsys):
    runs = [write_run(tmp_path / name, *pair) for name, pair in {"a": (0.1, 0.4), "b": (0.2, None)}.items()]
    report.main(["seeds", *runs])
    assert "| x | - | - | - | - | - |" in capsys.readouterr().out


def test_the_page_of_a_run_is_in_its_folder(tmp_path, capsys):
    report.main(["html", write_run(tmp_path / "a", 0.25, 0.5)])
    path = tmp_path / "a" / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    assert "<td>x</td><td>0.2500</td><td>0.5000</td><td>+0.2500</td>" in path.read_text()


def test_the_page_of_several_runs_is_where_the_command_says(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [write_run(tmp_path / name, *pair) for name, pair in {"a": (0.25, 0.5), "b": (0.5, 0.25)}.items()]
    report.main(["compare", *runs, "--page=mine.html"])
    report.main(["compare", *runs])
    assert capsys.readouterr().out == "mine.html\ncompare.html\n"
    for name in ("mine.html", "compare.html"):
        assert "<td>0.2500 \u2192 0.5000<br>+0.2500</td><td>0.5000 \u2192 0.2500<br>-0.2500</td>" in (
            tmp_path / name).read_text()
    assert not list(tmp_path.glob("*/report.html"))


def test_a_page_of_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl holds no metrics"):
        report.main(["html", str(tmp_path)])


def test_a_single_run_has_no_deviation(tmp_path, capsys):
    report.main(["seeds", write_run(tmp_path / "a", 0.1, 0.4)])
    assert "+0.3000 ± 0.0000" in capsys.readouterr().out


def test_a_run_that_did_not_end_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/x": 0.5}) + "\n")
    with pytest.raises(ValueError, match="does not hold a finished run"):
        report.main(["seeds", str(tmp_path)])


@pytest.mark.parametrize("argv", [[], ["seeds"], ["speeds", "out"], ["temperatures", "--picture=x.png"],
                                  ["seeds", "out", "--over=tokens"], ["html"], ["html", "a", "b"], ["compare"],
                                  ["compare", "a", "--pages=b"]])
def test_a_report_that_cannot_be_is_refused(argv):
    with pytest.raises(ValueError, match="seeds FOLDER"):
        report.main(argv)


def test_temperatures_compare_the_model_before_and_after(dataset, tmp_path, capsys):
    before, scorer = save(tmp_path / "before", model(scale=1.0)), save(tmp_path / "judge", judge())
    save(tmp_path / "model.safetensors", model())
    assert not same(model(scale=1.0), model())
    arguments = ["temperatures", f"--dataset={dataset}", f"--generator_checkpoint={before}", "--block_size=32",
                 f"--judge_checkpoint={scorer}", "--eval_problems=4", "--eval_completions=2", "--device=cpu",
                 f"--out_dir={tmp_path}", f"--picture={tmp_path / 't.png'}"]
    report.main(arguments)
    out = capsys.readouterr().out
    assert out.count("| 0.2 |") == out.count("| 1 |") == 2 and (tmp_path / "t.png").exists()
    assert out.index("before GRPO") < out.index("after GRPO") and "word_validity" in out
    report.main([*arguments, f"--trained={before}"])
    first, second = capsys.readouterr().out.split("after GRPO\n")
    assert first.removeprefix("before GRPO\n") == second, "--trained names the model that is compared"
    assert out.split("after GRPO\n")[1] != second


def test_an_unknown_option_is_no_folder():
    with pytest.raises(ValueError, match="seeds FOLDER"):
        report.main(["seeds", "--pictures=x.png"])
