"""The benchmarks: each command prints a table and one JSON object, on the same work for all sides."""

import dataclasses
import json
import os
import random
import re
import time
from types import SimpleNamespace

import pytest

from bench import bench, gpu, objectives, peer
from bench.peer import Work
from bench.sides import in_turns
from core.errors import Mistake
from core.files import METRICS
from grpo.policies import causal

SIZES = ["--n_layer=1", "--n_embd=16", "--batch_size=2", "--group_size=3", "--device=cpu"]
TINY = Work(n_layer=1, n_head=2, n_embd=16, batch_size=2, group_size=3, prompt_length=4, completion_length=8)


def steps_of(run, *arguments, steps=2):
    """The records of a side that takes its steps in this process."""
    records = []

    def turn(record):
        records.append(record)
        return len(records) <= steps

    run(*arguments, turn)
    return records[1:]


@pytest.mark.slow
@pytest.mark.parametrize("argv", [
    ["fill", "--block_size=32"], ["causal", "--prompt_length=20", "--completion_length=4"]])
def test_a_comparison_measures_both_sides_in_processes_of_their_own_and_their_gradients_are_equal(argv, capsys):
    bench.main(argv + SIZES)
    out = capsys.readouterr().out.strip().split("\n")
    shown = {line[:24].strip(): line[24:].split() for line in out}
    result = json.loads(out[-1])
    assert result.pop("relative difference of the gradients") < 1e-5
    for row, ratio in result.items():
        naive, shared, printed = map(float, shown[row.removeprefix("ratio of ")])
        assert printed == ratio == pytest.approx(naive / shared, rel=0.01, abs=0.006)


@pytest.mark.slow
def test_the_ratios_to_trl_are_those_of_steps_with_the_lengths_of_the_work(capsys, monkeypatch):
    pytest.importorskip("trl")
    mixed = dataclasses.replace(TINY, prompt_length=9, mixed=True)
    monkeypatch.setattr(peer, "CASES", {"even": TINY, "long": mixed})
    monkeypatch.setattr(peer, "MEAN_LENGTH", 3)
    monkeypatch.setattr(causal, "draw_uniforms", causal.draw_uniforms)
    monkeypatch.setattr(peer, "in_turns", lambda calls, steps: [steps_of(*call, steps=steps) for call in calls])
    bench.main(["peer", "--cases=even,long", "--steps=1"])
    out = capsys.readouterr().out.strip().split("\n")
    trl, ours, trl_long, ours_long = [float(line.split()[1]) for line in out if line.startswith(("TRL", "ours"))]
    assert json.loads(out[-1]) == {"ratio_even": pytest.approx(trl / ours, rel=0.1),
                                   "ratio_long": pytest.approx(trl_long / ours_long, rel=0.1)}


@pytest.mark.slow
def test_the_parts_that_measure_a_gpu_run_in_miniature_and_each_finding_is_a_line_of_json(capsys, tmp_path, backend):
    pytest.importorskip("peft")
    parts = ["machine", "sampling", "training", "generate"]
    gpu.main([*parts, "--mini=True", f"--out={tmp_path}/found.jsonl"])
    written = (tmp_path / "found.jsonl").read_text()
    assert "".join(f"{line}\n" for line in capsys.readouterr().out.split("\n") if line.startswith("{")) == written
    found = [json.loads(line) for line in written.splitlines()]
    assert list(dict.fromkeys(finding["part"] for finding in found)) == parts
    for finding in found:
        if "tokens a second" in finding:
            seconds = finding.get("of training", finding.get("seconds"))
            length = finding["tokens a second"] * seconds / finding["completions"]
            assert length == pytest.approx(gpu.SIZES["mini"].completion_length, abs=0.0006 / seconds * 8)


