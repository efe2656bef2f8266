"""The command, as a user runs it: what works, and one clear line for what does not."""

import json
import os
import re
import shutil
import sys

import pytest
import torch

from core.files.json_lines import read_records
from core.model import SEQUENCE_SCORER
from core.models import load_model, save_model
from core.settings.script import exit_code
from grpo import train_grpo
from grpo.grpo_config import GRPOConfig
from tests.core.run.test_trackers import READERS
from tests.families import model_folder
from tests.tiny import (
    CAUSAL,
    ROOT,
    TEXT,
    causal_model,
    judge,
    model,
    run_here,
    run_script,
    same,
    save,
    write_prompt_dataset,
    write_text_dataset,
)

TRAIN = "grpo/train_grpo.py"
SHORT = "the quick brown fox jumps over the lazy dog\n" * 40


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A dataset of text and checkpoints of every kind; the arguments of a run that works."""
    folder = tmp_path_factory.mktemp("world")
    write_text_dataset(folder / "data", TEXT)
    files = {"generator": model(), "judge": judge(), "gold": judge(seed=6)}
    paths = {name: save(folder / f"{name}.safetensors", net) for name, net in files.items()}
    base = {"dataset": folder / "data", "generator_checkpoint": paths["generator"], "judge_checkpoint": paths["judge"],
            "gold_judge_checkpoint": paths["gold"], "dtype": "float32", "block_size": 32, "batch_size": 4,
            "group_size": 3, "max_iters": 3, "eval_problems": 4,
            "eval_completions": 2, "log_interval": 1, "sample_interval": 3, "device": "cpu",
            "out_dir": folder / "out"}
    return folder, paths, base


@pytest.fixture(scope="module")
def causal_world(tmp_path_factory):
    """A dataset of prompts and a causal generator; the arguments of a run that works."""
    folder = tmp_path_factory.mktemp("causal")
    write_prompt_dataset(folder / "sums")
    write_text_dataset(folder / "text", SHORT)
    save_model(str(folder / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    save(folder / "judge.safetensors", model(SEQUENCE_SCORER))
    save(folder / "short.safetensors", model(SEQUENCE_SCORER, block_size=4))
    shutil.copytree(folder / "sums", folder / "lacking")
    lines = (folder / "sums" / "prompts.jsonl").read_text().split("\n")
    lines[6] = json.dumps({key: value for key, value in json.loads(lines[6]).items() if key != "answer"})
    (folder / "lacking" / "prompts.jsonl").write_text("\n".join(lines))
    base = {"dataset": folder / "sums", "generator_checkpoint": folder / "g.safetensors", "task_type": "general",
            "max_new_tokens": 5, "batch_size": 4, "group_size": 3, "max_iters": 3, "eval_problems": 4,
            "log_interval": 1, "sample_interval": 3, "device": "cpu", "out_dir": folder / "out"}
    return folder, base


def arguments(settings):
    return [f"--{key}={value}" for key, value in settings.items()]


def run(base, ranks=1, **changes):
    """The command, in this process if it has one rank."""
    settings = arguments(base | changes)
    return run_here(TRAIN, *settings) if ranks == 1 else run_script(TRAIN, *settings, ranks=ranks)


@pytest.fixture
def launch(monkeypatch, capsys):
    """The command in this process: (exit code, stdout, stderr)."""
    def launched(*argv):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [TRAIN, *map(str, argv)])
        code = exit_code(train_grpo.main)
        return code, *capsys.readouterr()
    return launched


@pytest.mark.slow
def test_the_main_job_from_start_to_finish(world):
    folder, _, base = world
    done = run_script(TRAIN, *arguments(base))
    assert done.returncode == 0, done.stderr
    for expected in ("group_size = 3", "default 8; command line",
                     "4 problems x 3 completions x 1 accumulation x 1 ranks = 12",
                     "judge      sequence_scorer", "frozen", "problem         |", "best", "held out | judge",
                     "gold_judge",
                     "word_validity", "mean_reward", "eta", "before", "change", "curves.png"):
        assert expected in done.stdout, expected
    assert {"config.json", "metrics.jsonl", "samples.jsonl", "model.safetensors", "state.pt", "curves.png"} <= set(
        os.listdir(folder / "out"))
    steps = [line for line in done.stdout.split("\n") if re.match(r" +\d+  ", line)]
    assert [int(line.split()[0]) for line in steps] == [1, 2, 3] and len(set(map(len, steps))) == 1, "aligned lines"

    picture = folder / "seeds.png"
    done = run_here("grpo/tools/report.py", "seeds", folder / "out", folder / "out", f"--picture={picture}")
    assert done.returncode == 0 and "| word_validity |" in done.stdout and picture.exists(), done.stderr
    picture = folder / "temperatures.png"
    done = run_here("grpo/tools/report.py", "temperatures", *arguments(base), f"--picture={picture}")
    assert done.returncode == 0 and done.stdout.count("| 0.2 |") == 2 and picture.exists(), done.stderr


@pytest.mark.slow
def test_a_causal_job_from_start_to_finish(causal_world):
    folder, base = causal_world
    done = run(base, reward_functions="('length_penalty','exact_match','judge')", success_reward="exact_match",
               judge_checkpoint=folder / "judge.safetensors")
    assert done.returncode == 0, done.stderr
    for expected in ("training and", "validation prompts", "1 x exact_match [0, 1]", "completion_length", "problem  ",
                     "greedy_accuracy", "pass_at_k", "reward/judge", "curves.png"):
        assert expected in done.stdout, expected
    sample = json.loads(open(folder / "out" / "samples.jsonl").readline())
    assert sample["problem"].endswith("=") and {"answer", "best", "worst", "best_score"} <= set(sample)
    load_model(str(folder / "out" / "model.safetensors"), tokenizer=CAUSAL)
    done = run(base, ranks=2, out_dir=folder / "two")
    assert done.returncode == 0, done.stderr


def test_a_dry_run_prints_the_changed_settings_and_the_plan_and_writes_nothing(world, launch):
    folder, _, base = world
    code, out, err = launch(*arguments(base | {"out_dir": folder / "dry", "dry_run": True}))
    assert code == 0 and err == "" and "nothing was trained" in out and " MB: weights" in out
    settings, plan = out[: out.index("effective batch")], out[out.index("effective batch") :]
    keys = [line.split(" = ")[0] for line in settings.strip().split("\n")]
    assert sorted(keys) == sorted(key for key, value in (base | {"out_dir": "dry", "dry_run": True}).items()
                                  if str(getattr(GRPOConfig(), key)) != str(value))
    assert "group_size = 3 " in settings and "kl_beta" not in settings
    for expected in ("effective batch: 4 problems x 3 completions x 1 accumulation x 1 ranks = 12 completions",
                     "generator  masked_fill, 1 layers x 16", "reference  masked_fill", "judge      sequence_scorer",
                     "gold judge sequence_scorer", "training and", "windows of 32", "rewards: 1 x judge [0, 1]",
                     "on cpu in torch.float32"):
        assert expected in plan, expected
    assert plan.count("frozen") == 3 and not (folder / "dry").exists()


@pytest.mark.slow
def test_a_run_on_two_ranks_reports_each_step_once_to_every_tracker(world):
    folder, _, base = world
    out = folder / "trackers" / "out"
    settings = base | {"out_dir": out, "report_to": tuple(READERS), "system_prompt": "a secret"}
    environment = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackers" / "trackio")}
    done = run_script(TRAIN, *arguments(settings), ranks=2, **environment)
    assert done.returncode == 0, done.stderr
    for name, read in READERS.items():
        assert {key: [step for step, _ in series] for key, series in read(folder / "trackers").items()} == {
            "loss": [1, 2, 3], "eval/judge": [0, 3]}, name
    assert len(list(out.glob("events*"))) == len(list(out.glob("wandb/offline*"))) == 1, "of rank 0 alone"


REFUSED = {  # {mistake: (changed settings, exit code, what the line says)}; every other one is refused by its own file
    "unknown key": ({"grup_size": 4}, 2, "unknown key grup_size; did you mean group_size"),
    "wrong type": ({"batch_size": "many"}, 2, "batch_size='many' must be int"),
    "out of range": ({"group_size": 1}, 1, "group_size=1 must be at least 2"),
    "no checkpoint": ({"judge_checkpoint": None}, 1, "judge_checkpoint is not set"),
    "missing checkpoint": ({"generator_checkpoint": "gone"}, 1, "generator_checkpoint=gone"),
    "a folder without a model": ({"generator_checkpoint": ROOT}, 1, "is a folder without a Hugging Face config.json"),
    "not prepared": ({"dataset": "nowhere"}, 1, "dataset not prepared"),
    "bad device": ({"device": "gpu"}, 1, "device='gpu'"),
    "bad dtype": ({"dtype": "float16"}, 1, "dtype='float16' is not one of"),
    "nothing to resume": ({"resume": True}, 1, "resume=True"),
    "too much to store": ({"batch_size": 1024, "stored_megabytes": 5}, 1, "stored_megabytes=5")}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_clear_line_before_anything_is_written(world, launch, name):
    changes, expected, message = REFUSED[name]
    code, _, err = launch(*arguments(world[2] | {"out_dir": world[0] / "mistake"} | changes))
    lines = [line for line in err.strip().split("\n") if line]
    assert code == expected and not list((world[0] / "mistake").glob("*.json*"))
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], err


REFUSED_ON_PROMPTS = {
    "causal on text": ({"dataset": "text"}, "another vocabulary"),
    "unwritable stop": ({"stop_sequences": "('\\u00e9',)"}, "a text that the tokenizer cannot write"),
    "short judge": ({"reward_functions": "('judge',)", "judge_checkpoint": "short.safetensors"},
                    "judge_checkpoint reads 4 tokens"),
    "no reward model": ({"reward_functions": "('reward_model',)", "reward_model_checkpoint": "folder"},
                        "reward_model_checkpoint=folder is no folder"),
    "no answer": ({"dataset": "lacking", "reward_functions": "('exact_match',)"},
                  "prompts.jsonl, line 7: reward exact_match needs the field 'answer'")}


@pytest.mark.parametrize("name", REFUSED_ON_PROMPTS)
def test_a_mistake_on_prompts_is_one_clear_line(causal_world, launch, monkeypatch, name):
    folder, base = causal_world
    monkeypatch.chdir(folder)
    changes, message = REFUSED_ON_PROMPTS[name]
    code, _, err = launch(*arguments(base | changes))
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.slow
def test_what_is_missing_is_built_from_its_recipe(world):
    folder, _, base = world
    (folder / "prepare.py").write_text(open(os.path.join(ROOT, "data", "char_diffusion", "prepare.py")).read().replace(
        "pathlib.Path(__file__).resolve().parents[2]", repr(ROOT)).replace(
        'options = {}', f'argv, options = [*argv, "--input={folder}/text.txt"], {{}}'))
    (folder / "text.txt").write_text(TEXT)
    (folder / "recipe.py").write_text(
        f"dataset = {str(folder / 'built')!r}\nblock_size = 32\nn_layer = 1\nn_embd = 16\n"
        f"n_head = 2\nmax_iters = 3\neval_batches = 1\nout_dir = {str(folder / 'recipe-out')!r}\n")
    done = run(base, dataset=folder / "built", dataset_recipe=folder / "prepare.py", out_dir=folder / "out-built",
               generator_checkpoint=folder / "made" / "g.safetensors", generator_recipe=folder / "recipe.py")
    assert done.returncode == 0, done.stderr
    assert "building it with" in done.stdout and (folder / "made" / "g.safetensors").exists()
    assert (folder / "built" / "meta.json").exists()


@pytest.mark.slow
def test_two_ranks_run_the_main_job_and_resume_within_an_iteration(world):
    folder, _, base = world
    base = base | {"ppo_epochs": 2, "minibatches": 2, "lr_decay_iters": 6, "eval_interval": 6, "sample_interval": 6}

    def go(name, steps, ranks=2, **more):
        return run(base | {"out_dir": folder / name, "max_iters": steps} | more, ranks)

    for done in (go("uncut-2", 6), go("cut-2", 3)):
        assert done.returncode == 0, done.stderr
        assert "x 2 ranks = 24 completions" in done.stdout and len(re.findall(r"^ +3  ", done.stdout, re.M)) == 1
    done = go("cut-2", 6, ranks=1, resume=True)
    assert done.returncode == 1 and "saved within an iteration on 2 ranks; resume it on as many" in done.stderr
    assert "Traceback" not in done.stderr
    done = go("cut-2", 6, resume=True)
    assert done.returncode == 0, done.stderr
    uncut, cut = (load_model(str(folder / name / "model.safetensors"))[0] for name in ("uncut-2", "cut-2"))
    assert all(torch.equal(a, b) for a, b in zip(uncut.parameters(), cut.parameters(), strict=True))


SLOW_RANK = """
import os, sys, time
sys.path.insert(0, {root!r})
from grpo import build, train_grpo

