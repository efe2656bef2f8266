"""Records of prompts: read from files as they are, checked, split into training and validation, and written."""

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter

from core.data import FIELDS, FILES, PROMPTS, SPLITS, dataset_folder, write_folder
from core.errors import Mistake, one_line, others
from core.files import HUB, on_hub, value_from_json
from core.settings.optional import quiet_hub, require, say_opening
from core.settings.setting import shown

RESERVED = ("prompts", "completions", "text", "tokens", "where")  # arguments of rewards, and what we add to a record
VALIDATION_PERCENT = 10
TRAINING_NAMES = ("train", "training")                                    # of the splits of others
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval", "test")  # the first one that a data set has counts
LISTS = ("prompts", "data", "records", "rows", "examples", "samples", "items", "instances")  # of records, in JSON
# Fields that other trainers make a part of the prompt
ELSEWHERE = ("system", "system_prompt", "input", "history", "context", "messages", "tools", "functions", "image",
             "images", "video", "videos", "audio", "chat_template_kwargs")
LARGEST_CELL = 2**31 - 1  # characters of a cell of a CSV file


def are_messages(value):
    """True if a value is a list of {"role", "content"} messages, with one at least."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return False
    texts = [message.get(key) for message in value for key in ("role", "content")]
    return set(map(type, texts)) == {str}


def text_of(content):
    """The text of a message whose content is a list of parts {"type": "text", "text": ...}; others as they are."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        return content
    return "".join(texts)


def with_texts(messages):
    """Messages whose contents are texts where they can be."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    return [message | {"content": text_of(message.get("content"))} for message in messages]


def as_record(row):
    """The record of a row of JSON, which may be a prompt alone: a text, or a list of messages."""
    return {"prompt": row} if isinstance(row, (str, list)) else row


def check_record(record, where, notes):
    """The record with its prompt and answer under these names. Errors name `where`, the file and line.

    notes: a Counter {what was left out or put together, in words: number of records}
    """
    record = as_record(record)
    if not isinstance(record, dict):
        raise Mistake(f"{where}: a record must be a prompt, or an object with one, not {shown(record)}; correct it or "
                      "leave it out")
    with others(f"{where} is no text", "write whole characters, not half of a surrogate pair"):
        json.dumps(record, ensure_ascii=False, default=str).encode()
    fields = list(record)
    record = {name: x for name, x in record.items() if name not in RESERVED and x == x}  # NaN is a missing value
    for name in RESERVED:
        if name in fields:
            notes[f"the field {name} is left out, because the name is taken"] += 1
    if isinstance(record.get("messages"), list) and record["messages"] and record.keys().isdisjoint(FIELDS["prompt"]):
        take_apart(record, notes)
    used = set()
    for field, names in FIELDS.items():
        found = next((name for name in names if name in record), None)
        if found is not None:
            record[field] = record.pop(found)
        if found == "instruction" and record.get("input"):
            join_input(record, where, notes)
            used.add("input")
    for field in ("prompt", "completion"):
        record[field] = with_texts(record.get(field))
    if are_messages(record["completion"]):  # of TRL's form of a prompt and a completion
        record["completion"] = record["completion"][-1]["content"]
    prompt = record["prompt"]
    if not (prompt and isinstance(prompt, str)) and not are_messages(prompt):
        found = one_line(", ".join(map(str, fields))) or "none"
        raise Mistake(f"{where}: no prompt that can be read, in the fields {found}; {remedy_of(record, fields)}")
    for name in ELSEWHERE:
        if record.get(name) and name not in used:
            notes[f"the field {name} is not a part of the prompt: rewards alone get it"] += 1
    known = (None, "", *TRAINING_NAMES, *VALIDATION_NAMES)
    if record.get("split") not in known and str(record["split"]).lower() not in known:
        raise Mistake(f"{where}: split={shown(record['split'])} must be {' or '.join(SPLITS)}")
    if record["completion"] is None:
        del record["completion"]
    return record | {"where": where}


def take_apart(record, notes):
    """Makes a prompt of the field messages. If its last turn is the assistant's, that is the answer or, beside an
    answer, the completion."""
    messages = record.pop("messages")
    last = messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant" and len(messages) > 1:
        has_answer = any(record.get(name) is not None for name in FIELDS["answer"])
        field = "completion" if has_answer else "answer"
        if record.get(field) is None:
            record[field] = text_of(last.get("content"))
            notes[f"the last turn of messages, the assistant's, is the {field}"] += 1
        messages = messages[:-1]
    record["prompt"] = messages


def join_input(record, where, notes):
    """Puts the input of a record of Alpaca's form behind its instruction. Rewards get it as a field, too."""
    parts = record["prompt"], record["input"]
    if not all(isinstance(part, str) for part in parts):
        raise Mistake(f"{where}: instruction and input make the prompt together, and must be texts")
    record["prompt"] = "\n\n".join(parts)
    notes["the fields instruction and input are the prompt together"] += 1


