"""--doctor=True finds what is wrong with a run, calls shipped configs fine, and changes no weight and no file."""

import itertools
import os
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from core import pretrain
from core.distributed import Distributed
from core.generation import Stop
from grpo.build import build_data, build_models, build_rewards
from grpo.doctor import checks
from grpo.doctor.checks import (
    CHECKS, OF_EACH_REWARD, ends_of_completions, equal_starts, examine, gradient, judge_on_true_texts, lost_characters,
    own_answers, right_completions, wrong_answers)
from grpo.environments import environment
from grpo.grpo_config import GRPOConfig
from tests.tiny import (
    ROOT, TEXT, causal_policy, grpo_step, jsonl, prompt_config, prompt_consumer, run_here, same, write_text_dataset)

pytestmark = pytest.mark.slow  # it is the number of them that takes the time
SUMS = [(a, b) for a in (7, 36, 58, 245, 901) for b in (4, 19, 62, 88, 730, 4096)]
SHIPPED = {name: os.path.join(ROOT, "data", name, "pretrained") for name in ("arithmetic", "char_diffusion")}


def sums(**changes):
    """Records of the arithmetic task; a change replaces a field, or leaves it out if it is None."""
    records = []
    for i, (a, b) in enumerate(SUMS):
        completion = f"<start_working_out>{a}+{b}<end_working_out><SOLUTION>{a + b}</SOLUTION>"
        record = {"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": completion} | changes
        record["split"] = "val" if i % 5 == 0 else "train"
        records.append({key: x for key, x in record.items() if x is not None})
    return records


def parts(settings):
    """What grpo/train_grpo.py builds of these settings."""
    config = GRPOConfig(**{"batch_size": 4, "temperature": 1.0, "top_p": 1.0, "eval_problems": 4, "max_iters": 20,
                           "eval_completions": 4, "device": "cpu", "out_dir": "unwritten"} | settings)
    dist = Distributed("cpu", config.dtype)
    data = build_data(config, dist)
    models = build_models(config, data, dist)
    return SimpleNamespace(config=config, models=models, rewards=build_rewards(config, models, data, dist), data=data,
                           dist=dist)


def completing(folder, records=None, **settings):
    """The parts of a run that completes these records, or those of sums()."""
    dataset = jsonl(folder / "records.jsonl", *(sums() if records is None else records))
    return parts({"dataset": dataset, "generator_checkpoint": f"{SHIPPED['arithmetic']}/generator.safetensors",
                  "reward_functions": ("math_number",), "max_new_tokens": 48, "group_size": 8} | settings)


def examined(run):
    return examine(run.config, run.models, run.rewards, run.data, run.dist)


def test_a_healthy_step_is_fine_and_every_way_to_break_its_gradient_is_found(tmp_path):
    run = completing(tmp_path)
    x = examined(run)
    assert [check(x) for check in (gradient, lost_characters, ends_of_completions)] == [""] * 3
    assert [check(x, "math_number") for check in OF_EACH_REWARD.values()] == [""] * 2
    for size in (0.0, float("nan")):
        assert f"{size:g}" in gradient(replace(x, gradient=dict.fromkeys(x.gradient, size)))
    run.models.policy.model.blocks[2].requires_grad_(False)
    for p in run.models.policy.parameters():
        p.grad = None
    assert "blocks.2 " in gradient(examined(run))


def test_the_examined_step_is_the_first_of_the_run_and_changes_no_weight(tmp_path, monkeypatch):
    patient, twin = completing(tmp_path), completing(tmp_path)
    x = examined(patient)
    assert same(patient.models.policy.model, twin.models.policy.model)
    metrics = grpo_step(twin.models.policy, twin.models.reference, twin.rewards, twin.data, twin.config)
    assert 0 < patient.config.grad_clip < metrics["grad_norm"], "the run cuts it"
    total = sum(size**2 for size in x.gradient.values()) ** 0.5
    assert total == pytest.approx(metrics["grad_norm"], rel=1e-4) and len(x.gradient) == 7
    monkeypatch.setattr(checks, "MOST", 3)
    x = examined(completing(tmp_path, gradient_accumulation_steps=2, ppo_epochs=2, minibatches=2))
    assert x.rollouts.problems == len(x.problems["number"]) == 3


def test_prompts_that_the_tokenizer_cannot_write_are_found(tmp_path):
    records = [record | {"prompt": record["prompt"] + "\u4eca\u65e5"} for record in sums()]
    assert "\u4eca" in lost_characters(completing(tmp_path, records))


