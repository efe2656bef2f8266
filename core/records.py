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

# A field may not have these names: rewards have arguments of these names, and "where" is the place of a record
RESERVED = ("prompts", "completions", "text", "tokens", "where")
VALIDATION_PERCENT = 10
TRAINING_NAMES = ("train", "training")
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval", "test")  # a data set is validated on its first one
LISTS = ("prompts", "data", "records", "rows", "examples", "samples", "items", "instances")  # of records, in JSON
# Fields that other trainers make a part of the prompt
ELSEWHERE = ("system", "system_prompt", "input", "history", "context", "messages", "tools", "functions", "image",
             "images", "video", "videos", "audio", "chat_template_kwargs")
LARGEST_CELL = 2**31 - 1  # characters of a cell of a CSV file


# One record

def are_messages(value):
    """True for a list of at least one {"role", "content"} message, both of them texts."""
    if not isinstance(value, list):
        return False
    for message in value:
        match message:
            case {"role": str(), "content": str()}:
                continue
        return False
    return value != []


def with_text(message):
    """A message with a text as its content, if that is a list of parts {"type": "text", "text": ...}. Anything else
    stays as it is."""
    match message:
        case {"content": list(parts)}:
            text = ""
        case _:
            return message
    for part in parts:
        match part:
            case {"type": "text", "text": str(more)}:
                text += more
            case _:
                return message
    return message | {"content": text}


def with_texts(value):
    """Messages with texts as their contents, as with_text makes them. Anything else stays as it is."""
    if not isinstance(value, list):
        return value
    return [with_text(message) for message in value]


def check_record(row, where, notes):
    """The record of a row, with our names for its prompt, answer and completion. Raises Mistake without a prompt.

    row: an object or, in JSON, a prompt by itself
    where: the file and line of the row, for errors
    notes: a Counter {a change that was made, in words: number of records}
    """
    if isinstance(row, (str, list)):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise Mistake(f"{where}: a record must be a prompt, or an object with one, not {shown(row)}; correct it or "
                      "leave it out")
    with others(f"{where} is no text", "write whole characters, not half of a surrogate pair"):
        json.dumps(row, ensure_ascii=False, default=str).encode()
    record = {}
    for name, value in row.items():
        if name in RESERVED:
            notes[f"the field {name} is left out, because the name is taken"] += 1
        elif value == value:  # NaN is a missing value
            record[name] = value
    take_prompt_from_messages(record, notes)
    for field, names in FIELDS.items():
        found = [name for name in names if name in record]
        if found:
            record[field] = record.pop(found[0])
    is_joined = "instruction" in row and "instruction" not in record and bool(record.get("input"))
    if is_joined:
        join_input(record, where, notes)
    prompt = record["prompt"] = with_texts(record.get("prompt"))
    completion = with_texts(record.pop("completion", None))
    if are_messages(completion):  # as TRL writes a prompt and a completion
        completion = completion[-1]["content"]
    if completion is not None:
        record["completion"] = completion
    if prompt == "" or not isinstance(prompt, str) and not are_messages(prompt):
        fields = one_line(", ".join(row)) or "none"
        raise Mistake(f"{where}: no prompt that can be read, in the fields {fields}; {remedy_of(record, row)}")
    for name in ELSEWHERE:
        if record.get(name) and not (is_joined and name == "input"):
            notes[f"the field {name} is not a part of the prompt: only rewards get it"] += 1
    if record.get("split") is not None:
        record["split"] = str(record["split"]).lower()
    record["where"] = where
    return record


def take_prompt_from_messages(record, notes):
    """Replaces the field messages by a prompt, in a record without one. A last turn of the assistant becomes the answer
    or, if the record has an answer, the completion."""
    messages = with_texts(record.get("messages"))
    has_prompt = not record.keys().isdisjoint(FIELDS["prompt"])
    if has_prompt or not messages or not isinstance(messages, list):
        return
    del record["messages"]
    record["prompt"] = messages
    match messages:
        case [*turns, {"role": "assistant"} as last] if turns:
            record["prompt"] = turns
            has_answer = any(record.get(name) is not None for name in FIELDS["answer"])
            field = "completion" if has_answer else "answer"
            if record.get(field) is None:
                record[field] = last.get("content")
                notes[f"the last turn of messages, the assistant's, is the {field}"] += 1


