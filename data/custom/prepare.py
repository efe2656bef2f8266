"""Makes a dataset of your own prompts: writes prompts.jsonl and meta.json beside this file.

python data/custom/prepare.py --input=FILE
--tokenizer=gpt2 (or cl100k_base, a Hugging Face folder or hf:owner/name) instead of characters
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A Hugging Face model needs no preparation: --dataset=FILE reads the file with the model's own tokenizer.

FILE is JSONL, JSON, CSV or Parquet, in any form of docs/huggingface.md, such as {"prompts": ["text", "text"]}. The
fields of a record:
  prompt (or question, instruction, problem)    a text, or a list of {"role", "content"} messages
  answer (or solution, response, output)        optional: what rewards compare a completion with
  completion                                    optional: the text that core/pretrain.py trains a model to write; if it
                                                is missing, an answer takes its place
  messages                                      instead of prompt and answer: a list of messages; the answer is the
                                                content of the last one if that is the assistant's, the prompt the
                                                others
  split                                         optional: train or val
  any other                                     optional: for your own rewards
"""

import os
import pathlib
import sys
from collections import Counter
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import Mistake, UsageError, run_script
from core.prompts import plain
from core.records import in_words, read_records, with_completion, write_prompts
from core.settings.setting import Settings
from core.tokenizer import CharTokenizer, fold_to_ascii, named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))


@dataclass(frozen=True)
class CustomConfig(Settings):
    input: str = ""  # the JSONL, JSON, CSV or Parquet file with the prompts
    tokenizer: str = "char"  # char, gpt2, cl100k_base, a Hugging Face folder or hf:owner/name
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def __post_init__(self, origin):
        super().__post_init__(origin)
        if not self.input:
            raise UsageError("which prompts? pass --input=FILE (JSONL, JSON, CSV or Parquet)")


def as_lesson(record):
    """The record without its place in the file; its answer becomes the completion if there is none."""
    return with_completion({key: value for key, value in record.items() if key != "where"})


def text_of(record):
    """The whole text of a record that a model is trained on: the prompt and the completion."""
    prompt = record["prompt"]
    return (prompt if isinstance(prompt, str) else plain(prompt)) + str(record.get("completion") or "")


def main(argv):
    config, _ = load_config(CustomConfig, argv)
    notes = Counter()
    records = [as_lesson(record) for record in read_records(config.input, notes)]
    for line in in_words(notes):
        print(line)
    tokenizer = named_tokenizer(config.tokenizer)
    if tokenizer.stop_token_id is None:
        raise Mistake(f"tokenizer={config.tokenizer} has no token that ends a completion; name that of a causal "
                      "model, with its eos_token_id in generation_config.json")
    facts = {"source": os.path.basename(config.input), "completions": sum("completion" in r for r in records)}
    if isinstance(tokenizer, CharTokenizer):
        _, facts["characters_folded"], facts["characters_dropped"] = fold_to_ascii("".join(map(text_of, records)))
    write_prompts(config.out, records, tokenizer, **facts)


if __name__ == "__main__":
    run_script(main)
