"""Your own prompts, as a dataset: prompts.jsonl and meta.json beside this file.

python data/custom/prepare.py --input=FILE
--tokenizer=gpt2 (or cl100k_base, or a file of ranks) instead of characters
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

FILE is JSONL, a JSON list or {"prompts": [...]}. A record has a prompt, a text or a list of {"role", "content"}
messages, also called question, instruction or problem; it may have an answer (solution, response, output), which
rewards compare with, a "completion", which core/pretrain.py learns to write, a "split" (train or val), and any fields
that your rewards read. A record without a completion gets its answer as one, so that there is something to learn.
"""

import os
import pathlib
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import UsageError, load_config, run_script
from core.prompts import plain, read_records, write_prompts
from core.tokenizer import CharTokenizer, fold_to_ascii, named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))


@dataclass(frozen=True)
class CustomConfig:
    input: str = ""          # JSONL or JSON of prompts
    tokenizer: str = "char"  # char, gpt2, cl100k_base or a file of ranks
    out: str = HERE          # the folder of the dataset; another one is used as --dataset=FOLDER

    def __post_init__(self):
        if not self.input:
            raise UsageError("which prompts? pass --input=FILE (JSONL or JSON)")


def as_lesson(record):
    """The record without its place in the file; an answer in words is its completion if it has no other."""
    record = {key: value for key, value in record.items() if key != "where"}
    if record.get("completion") is None and isinstance(record.get("answer"), str):
        record["completion"] = record["answer"]
    return record


def text_of(record):
    """All that a model reads or learns to write of a record."""
    prompt = record["prompt"]
    return (prompt if isinstance(prompt, str) else plain(prompt)) + str(record.get("completion") or "")


def main(argv):
    config, _ = load_config(CustomConfig, argv)
    records = [as_lesson(record) for record in read_records(config.input)]
    tokenizer = named_tokenizer(config.tokenizer)
    facts = {"source": os.path.basename(config.input), "completions": sum("completion" in r for r in records)}
    if isinstance(tokenizer, CharTokenizer):
        _, facts["characters_folded"], facts["characters_dropped"] = fold_to_ascii("".join(map(text_of, records)))
    write_prompts(config.out, records, tokenizer, **facts)


if __name__ == "__main__":
    run_script(main)
