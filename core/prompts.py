"""Prompts: records from JSONL or JSON, rendered by a template, split, and drawn as problems or training examples."""

import hashlib
import json
import os

import numpy as np

from core.dataset_consumer import PROBLEMS, SPLITS, dataset_folder
from core.tokenizer import load_meta

PROMPTS = "prompts.jsonl"
FIELDS = {"prompt": ("prompt", "question", "instruction", "problem"),
          "answer": ("answer", "solution", "response", "output")}  # their names in other data sets; the first one wins
RESERVED = ("prompts", "completions", "text", "tokens", "where")  # arguments of rewards, and what we add to a record
VALIDATION_PERCENT = 10


def plain(messages):
    """The contents alone, a blank line between two messages: for a model that was trained on plain text."""
    return "\n\n".join(m["content"] for m in messages)


def chat(messages):
    """Turns with the names of their roles; the assistant's turn begins at the end."""
    return "".join(f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages) + "Assistant: "


def math(messages):
    """A chat that asks for working-out and for the answer between SOLUTION tags."""
    rules = ("Put your reasoning between <start_working_out> and <end_working_out>, "
             "then the final number between <SOLUTION> and </SOLUTION>.")
    return chat([{"role": "system", "content": rules}, *messages])


def code(messages):
    """A chat that asks for one fenced block of Python."""
    return chat([{"role": "system", "content": "Answer with one fenced block of Python code."}, *messages])


TEMPLATES = {"plain": plain, "chat": chat, "math": math, "code": code}


def render(prompt, template="plain", system_prompt=None, response_prefix=""):
    """The text that a model reads. prompt: str or a list of {"role", "content"}; response_prefix begins the answer."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return TEMPLATES[template](messages) + response_prefix


def check_record(record, where):
    """The record with its prompt and answer under these names; errors name `where` (file and line)."""
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a record must be an object with a prompt, not {type(record).__name__}")
    record = dict(record)
    for name in RESERVED:
        if name in record:
            raise ValueError(f"{where}: the field {name} is reserved; give it another name")
    for field, names in FIELDS.items():
        found = next((name for name in names if name in record), None)
        if found is not None:
            record[field] = record.pop(found)
    if "prompt" not in record:
        raise ValueError(f"{where}: no prompt; it needs one of the fields {', '.join(FIELDS['prompt'])}")
    prompt = record["prompt"]
    turns = isinstance(prompt, list) and prompt and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt)
    if not (isinstance(prompt, str) and prompt) and not turns:
        raise ValueError(f"{where}: prompt must be a text, or a list of {{\"role\", \"content\"}} messages")
    if record.get("split") not in (None, *SPLITS):
        raise ValueError(f"{where}: split={record['split']!r} must be {' or '.join(SPLITS)}")
    if isinstance(record.get("answer"), (int, float)):
        record["answer"] = str(record["answer"])
    return record | {"where": where}


def read_records(path):
    """The records of a JSONL file, or of a JSON file {"prompts": [...]} or [...]; errors name the file and the line."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist")
    with open(path, "rb") as f:
        raw = f.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {number}: not UTF-8 text") from None
    try:
        whole = json.loads(text)
        whole = whole.get("prompts", [whole]) if isinstance(whole, dict) else whole
        if not isinstance(whole, list):
            raise ValueError(f"{path} must be a record per line, a list of records, or {{\"prompts\": [...]}}")
        places = [f"{path}, record {i}" for i in range(1, len(whole) + 1)]
    except json.JSONDecodeError:
        whole, places = [], []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                places.append(f"{path}, line {number}")
                try:
                    whole.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise ValueError(f"{places[-1]}: not JSON ({error.msg})") from None
    if not whole:
        raise ValueError(f"{path} has no records")
    return [check_record(record, where) for record, where in zip(whole, places, strict=True)]


def as_columns(records):
    """(rendered prompts, {field: values}) of records of PromptConsumer: the arguments of rewards."""
    fields = {field for record in records for field in record} - {"prompt", "text", "tokens", "where", "split"}
    return [r["text"] for r in records], {field: [r.get(field) for r in records] for field in fields}


