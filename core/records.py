"""Records of prompts: read from files as they are, checked, split into training and validation, and written."""

import hashlib
import json
import os

from core.data_folder import FIELDS, FILES, PROMPTS, SPLITS, dataset_folder, write_folder
from core.errors import Mistake, others
from core.files import HUB, object_from_json, on_hub
from core.settings.optional import quiet_hub, require

RESERVED = ("prompts", "completions", "text", "tokens", "where")  # arguments of rewards, and what we add to a record
VALIDATION_PERCENT = 10
VALIDATION_NAMES = ("validation", "val", "dev", "test")            # of the split of a data set, the first one wins


def are_messages(value):
    """True if a value is a list of {"role", "content"} messages, with one at least."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return False
    texts = [message.get(key) for message in value for key in ("role", "content")]
    return set(map(type, texts)) == {str}


def check_record(record, where):
    """The record with its prompt and answer under these names. Errors name `where`, the file and line."""
    if not isinstance(record, dict):
        raise Mistake(f"{where}: a record must be an object with a prompt, not {type(record).__name__}")
    record = dict(record)
    with others(f"{where} is no text", "write whole characters, not half of a surrogate pair"):
        json.dumps(record, ensure_ascii=False, default=str).encode()
    if taken := [name for name in RESERVED if name in record]:
        raise Mistake(f"{where}: the field {taken[0]} is reserved; give it another name")
    for field, names in FIELDS.items():
        found = next((name for name in names if name in record), None)
        if found is not None:
            record[field] = record.pop(found)
    prompt = record.get("prompt")
    if not (prompt and isinstance(prompt, str)) and not are_messages(prompt):
        raise Mistake(f"{where}: prompt must be a text, or a list of messages {{\"role\": ..., \"content\": ...}}, "
                      f"in one of the fields {', '.join(FIELDS['prompt'])}")
    if record.get("split") not in (None, *SPLITS):
        raise Mistake(f"{where}: split={record['split']!r} must be {' or '.join(SPLITS)}")
    return record | {"where": where}


def read_records(path):
    """The records of a JSONL file, of a JSON file {"prompts": [...]} or [...], or of a Parquet file; errors name the
    file and the line.

    A record has a prompt, a text or a list of {"role", "content"} messages.
    """
    if not os.path.isfile(path):
        raise Mistake(f"dataset={path} does not exist; correct the path")
    if path.endswith(".parquet"):
        parquet = require("pyarrow.parquet", f"dataset={path}")
        with others(f"{path} is not a parquet file", "copy it again", quiet=True):
            rows = parquet.read_table(path).to_pylist()
        return check_rows(rows, path)
    with others(f"{path}: not UTF-8 text", "save it as such"), open(path, encoding="utf-8-sig", newline="\n") as f:
        text = f.read()
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):  # a record on each line, then, or no JSON
        lines = {f"{path}, line {n}": line for n, line in enumerate(text.split("\n"), 1) if line.strip()}
        found = {where: object_from_json(line, where, "correct it") for where, line in lines.items()}
    else:
        if isinstance(whole, dict):
            whole = whole.get("prompts", [whole])
        records = whole if isinstance(whole, list) else []
        found = {f"{path}, record {n}": record for n, record in enumerate(records, 1)}
    if not found:
        raise Mistake(f"{path} has no records: a record per line, a list of records, or {{\"prompts\": [...]}}")
    return [check_record(record, where) for where, record in found.items()]


def check_rows(rows, name, left_out=RESERVED):
    """The records of rows {column: value}: an empty cell is a missing field; columns in left_out are left out."""
    given = [{key: x for key, x in row.items() if x is not None and key not in left_out} for row in rows]
    return [check_record(row, f"{name}, row {number}") for number, row in enumerate(given, 1)]


def with_completion(record):
    """The record; if it has no completion, its answer, a text or a number, is the completion to learn from."""
    if record.get("completion") is None and isinstance(record.get("answer"), (str, int, float)):
        return record | {"completion": str(record["answer"])}
    return record


def read_hub(dataset):
    """The records of a data set that the package datasets loads: hf:owner/name, hf:owner/name:subset or hf:FOLDER.

    Its train split is for training, its validation or test split for validation; without one a hash of the prompt
    decides, as for files. A column named split is not read.
    """
    datasets = require("datasets", f"dataset={dataset}")
    quiet_hub(f"dataset={dataset}")
    name, _, subset = dataset.removeprefix(HUB).partition(":")
    with others(f"dataset={dataset} could not be loaded", "check the name and the network, or name a file", quiet=True):
        found = datasets.load_dataset(name, subset or None)
    if "train" not in found:
        raise Mistake(f"dataset={dataset} has the splits {', '.join(found)} but none named train; name a file")
    validation = next((split for split in VALIDATION_NAMES if split in found), None)
    sides = {"train": "train", "val": validation} if validation else {None: "train"}
    records = []
    for split, theirs in sides.items():
        rows = check_rows(found[theirs].to_list(), f"{dataset}, {theirs}", (*RESERVED, "split"))
        records += [record | {"split": split} for record in rows]
    return records


def load_records(dataset):
    """The records of a file, of hf:owner/name, or of a prepared folder."""
    if on_hub(dataset):
        return read_hub(dataset)
    return read_records(dataset if dataset.endswith(FILES) else os.path.join(dataset_folder(dataset), PROMPTS))


def unique_prompts(records):
    """The records with each prompt once: its last record, in the place of its first."""
    return list({json.dumps(record["prompt"]): record for record in records}.values())


def side(prompt):
    """The split of a prompt, 'train' or 'val': the same in every file and Python version."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return "val" if number % 100 < VALIDATION_PERCENT else "train"


def write_prompts(folder, records, tokenizer, **facts):
    """Writes prompts.jsonl and meta.json. Identical prompts are kept once.
    A record without a "split" gets the one that a hash of its prompt chooses."""
    unique = unique_prompts({**record, "split": record.get("split") or side(record["prompt"])} for record in records)
    facts["records"] = len(unique)
    for split in SPLITS:
        facts[f"{split}_records"] = sum(record["split"] == split for record in unique)
    lines = "".join(json.dumps(record) + "\n" for record in unique)
    write_folder(folder, {PROMPTS: lines.encode()}, tokenizer, facts)