def join_input(record, where, notes):
    """Appends the input of a record in Alpaca's form to its instruction. Rewards get it as a field, too."""
    parts = [record["prompt"], record["input"]]
    if not all(isinstance(part, str) for part in parts):
        raise Mistake(f"{where}: instruction and input make the prompt together, and must be texts")
    record["prompt"] = "\n\n".join(parts)
    notes["the fields instruction and input are the prompt together"] += 1


def remedy_of(record, row):
    """The remedy for a record without a prompt. row: the record as it was written"""
    if "conversations" in row:
        return 'call that field messages, with "role" and "content" in place of "from" and "value"'
    if record.get("messages"):
        return 'messages must be a list of {"role": ..., "content": a text}, as in JSONL'
    if isinstance(record["prompt"], dict) or isinstance(record.get("answer"), dict):
        return "write a record for each row (pandas: orient='records')"
    if record["prompt"] == "":
        return "write its text, or leave the record out"
    if isinstance(record["prompt"], list):
        return 'each message needs a "role" and, as its "content", a text; a list of prompts must be called prompts'
    return f'call it {" or ".join(FIELDS["prompt"])}: a text, or a list of messages {{"role": ..., "content": ...}}'


# Records of a file, or of the hub

def load_records(dataset, notes):
    """Reads the records of a file, of hf:owner/name, or of a prepared folder. notes: as in check_record"""
    if on_hub(dataset):
        return read_hub(dataset, notes)
    if not dataset.endswith(FILES):
        dataset = os.path.join(dataset_folder(dataset), PROMPTS)
    return read_records(dataset, notes)


def read_records(path, notes=None):
    """Reads the records of a JSONL, JSON, CSV or Parquet file. Raises Mistake, naming the file and the line.

    A record has a prompt or, in JSON, may be one: a text or a list of {"role", "content"} messages.
    notes: as in check_record
    """
    notes = Counter() if notes is None else notes
    if not os.path.isfile(path):
        raise Mistake(f"dataset={path} does not exist; correct the path")
    if path.endswith(".parquet"):
        parquet = require("pyarrow.parquet", f"dataset={path}")
        with others(f"{path} is not a parquet file", "copy it again", quiet=True):
            rows = parquet.read_table(path).to_pylist()
        records = records_of_table(rows, path, notes)
    else:
        with others(f"{path}: not UTF-8 text", "save it as such"), open(path, encoding="utf-8-sig", newline="\n") as f:
            text = f.read()
        records_of_text = records_of_csv if path.endswith(".csv") else records_of_json
        records = records_of_text(text, path, notes)
    records = list(records)
    if not records:
        raise Mistake(f"{path} has no records: a record per line, a list of records, or {{\"prompts\": [...]}}")
    return in_our_splits(records, notes)


