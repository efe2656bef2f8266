"""Products of two numbers of two digits as questions for a chat model: writes prompts.jsonl and meta.json beside this
file.

python data/calculator/prepare.py                               behind an example that uses environment.py's calculator
python data/calculator/prepare.py --tool=False --out=FOLDER     the same products without a calculator and an example
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.
"""

import os
import pathlib
import random
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import run_script
from core.records import write_prompts
from core.settings.setting import Settings
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
QUESTION = "What is {}*{}?"
EXAMPLE = 12, 34


@dataclass(frozen=True)
class CalculatorConfig(Settings):
    tool: bool = True  # an example shows how to call the calculator; False: the question stands alone
    problems: int = 2000  # number of products; a tenth of them is for validation
    seed: int = 0  # seed of the random numbers
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def conflicts(self):
        yield (not 20 <= self.problems <= 8099, "problems",
               "must be 20 to 8099, all products but that of the example")


def message(role, content):
    return {"role": role, "content": content}


def messages(a, b, tool):
    """The prompt of a product, after a solved example if there is a calculator."""
    question = QUESTION.format(a, b)
    if not tool:
        return [message("user", f"{question} Answer with the number only.")]
    x, y = EXAMPLE
    return [
        message("user", QUESTION.format(x, y)),
        message("assistant", f"<calc>{x}*{y}</calc>"),
        message("user", str(x * y)),
        message("assistant", str(x * y)),
        message("user", question)]


def products(config):
    """Records of different products, without that of the example."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) != EXAMPLE]
    for i, (a, b) in enumerate(random.Random(config.seed).sample(pairs, config.problems)):
        split = "val" if i % 10 == 0 else "train"  # the same products with and without the tool
        yield {"prompt": messages(a, b, config.tool), "answer": str(a * b), "split": split}


def main(argv):
    config, _ = load_config(CalculatorConfig, argv)
    write_prompts(config.out, products(config), CharTokenizer(stop=True), tool=config.tool)


if __name__ == "__main__":
    run_script(main)
