"""Problems of the package reasoning-gym: writes prompts.jsonl and meta.json beside this file.

pip install reasoning-gym
python data/gym/prepare.py                                       twenty tasks in sizes for a small model
python data/gym/prepare.py --tasks=gcd,lcm --size=500 --settings="{'gcd': {'max_value': 60}}" --shots=0
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

The reward is `gym` of data/gym/reward.py. A task that is named twice gets twice as many problems. A few tasks depend on
the hashes of Python: with PYTHONHASHSEED=0 before the command they are the same each time.
"""

import difflib
import json
import os
import pathlib
import random
import sys
from dataclasses import dataclass
from typing import Annotated

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import Mistake, others, run_script
from core.records import split_of, unique_prompts, write_prompts
from core.settings.optional import require
from core.settings.setting import Count, Settings
from core.tokenizer import named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
SMALL = {  # tasks and their settings, in sizes for a small model
    "aiw": {"task_type_weights": [1, 0, 0]},
    "base_conversion": {"max_value": 60},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "chain_sum": {"max_terms": 3, "max_digits": 1},
    "coin_flip": {"max_trials": 60},
    "count_bits": {"max_n": 2000},
    "family_relationships": {},
    "fraction_simplification": {"max_factor": 10, "max_value": 50},
    "gcd": {"max_value": 60},
    "lcm": {"max_value": 40},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 5},
    "letter_counting": {"min_words": 2, "max_words": 5},
    "number_format": {"max_num_candidates": 2, "min_n": 10, "max_n": 1000},
    "number_sorting": {"min_numbers": 3, "max_numbers": 4, "max_decimals": 0, "min_value": 0, "max_value": 50},
    "prime_factorization": {"max_value": 1500},
    "products": {"min_digits": 1, "max_digits": 2},
    "simple_equations": {"max_terms": 2, "max_value": 20},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
    "syllogism": {},
    "word_sorting": {"min_words": 3, "max_words": 4},
}


@dataclass(frozen=True)
class GymConfig(Settings):
    """The settings of this script: which tasks, and how many problems of each."""

    tasks: tuple[str, ...] = ()  # of reasoning-gym; (): twenty in sizes for a small model
    settings: dict | None = None  # {task: {its parameter: value}}; None: sizes for a small model, where a task has them
    size: Count = 8000  # problems of all tasks together; of repeated ones, one is kept
    shots: Annotated[int, "[0, 100]"] = 2
        # solved problems before each, without which a small model answers in sentences
    seed: Annotated[int, "[0, 1e18]"] = 0  # seed of the random numbers
    tokenizer: str = "char"  # char, gpt2 or cl100k_base; a Hugging Face model brings its own
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def conflicts(self):
        yield self.size < len(self.names), "size", f"must be at least the number of tasks, {len(self.names)}"
        for task, of_task in (self.settings or {}).items():
            yield (task not in self.names or not isinstance(of_task, dict), "settings",
                   f"must be {{task: {{parameter: value}}}} of the tasks {', '.join(self.names)}")

    @property
    def names(self):
        return self.tasks or tuple(SMALL)


def entries_of(package, task, settings, count, seed):
    """`count` problems of a task, as the package gives them. Raises Mistake for an unknown task, for settings that
    it refuses, and where its scorer does not know an entry again that was read from a file."""
    if task not in package.factory.DATASETS:
        near = difflib.get_close_matches(task, package.factory.DATASETS, n=1)
        remedy = f"did you mean {near[0]}?" if near else "docs/rewards.md has a command that lists them"
        raise Mistake(f"tasks: {task!r} is no task of reasoning-gym; {remedy}")
    with others(f"{task} with {settings} made no problems", "correct the settings"):
        random.seed(seed)  # some tasks draw from the global random state
        made = package.create_dataset(task, size=count, seed=seed, **settings)
        entries = [made[i] for i in range(count)]
        answer, read = entries[0]["answer"], json.loads(json.dumps(entries[0]))
        known = answer is None or made.score_answer(answer, read) == made.score_answer(answer, entries[0])
    if not known:
        raise Mistake(f"tasks: {task} cannot score problems that come from a file; leave it out")
    return entries


def records_of(task, settings, entries, shots):
    """The records of a task. Its first `shots` entries begin every prompt as solved problems, and are not asked.

    A hash of the question decides the split, so that it is the same with other shots.
    """
    before = []
    for entry in entries[:shots]:
        if entry["answer"] is None:
            raise Mistake(f"shots={shots} is not for {task}, whose problems come without an answer; use shots=0")
        before.append({"role": "user", "content": entry["question"]})
        before.append({"role": "assistant", "content": entry["answer"]})
    solved = {entry["question"] for entry in entries[:shots]}
    for entry in entries[shots:]:
        question = entry["question"]
        if question not in solved:
            prompt = [*before, {"role": "user", "content": question}] if shots else question
            yield {"prompt": prompt, "task": task, "settings": settings, "entry": entry, "split": split_of(question)}


def main(argv):
    config, _ = load_config(GymConfig, argv)
    package = require("reasoning_gym", "data/gym", "reasoning-gym")
    records = []
    for task in dict.fromkeys(config.names):
        settings = (SMALL if config.settings is None else config.settings).get(task, {})
        count = round(config.size * config.names.count(task) / len(config.names))
        entries = entries_of(package, task, settings, config.shots + count, config.seed)
        records += records_of(task, settings, entries, config.shots)
    random.Random(config.seed).shuffle(records)  # an evaluation takes the first ones, which are to be of all tasks
    write_prompts(config.out, unique_prompts(records), named_tokenizer(config.tokenizer), tasks=config.names)


if __name__ == "__main__":
    run_script(main)