def remedy_of(record, fields):
    """The remedy for a record without a prompt. fields: their names in the file"""
    if "conversations" in fields:
        return 'call that field messages, with "role" and "content" in place of "from" and "value"'
    if record.get("messages"):
        return 'messages must be a list of {"role": ..., "content": ...}, as in JSONL'
    if any(isinstance(record.get(field), dict) for field in FIELDS):
        return "write a record for each row (pandas: orient='records')"
    if record["prompt"] == "":
        return "write its text, or leave the record out"
    if isinstance(record["prompt"], list):
        return 'each message needs a "role" and, as its "content", a text; a list of prompts must be called prompts'
    names = f"{', '.join(FIELDS['prompt'][:-1])} or {FIELDS['prompt'][-1]}"
    return f'call it {names}: a text, or a list of messages {{"role": ..., "content": ...}}'


def in_our_splits(records, notes):
    """The records with train, val or None as their split. Of several names for validation the first one of
    VALIDATION_NAMES counts, and the records of the others are left out."""
    names = [str(record.get("split") or "").lower() for record in records]
    validation = next((name for name in VALIDATION_NAMES if name in names), None)
    kept = []
    for record, name in zip(records, names, strict=True):
        if name in VALIDATION_NAMES and name != validation:
            notes[f"the split {name} is left out, because {validation} is for validation"] += 1
            continue
        if name:
            record["split"] = "train" if name in TRAINING_NAMES else "val"
        kept.append(record)
    return kept


def read_records(path, notes=None):
    """The records of a JSONL, JSON, CSV or Parquet file; errors name the file and the line.

    A record has, or in JSON is, a prompt: a text or a list of {"role", "content"} messages. notes: as in check_record
    """
    notes = Counter() if notes is None else notes
    if not os.path.isfile(path):
        raise Mistake(f"dataset={path} does not exist; correct the path")
    if path.endswith(".parquet"):
        rows = rows_of_parquet(path)
    else:
        with others(f"{path}: not UTF-8 text", "save it as such"), open(path, encoding="utf-8-sig", newline="\n") as f:
            text = f.read()
        rows = rows_of_csv(text, path, notes) if path.endswith(".csv") else rows_of_json(text, path, notes)
    if not rows:
        raise Mistake(f"{path} has no records: a record per line, a list of records, or {{\"prompts\": [...]}}")
    return in_our_splits([check_record(row, where, notes) for where, row in rows.items()], notes)


