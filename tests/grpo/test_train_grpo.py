"""The command, as a user runs it: what works, and one clear line for what does not."""

import json
import os
import shutil

import pytest

from core.logger import WIDTH
from core.models import save_model
from grpo.grpo_config import GRPOConfig
from tests.families import model_folder
from tests.tiny import (
    CAUSAL,
    ROOT,
    TEXT,
    WORDS,
    causal_model,
    judge,
    model,
    read_records,
    run_here,
    save,
    write_prompt_dataset,
    write_text_dataset,
)

TRAIN = "grpo/train_grpo.py"
SMALL = {"batch_size": 4, "group_size": 3, "max_iters": 3, "eval_problems": 4, "eval_completions": 2,
         "log_interval": 1, "sample_interval": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a dataset of text and checkpoints of every kind; the arguments of a run that works."""
    folder = tmp_path_factory.mktemp("world")
    write_text_dataset(folder / "data", TEXT)
    files = {"generator": model(), "judge": judge(), "gold": judge(seed=6)}
    paths = {name: save(folder / f"{name}.safetensors", net) for name, net in files.items()}
    return folder, SMALL | {
        "dataset": folder / "data", "generator_checkpoint": paths["generator"], "judge_checkpoint": paths["judge"],
        "gold_judge_checkpoint": paths["gold"], "dtype": "float32", "block_size": 32, "out_dir": folder / "out"}


@pytest.fixture(scope="module")
def causal_world(tmp_path_factory):
    """A folder with a dataset of prompts and a causal generator; the arguments of a run that works."""
    folder = tmp_path_factory.mktemp("causal")
    write_prompt_dataset(folder / "sums")
    save_model(str(folder / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    save(folder / "judge.safetensors", judge())
    shutil.copytree(folder / "sums", folder / "lacking")
    lines = (folder / "sums" / "prompts.jsonl").read_text().split("\n")
    lines[6] = json.dumps({key: value for key, value in json.loads(lines[6]).items() if key != "answer"})
    (folder / "lacking" / "prompts.jsonl").write_text("\n".join(lines))
    return folder, SMALL | {"dataset": folder / "sums", "generator_checkpoint": folder / "g.safetensors",
                            "task_type": "general", "max_new_tokens": 5, "out_dir": folder / "out"}


def arguments(settings):
    return [f"--{key}={value}" for key, value in settings.items()]


def train(base, **changes):
    """The command, in this process."""
    return run_here(TRAIN, *arguments(base | changes))


@pytest.mark.slow
def test_a_masked_fill_model_learns_to_answer_prompts_and_is_then_trained_on_rewards(causal_world, tmp_path):
    """The two commands: supervised on the records' completions, then GRPO in blocks."""
    folder, base = causal_world
    done = run_here("core/pretrain.py", f"--dataset={folder}/sums", "--mode=masked_fill", "--block_size=24", "--n_layer=1",
                    "--n_embd=16", "--n_head=2", "--max_iters=12", "--eval_interval=6", "--batch_size=16", "--device=cpu",
                    "--warmup_iters=0", f"--out_dir={tmp_path}/start")
    assert done.returncode == 0, done.stderr
    losses = [r["val_loss"] for r in read_records(tmp_path / "start" / "metrics.jsonl") if "val_loss" in r]
    assert losses[-1] < losses[0]
    settings = {"generator_checkpoint": f"{tmp_path}/start/model.safetensors", "reward_functions": "exact_match",
                "unmask_steps": 2, "block_length": 3, "temperature": 1.0, "top_p": 1.0, "out_dir": tmp_path / "out"}
    done = train(base, **settings)
    assert done.returncode == 0, done.stderr
    steps = [r for r in read_records(tmp_path / "out" / "metrics.jsonl") if "loss" in r]
    assert steps[0]["mean_kl"] == 0.0 and steps[0]["mismatch_max"] < 1e-4 and steps[0]["ratio_minus_one"] < 1e-4
    assert all(0 < r["completion_length"] <= 6 and 0 <= r["truncated"] <= 1 for r in steps)
    resumed = train(base, **settings | {"max_iters": 4, "resume": True})
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_a_run_of_no_steps_evaluates_and_ends(causal_world):
    folder, base = causal_world
    done = train(base, reward_functions="exact_match", max_iters=0, out_dir=folder / "evaluated")
    assert done.returncode == 0, done.stderr
    only, = read_records(folder / "evaluated" / "metrics.jsonl")
    assert only["step"] == 0 and 0 <= only["eval/sampled_accuracy"] <= 1 and "the model" not in done.stdout
    assert not {"model.safetensors", "state.pt"} & set(os.listdir(folder / "evaluated"))


def test_a_dry_run_prints_the_changed_settings_and_the_plan_and_writes_nothing(world):
    folder, base = world
    changed = base | {"out_dir": folder / "dry", "dry_run": True}
    done = train(changed)
    out = done.stdout
    assert done.returncode == 0 and done.stderr == "" and "nothing was trained" in out
    assert all(len(line) <= WIDTH for line in out.split("\n") if str(folder) not in line), out
    settings, _, plan = out.replace("\n    ", " ").partition("effective batch: 4 problems x 3 completions ")
    keys = [line.split(" = ")[0] for line in settings.strip().split("\n")]
    assert sorted(keys) == sorted(key for key, value in changed.items() if str(getattr(GRPOConfig(), key)) != str(value))
    assert plan.count("frozen") == 3 and not (folder / "dry").exists()


REFUSED = {  # {mistake: (changed settings, exit code, words of the line)}; every other one is refused by its own file
    "unknown key": ({"grup_size": 4}, 2, "unknown key grup_size; did you mean group_size"),
    "not prepared": ({"dataset": "nowhere"}, 1, "dataset not prepared"),
    "nothing to resume": ({"resume": True}, 1, "resume=True"),
    "no answer": ({"dataset": "lacking", "reward_functions": "('exact_match',)"}, 1,
                  "prompts.jsonl, line 7: reward exact_match needs the field 'answer'")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_clear_line_before_anything_is_written(world, causal_world, monkeypatch, name):
    folder, base = causal_world if name == "no answer" else world
    monkeypatch.chdir(folder)
    changes, expected, message = REFUSED[name]
    done = train(base, **{"out_dir": folder / "mistake"} | changes)
    lines = [line for line in done.stderr.strip().split("\n") if line]
    assert done.returncode == expected and not list((folder / "mistake").glob("*.json*"))
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], done.stderr


@pytest.mark.slow
def test_what_is_missing_is_built_from_its_recipe(world, monkeypatch):
    folder, base = world
    built = folder / "built"
    built.mkdir()
    (built / "prepare.py").write_text(open(os.path.join(ROOT, "data", "char_diffusion", "prepare.py")).read().replace(
        "pathlib.Path(__file__).resolve().parents[2]", repr(ROOT)).replace(
        'options = {}', f'argv, options = [*argv, "--input={folder}/text.txt"], {{}}'))
    (folder / "text.txt").write_text(TEXT)
    (folder / "config").mkdir()
    (folder / "config" / "pretrain_equations.py").write_text("block_size = 32\nn_layer = 1\nn_embd = 16\nn_head = 2\nmax_iters = 3\n"
                                                         "eval_batches = 1\n")
    monkeypatch.chdir(folder)
    made = "out-equations/generator.safetensors"
    done = train(base, dataset=built, generator_checkpoint=made, max_iters=1, out_dir=folder / "out-built")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("building it with") == 2 and (folder / made).exists()
    assert (built / "meta.json").exists()


PUBLISHED = {  # the form of a row of the data set of the hub that the config names
    "gsm8k": {"question": "Ann has {} cats and gets {} more. How many has she?",
              "answer": "She has {0}+{1}=<<{0}+{1}={2}>>{2} cats.\n#### {2}"},
    "math": {"problem": "What is ${}+{}$?", "solution": r"It is $\boxed{{{2}}}$.", "answer": "{2}",
             "subject": "Prealgebra", "unique_id": "test/{}-{}"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_a_published_run_works_on_a_small_model_and_rows_of_that_form(tmp_path, name):
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("math_verify")
    for split, first in (("train", 1), ("test", 50)):
        rows = [{key: text.format(first + i, 3, first + i + 3) for key, text in PUBLISHED[name].items()}
                for i in range(8)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{split}.parquet")
    done = run_here(TRAIN, f"config/grpo_{name}.py", *arguments(SMALL | {
        "dataset": f"hf:{tmp_path}/data", "generator_checkpoint": model_folder(tmp_path / "model", "qwen3", longest=999),
        "max_iters": 1, "max_new_tokens": 4, "out_dir": tmp_path / "out"}))
    assert done.returncode == 0, done.stderr
    assert "8 training and 8 validation prompts" in " ".join(done.stdout.split())
    assert "boxed{}" in done.stdout or "boxed{ANSWER}" in done.stdout
    assert "nswer:" in done.stdout or name == "gsm8k", "the text around the prompt is its end"
    evaluation = read_records(tmp_path / "out" / "metrics.jsonl")[0]
    assert evaluation["eval/greedy_accuracy"] == 0


@pytest.mark.slow
def test_electra_runs_on_small_models_of_that_shape(tmp_path):
    """Folders in the place of the names of the hub, and its two commands: the text is prepared as word pieces."""
    pytest.importorskip("transformers")
    generator, detector = (model_folder(tmp_path / name, name) for name in ("electra", "electra_judge"))
    lines = [" ".join(WORDS[(i * j + i // 17) % len(WORDS)] for j in range(12)) for i in range(1500)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    done = run_here("data/char_diffusion/prepare.py", f"--input={tmp_path}/text.txt", f"--tokenizer={generator}",
                    f"--out={tmp_path}/pieces")
    assert done.returncode == 0, done.stderr
    settings = {"dataset": tmp_path / "pieces", "generator_checkpoint": generator, "judge_checkpoint": detector,
                "gold_judge_checkpoint": None, "block_size": 126}
    done = run_here(TRAIN, "config/grpo_example.py", *arguments(SMALL | settings | {
        "max_iters": 2, "sample_interval": 1, "out_dir": tmp_path / "out"}))
    assert done.returncode == 0 and "credit_window = 2" in done.stdout and "sequence_scorer" in done.stdout, done.stderr
    steps = [r for r in read_records(tmp_path / "out" / "metrics.jsonl") if "loss" in r]
    assert len(steps) == 2 and all(0 < r["reward/judge"] < 1 and r["grad_norm"] > 0 for r in steps)
    assert steps[0]["mean_kl"] == 0.0 and steps[0]["mismatch_max"] < 1e-4
    samples = read_records(tmp_path / "out" / "samples.jsonl")
    assert samples and all("_" in r["problem"] and "[mask]" not in r["group"][0]["text"].lower() for r in samples)
