"""The memory that a run is expected to need is what a child process is measured to need; what cannot fit is refused."""

import os
import random
import re
import subprocess
import sys

import pytest

from grpo.evaluation import memory
from grpo.evaluation.memory import check_fits, memory_estimate
from tests.families import model_folder
from tests.grpo.evaluation.patients import SHIPPED, completing, filling
from tests.tiny import ROOT, TEXT, jsonl, write_text_dataset

MEASURE = """
import re, sys
sys.path.insert(0, sys.argv[1])
from grpo.train_grpo import main
main(sys.argv[2:])
with open("/proc/self/status") as f:
    print(f"measured {int(re.search('VmHWM: *([0-9]+)', f.read().replace(chr(9), ' '))[1]) * 1024 / 1e6:.0f} MB")
"""


def check(parts):
    check_fits(parts.config, parts.models, parts.data, parts.dist)


@pytest.mark.parametrize("kind, settings, words", [
    (completing, {"group_size": 100_000}, "group_size=100000"),
    (completing, {"eval_completions": 100_000, "eval_problems": 8}, "for evaluation; lower eval_completions=100000"),
    (completing, {"batch_size": 1_000_000}, "batch_size=1000000"),
    (filling, {"unmask_steps": 1_000_000}, "unmask_steps=1000000"),
    (filling, {"group_size": 100_000, "batch_size": 64}, "group_size=100000")])
def test_sizes_that_cannot_fit_are_refused_by_the_name_of_the_setting(kind, settings, words, tmp_path, monkeypatch):
    parts = kind(tmp_path)
    monkeypatch.setattr(memory, "memory_limit", lambda device: 8_000.0)
    check(parts)
    parts.config = parts.config.__class__(**vars(parts.config) | settings)
    with pytest.raises(ValueError) as found:
        check(parts)
    text = str(found.value)
    assert text.startswith("the run needs about ") and "but cpu has 8,000" in text and words in text, text


def test_a_system_that_does_not_tell_its_memory_refuses_nothing(tmp_path, monkeypatch):
    parts = completing(tmp_path)
    parts.config = parts.config.__class__(**vars(parts.config) | {"group_size": 100_000})
    monkeypatch.setattr(memory, "memory_limit", lambda device: None)
    check(parts)


@pytest.mark.parametrize("setting, value, part", [
    ("group_size", 16, "training"), ("batch_size", 16, "training"), ("max_new_tokens", 96, "training"),
    ("eval_completions", 4000, "evaluation")])
def test_what_makes_a_run_larger_makes_the_estimate_larger(setting, value, part, tmp_path):
    parts = completing(tmp_path)
    small, large = (sum(memory_estimate(c, parts.models, parts.data, parts.dist).values())
                    for c in (parts.config, parts.config.__class__(**vars(parts.config) | {setting: value})))
    assert large > 1.3 * small


def shapes(folder, name):
    """The arguments of a run that needs several hundred megabytes."""
    if name == "sums":
        records = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
        return {"dataset": jsonl(folder / "sums.jsonl", *records), "batch_size": 128, "max_new_tokens": 20,  # which none ends before
                "generator_checkpoint": f"{SHIPPED['arithmetic']}/generator.safetensors"}
    if name == "passes":
        write_text_dataset(folder / "text", TEXT)
        return {"dataset": str(folder / "text"), "block_size": 64, "unmask_steps": 3, "batch_size": 16,
                "generator_checkpoint": f"{SHIPPED['char_diffusion']}/generator.safetensors",
                "judge_checkpoint": f"{SHIPPED['char_diffusion']}/judge.safetensors", "dtype": "float32"}
    pytest.importorskip("transformers")
    draw, letters = random.Random(0), "abcdefgh1234567"
    records = [{"prompt": " ".join(draw.choices(letters, k=1800 + 300 * (i % 2))), "answer": "4"} for i in range(40)]
    return {"dataset": jsonl(folder / "long.jsonl", *records), "batch_size": 4, "max_new_tokens": 8,
            "max_prompt_length": 20_000, "generator_checkpoint": model_folder(folder / "m", "llama", longest=20_000)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is measured as Linux counts it")
@pytest.mark.parametrize("name", ["sums", "passes", "long prompts"])
def test_the_estimate_is_within_a_factor_of_what_is_measured(name, tmp_path):
    settings = {"group_size": 8, "max_iters": 1, "eval_problems": 8, "device": "cpu", "dtype": "float32",
                "out_dir": str(tmp_path / "out"), "reward_functions": ("exact_match",)} | shapes(tmp_path, name)
    if name == "passes":
        settings["reward_functions"] = ("judge",)
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    done = subprocess.run([sys.executable, "-c", MEASURE, ROOT, *arguments], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = [float(re.search(words, done.stdout)[1]) for words in (
        r"about (\d+) MB", r"besides (\d+) MB", r"measured (\d+) MB")]
    needed, alone, measured = found
    assert needed > alone / 2, "the shape is too small to say anything"
    assert 1 / memory.MARGIN < (needed + alone) / measured < memory.MARGIN, found
