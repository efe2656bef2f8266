"""GSM8K, grade-school word problems with worked answers: writes prompts.jsonl and meta.json beside this file.

python data/gsm8k/prepare.py                                        downloads 7473 training, 1319 validation problems
python data/gsm8k/prepare.py --train=train.jsonl --test=test.jsonl  your own files, in the same format
--tokenizer=char needs no download of a tokenizer; --out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A line of the files is {"question": ..., "answer": "reasoning #### 42"}. Calculator marks such as <<3+4=7>> are removed
from the reasoning. A completion is <start_working_out>reasoning<end_working_out><SOLUTION>42</SOLUTION>.
"""

import http.client
import os
import pathlib
import re
import sys
import tempfile
import urllib.request
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import Mistake, UsageError, run_script
from core.records import read_records, write_prompts
from core.settings.setting import Settings
from core.tokenizer import CharTokenizer, fold_to_ascii, named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
TAGS = ("<start_working_out>", "<end_working_out>", "<SOLUTION>", "</SOLUTION>")
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class GSM8KConfig(Settings):
    train: str = ""  # a local train.jsonl; if train and test are both empty, both are downloaded
    test: str = ""  # a local test.jsonl
    tokenizer: str = "gpt2"  # char (tags are one token each), gpt2, cl100k_base or a Hugging Face one
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def __post_init__(self, origin):
        super().__post_init__(origin)
        if bool(self.train) != bool(self.test):
            raise UsageError("give both --train=FILE and --test=FILE, or neither to download them")


def download(name, folder):
    """Downloads a file of the dataset into a folder and returns its path."""
    path = os.path.join(folder, name)
    try:
        with urllib.request.urlopen(SOURCE + name, timeout=30) as response, open(path, "wb") as f:
            f.write(response.read())
    except (OSError, http.client.HTTPException) as error:
        raise Mistake(f"could not download {SOURCE}{name} ({error}); get both files by other means and pass "
                      "--train=FILE --test=FILE") from None
    return path


def lesson(record, split):
    """The record of a problem: its prompt with answer and completion. record: one from read_records."""
    reasoning, mark, number = str(record.get("answer", "")).rpartition("####")
    number = number.replace(",", "").strip()
    if not mark or not NUMBER.fullmatch(number):
        raise Mistake(f"{record['where']}: its answer must end in '#### ' and a number")
    reasoning = re.sub(r"<<[^<>]*>>", "", reasoning).strip()
    working = f"<start_working_out>{reasoning}<end_working_out>"
    return {"prompt": record["prompt"], "answer": number, "completion": f"{working}<SOLUTION>{number}</SOLUTION>",
            "split": split}


def main(argv):
    config, _ = load_config(GSM8KConfig, argv)
    tokenizer = named_tokenizer(config.tokenizer, TAGS)
    with tempfile.TemporaryDirectory() as folder:
        train, test = (given or download(name, folder)
                       for given, name in ((config.train, "train.jsonl"), (config.test, "test.jsonl")))
        records = [lesson(record, split) for path, split in ((train, "train"), (test, "val"))
                   for record in read_records(path)]
    facts = {"source": os.path.basename(config.train) or "gsm8k"}
    if isinstance(tokenizer, CharTokenizer):
        _, facts["characters_folded"], facts["characters_dropped"] = fold_to_ascii(
            "".join(r["prompt"] + r["completion"] for r in records))
    write_prompts(config.out, records, tokenizer, **facts)


if __name__ == "__main__":
    run_script(main)
