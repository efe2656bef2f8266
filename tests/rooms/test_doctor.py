"""--doctor=True finds what is wrong with a run, calls shipped configs fine, and changes no weight and no file."""

import itertools
import os
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from core.distributed import Distributed
from grpo.build import build_data, build_models, build_rewards
from grpo.doctor.checks import (
    CHECKS, OF_EACH_REWARD, equal_starts, examine, judge_on_true_texts, time_and_memory)
from grpo.environments import environment
from grpo.grpo_config import GRPOConfig
from tests.tiny import ROOT, TEXT, grpo_step, jsonl, prompt_config, run_here, same, write_text_dataset

pytestmark = pytest.mark.slow  # it is the number of them that takes the time
SUMS = [(a, b) for a in (7, 36, 58, 245, 901) for b in (4, 19, 62, 88, 730, 4096)]
SHIPPED = {name: os.path.join(ROOT, "data", name, "pretrained") for name in ("arithmetic", "char_diffusion")}


def sums(tail="", **changes):
    """Records of the arithmetic task; a change replaces a field, or leaves it out if it is None."""
    records = []
    for i, (a, b) in enumerate(SUMS):
        completion = f"<start_working_out>{a}+{b}<end_working_out><SOLUTION>{a + b}</SOLUTION>"
        record = {"prompt": f"{a}+{b}={tail}", "answer": str(a + b), "completion": completion} | changes
        record["split"] = "val" if i % 5 == 0 else "train"
        records.append({key: x for key, x in record.items() if x is not None})
    return records


def parts(settings):
    """What grpo/train_grpo.py builds of these settings."""
    config = GRPOConfig(**{"batch_size": 4, "temperature": 1.0, "top_p": 1.0, "max_iters": 20, "device": "cpu",
                           "out_dir": "unwritten"} | settings)
    dist = Distributed("cpu", config.dtype)
    data = build_data(config, dist)
    models = build_models(config, data, dist)
    return SimpleNamespace(config=config, models=models, rewards=build_rewards(config, models, data, dist), data=data,
                           dist=dist)


def completing(folder, records=(), **settings):
    """The parts of a run that completes these records, or those of sums()."""
    dataset = jsonl(folder / "records.jsonl", *(records or sums()))
    return parts({"dataset": dataset, "generator_checkpoint": f"{SHIPPED['arithmetic']}/generator.safetensors",
                  "reward_functions": ("math_number",), "max_new_tokens": 48, "group_size": 8} | settings)


def examined(run):
    return examine(run.config, run.models, run.rewards, run.data, run.dist)


def wrong(x):
    """The titles of the checks that speak."""
    found = [title for title, check in CHECKS.items() if check(x)]
    return found + [title for title, check in OF_EACH_REWARD.items() for name in x.rewards.names if check(x, name)]


MINE = """import re
from grpo.rewards import reward

@reward(0, 1)
def never_empty(prompts, completions, answer):
    return [float(not text or a == text) for text, a in zip(completions, answer)]

@reward(0, 1)
def longest(prompts, completions, answer):
    return [float(len(text) >= len(a)) for text, a in zip(completions, answer)]

@reward(0, 2)
def whole(prompts, completions, answer):
    return [("working" in text) + float(f"N>{a}<" in text) for text, a in zip(completions, answer)]

def last_number(completions, answer, **kwargs):
    return [re.findall("[0-9]+", text)[-1:] == [a] for text, a in zip(completions, answer)]
"""
ANSWERS, WRONG = ["correct answers"], ["wrong answers"]


@pytest.mark.parametrize(("changes", "settings", "speaks"), [
    ({}, {}, []), ({"tail": "\u4eca\u65e5"}, {}, ["prompt"]),
    ({}, {"stop_sequences": ("</SOLUTION>",)}, ANSWERS), ({}, {"stop_sequences": ("<SOLUTION>",)}, ["end", *ANSWERS]),
    ({}, {"max_new_tokens": 16}, ["end"]), ({"answer": "The answer is 8."}, {}, ANSWERS),
    ({"completion": None, "answer": "so it is 8"}, {}, ANSWERS),
    ({"completion": None}, {"reward_functions": ("exact_match",), "response_prefix": "="}, ANSWERS),
    ({"completion": None}, {"reward_functions": ("math_answer", "exact_match", "last_number", "math_format")}, []),
    ({"completion": None, "answer": ["7", "seven"]}, {"reward_functions": ("exact_match",)}, []),
    ({"completion": None, "answer": "\u4e03"}, {"reward_functions": ("exact_match",)}, ANSWERS),
    ({"completion": None, "answer": "7" * 60}, {"reward_functions": ("exact_match",)}, ANSWERS),
    ({}, {"reward_functions": ("whole",)}, []), ({"completion": None}, {"reward_functions": ("contains",)}, WRONG),
    ({"completion": None}, {"reward_functions": ("longest",)}, WRONG),
    ({"completion": None}, {"reward_functions": ("never_empty",)}, WRONG)])
