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
from core.settings.setting import shown

# A field may not have these names: rewards have arguments of these names, and "where" is the place of a record
RESERVED = ("prompts", "completions", "text", "tokens", "where")
VALIDATION_PERCENT = 10
TRAINING_NAMES = ("train", "training")
# A data set with several of these splits is validated on the first of them, in this order
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "eval", "test")
# Keys of a JSON object that may hold its list of records
LISTS = ("prompts", "data", "records", "rows", "examples", "samples", "items", "instances")
# Fields that other trainers make a part of the prompt
OUTSIDE = ("system", "system_prompt", "input", "history", "context", "messages", "tools", "functions", "image",
             "images", "video", "videos", "audio", "chat_template_kwargs")
LARGEST_CELL = 2**31 - 1  # characters of a cell of a CSV file


# One record

def is_message(value):
    """True for {"role", "content"} with text values, perhaps with more keys."""
    match value:
        case {"role": str(), "content": str()}:
            return True
    return False


def are_messages(value):
    """True for a list of at least one message."""
    if not isinstance(value, list) or not value:
        return False
    return all(map(is_message, value))


def is_text_part(part):
    """True for a text part of a multi-part content: {"type": "text", "text": ...}."""
    match part:
        case {"type": "text", "text": str()}:
            return True
    return False


def with_text(message):
    """Joins the content of a message to one text if it is a list of text parts. Anything else is unchanged."""
    match message:
        case {"content": [*parts]} if parts and all(map(is_text_part, parts)):
            texts = [part["text"] for part in parts]
            return message | {"content": "".join(texts)}
    return message


def with_texts(value):
    """Applies with_text to the messages of a list. Anything else is unchanged."""
    if not isinstance(value, list):
        return value
    return [with_text(message) for message in value]


def check_record(row, where, notes):
    """Turns a row into a record, with our names for prompt, answer and completion. Raises Mistake without a prompt.

    row: an object or, in JSON and in Python, just a prompt
    where: the file and line of the row, for errors
    notes: a Counter {a change that was made, in words: number of records}
    """
    if isinstance(row, (str, list)):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise Mistake(f"{where}: a record must be a prompt, or an object with one, not {shown(row)}; correct it or "
                      "leave it out")
    if not all(isinstance(name, str) for name in row):
        raise Mistake(f"{where}: the names of fields must be texts; rename {list(row)}")
    # JSON can hold half of a surrogate pair, which no tokenizer and no file takes
    with others(f"{where} is no text", "write whole characters, not half of a surrogate pair"):
        json.dumps(row, ensure_ascii=False, default=str).encode()
    record = {}
    for name, value in row.items():
        if name in RESERVED:
            notes[f"the field {name} is left out, because the name is taken"] += 1
        elif not isinstance(value, float) or value == value:  # NaN is a missing value
            record[name] = value
    take_prompt_from_messages(record, notes)
    is_joined = names_in(record, "prompt")[:1] == ["instruction"] and bool(record.get("input"))
    if is_joined:
        join_input(record, where, notes)
    for field in FIELDS:
        names = names_in(record, field)
        if names:
            record[field] = record.pop(names[0])
    prompt = with_texts(record.get("prompt"))
    record["prompt"] = prompt
    is_text = isinstance(prompt, str) and prompt != ""
    if not is_text and not are_messages(prompt):
        fields = one_line(", ".join(row)) or "none"
        raise Mistake(f"{where}: no prompt that can be read, in the fields {fields}; {remedy_of(record, row)}")
    completion = with_texts(record.pop("completion", None))
    if are_messages(completion):  # as TRL writes a prompt and a completion
        completion = completion[-1]["content"]
    if completion is not None:
        record["completion"] = completion
    outside = [name for name in OUTSIDE if record.get(name)]
    if is_joined:
        outside.remove("input")
    for name in outside:
        notes[f"the field {name} is not a part of the prompt: only rewards get it"] += 1
    if record.get("split") is not None:
        record["split"] = str(record["split"]).lower()
    record["where"] = where
    return record


def names_in(record, field):
    """Lists the names of a field (FIELDS) that a record uses."""
    return [name for name in FIELDS[field] if name in record]