def records_of_json(text, path, notes):
    """Yields the records of a JSON text, or of a text with a JSON value on each line."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or a value on each line
        for number, line in enumerate(text.split("\n"), 1):
            where = f"{path}, line {number}"
            if line.strip():
                yield check_record(value_from_json(line, where, "correct it"), where, notes)
        return
    keys = keys_of_lists(whole)
    if not keys:
        rows = whole if isinstance(whole, list) else [whole]
        yield from records_of_list(rows, path, notes)
        return
    for key, rows in whole.items():
        if key in keys:
            if isinstance(rows, dict):
                rows = [rows]
            if not isinstance(rows, list):
                raise Mistake(f"{path}: {key} must be a list of records, not {shown(rows)}; put it in [ ], or leave it "
                              "out")
            split = key if is_split(key) else None
            yield from records_of_list(rows, f"{path}, {key}", notes, split)
        elif isinstance(rows, list):
            notes[f"the list {one_line(key)} of the file is left out"] += len(rows)


def is_split(name):
    """True for a name of a training or validation split."""
    return name.lower() in (*TRAINING_NAMES, *VALIDATION_NAMES)


def keys_of_lists(whole):
    """The keys of the lists of records in a JSON object: all splits, or else the first one of LISTS. A record, or any
    other value, has none."""
    if not isinstance(whole, dict) or not whole.keys().isdisjoint(("messages", *FIELDS["prompt"])):
        return []
    splits = [key for key in whole if is_split(key)]
    return splits or [key for key in LISTS if key in whole][:1]


def records_of_list(rows, place, notes, split=None):
    """Yields the records of a list of rows.
    place: the file and list, for errors; split: the split of all records; None: each record may name its own"""
    for number, row in enumerate(rows, 1):
        record = check_record(row, f"{place}, record {number}", notes)
        if split is not None:
            record["split"] = split.lower()
        yield record


def records_of_table(rows, place, notes, split=None):
    """Yields the records of rows {column: value}. None is an empty cell: the record lacks the field.
    place, split: as in records_of_list"""
    filled = []
    for row in rows:
        filled.append({column: value for column, value in row.items() if value is not None})
    return records_of_list(filled, place, notes, split)


def records_of_csv(text, path, notes):
    """Yields the records of a CSV text with commas and a header. Every value is a text; an empty cell is a missing
    field."""
    csv.field_size_limit(LARGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names = []
    where = f"{path}, line 1"
    try:
        for cells in reader:
            if not names:
                names = [name.strip() for name in cells]
                check_columns(names, path, notes)
            elif cells and len(cells) != len(names):
                raise Mistake(f"{where}: {len(cells)} cells below {len(names)} columns; put a cell with a comma in "
                              "quotes")
            elif any(cells):
                row = {name: cell for name, cell in zip(names, cells, strict=True) if name and cell}
                yield check_record(row, where, notes)
            where = f"{path}, line {reader.line_num + 1}"  # a row may have several lines
    except csv.Error as error:
        raise Mistake(f"{where}: no CSV ({error}); correct it") from None


def check_columns(names, path, notes):
    """Raises Mistake if there are no commas between the names of columns, or if a name occurs twice."""
    if len(names) == 1 and re.search("[;\t]", names[0]):
        raise Mistake(f"{path}: the columns {one_line(names[0])} must have commas between them; put them there")
    for name in names:
        if name and names.count(name) > 1:
            raise Mistake(f"{path}: two columns are called {one_line(name)}; rename one")
    if "" in names:
        notes["a column without a name is left out"] += 1


def read_hub(dataset, notes):
    """Reads the records of a data set with the package datasets: hf:owner/name, hf:owner/name:subset or hf:FOLDER.

    Its train split is for training, its validation or test split for validation. If it has only a train split, a hash
    of the prompt decides, as for files. A column named split is not read. notes: as in check_record
    """
    say_opening(dataset, "dataset")
    datasets = require("datasets", f"dataset={dataset}")
    quiet_hub(f"dataset={dataset}")
    name, _, subset = dataset.removeprefix(HUB).partition(":")
    with others(f"dataset={dataset} could not be loaded", "check the name and the network, or name a file", quiet=True):
        tables = datasets.load_dataset(name, subset or None)
    if "train" not in tables:
        raise Mistake(f"dataset={dataset} has the splits {', '.join(tables)} but none named train; name a file")
    known = [split for split in tables if is_split(split)]
    records = []
    for split, table in tables.items():
        if split in known:
            ours = split if len(known) > 1 else ""
            records += records_of_table(table.to_list(), f"{dataset}, {split}", notes, ours)
        else:
            notes[f"the split {split} is left out, because its name is not known"] += len(table)
    return in_our_splits(records, notes)


def in_our_splits(records, notes):
    """The records with train, val or no split. If there are several splits for validation, only the first one of
    VALIDATION_NAMES is kept. Raises Mistake for another name of a split."""
    names = {record.get("split") for record in records}
    validation = [name for name in VALIDATION_NAMES if name in names][:1]
    kept = []
    for record in records:
        name = record.get("split")
        if name in TRAINING_NAMES:
            record["split"] = "train"
        elif name in validation:
            record["split"] = "val"
        elif name in VALIDATION_NAMES:
            notes[f"the split {name} is left out, because {validation[0]} is for validation"] += 1
            continue
        elif name:
            raise Mistake(f"{record['where']}: split={shown(name)} must be {' or '.join(SPLITS)}")
        kept.append(record)
    return kept


# Answers, copies and splits

def answer_texts(answer):
    """The correct texts of an answer: of each alternative, if it is a list. A whole number is correct with and without
    ".0", which pandas adds to a column of whole numbers with a missing value."""
    if isinstance(answer, (list, tuple)):
        texts = []
        for alternative in answer:
            texts += answer_texts(alternative)
        return texts
    text = str(answer)
    whole = re.fullmatch(r"(-?[0-9]+)\.0", text.strip())
    return [whole[1], text] if whole else [text]


def with_completion(record):
    """The record with a completion to learn from: its own, or else its first answer."""
    answer = record.get("answer")
    if record.get("completion") is not None or not isinstance(answer, (str, int, float, list)):
        return record
    texts = answer_texts(answer)
    return record | {"completion": texts[0]} if texts else record


def unique_prompts(records):
    """The records with each prompt once: its last record, in the place of its first. For generated problems."""
    return list({json.dumps(record["prompt"]): record for record in records}.values())


def unique_records(records, notes):
    """A copy of each record that differs from all earlier ones. Equal records may stand in different places."""
    first = {}
    for record in records:
        written = {name: value for name, value in record.items() if name != "where"}
        key = json.dumps(written, sort_keys=True, default=str)
        if key in first:
            notes["equal to another one, and left out"] += 1
        else:
            first[key] = {**record}
    return list(first.values())


def split_of(prompt):
    """The split of a prompt by its hash, 'train' or 'val': the same in every file and Python version."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    percent = int(digest[:8], 16) % 100
    return "val" if percent < VALIDATION_PERCENT else "train"


