"""The memory that a run is expected to need is what a child process is measured to need; what cannot fit is refused."""

import os
import random
import re
import subprocess
import sys

import pytest

from grpo.evaluation import memory
from grpo.evaluation.memory import check_fits
from tests.families import model_folder
from tests.grpo.evaluation.patients import SHIPPED, completing, filling
from tests.tiny import ROOT, TEXT, jsonl, write_text_dataset

MEASURE = """
import ast, re, sys
sys.path.insert(0, sys.argv[1])
from grpo.evaluation.memory import describe_memory
from tests.grpo.evaluation.patients import parts
from tests.tiny import collect, train
run = parts(ast.literal_eval(sys.argv[2]))
print(describe_memory(run.config, run.models, run.data, run.dist))
policy = run.models.policy
train(policy, *collect(policy, run.rewards, run.data, run.config, run.models.reference), run.config)
with open("/proc/self/status") as f:
    print(f"measured {int(re.search('VmHWM:[^0-9]*([0-9]+)', f.read())[1]) * 1024 / 1e6:.0f} MB")
"""


def check(parts):
    check_fits(parts.config, parts.models, parts.data, parts.dist)


@pytest.mark.parametrize("kind, settings, words", [
    (completing, {"group_size": 100_000}, "group_size=100000"),
    (completing, {"eval_completions": 100_000, "eval_problems": 8}, "eval_completions=100000"),
    (completing, {"batch_size": 1_000_000}, "batch_size=1000000"),
    (completing, {"max_new_tokens": 100_000}, "max_new_tokens=100000"),
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
    parts.config = parts.config.__class__(**vars(parts.config) | {"dry_run": True})
    check(parts)  # it may be on a smaller machine than the run
    parts.config = parts.config.__class__(**vars(parts.config) | {"dry_run": False})
    monkeypatch.setattr(memory, "memory_limit", lambda device: None)  # a system that does not tell refuses nothing
    check(parts)


def shapes(folder, name):
    """The settings of a run that needs several hundred megabytes."""
    if name == "sums":
        records = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
        return {"dataset": jsonl(folder / "sums.jsonl", *records), "batch_size": 64,
                "max_new_tokens": 20,  # which none ends before
                "generator_checkpoint": f"{SHIPPED['arithmetic']}/generator.safetensors"}
    if name == "passes":
        write_text_dataset(folder / "text", TEXT)
        return {"dataset": str(folder / "text"), "block_size": 64, "unmask_steps": 3, "batch_size": 8,
                "generator_checkpoint": f"{SHIPPED['char_diffusion']}/generator.safetensors",
                "judge_checkpoint": f"{SHIPPED['char_diffusion']}/judge.safetensors", "reward_functions": ("judge",)}
    pytest.importorskip("transformers")
    draw, letters = random.Random(0), "abcdefgh1234567"
    records = [{"prompt": " ".join(draw.choices(letters, k=1800 + 300 * (i % 2))), "answer": "4"} for i in range(8)]
    return {"dataset": jsonl(folder / "long.jsonl", *records), "batch_size": 2, "max_new_tokens": 4,
            "max_prompt_length": 20_000, "generator_checkpoint": model_folder(folder / "m", "llama", longest=20_000)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is measured as Linux counts it")
@pytest.mark.parametrize("name", ["sums", "passes", "long prompts"])
def test_the_estimate_is_within_a_factor_of_what_is_measured(name, tmp_path):
    settings = {"group_size": 8, "dtype": "float32", "reward_functions": ("exact_match",)} | shapes(tmp_path, name)
    done = subprocess.run([sys.executable, "-c", MEASURE, ROOT, repr(settings)], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    needed, alone, measured = (float(re.search(words, done.stdout)[1]) for words in (
        r"about (\d+) MB", r"besides (\d+) MB", r"measured (\d+) MB"))
    assert needed > alone / 2, "the shape is too small to say anything"
    assert 1 / memory.MARGIN < (needed + alone) / measured < memory.MARGIN, (needed, alone, measured)