def rows_of_json(text, path, notes):
    """{place: record} of a JSON text, or of a text with a record on each line."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):  # a record on each line, then, or no JSON
        lines = {f"{path}, line {n}": line for n, line in enumerate(text.split("\n"), 1) if line.strip()}
        return {where: value_from_json(line, where, "correct it") for where, line in lines.items()}
    splits, lists = [], []
    if isinstance(whole, dict) and not any(name in whole for name in ("messages", *FIELDS["prompt"])):
        splits = [key for key in whole if key.lower() in (*TRAINING_NAMES, *VALIDATION_NAMES)]
        lists = splits or [key for key in LISTS if key in whole][:1]
        for key in whole.keys() - lists if lists else ():
            if isinstance(whole[key], list):
                notes[f"the list {one_line(key)} of the file is left out"] += len(whole[key])
    found = {}
    for key in lists:
        rows = [whole[key]] if isinstance(whole[key], dict) else whole[key]
        if not isinstance(rows, list):
            raise Mistake(f"{path}: {key} must be a list of records, not {shown(rows)}; put it in [ ], or leave it out")
        for n, record in enumerate(rows, 1):
            record = as_record(record)
            is_in_split = splits and isinstance(record, dict)
            found[f"{path}, {key}, record {n}"] = record | {"split": key} if is_in_split else record
    if not lists:
        records = whole if isinstance(whole, list) else [whole]
        found = {f"{path}, record {n}": record for n, record in enumerate(records, 1)}
    return found


def rows_of_csv(text, path, notes):
    """{place: row} of a CSV text with commas and a header. Every value is a text, an empty cell a missing field."""
    csv.field_size_limit(LARGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names, rows = None, {}
    while True:
        where = f"{path}, line {reader.line_num + 1}"
        with others(f"{where}: no CSV", "correct it"):
            cells = next(reader, None)
        if cells is None:
            return rows
        if names is None:
            names = [name.strip() for name in cells]
            check_columns(names, path, notes)
        elif cells and len(cells) != len(names):
            raise Mistake(f"{where}: {len(cells)} cells below {len(names)} columns; put a cell with a comma in quotes")
        elif any(cells):
            found = {name: cell for name, cell in zip(names, cells, strict=True) if name and cell}
            if found.keys().isdisjoint((*FIELDS["prompt"], "messages")):
                raise Mistake(f"{where}: the cell of the prompt is empty; fill it in, or leave the line out")
            rows[where] = found


def check_columns(names, path, notes):
    """Raises Mistake unless the names of columns name a prompt, and none occurs twice."""
    if len(names) == 1 and re.search("[;\t]", names[0]):
        raise Mistake(f"{path}: the columns {one_line(names[0])} must have commas between them; put them there")
    if set(names).isdisjoint((*FIELDS["prompt"], "messages")):
        raise Mistake(f"{path}: no prompt in the columns {one_line(', '.join(names))}; call it {FIELDS['prompt'][0]}")
    for name in names:
        if name and names.count(name) > 1:
            raise Mistake(f"{path}: two columns are called {one_line(name)}; rename one")
    if "" in names:
        notes["a column without a name is left out"] += 1


def rows_of_parquet(path):
    """{place: row} of a Parquet file."""
    parquet = require("pyarrow.parquet", f"dataset={path}")
    with others(f"{path} is not a parquet file", "copy it again", quiet=True):
        table = parquet.read_table(path).to_pylist()
    return numbered(table, path)


def numbered(table, name):
    """{place: row} of rows {column: value}; an empty cell is a missing field."""
    return {f"{name}, row {n}": {key: x for key, x in row.items() if x is not None} for n, row in enumerate(table, 1)}


def read_hub(dataset, notes=None):
    """The records of a data set that the package datasets loads: hf:owner/name, hf:owner/name:subset or hf:FOLDER.

    Its train split is for training, its validation or test split for validation; without one a hash of the prompt
    decides, as for files. A column named split is not read.
    """
    notes = Counter() if notes is None else notes
    say_opening(dataset, "dataset")
    datasets = require("datasets", f"dataset={dataset}")
    quiet_hub(f"dataset={dataset}")
    name, _, subset = dataset.removeprefix(HUB).partition(":")
    with others(f"dataset={dataset} could not be loaded", "check the name and the network, or name a file", quiet=True):
        found = datasets.load_dataset(name, subset or None)
    if "train" not in found:
        raise Mistake(f"dataset={dataset} has the splits {', '.join(found)} but none named train; name a file")
    known = [split for split in found if split.lower() in (*TRAINING_NAMES, *VALIDATION_NAMES)]
    for split in found.keys() - known:
        notes[f"the split {split} is left out, because its name is not known"] += len(found[split])
    records = []
    for split in known:
        for where, row in numbered(found[split].to_list(), f"{dataset}, {split}").items():
            records.append(check_record(row | {"split": split if len(known) > 1 else None}, where, notes))
    return in_our_splits(records, notes)


def load_records(dataset, notes=None):
    """The records of a file, of hf:owner/name, or of a prepared folder. notes: as in check_record"""
    if on_hub(dataset):
        return read_hub(dataset, notes)
    return read_records(dataset if dataset.endswith(FILES) else os.path.join(dataset_folder(dataset), PROMPTS), notes)


def answer_texts(answer):
    """The texts of an answer, each of which is right: of each alternative if it is a list, and of a whole number with
    and without its ".0", which a column of numbers with a gap gets."""
    if isinstance(answer, (list, tuple)):
        return [text for alternative in answer for text in answer_texts(alternative)]
    text = str(answer)
    whole = re.fullmatch(r"(-?[0-9]+)\.0", text.strip())
    return [whole[1], text] if whole else [text]


def with_completion(record):
    """The record; if it has no completion, its answer, or the first one of a list, is the completion to learn from."""
    answer = record.get("answer")
    if record.get("completion") is None and isinstance(answer, (str, int, float, list)) and answer_texts(answer):
        return record | {"completion": answer_texts(answer)[0]}
    return record


def unique_prompts(records):
    """The records with each prompt once: its last record, in the place of its first. For problems that are drawn."""
    return list({json.dumps(record["prompt"]): record for record in records}.values())


def unique_records(records):
    """The records without those that equal an earlier one in all that their author wrote."""
    first = {}
    for record in records:
        own = {name: x for name, x in record.items() if name != "where"}
        first.setdefault(json.dumps(own, sort_keys=True, default=str), record)
    return list(first.values())


def side(prompt):
    """The split of a prompt, 'train' or 'val': the same in every file and Python version."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return "val" if number % 100 < VALIDATION_PERCENT else "train"