load = build.load_model


def load_late(*arguments):
    if os.environ["RANK"] == "1":
        time.sleep(2)
    return load(*arguments)


build.load_model = load_late
train_grpo.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_slower_rank_still_finds_a_checkpoint_in_the_folder_of_the_run(world):
    """The generator is the model of an earlier run in out_dir, which rank 0 moves aside."""
    folder, paths, base = world
    out_dir = folder / "slow"
    out_dir.mkdir()
    shutil.copy(paths["generator"], out_dir / "model.safetensors")
    (out_dir / "metrics.jsonl").write_text('{"step": 7}\n')
    (folder / "slow_rank.py").write_text(SLOW_RANK.format(root=ROOT))
    settings = base | {"out_dir": out_dir, "generator_checkpoint": out_dir / "model.safetensors", "max_iters": 1}
    done = run_script(folder / "slow_rank.py", *arguments(settings), ranks=2)
    assert done.returncode == 0, done.stderr
    assert f"which is now in {out_dir}/previous/1" in done.stdout and os.listdir(out_dir / "previous") == ["1"]
    assert sorted(os.listdir(out_dir / "previous" / "1")) == ["metrics.jsonl", "model.safetensors"]
    assert same(load_model(str(out_dir / "previous" / "1" / "model.safetensors"))[0], model())
    assert read_records(out_dir / "metrics.jsonl")[-1]["step"] == 1


