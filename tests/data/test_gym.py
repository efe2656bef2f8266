"""Tasks of reasoning-gym as prompts, scored by the tasks themselves."""

import os
import re

import pytest

from core.prompts import PromptConsumer
from grpo.reward_functions.registry import REWARDS, load_reward_file
from tests.data.test_prepare import error, records_in, run
from tests.tiny import ROOT

pytest.importorskip("reasoning_gym")
TASKS = {"needle_haystack": "{'min_num_statements': 3, 'max_num_statements': 5}",
         "leg_counting": "{'max_instances': 3}", "prime_factorization": "{'max_value': 50}"}


@pytest.mark.parametrize("task", TASKS)
def test_the_reward_of_a_task_counts_its_own_answers_and_nothing_else(tmp_path, task):
    load_reward_file(os.path.join(ROOT, "data", "gym", "reward.py"))
    run("gym", f"--task={task}", f"--settings={TASKS[task]}", "--problems=30", "--shots=1", f"--out={tmp_path}/d")
    data = PromptConsumer(str(tmp_path / "d"), 4)
    records = data.records["train"] + data.records["val"]
    columns = {key: [r[key] for r in records] for key in ("answer", "task", "entry")}
    score = REWARDS["gym"].fn
    for text, value in (("{}", 1.0), (" {}.\nThat is it.", 1.0), ("{} is wrong, 97 and 2 is right", 0.0), ("", 0.0)):
        assert set(score(None, [text.format(r["answer"]) for r in records], **columns)) == {value}, text


def test_a_prompt_begins_with_solved_problems_and_the_same_seed_gives_the_same(tmp_path):
    for name in "ab":
        run("gym", "--problems=30", "--shots=2", f"--out={tmp_path}/{name}")
    records = records_in(tmp_path / "a")
    assert records == records_in(tmp_path / "b")
    assert {tuple(m["role"] for m in r["prompt"]) for r in records} == {("user", "assistant") * 2 + ("user",)}
    assert len({r["prompt"][1]["content"] for r in records}) == 1


@pytest.mark.parametrize(("arguments", "message"), [
    (["--task=knitting"], "task=knitting, settings=None .*; correct the name or the settings"),
    (["--settings={'colour': 1}"], "colour.*; correct the name or the settings"),
    (["--problems=3"], "problems=3 at least 20")])
def test_a_task_that_cannot_be_made_is_one_line(tmp_path, arguments, message):
    assert re.search(message, error("gym", *arguments, f"--out={tmp_path}/d")) and not (tmp_path / "d").exists()
