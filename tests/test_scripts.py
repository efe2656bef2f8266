"""The commands, as a user runs them: what works, and one clear line for what does not."""

import json
import os
import re
import shutil

import pytest
import torch

from core.checkpoint_manager import load_model
from core.model import SEQUENCE_SCORER
from tests.tiny import ROOT, TEXT, judge, model, run_script, save, write_text_dataset

TRAIN = "grpo/train_grpo.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A dataset and checkpoints of every kind; the arguments of a run that works."""
    folder = tmp_path_factory.mktemp("world")
    write_text_dataset(folder / "data", TEXT)
    files = {"generator": model(), "judge": judge(), "gold": judge(seed=6), "small": judge(block_size=16),
             "cls": model(SEQUENCE_SCORER, judge_head="cls", block_size=32),
             "wide cls": model(SEQUENCE_SCORER, judge_head="cls")}
    paths = {name: save(folder / f"{name}.safetensors", net) for name, net in files.items()}
    base = {"dataset": folder / "data", "generator_checkpoint": paths["generator"], "judge_checkpoint": paths["judge"],
            "gold_judge_checkpoint": paths["gold"], "block_size": 32, "batch_size": 4, "group_size": 3, "max_iters": 3,
            "eval_problems": 4, "eval_completions": 2, "log_interval": 1, "sample_interval": 3, "device": "cpu",
            "out_dir": folder / "out"}
    return folder, paths, base


def run(base, **changes):
    return run_script(TRAIN, *(f"--{k}={v}" for k, v in (base | changes).items()))


def test_the_main_job_from_start_to_finish(world):
    folder, _, base = world
    done = run(base)
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
    done = run_script("grpo/report.py", "seeds", folder / "out", folder / "out", f"--picture={picture}")
    assert done.returncode == 0 and "| word_validity |" in done.stdout and picture.exists(), done.stderr
    picture = folder / "temperatures.png"
    done = run_script("grpo/report.py", "temperatures", *(f"--{k}={v}" for k, v in base.items()),
                      f"--picture={picture}")
    assert done.returncode == 0 and done.stdout.count("| 0.2 |") == 2 and picture.exists(), done.stderr


def test_a_dry_run_checks_everything_and_writes_nothing(world):
    folder, _, base = world
    done = run(base, out_dir=folder / "dry", dry_run=True)
    assert done.returncode == 0 and "nothing was trained" in done.stdout and " MB " in done.stdout
    assert not (folder / "dry").exists()


def test_wandb_offline(world):
    folder, _, base = world
    done = run_script(TRAIN, *(f"--{k}={v}" for k, v in (base | {"out_dir": folder / "w", "wandb_log": True}).items()),
                      WANDB_MODE="offline", WANDB_SILENT="true")
    assert done.returncode == 0, done.stderr
    assert any(name.startswith("offline-run") for name in os.listdir(folder / "w" / "wandb"))


def broken(world, name):
    """(changed settings, exit code, what the line has to say) of a mistake."""
    folder, paths, _ = world
    if name == "truncated":
        whole = open(paths["generator"], "rb").read()
        (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    if name in ("no mask id", "no binary", "broken meta"):
        shutil.copytree(folder / "data", folder / name, dirs_exist_ok=True)
        if name == "broken meta":
            (folder / name / "meta.json").write_text("{")
            return {"dataset": folder / name}, 1, "is not JSON"
        if name == "no binary":
            os.remove(folder / name / "train.bin")
        else:
            text = (folder / name / "meta.json").read_text()
            (folder / name / "meta.json").write_text(re.sub(r'"mask_token_id": \d+,', "", text))
    if name == "other vocabulary":
        from core.checkpoint_manager import save_model
        from core.tokenizer import CharTokenizer
        save_model(str(folder / "other.safetensors"), judge(), CharTokenizer("abcdef"))
    return {
        "unknown key": ({"grup_size": 4}, 2, "did you mean group_size"),
        "synonym": ({"kl_coef": 0.1}, 2, "did you mean kl_beta"),
        "wrong type": ({"batch_size": "many"}, 2, "batch_size='many' must be int"),
        "missing checkpoint": ({"generator_checkpoint": "gone.safetensors"}, 1,
                               "generator_checkpoint=gone.safetensors"),
        "no checkpoint": ({"judge_checkpoint": None}, 1, "judge_checkpoint is not set"),
        "truncated": ({"generator_checkpoint": folder / "cut.safetensors"}, 1, "damaged or cut short"),
        "generator as judge": ({"judge_checkpoint": paths["generator"]}, 1,
                               "has mode masked_fill, but sequence_scorer"),
        "other vocabulary": ({"judge_checkpoint": folder / "other.safetensors"}, 1, "another vocabulary"),
        "long block": ({"block_size": 40}, 1, "block_size=40 is larger than the 33"),
        "small judge": ({"judge_checkpoint": paths["small"]}, 1, "block_size=16, but needs 32"),
        "no room for cls": ({"judge_checkpoint": paths["cls"]}, 1, "needs 33 for texts of block_size=32 and CLS"),
        "not prepared": ({"dataset": folder / "nothing"}, 1, "dataset not prepared"),
        "no binary": ({"dataset": folder / "no binary"}, 1, "train.bin is missing"),
        "no mask id": ({"dataset": folder / "no mask id"}, 1, "has no mask_token_id"),
        "group of one": ({"group_size": 1}, 1, "group_size=1 must be at least 2"),
        "no masks": ({"mask_random": 0.0, "mask_span": 0.0}, 1, "a batch without masks"),
        "nothing to resume": ({"resume": True, "out_dir": folder / "empty"}, 1, "resume=True"),
        "bad device": ({"device": "gpu"}, 1, "device='gpu'"),
        "folder as checkpoint": ({"generator_checkpoint": folder}, 1, "is a folder; name the file in it"),
        "credit of cls": ({"judge_checkpoint": paths["wide cls"], "credit_window": 4}, 1, "use credit_window=None"),
    }[name]


@pytest.mark.parametrize("name", [
    "unknown key", "synonym", "wrong type", "missing checkpoint", "no checkpoint", "truncated", "generator as judge",
    "other vocabulary", "long block", "small judge", "no room for cls", "not prepared", "no binary", "no mask id",
    "group of one", "no masks", "nothing to resume", "bad device",
    "folder as checkpoint", "credit of cls", "broken meta"])
def test_a_mistake_is_one_clear_line(world, name):
    changes, code, message = broken(world, name)
    done = run(world[2], **changes)
    errors = [line for line in done.stderr.strip().split("\n") if line]
    assert done.returncode == code, done.stderr
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0], done.stderr


