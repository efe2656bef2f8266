"""Generates arithmetic problems: writes prompts.jsonl and meta.json beside this file.

python data/arithmetic/prepare.py                    sums of 2 numbers of up to 4 digits, with working-out
python data/arithmetic/prepare.py --digits=2 --terms=3 --operators=+- --working=False --problems=20000
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

With working-out, the completion of "347+85=" is

    <start_working_out>7+5=12,4+8+1=13,3+0+1=4<end_working_out><SOLUTION>432</SOLUTION>

It goes column by column from the right; a carry or borrow is the third number of a column. The operations of a problem
with several are separated by ";". Without working-out, the completion is the answer alone. No partial result is
negative.
"""

import os
import pathlib
import random
import sys
from dataclasses import dataclass
from typing import Annotated

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import run_script
from core.records import write_prompts
from core.settings.setting import Settings
from core.tokenizer import named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
TAGS = ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")


@dataclass(frozen=True)
class ArithmeticConfig(Settings):
    """The settings of this script: which sums, and how many."""

    digits: Annotated[int, "[1, 18]"] = 4  # largest number of digits of a number
    terms: Annotated[int, "[2, 100]"] = 2  # numbers in a problem
    operators: str = "+"  # + or - or both, as in '+-'
    working: bool = True  # whether a completion has the working-out between tags
    problems: Annotated[int, "[20, 1e6]"] = 100000  # number of problems; a tenth of them is for validation
    tokenizer: str = "char"  # char (tags are one token each), gpt2 or cl100k_base
    seed: int = 0  # seed of the random numbers
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def conflicts(self):
        yield not self.operators or set(self.operators) - set("+-"), "operators", "must be +, - or +-"


def columns(a, b, operator):
    """The working-out of a + b or a - b, digit by digit from the right."""
    sign = 1 if operator == "+" else -1
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = (n // 10**place % 10 for n in (a, b))
        value = x + sign * y + carry
        steps.append(f"{x}{operator}{y}{f'{carry:+d}' if carry else ''}={value}")
        carry = value // 10
    return ",".join(steps)


def number(rng, digits):
    """A number of 1 to `digits` digits, each length equally likely."""
    return rng.randrange(10 ** rng.randint(1, digits))


def problem(rng, c):
    """A record with a problem, its answer and a model completion."""
    value = number(rng, c.digits)
    prompt, working = str(value), []
    for _ in range(c.terms - 1):
        operator, other = rng.choice(c.operators), number(rng, c.digits)
        if operator == "-" and other > value:  # the partial result stays at least 0
            other = rng.randint(0, value)
        working.append(columns(value, other, operator))
        prompt, value = f"{prompt}{operator}{other}", value + other if operator == "+" else value - other
    completion = f"<start_working_out>{';'.join(working)}<end_working_out><SOLUTION>{value}</SOLUTION>"
    return {"prompt": f"{prompt}=", "answer": str(value), "completion": completion if c.working else str(value)}


def main(argv):
    config, _ = load_config(ArithmeticConfig, argv)
    rng = random.Random(config.seed)
    records = [problem(rng, config) for _ in range(config.problems)]
    tokenizer = named_tokenizer(config.tokenizer, TAGS if config.working else ())
    write_prompts(config.out, records, tokenizer, digits=config.digits, terms=config.terms, operators=config.operators)


if __name__ == "__main__":
    run_script(main)