def splits_of(records, notes):
    """The split of each record: the one that it names, else that of a record with the same prompt, else the one that
    a hash of the prompt chooses. None for all if no record names one, and the hash would leave a split empty."""
    prompts = [json.dumps(record["prompt"]) for record in records]
    named = {prompt: record["split"] for prompt, record in zip(prompts, records, strict=True) if record.get("split")}
    splits = [record.get("split") or named.get(prompt) or side(record["prompt"])
              for prompt, record in zip(prompts, records, strict=True)]
    if not named and len(set(splits)) < len(SPLITS):
        notes["in both splits, so that the run is evaluated on what it trains on: no record names a split, and the "
              'hash of the prompts put all on one side; mark some "split": "val", or write '
              '{"train": [...], "val": [...]}'] += len(records)
        return [None] * len(records)
    trained_on = {prompt for prompt, split in zip(prompts, splits, strict=True) if split == "train"}
    for prompt, split in zip(prompts, splits, strict=True):
        if split == "val" and prompt in trained_on:
            notes["the prompt is in both splits, as the records say"] += 1
    return splits


def write_prompts(folder, records, tokenizer, **facts):
    """Writes prompts.jsonl and meta.json, and prints what should be known of the records. Equal records are kept once.
    A record without a split gets that of splits_of."""
    records, notes = list(records), Counter()
    unique = unique_records(records)
    splits = splits_of(unique, notes)
    if len(unique) < len(records):
        notes["equal to another one, and left out"] = len(records) - len(unique)
    facts["records"] = len(unique)
    for split in SPLITS:
        facts[f"{split}_records"] = sum(name in (split, None) for name in splits)
    lines = []
    for record, split in zip(unique, splits, strict=True):
        lines.append(json.dumps({**record, "split": split} if split else record, default=str) + "\n")
    write_folder(folder, {PROMPTS: "".join(lines).encode()}, tokenizer, facts)
    for line in in_words(notes):
        print(line)


def in_words(notes):
    """A line for each of the notes."""
    return [f"{count} record{'s' * (count > 1)}: {what}" for what, count in notes.items()]