def take_prompt_from_messages(record, notes):
    """Replaces the field messages by a prompt, in a record without one. A last turn of the assistant becomes the answer
    or, if the record has an answer, the completion."""
    messages = with_texts(record.get("messages"))
    if names_in(record, "prompt") or not messages or not isinstance(messages, list):
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
    """Appends the input of a record in Alpaca's form to its instruction. Rewards still get the field input."""
    parts = [record["instruction"], record["input"]]
    if not all(isinstance(part, str) for part in parts):
        raise Mistake(f"{where}: instruction and input make the prompt together, and must be texts")
    record["instruction"] = "\n\n".join(parts)
    notes["the fields instruction and input are the prompt together"] += 1


def remedy_of(record, row):
    """Returns the remedy for a record without a prompt. row: the record as it was written"""
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


# Records of a file, of the hub, or from Python

def load_records(dataset, notes):
    """Reads the records of a file, of hf:owner/name, of a prepared folder, or of a list from Python. notes: as in
    check_record"""
    if isinstance(dataset, list):
        return in_our_splits(records_of_list(dataset, "dataset", notes), "dataset", notes)
    if not isinstance(dataset, str):
        raise Mistake(f"dataset must be a path or a list of records, not {type(dataset).__name__}; make a list of it, "
                      "with to_dict('records') in pandas or to_list() in datasets")
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
    if notes is None:
        notes = Counter()
    if not os.path.isfile(path):
        raise Mistake(f"dataset={path} does not exist; correct the path")
    if path.endswith(".parquet"):
        from core.settings.optional import require
        parquet = require("pyarrow.parquet", f"dataset={path}")
        with others(f"{path} is not a parquet file", "copy it again", quiet=True):
            rows = parquet.read_table(path).to_pylist()
        records = records_of_table(rows, path, notes)
    else:
        with open(path, "rb") as f:
            content = f.read()
        with others(f"{path}: not UTF-8 text", "save it as such"):
            text = content.decode("utf-8-sig")
        if path.endswith(".csv"):
            records = records_of_csv(text, path, notes)
        else:
            records = records_of_json(text, path, notes)
    return in_our_splits(records, path, notes)


