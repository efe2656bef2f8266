"""Folders of prepared datasets: token files or prompts, with meta.json."""

import json
import os

import numpy as np

from core.errors import Mistake
from core.files import on_hub, read_object, replacing
from core.settings.setting import shown
from core.tokenizer_kinds import AGAIN, from_description, same_vocabulary

SPLITS = ("train", "val")
PROMPTS = "prompts.jsonl"
FILES = (".jsonl", ".json", ".csv", ".parquet")  # a dataset with such an ending is a file of records
FIELDS = {"prompt": ("prompt", "question", "instruction", "problem"),
          "answer": ("answer", "solution", "response", "output")}  # their names in other data sets; the first one wins
OF_CONSUMER = {"text", "tokens", "where", "split"}  # fields of a record that a PromptConsumer adds, or needs alone


def dataset_folder(dataset):
    """A name under data/, or a folder of your own."""
    return dataset if os.path.isdir(dataset) else os.path.join("data", dataset)


def is_file_of_records(dataset):
    """Tells whether a dataset is a file of records, or one of the hub, which need no preparation."""
    return on_hub(dataset) or dataset.endswith(FILES)


def has_prompts(dataset):
    """Tells whether a dataset consists of prompts, not of running text. Raises Mistake for other files."""
    if is_file_of_records(dataset):
        return True
    if os.path.isfile(dataset):
        raise Mistake(f"dataset={dataset} is a file, but not of prompts; write those as {', '.join(FILES)}, unpacked. "
                      "Make running text a folder with data/char_diffusion/prepare.py "
                      f"--input={dataset} --out=data/mine")
    return os.path.exists(os.path.join(dataset_folder(dataset), PROMPTS))


def dtype_of_ids(tokenizer):
    """An id takes 16 bits or, of a vocabulary above 65,536, 32."""
    return np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")


def write_dataset(folder, tokens, tokenizer, **facts):
    """Writes train.bin, val.bin and meta.json.
    tokens: {"train": ids, "val": ids}; facts: counts worth keeping, printed and written to meta.json"""
    files = {}
    for split in SPLITS:
        facts[f"{split}_tokens"] = len(tokens[split])
        files[f"{split}.bin"] = np.array(tokens[split], dtype=dtype_of_ids(tokenizer)).tobytes()
    write_folder(folder, files, tokenizer, facts)


def write_folder(folder, files, tokenizer, facts):
    """Writes the files {name: bytes} of a dataset and, last, meta.json; each whole or not at all. Prints the facts."""
    if not folder:
        raise Mistake("out is empty; name a folder with --out=FOLDER")
    meta = json.dumps({"tokenizer": tokenizer.description(), **facts}, indent=1).encode()
    for name, content in {**files, "meta.json": meta}.items():
        with replacing(os.path.join(folder, name)) as new, open(new, "wb") as f:
            f.write(content)
    print(f"{folder}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))


def file_of(folder, name):
    """The path of a file of a prepared dataset, which must exist."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise Mistake(f"dataset not prepared: {path} is missing; correct the path, or run its prepare.py "
                      "(for your own data: data/char_diffusion/prepare.py or data/custom/prepare.py)")
    return path


def load_meta(folder, tokenizer=None):
    """(meta.json of a prepared dataset, its tokenizer). tokenizer: one that is used in place of the dataset's own"""
    path = file_of(folder, "meta.json")
    meta = read_object(path, path, AGAIN)
    if not isinstance(meta.get("tokenizer"), dict):
        raise Mistake(f"{path} has no tokenizer: {AGAIN}")
    return meta, tokenizer or from_description(meta["tokenizer"], path)


def open_tokens(folder, split, tokenizer, block_size):
    """The token ids of a split, as an array that stays on disk. Raises Mistake, naming the file,
    unless it has more than a window of block_size."""
    path = file_of(folder, f"{split}.bin")
    dtype = dtype_of_ids(tokenizer)
    count = os.path.getsize(path) // dtype.itemsize
    if count <= block_size + 1:
        raise Mistake(f"{path} has {count} tokens, fewer than one window of block_size={block_size} + 1")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def check_meta(folder, meta, tokenizer, masks):
    """Raises Mistake unless windows of the dataset can be cut and masked with this tokenizer.
    masks: {key of MASKS: weight}, or None where nothing is masked"""
    if not same_vocabulary(meta["tokenizer"], tokenizer):
        raise Mistake(f"dataset={folder} was prepared with another vocabulary "
                      f"({meta['tokenizer'].get('vocab_size')} tokens) than the model's ({tokenizer.vocab_size}); "
                      "prepare it for this one: data/char_diffusion/prepare.py --tokenizer=MODEL")
    stride = meta.get("stride", 1)
    if type(stride) is not int or stride < 1:
        raise Mistake(f"{os.path.join(folder, 'meta.json')}: stride={shown(stride)} must be a whole number, 1 or more: "
                      f"{AGAIN}")
    if masks and tokenizer.mask_token_id is None:
        raise Mistake(f"dataset={folder}: its tokenizer has no mask token, which filling in needs")
    if masks and "line" in masks and tokenizer.newline_token_id < 0:
        raise Mistake(f"masks={masks} has lines, but the tokenizer has no end of a line; leave 'line' out")