def test_an_end_that_cuts_right_completions_is_found(tmp_path):
    def of(**settings):
        return ends_of_completions(completing(tmp_path, **settings))

    assert of(stop_sequences=("</SOLUTION>",)) == ""
    assert "'<SOLUTION>'" in of(stop_sequences=("</SOLUTION>", "<SOLUTION>"))
    enough = re.search("set max_new_tokens=([0-9]+)", of(max_new_tokens=16))
    assert of(max_new_tokens=int(enough[1])) == ""


def test_verifiers_are_tried_on_answers_in_every_form(tmp_path):
    x = completing(tmp_path, sums(completion=None), reward_functions=("math_answer", "exact_match", "math_format"))
    assert own_answers(x, "math_answer") == own_answers(x, "exact_match") == ""
    assert own_answers(x, "math_format") is wrong_answers(x, "math_format") is None, "it reads no record"


@pytest.mark.parametrize(("changes", "settings"), [
    ({"answer": "The answer is 8."}, {}), ({"completion": None, "answer": "so it is 8"}, {}),
    ({"completion": None}, {"reward_functions": ("exact_match",), "response_prefix": "="})])
def test_a_verifier_that_rejects_the_records_answers_is_found(tmp_path, changes, settings):
    x = completing(tmp_path, sums(**changes), **settings)
    assert "records.jsonl, line 2" in own_answers(x, *x.rewards.names)


MINE = """import re
from grpo.rewards import reward

@reward(0, 1)
def fails(prompts, completions, answer):
    return [float(int(text) == int(a)) for text, a in zip(completions, answer)]

@reward(0, 1)
def never_empty(prompts, completions, answer):
    return [float(not text or a == text) for text, a in zip(completions, answer)]

@reward(0, 1)
def longest(prompts, completions, answer):
    return [float(len(text) >= len(a)) for text, a in zip(completions, answer)]

@reward(0, 2)
def whole(prompts, completions, answer):
    return [("working" in text) + float(f"N>{a}<" in text) for text, a in zip(completions, answer)]

def inside(completions, answer, **kwargs):
    return [a in text for text, a in zip(completions, answer)]

def last_number(completions, answer, **kwargs):
    return [re.findall("[0-9]+", text)[-1:] == [a] for text, a in zip(completions, answer)]
"""
HEDGED = "both 'X or Y' and 'Y or X'"


@pytest.mark.parametrize(("name", "accepted"), [
    ("exact_match", None), ("math_answer", None), ("math_number", None), ("last_number", None), ("whole", None),
    ("contains", HEDGED), ("inside", f"{HEDGED}, the prompt"), ("longest", f"Y, {HEDGED}, the prompt"),
    ("never_empty", "an empty completion")])
def test_wrong_answers_that_a_verifier_accepts_are_named(tmp_path, name, accepted):
    (tmp_path / "mine.py").write_text(MINE)
    records = sums() if name == "whole" else sums(completion=None)
    if name == "inside":  # its prompts have the answer among others
        records = [record | {"prompt": f"{record['prompt']} 1, 2, {record['answer']}?"} for record in records]
    x = completing(tmp_path, records, reward_file=str(tmp_path / "mine.py"), reward_functions=(name,))
    found = wrong_answers(x, name)
    assert found == "" if accepted is None else f"accepts {accepted}: " in found
    assert name != "never_empty" or own_answers(completing(tmp_path, reward_file=str(tmp_path / "mine.py")), "fails")


def test_verifiers_read_the_records_completions_as_those_of_the_model_cut_before_a_stop_sequence(tmp_path):
    run = completing(tmp_path, stop_sequences=("</SOLUTION>", "<end_working_out>"), response_prefix="=")
    stop = Stop(run.data.tokenizer, run.config.stop_sequences, "=")
    for record in run.data.records["train"]:
        right, = right_completions(run, "math_number", record)
        assert right == stop.text(run.data.tokenizer.encode(record["completion"]))
        assert right.startswith("=<start_working") and "SOLUTION" not in right


def test_a_judge_that_prefers_filled_text_is_found(tmp_path, monkeypatch):
    write_text_dataset(tmp_path / "text", TEXT)
    files = {f"{name}_checkpoint": f"{SHIPPED['char_diffusion']}/{name}.safetensors" for name in ("generator", "judge")}
    files |= {"dataset": str(tmp_path / "text"), "block_size": 64, "group_size": 4, "dtype": "float32"}
    x = examined(parts(files))
    assert judge_on_true_texts(x) == "" and lost_characters(x) is ends_of_completions(x) is None, "it has no prompts"
    scores = x.models.judge.scores
    monkeypatch.setattr(x.models.judge, "scores", lambda texts: 1 - scores(texts))
    assert "->" in judge_on_true_texts(x)


