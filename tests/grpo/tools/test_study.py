"""The command that compares settings over seeds."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from core.config import load_config
from grpo.grpo_config import GRPOConfig
from grpo.tools import study


def test_a_study_runs_what_is_missing_and_prints_a_row_for_each(tmp_path, monkeypatch, capsys):
    compared = study.Study("config/grpo_example.py", "objective", study.values("objective", ("grpo", "gspo")), "x", 0.5,
                           ("--max_iters=4",))
    started = []

    def train(command, env, **options):
        """A run in which seed and objective decide what was learned; one with --weight_decay=9 ends early."""
        settings = dict(argument.removeprefix("--").split("=") for argument in command[3:])
        started.append((settings["objective"], settings["seed"], env.get("OMP_NUM_THREADS")))
        last = int(settings["seed"]) / 5 if settings["objective"] == "grpo" else 0.4
        records = [{"step": 0, "eval/x": 0.1}, {"step": 5, "time/train": 2.0, "time/collect": 1.0},
                   {"step": 5, "eval/x": last, "eval/kl": 0.3}]
        if settings["objective"] == "gspo":  # it takes longer: at equal time it is between two evaluations
            records += [{"step": 6, "time/train": 3.0}, {"step": 6, "eval/x": last + 0.1}]
        folder = Path(settings["out_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return subprocess.CompletedProcess(command, int("weight_decay" in settings), "", "killed")

    monkeypatch.setattr(study.subprocess, "run", train)
    monkeypatch.setitem(study.STUDIES, "tiny", compared)
    arguments = ["tiny", "--seeds=3", "--jobs=2", f"--out={tmp_path}"]
    for _ in range(2):
        study.main(arguments)
        assert capsys.readouterr().out.split("\n")[2:-1] == [
            "| grpo | 0.100 | 0.400 ± 0.200 | 0.400 ± 0.200 | 5 (1/3) | 0.300 | 3 |",
            "| gspo | 0.100 | 0.500 ± 0.000 | 0.400 ± 0.000 | 6 (3/3) | 0.000 | 6 |"]
    assert sorted(started) == [(name, seed, "1") for name in ("grpo", "gspo") for seed in "123"], "and only once"
    with pytest.raises(ValueError, match="train_grpo.py config/grpo_example.py .* failed:\nkilled"):
        study.main([*arguments, "--weight_decay=9"])
    study.main(arguments)
    assert len(started) > 12, "a run that was killed does not pass for the one that was there before"


@pytest.mark.parametrize("argv", [["nothing"], [], ["fill_in", "--help"], ["fill_in", "--seeds=many"],
                                  ["fill_in", "--seeds=0"], ["fill_in", "--jobs=0"], ["arithmetic", "--bogus=1"]])
def test_a_study_that_cannot_be_is_refused_before_the_first_run(argv, monkeypatch):
    monkeypatch.setattr(study, "run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(ValueError, match="study.py|seeds|jobs|unknown key bogus"):
        study.main(argv)


@pytest.mark.parametrize("name", study.STUDIES)
def test_the_settings_of_a_study_are_settings_of_its_runs(name):
    chosen = study.STUDIES[name]
    configs = [load_config(GRPOConfig, [chosen.config, *chosen.settings, *choice])[0]
               for choice in chosen.choices.values()]
    assert all(a != b for a, b in itertools.combinations(configs, 2)) and len(configs) > 1
    named = [", ".join(str(getattr(config, key)) for key in chosen.heading.split(", ")) for config in configs]
    assert named == list(chosen.choices)