def test_the_check_of_what_is_wrong_speaks_and_no_other(tmp_path, changes, settings, speaks):
    (tmp_path / "mine.py").write_text(MINE)
    run = completing(tmp_path, sums(**changes), **{"reward_file": str(tmp_path / "mine.py")} | settings)
    assert wrong(SimpleNamespace(gradient={"": 1.0}, **vars(run))) == speaks


def test_the_examined_step_is_the_first_of_the_run_and_every_way_to_break_its_gradient_is_found(tmp_path):
    run, twin = completing(tmp_path), completing(tmp_path)
    x = examined(run)
    assert wrong(x) == [] and same(run.models.policy.model, twin.models.policy.model)
    metrics = grpo_step(twin.models.policy, twin.models.reference, twin.rewards, twin.data, twin.config)
    assert 0 < run.config.grad_clip < metrics["grad_norm"], "the run cuts it"
    total = sum(size**2 for size in x.gradient.values()) ** 0.5
    assert total == pytest.approx(metrics["grad_norm"], rel=1e-4) and len(x.gradient) == 7
    again = examined(run)
    assert again.gradient == pytest.approx(x.gradient, rel=1e-4), "the doctor takes it twice"
    _, *_, line = time_and_memory(x, 3.5, torch.device("cpu"))
    completions = 20 * 4 * 8 + 2 * 6 * 5  # steps; before and after: all validation prompts, one completion is greedy
    assert f" {3.5 * completions / (4 * 8) / 60:.1f} min" in line
    for size in (0.0, float("nan")):
        assert wrong(replace(x, gradient=dict.fromkeys(x.gradient, size))) == ["gradient"]
    run.models.policy.model.blocks[2].requires_grad_(False)
    for p in run.models.policy.parameters():
        p.grad = None
    assert "blocks.2 " in CHECKS["gradient"](examined(run))


def test_a_judge_that_prefers_filled_text_is_found(tmp_path, monkeypatch):
    write_text_dataset(tmp_path / "text", TEXT)
    files = {"generator_checkpoint": f"{SHIPPED['char_diffusion']}/generator.safetensors",
             "judge_checkpoint": f"{SHIPPED['char_diffusion']}/small_judge.safetensors"}
    files |= {"dataset": str(tmp_path / "text"), "block_size": 64, "group_size": 4, "dtype": "float32"}
    x = examined(parts(files))
    assert wrong(x) == []
    scores = x.models.judge.scores
    monkeypatch.setattr(x.models.judge, "scores", lambda texts: 1 - scores(texts))
    assert judge_on_true_texts(x)


@environment
class Fair:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self, record):
        pass

    def step(self, text):
        return str(self.random.random()), len(text)


@environment
class Luck(Fair):
    def step(self, text):
        return text, random.random()


@environment
class Shared(Fair):
    count = itertools.count()

    def step(self, text):
        return str(next(self.count)), 0


@pytest.mark.parametrize(("name", "fine"), [("Fair", True), ("Shared", False), ("Luck", False)])
def test_environments_that_answer_the_same_texts_differently_are_found(name, fine):
    c = prompt_config(environment=name, max_turns=3, reward_functions=("environment",))
    rollouts = SimpleNamespace(texts=SimpleNamespace(completions=["a", "bc", "d", "e"]))
    x = SimpleNamespace(config=c, problems={"record": [{"prompt": "?"}] * 4}, rollouts=rollouts)
    assert (equal_starts(x) == "") == fine


def ask(tmp_path, *configs, **settings):
    """The finished command with doctor=True, and the titles of what it calls wrong."""
    settings |= {"device": "cpu", "out_dir": tmp_path / "out", "doctor": True, "batch_size": 4, "eval_problems": 4}
    done = run_here("grpo/train_grpo.py", *configs, *(f"--{key}={x}" for key, x in settings.items()))
    return done, [title.strip() for title in re.findall(r"^  WRONG +(.{16})  ", done.stdout, re.M)]


def test_what_is_wrong_ends_with_exit_code_1_and_the_folder_stays_as_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 7}\n')
    done, found = ask(
        tmp_path, dataset=jsonl(tmp_path / "mine.jsonl", *sums()), reward_functions="math_number", max_new_tokens=3,
        generator_checkpoint=f"{SHIPPED['arithmetic']}/generator.safetensors", temperature=1.0, top_p=1.0)
    assert done.stderr == "" and done.returncode == 1 and "end" in found
    assert os.listdir(tmp_path / "out") == ["metrics.jsonl"]
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == '{"step": 7}\n'


@pytest.mark.parametrize(("name", "arguments"), [
    ("arithmetic", ["--problems=200"]), ("code", ["--problems=116"]), ("countdown", ["--problems=100"]),
    ("guess", ["--most=16"]), ("sudoku", [])])  # arguments for a small dataset
def test_a_shipped_config_is_not_called_wrong(name, arguments, tmp_path):
    assert run_here(f"data/{name}/prepare.py", *arguments, f"--out={tmp_path}/data").returncode == 0
    done, found = ask(tmp_path, f"config/grpo_{name}.py", dataset=f"{tmp_path}/data", dtype="float32")
    assert done.stderr == "" and done.returncode == 0 and found == [], done.stdout