FAILING = """
from grpo.rewards import reward


@reward(0, 1)
def failing(prompts, completions, **columns):
    return [1 / 0 if text else 0.0 for text in completions]
"""


def test_two_failed_starts_after_a_finished_run_keep_that_run_whole(causal_world, tmp_path, launch):
    _, base = causal_world
    (tmp_path / "failing.py").write_text(FAILING)
    settings = base | {"out_dir": tmp_path / "out", "max_iters": 1}
    code, _, err = launch(*arguments(settings))
    assert code == 0, err
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "lock"}
    assert {"config.json", "metrics.jsonl", "model.safetensors", "state.pt"} <= set(whole)
    failing = settings | {"reward_file": tmp_path / "failing.py", "reward_functions": "('failing',)"}
    for number in (1, 2):
        code, out, err = launch(*arguments(failing | {"seed": number}))
        assert code == 1 and "reward failing" in err and "ZeroDivisionError" in err
        assert f"previous/{number}\n" in out
    kept = {path.name: path.read_bytes() for path in (tmp_path / "out" / "previous" / "1").iterdir()}
    assert kept == whole
    failed = json.loads((tmp_path / "out" / "previous" / "2" / "config.json").read_text())
    assert failed["seed"] == 1, "a failed start has a folder of its own"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["seed"] == 2