def choose_splits(records, notes):
    """Gives a split to each record without one: the split of a record with the same prompt, or else the choice of a
    hash of the prompt. If no record names a split, and the hash would leave one empty, all records stay without: they
    are in both."""
    named = {}
    for record in records:
        if record.get("split"):
            named[json.dumps(record["prompt"])] = record["split"]
    for record in records:
        if not record.get("split"):
            prompt = json.dumps(record["prompt"])
            record["split"] = named.get(prompt) or split_of(record["prompt"])
    splits = {record["split"] for record in records}
    if not named and len(splits) < len(SPLITS):
        notes["in both splits, so that the run is evaluated on what it trains on: no record names a split, and the "
              'hash of the prompts put all on one side; mark some "split": "val", or write '
              '{"train": [...], "val": [...]}'] += len(records)
        for record in records:
            del record["split"]
        return
    trained_on = {json.dumps(record["prompt"]) for record in of_split(records, "train")}
    for record in of_split(records, "val"):
        if json.dumps(record["prompt"]) in trained_on:
            notes["the prompt is in both splits, as the records say"] += 1


def of_split(records, split):
    """The records that are in a split. Those without a split are in both."""
    return [record for record in records if record.get("split", split) == split]


def write_prompts(folder, records, tokenizer, **facts):
    """Writes prompts.jsonl and meta.json, and prints the facts and notes. Copies of a record are left out, and
    choose_splits completes the splits."""
    notes = Counter()
    records = unique_records(records, notes)
    choose_splits(records, notes)
    facts["records"] = len(records)
    for split in SPLITS:
        facts[f"{split}_records"] = len(of_split(records, split))
    lines = [json.dumps(record, default=str) + "\n" for record in records]
    write_folder(folder, {PROMPTS: "".join(lines).encode()}, tokenizer, facts)
    for line in in_words(notes):
        print(line)


def in_words(notes):
    """A line for each of the notes."""
    return [f"{count} record{'s' * (count > 1)}: {what}" for what, count in notes.items()]