def test_a_mistake_is_one_line_through_a_symbolic_link_too(world):
    link = world[0] / "link"
    link.symlink_to(ROOT)
    done = run_script(link / "grpo" / "train_grpo.py", "--grup_size=4", cwd=link)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_what_is_missing_is_built_from_its_recipe(world):
    folder, paths, base = world
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


def test_two_ranks_run_the_main_job(world):
    folder, _, base = world
    done = run_script(TRAIN, *(f"--{k}={v}" for k, v in (base | {"out_dir": folder / "out-2"}).items()), ranks=2)
    assert done.returncode == 0, done.stderr
    assert "x 2 ranks = 24 completions" in done.stdout and len(re.findall(r"^ +3  ", done.stdout, re.M)) == 1


def test_two_ranks_resume_within_an_iteration(world):
    folder, _, base = world
    base = base | {"ppo_epochs": 2, "minibatches": 2, "lr_decay_iters": 6, "eval_interval": 6, "sample_interval": 6}

    def go(name, steps, ranks=2, **more):
        settings = base | {"out_dir": folder / name, "max_iters": steps} | more
        return run_script(TRAIN, *(f"--{k}={v}" for k, v in settings.items()), ranks=ranks)

    for done in (go("uncut-2", 6), go("cut-2", 3)):
        assert done.returncode == 0, done.stderr
    done = go("cut-2", 6, ranks=1, resume=True)
    assert done.returncode == 1 and "saved within an iteration on 2 ranks; resume it on as many" in done.stderr
    assert "Traceback" not in done.stderr
    done = go("cut-2", 6, resume=True)
    assert done.returncode == 0, done.stderr
    uncut, cut = (load_model(str(folder / name / "model.safetensors"))[0] for name in ("uncut-2", "cut-2"))
    assert all(torch.equal(a, b) for a, b in zip(uncut.parameters(), cut.parameters(), strict=True))


def test_sample_fills_your_text(world):
    _, paths, _ = world
    done = run_script("core/sample.py", f"--checkpoint={paths['generator']}", "--text=the qu__k = fox",
                      "--num_samples=3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 3 and all(len(x) == 15 and x.startswith("the qu") and x.endswith("k = fox") for x in lines)
    for text, message in (("no gaps", "nothing to fill in"), ("____", "no usable characters"),
                          ("", "no usable characters"), ("a" * 40 + "_", "does not fit")):
        done = run_script("core/sample.py", f"--checkpoint={paths['generator']}", f"--text={text}")
        assert done.returncode == 1 and message in done.stderr and len(done.stderr.strip().split("\n")) == 1
    done = run_script("core/sample.py", f"--checkpoint={paths['judge']}", "--text=a_b")
    assert done.returncode == 1 and "masked_fill or language_model is needed" in done.stderr


@pytest.mark.parametrize("kind", ["fill", "checkpoint"])
def test_the_benchmark_prints_a_table_and_one_json_object(kind):
    done = run_script("grpo/bench.py", kind, "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=32",
                      "--batch_size=2", "--group_size=3", "--repeats=1", "--device=cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    keys = {"time_ratio", "time_ratio_without_judge", "memory_ratio", "gradient_difference"}
    assert set(result) == (keys if kind == "fill" else keys - {"time_ratio_without_judge"})
    assert result["gradient_difference"] < 1e-5


def test_the_shipped_config_and_models_belong_together(world):
    """The README's first command, on the shipped models, cut to two steps."""
    folder, _, _ = world
    done = run_script(TRAIN, "config/grpo_example.py", f"--dataset={folder}/data", f"--out_dir={folder}/out-shipped",
                      "--max_iters=2", "--eval_problems=4", "--batch_size=2", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("frozen") == 3 and "gold_judge" in done.stdout
    pretrained = os.path.join(ROOT, "data", "char_diffusion", "pretrained")
    assert sum(os.path.getsize(os.path.join(pretrained, name)) for name in os.listdir(pretrained)) < 16e6


def test_help_lists_the_keys():
    done = run_script(TRAIN, "--help")
    assert done.returncode == 0 and "--group_size=8" in done.stdout and "--kl_beta=0.1" in done.stdout
