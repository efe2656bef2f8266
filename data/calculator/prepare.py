"""Products of two numbers of two digits, as chats with one solved example: writes prompts.jsonl and meta.json beside
this file.

python data/calculator/prepare.py                               the example uses the calculator of environment.py
python data/calculator/prepare.py --tool=False --out=FOLDER     the same problems, answered directly
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.
"""

import os
import pathlib
import random
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.files.records import write_prompts
from core.settings.script import run_script
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
QUESTION = "What is {}*{}?"
EXAMPLE = 12, 34


@dataclass(frozen=True)
class CalculatorConfig:
    tool: bool = True      # the example calls the calculator; False: it gives the product at once
    problems: int = 2000   # number of products; a tenth of them is for validation
    seed: int = 0          # seed of the random numbers
    out: str = HERE        # the folder of the dataset; another one is used as --dataset=FOLDER

    def __post_init__(self):
        if not 20 <= self.problems <= 8099:
            raise ValueError(f"problems={self.problems} must be 20 to 8099, all products but that of the example")


def message(role, content):
    return {"role": role, "content": content}


def example(tool):
    """The messages of a solved problem."""
    a, b = EXAMPLE
    answer = str(a * b)
    messages = [message("user", QUESTION.format(a, b))]
    if tool:
        messages += [message("assistant", f"<calc>{a}*{b}</calc>"), message("user", answer)]
    return [*messages, message("assistant", answer)]


def products(config):
    """Records of different products, without that of the example."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) != EXAMPLE]
    for i, (a, b) in enumerate(random.Random(config.seed).sample(pairs, config.problems)):
        prompt = [*example(config.tool), message("user", QUESTION.format(a, b))]
        split = "val" if i % 10 == 0 else "train"  # the same problems with and without the tool
        yield {"prompt": prompt, "answer": str(a * b), "split": split}


def main(argv):
    config, _ = load_config(CalculatorConfig, argv)
    write_prompts(config.out, products(config), CharTokenizer(stop=True), tool=config.tool)


if __name__ == "__main__":
    run_script(main)