@environment
class Fair:
    """Answers with a random number, three times out of four."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self, record):
        pass

    def step(self, text):
        answer = f"<{self.draw()}>" if self.random.random() < 0.75 else None
        return answer, self.reward(text)

    def draw(self):
        return self.random.randint(10, 99)

    def reward(self, text):
        return len(text)


@environment
class Luck(Fair):
    def reward(self, text):
        return random.random()


@environment
class Shared(Fair):
    count = itertools.count(10)

    def draw(self):
        return next(self.count)


@pytest.mark.parametrize(("name", "other", "fine"), [
    ("Fair", 0, True), ("Shared", 0, False), ("Luck", 0, False), ("Fair", 1, True)])
def test_environments_that_answer_the_same_texts_differently_are_found(prompts, name, other, fine):
    c = prompt_config(environment=name, max_turns=3, max_new_tokens=60, group_size=4, batch_size=4, top_p=1.0,
                      reward_functions=("environment",), stop_sequences=tuple("abcdefghijklmnopqrstuvwxyz"))
    policy = causal_policy(1, scale=3.0, block_size=160)

    def sample(*arguments):
        rollouts = policy.sample(*arguments)
        rollouts.target[::2, 0] += other  # a policy that writes something else is not taken for its environment
        return rollouts

    x = SimpleNamespace(config=c, problems=prompt_consumer(prompts, c).problems("train", 0),
                        models=SimpleNamespace(policy=SimpleNamespace(sample=sample)))
    assert (equal_starts(x) == "") == fine


def ask(tmp_path, *configs, **settings):
    """The finished command with doctor=True, and the titles of what it calls wrong and of all checks."""
    settings |= {"device": "cpu", "out_dir": tmp_path / "out", "doctor": True, "batch_size": 4, "eval_problems": 4}
    done = run_here("grpo/train_grpo.py", *configs, *(f"--{key}={x}" for key, x in settings.items()))
    verdicts = re.findall(r"^  (fine|WRONG) +(.{16})  ", done.stdout, re.M)
    return done, [title.strip() for verdict, title in verdicts if verdict == "WRONG"], len(verdicts)


@pytest.mark.parametrize("most", [48, 3])
def test_what_is_wrong_is_named_with_its_remedy_and_the_folder_stays_as_it_is(tmp_path, most):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 7}\n')
    done, wrong, count = ask(
        tmp_path, dataset=jsonl(tmp_path / "mine.jsonl", *sums()), reward_functions="math_number", max_new_tokens=most,
        generator_checkpoint=f"{SHIPPED['arithmetic']}/generator.safetensors", temperature=1.0, top_p=1.0)
    assert done.stderr == "" and sorted(os.listdir(tmp_path)) == ["mine.jsonl", "out"]
    assert os.listdir(tmp_path / "out") == ["metrics.jsonl"]
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == '{"step": 7}\n'
    assert count == len(CHECKS) - 2 + len(OF_EACH_REWARD), "all but those of the judge and of environments"
    assert (done.returncode, "end" in wrong) == (int(most == 3), most == 3) and bool(wrong) == (most == 3)


SMALL = {"any_order": ["--problems=100"], "arithmetic": ["--problems=200"], "code": ["--problems=116"],
         "countdown": ["--problems=100"], "equations": ["--copies=3"], "guess": ["--most=16"], "sudoku": [],
         "example": None}  # of each config, arguments for a small dataset


@pytest.mark.parametrize(("name", "arguments"), SMALL.items())
def test_a_shipped_config_is_not_called_wrong(name, arguments, tmp_path):
    changes = {"dataset": f"{tmp_path}/data", "dtype": "float32"}
    if arguments is None:
        write_text_dataset(tmp_path / "data", TEXT)
    else:
        script = f"data/{'countdown' if name == 'any_order' else name}/prepare.py"
        assert run_here(script, *arguments, f"--out={tmp_path}/data").returncode == 0
    if name == "equations":  # its generator is not shipped; after one step instead of two minutes it writes no true sum
        pretrain.main(["config/pretrain_equations.py", f"--dataset={tmp_path}/data", "--max_iters=1", "--device=cpu",
                       "--warmup_iters=0", "--batch_size=2", f"--out_dir={tmp_path}/equations"])
        changes["generator_checkpoint"] = f"{tmp_path}/equations/model.safetensors"
    done, wrong, _ = ask(tmp_path, f"config/grpo_{name}.py", **changes)
    assert done.stderr == "" and set(wrong) <= ({"gradient"} if name == "equations" else set()), done.stdout
    assert (name == "guess") == ("equal starts" in done.stdout) and (name == "example") == ("  judge  " in done.stdout)