def test_a_resumed_run_goes_on_in_its_folder_and_a_refused_one_leaves_it_alone(causal_world, tmp_path, launch):
    base = causal_world[1] | {"out_dir": tmp_path / "out", "max_iters": 1, "lr_decay_iters": 2}
    assert launch(*arguments(base))[0] == 0
    settings = (tmp_path / "out" / "config.json").read_text()
    code, _, err = launch(*arguments(base | {"resume": True, "optimizer": "muon", "max_iters": 2}))
    assert code == 1 and "config.json" in err and (tmp_path / "out" / "config.json").read_text() == settings
    code, _, err = launch(*arguments(base | {"resume": True, "max_iters": 2}))
    assert code == 0 and not (tmp_path / "out" / "previous").exists(), err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_iters"] == 2
    assert [r["step"] for r in read_records(tmp_path / "out" / "metrics.jsonl") if "loss" in r] == [1, 2]


@pytest.mark.slow
def test_the_shipped_config_and_models_belong_together(world):
    """The README's first command, on the shipped models, cut to two steps."""
    folder, _, _ = world
    done = run_here(TRAIN, "config/grpo_example.py", f"--dataset={folder}/data", f"--out_dir={folder}/out-shipped",
                      "--max_iters=2", "--eval_problems=4", "--batch_size=2", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("frozen") == 3 and "gold_judge" in done.stdout
    pretrained = os.path.join(ROOT, "data", "char_diffusion", "pretrained")
    assert sum(os.path.getsize(os.path.join(pretrained, name)) for name in os.listdir(pretrained)) < 16e6


@pytest.mark.parametrize("family", ["bert_reward", "llama_reward"])
def test_a_reward_model_scores_the_completions_of_a_run(causal_world, tmp_path, launch, family):
    """The score that is shown beside a completion is that of transformers for prompt and completion as one text."""
    transformers = pytest.importorskip("transformers")
    folder, base = causal_world
    judging = model_folder(tmp_path / "judging", family)
    code, out, err = launch(*arguments(base | {
        "reward_functions": "('reward_model',)", "reward_model_checkpoint": judging, "out_dir": tmp_path / "out",
        "max_iters": 2, "sample_interval": 1, "learning_rate": 1e-3, "kl_beta": 0.0}))
    assert code == 0 and "1 x reward_model [-inf, inf]" in out, err
    net = transformers.AutoModelForSequenceClassification.from_pretrained(judging).eval()
    tokenizer, seen = transformers.AutoTokenizer.from_pretrained(judging), set()
    for sample in read_records(tmp_path / "out" / "samples.jsonl"):
        for which in ("best", "worst"):
            ids = torch.tensor([tokenizer(sample["problem"] + sample[which]).input_ids])
            with torch.no_grad():
                score = float(net(input_ids=ids).logits)
            assert sample[f"{which}_score"] == pytest.approx(score, rel=1e-3, abs=1e-3)
            seen.add(round(score, 3))
        assert sample["best_score"] >= sample["worst_score"]
    assert len(seen) > 2
    steps = [r for r in read_records(tmp_path / "out" / "metrics.jsonl") if "loss" in r]
    assert all(r["mean_reward"] == r["reward/reward_model"] != 0 and r["grad_norm"] > 0 for r in steps)


@pytest.mark.slow
def test_the_electra_config_runs_on_small_models_of_that_shape(tmp_path, launch):
    """Folders in the place of the names of the hub: the recipe prepares the text in the generator's word pieces."""
    pytest.importorskip("transformers")
    generator, detector = (model_folder(tmp_path / name, name) for name in ("electra", "electra_judge"))
    code, out, err = launch("config/grpo_electra.py", *arguments({
        "dataset": tmp_path / "pieces", "generator_checkpoint": generator, "judge_checkpoint": detector,
        "dataset_recipe": f"data/char_diffusion/prepare.py --tokenizer={generator}", "max_iters": 2, "batch_size": 2,
        "group_size": 3, "eval_problems": 4, "eval_completions": 2, "device": "cpu", "out_dir": tmp_path / "out",
        "log_interval": 1, "sample_interval": 1}))
    assert code == 0 and "credit_window = 2" in out and "sequence_scorer" in out, err
    steps = [r for r in read_records(tmp_path / "out" / "metrics.jsonl") if "loss" in r]
    assert len(steps) == 2 and all(0 < r["reward/judge"] < 1 and r["grad_norm"] > 0 for r in steps)
    assert steps[0]["mean_kl"] == 0.0 and steps[0]["mismatch_max"] < 1e-4
    samples = read_records(tmp_path / "out" / "samples.jsonl")
    assert samples and all("_" in r["problem"] and "[mask]" not in r["best"].lower() for r in samples)