@pytest.mark.slow
def test_learning_is_measured_on_the_model_the_dataset_and_the_settings_that_are_named(capsys, tmp_path):
    records = [{"prompt": f"{i}+1=", "answer": str(i + 1), "split": "val" if i < 4 else "train"} for i in range(20)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"max_new_tokens": 6, "template": "plain", "reward_functions": "exact_match", "reward_weights": (),
                "success_reward": None}
    gpu.main(["learn", "--mini=True", "--seeds=2", f"--dataset={tmp_path}/sums.jsonl", f"--settings={settings}",
              "--model=data/arithmetic/pretrained/generator.safetensors", f"--folder={tmp_path}/runs"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [finding["seed"] for finding in found] == [1, 2]
    for finding in found:
        assert [record["step"] for record in finding["curve"]] == [0, 3] and finding["seconds of a step"]
        path = tmp_path / "runs" / f"learn-{finding['seed']}" / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        last = [record for record in records if "eval/reward/exact_match" in record][-1]
        assert finding["curve"][-1]["eval/completion_length"] == round(last["eval/completion_length"], 4) <= 6


def clocked_steps(name, turn):
    """Steps that report when they ran."""
    go_on = turn(None)
    while go_on:
        start = time.monotonic()
        time.sleep(0.01)
        go_on = turn((name, start, time.monotonic()))


def failing_steps(turn):
    turn(None)
    raise SystemExit(3)


@pytest.mark.slow
def test_sides_take_their_steps_one_after_another_and_a_child_that_ends_early_is_noticed():
    a, b = in_turns([(clocked_steps, "a"), (clocked_steps, "b")], steps=3)
    in_order = [record for pair in zip(a, b, strict=True) for record in pair]
    assert [name for name, *_ in in_order] == ["a", "b"] * 3
    assert all(end <= start for (*_, end), (_, start, _) in zip(in_order, in_order[1:]))
    with pytest.raises(Mistake, match="3"):
        in_turns([(failing_steps,)], steps=1)


def run_in_place(command, results):
    """Writes the metrics that a run of this command is said to have had, in place of training."""
    values = {key: value for key, _, value in (argument.partition("=") for argument in command)}
    task = "sums" if "config/grpo_arithmetic.py" in command else "words"
    metric = {"sums": "eval/sampled_accuracy", "words": "eval/word_validity"}[task]
    before, after = results[task, values["--objective"], int(values["--seed"])]
    os.makedirs(values["--out_dir"])
    with open(os.path.join(values["--out_dir"], METRICS), "w") as f:
        for step, value in ((0, before), (int(values["--max_iters"]), after)):
            f.write(json.dumps({"step": step, metric: value}) + "\n")
    return SimpleNamespace(returncode=0)


def test_objectives_are_compared_by_seed_and_finished_runs_are_not_repeated(tmp_path, capsys, monkeypatch):
    rng = random.Random(0)
    results = {(task, objective, seed): (0.25, round(rng.random(), 4))
               for task in ("sums", "words") for objective in ("grpo", "dapo", "gspo") for seed in (1, 2, 3)}
    commands = []

    def run(command, **_):
        commands.append(command)
        return run_in_place(command, results)

    monkeypatch.setattr(objectives.subprocess, "run", run)
    folder = f"--folder={tmp_path}"
    objectives.main([folder, "--seeds=2", "--objectives=('dapo',)"])
    assert len(commands) == 2 * 2 * 2
    objectives.main([folder, "--seeds=3", "--objectives=('dapo', 'gspo')"])
    assert len(commands) == 2 * 3 * 3
    lines = capsys.readouterr().out.strip().split("\n")
    row = [cell.strip() for cell in lines[-2].split("|")]
    assert row[1] == "gspo"
    share = 0.5 + 0.9875 / 2  # 5% are shared by four comparisons, each with two degrees of freedom
    t = (2 * share - 1) / (2 * share * (1 - share)) ** 0.5
    for task, cell in (("sums", row[3]), ("words", row[5])):
        differences = [results[task, "gspo", seed][1] - results[task, "grpo", seed][1] for seed in (1, 2, 3)]
        mean = sum(differences) / 3
        error = (sum((x - mean) ** 2 for x in differences) / 2 / 3) ** 0.5
        shown = [float(x) for x in re.findall(r"[+-][\d.]+", cell)]
        assert shown == pytest.approx([mean, mean - t * error, mean + t * error], abs=2e-3)