def records_of_json(text, path, notes):
    """Yields the records of a JSON text, or of a text with a JSON value on each line."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or a value on each line
        yield from records_of_lines(text, path, notes)
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


def records_of_lines(text, path, notes):
    """Yields the records of a text with a JSON value on each line."""
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}, line {number}"
        if line.strip():
            row = value_from_json(line, where, "correct it")
            yield check_record(row, where, notes)


def is_split(name):
    """True for a name of a training or validation split."""
    return name.lower() in (*TRAINING_NAMES, *VALIDATION_NAMES)


def keys_of_lists(whole):
    """Returns the keys of the lists of records in a JSON object: all splits, or else the first key of LISTS. A record,
    or any other value, has no such keys."""
    if not isinstance(whole, dict) or "messages" in whole or names_in(whole, "prompt"):
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


PROMPT_COLUMNS = {*FIELDS["prompt"], "messages"}


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
                if row.keys().isdisjoint(PROMPT_COLUMNS) and not PROMPT_COLUMNS.isdisjoint(names):
                    raise Mistake(f"{where}: the cell of the prompt is empty; fill it in, or leave the line out")
                yield check_record(row, where, notes)
            where = f"{path}, line {reader.line_num + 1}"  # the first line of the next row; a row may have several
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
    from core.settings.optional import quiet_hub, require, say_opening
    say_opening(dataset, "dataset")
    datasets = require("datasets", f"dataset={dataset}")
    quiet_hub(f"dataset={dataset}")
    repository, _, subset = dataset.removeprefix(HUB).partition(":")
    with others(f"dataset={dataset} could not be loaded", "check the name and the network, or name a file", quiet=True):
        tables = datasets.load_dataset(repository, subset or None)
    if "train" not in tables:
        raise Mistake(f"dataset={dataset} has the splits {', '.join(tables)} but none named train; name a file")
    known = [split for split in tables if is_split(split)]
    has_several = len(known) > 1
    records = []
    for name, table in tables.items():
        if name not in known:
            notes[f"the split {name} is left out, because its name is not known"] += len(table)
            continue
        # "" is no split, and takes the place of a column that is named split
        split = name if has_several else ""
        records += records_of_table(table.to_list(), f"{dataset}, {name}", notes, split)
    return in_our_splits(records, dataset, notes)


def in_our_splits(records, place, notes):
    """Renames the splits of records to train and val. If there are several validation splits, keeps only the first in
    VALIDATION_NAMES. Raises Mistake for an unknown split, or if there are no records. place: for the error"""
    records = list(records)
    if not records:
        raise Mistake(f"{place} has no records: a record per line, a list of records, or {{\"prompts\": [...]}}")
    names = {record.get("split") for record in records}
    validation = next((name for name in VALIDATION_NAMES if name in names), None)
    kept = []
    for record in records:
        name = record.get("split")
        if name in TRAINING_NAMES:
            record["split"] = "train"
        elif name in VALIDATION_NAMES:
            if name != validation:
                notes[f"the split {name} is left out, because {validation} is for validation"] += 1
                continue
            record["split"] = "val"
        elif name:
            raise Mistake(f"{record['where']}: split={shown(name)} must be {' or '.join(SPLITS)}")
        kept.append(record)
    return kept


# Answers, copies and splits

def answer_texts(answer):
    """Returns the correct texts of an answer or of a list of alternatives. For "7.0", "7" is correct, too: pandas
    writes whole numbers this way if another cell of the column is empty."""
    if isinstance(answer, (list, tuple)):
        texts = []
        for alternative in answer:
            texts += answer_texts(alternative)
        return texts
    text = str(answer)
    whole = re.fullmatch(r"(-?[0-9]+)\.0", text.strip())
    if whole:
        return [whole[1], text]
    return [text]


def with_completion(record):
    """Returns a record with a completion to learn from: its own, or else its first answer."""
    answer = record.get("answer")
    if record.get("completion") is not None or not isinstance(answer, (str, int, float, list)):
        return record
    texts = answer_texts(answer)
    if not texts:
        return record
    return record | {"completion": texts[0]}


def prompt_key(record):
    """Returns the prompt of a record as a text, equal for equal prompts."""
    return json.dumps(record["prompt"])


def unique_prompts(records):
    """Keeps one record per prompt: the last, at the position of the first. For generated problems."""
    last = {prompt_key(record): record for record in records}
    return list(last.values())


def unique_records(records, notes):
    """Copies the records, leaving out records that equal an earlier record in everything but "where"."""
    unique = {}
    for record in records:
        written = {name: value for name, value in record.items() if name != "where"}
        key = json.dumps(written, sort_keys=True, default=str)
        if key in unique:
            notes["equal to another one, and left out"] += 1
        else:
            unique[key] = record.copy()
    return list(unique.values())


def split_of(prompt):
    """Chooses the split of a prompt by its hash, 'train' or 'val': the same in every file and Python version."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    percent = int(digest[:8], 16) % 100
    return "val" if percent < VALIDATION_PERCENT else "train"


def choose_splits(records, notes):
    """Assigns a split to each record without a split: the split of a record with the same prompt, or else by a hash of
    the prompt. If no record names a split, and the hash would leave one empty, no record gets a split: all are in
    both."""
    named = {}  # {prompt: its split, by a record}
    for record in records:
        if record.get("split"):
            named[prompt_key(record)] = record["split"]
    for record in records:
        if not record.get("split"):
            record["split"] = named.get(prompt_key(record)) or split_of(record["prompt"])
    splits = {record["split"] for record in records}
    if not named and len(splits) < len(SPLITS):
        notes["in both splits, so that the run is evaluated on what it trains on: no record names a split, and the "
              'hash of the prompts put all on one side; mark some "split": "val", or write '
              '{"train": [...], "val": [...]}'] += len(records)
        for record in records:
            del record["split"]
        return
    trained_on = set(map(prompt_key, of_split(records, "train")))
    for record in of_split(records, "val"):
        if prompt_key(record) in trained_on:
            notes["the prompt is in both splits, as the records say"] += 1


def of_split(records, split):
    """Returns the records of a split. A record without a split is in both."""
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
    """Returns one line per note."""
    lines = []
    for what, count in notes.items():
        noun = "record" if count == 1 else "records"
        lines.append(f"{count} {noun}: {what}")
    return lines
