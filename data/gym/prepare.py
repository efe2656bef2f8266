"""Problems of the package reasoning-gym, a task by its name: writes prompts.jsonl and meta.json beside this file.

pip install reasoning-gym
python data/gym/prepare.py --task=needle_haystack --settings="{'min_num_statements': 3, 'max_num_statements': 5}"
--shots=2 begins every prompt with two solved problems, which show the form of an answer.
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

The names of tasks and their settings: https://github.com/open-thought/reasoning-gym. The reward, data/gym/reward.py,
asks the task itself. The records have messages, for a chat model: template='model'.
"""

import os
import pathlib
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.files.records import write_prompts
from core.settings.optional import require
from core.settings.script import run_script
from core.settings.user_code import guarded
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))


@dataclass(frozen=True)
class GymConfig:
    task: str = "needle_haystack"   # a name of a task of reasoning-gym
    settings: dict | None = None    # of the task, such as {"max_value": 30}; None: its own
    shots: int = 0                  # solved problems at the beginning of every prompt, the same in all
    problems: int = 2000            # number of problems; a tenth of them is for validation
    seed: int = 0                   # seed of the random numbers
    out: str = HERE                 # the folder of the dataset; another one is used as --dataset=FOLDER

    def __post_init__(self):
        if self.shots < 0 or self.problems < 20:
            raise ValueError(f"shots={self.shots} must be at least 0, problems={self.problems} at least 20")


def entries(config):
    """`shots + problems` entries of the task: {"question", "answer", "metadata"} each."""
    gym = require("reasoning_gym", f"task={config.task}", "reasoning-gym")
    with guarded(f"task={config.task}, settings={config.settings}", "correct the name or the settings"):
        return list(gym.create_dataset(config.task, size=config.shots + config.problems, seed=config.seed,
                                       **(config.settings or {})))


def solved(entry):
    """A problem and its answer, as messages."""
    return [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": entry["answer"]}]


def main(argv):
    config, _ = load_config(GymConfig, argv)
    found = entries(config)
    examples, problems = found[: config.shots], found[config.shots :]
    before = [message for entry in examples for message in solved(entry)]
    records = [{"prompt": [*before, {"role": "user", "content": entry["question"]}], "answer": entry["answer"],
                "task": config.task, "entry": entry} for entry in problems]
    write_prompts(config.out, records, CharTokenizer(stop=True), task=config.task, shots=config.shots)


if __name__ == "__main__":
    run_script(main)