def side(prompt):
    """The split of a prompt, 'train' or 'val': the same in every file and Python version."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    return "val" if number % 100 < VALIDATION_PERCENT else "train"


def write_prompts(folder, records, tokenizer, **facts):
    """Writes prompts.jsonl and, last, meta.json; each appears whole or not at all. Identical prompts are kept once.

    A record without a "split" gets the one that a hash of its prompt chooses.
    """
    os.makedirs(folder, exist_ok=True)
    unique = {json.dumps(record["prompt"]): {**record, "split": record.get("split") or side(record["prompt"])}
              for record in records}
    facts |= {"records": len(unique), **{f"{split}_records": sum(r["split"] == split for r in unique.values())
                                         for split in SPLITS}}
    files = {PROMPTS: "".join(json.dumps(record) + "\n" for record in unique.values()),
             "meta.json": json.dumps({"tokenizer": tokenizer.description(), **facts}, indent=1)}
    for name, content in files.items():
        path = os.path.join(folder, name)
        with open(path + ".tmp", "w") as f:
            f.write(content)
        os.replace(path + ".tmp", path)
    print(f"{folder}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))
    for split in SPLITS:
        if not facts[f"{split}_records"]:
            print(f'no {split} records: give more, or mark one with "split": "{split}"')


def has_prompts(dataset):
    """Whether a dataset consists of prompts, not of running text."""
    return os.path.exists(os.path.join(dataset_folder(dataset), PROMPTS))


class PromptConsumer:
    """Prompts as problems to complete, or records as supervised training examples.

    problems(split, step, micro) is {"input": (B, T) prompts padded on the left, "padding": (B,), "number": (B,),
    "record": (B,) objects}; batch(split, step, micro) is {"input", "target", "mask", "number"}, each (B, T): the whole
    text shifted by one, the mask True on its completion and stop token.
    Problem i of a step is drawn from (seed, step, its number in the step), however a step is cut into ranks and
    micro-batches, and no problem occurs twice in a step unless there are too few. Prompts longer than
    min(90th percentile of the lengths, max_prompt_length) tokens are left out and counted.
    """

    def __init__(self, dataset, batch_size, seed=1337, rank=0, world=1, max_prompt_length=512, template="plain",
                 system_prompt=None, response_prefix="", block_size=None):
        self.folder = dataset_folder(dataset)
        self.meta, self.tokenizer = load_meta(self.folder)
        if self.tokenizer.stop_token_id is None:
            raise ValueError(f"{self.folder}/meta.json has no stop_token_id: prepare it as a dataset of prompts, "
                             "for example with data/custom/prepare.py --input=FILE")
        self.block_size, self.batch_size, self.seed, self.rank, self.world = block_size, batch_size, seed, rank, world
        records = read_records(os.path.join(self.folder, PROMPTS))
        for record in records:
            record["text"] = render(record["prompt"], template, system_prompt)
            record["tokens"] = self.tokenizer.encode(record["text"] + response_prefix)
        lengths = np.array([len(record["tokens"]) for record in records])
        if not lengths.all():
            raise ValueError(f"{self.folder}/{PROMPTS}: record {int(lengths.argmin()) + 1} has no usable characters in "
                             "its prompt")
        longest = min(int(np.percentile(lengths, 90, method="higher")), max_prompt_length)
        self.dropped = int((lengths > longest).sum())
        self.records = {split: [r for r in records if len(r["tokens"]) <= longest
                                and (r.get("split") or side(r["prompt"])) == split] for split in SPLITS}
        for split in SPLITS:
            if not self.records[split]:
                raise ValueError(f"{self.folder}/{PROMPTS}: no {split} prompts of at most {longest} tokens; give more "
                                 "records, or set \"split\" in them")
        if block_size and longest >= block_size:
            raise ValueError(f"prompts of up to {longest} tokens leave no room for a completion in block_size="
                             f"{block_size}: raise block_size or lower max_prompt_length")
        self.longest = max(len(r["tokens"]) for split in SPLITS for r in self.records[split])
        self.order = (None, None)

    def require(self, field, why):
        """Raises ValueError, naming file and line, unless every record has the field."""
        for record in (r for split in SPLITS for r in self.records[split]):
            if field not in record:
                names = FIELDS.get(field, (field,))
                raise ValueError(f"{record['where']}: no {field}, which {why} needs; give it as {' or '.join(names)}")

    def size(self):
        """The numbers of prompts, in words."""
        cut = ""
        if self.block_size:
            cut = sum(len(r["tokens"]) + len(self.tokenizer.encode(str(r.get("completion", "")))) > self.block_size
                      for split in SPLITS for r in self.records[split])
            cut = f"; {cut} training examples are cut at block_size={self.block_size}" if cut else ""
        return (f"{len(self.records['train'])} training and {len(self.records['val'])} validation prompts of at most "
                f"{self.longest} tokens, {self.dropped} longer ones dropped{cut}")

    def _drawn(self, split, step, micro):
        """(numbers, records) of this rank's share of a micro-batch."""
        if self.order[0] != (split, step):
            rng = np.random.default_rng([PROBLEMS, self.seed, SPLITS.index(split), step])
            self.order = (split, step), rng.permutation(len(self.records[split]))
        first = (micro * self.world + self.rank) * self.batch_size
        numbers = np.arange(first, first + self.batch_size)
        return numbers, [self.records[split][i] for i in self.order[1][numbers % len(self.order[1])]]

    def problems(self, split, step, micro=0):
        """Prompts to complete, this rank's share of a micro-batch."""
        numbers, records = self._drawn(split, step, micro)
        return self.pack(records, numbers)

    def pack(self, records, numbers):
        """The records as a batch of problems, padded on the left."""
        input = np.full((len(records), self.longest), self.tokenizer.pad_token_id, dtype=np.int64)
        for row, record in zip(input, records, strict=True):
            row[self.longest - len(record["tokens"]) :] = record["tokens"]
        padding = np.array([self.longest - len(record["tokens"]) for record in records], dtype=np.int64)
        return {"input": input, "padding": padding, "number": np.asarray(numbers),
                "record": np.array([*records, None], dtype=object)[:-1]}

    def batch(self, split, step, micro=0):
        """Training examples: the prompt, the record's "completion" and the stop token."""
        numbers, records = self._drawn(split, step, micro)
        texts = [(r["tokens"], [*self.tokenizer.encode(str(r["completion"])), self.tokenizer.stop_token_id])
                 for r in records]
        width = max(len(prompt) + len(completion) for prompt, completion in texts) - 1
        width = min(width, self.block_size or width)                                 # the longest input of the model
        input = np.full((len(texts), width + 1), self.tokenizer.pad_token_id, dtype=np.int64)
        mask = np.zeros((len(texts), width + 1), dtype=bool)
        for i, (prompt, completion) in enumerate(texts):
            whole = (prompt + completion)[: width + 1]
            input[i, : len(whole)], mask[i, len(prompt) : len(whole)] = whole, True
        target, mask = input[:, 1:], mask[:, 1:]
        return {"input": input[:, :-1], "target": np.where(mask, target, 0), "mask": mask, "number": numbers}
