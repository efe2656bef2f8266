"""Prompts: records rendered by a template, and drawn as problems or training examples."""

import os

import numpy as np

from core.dataset_consumer import PROBLEMS, SPLITS, dataset_folder
from core.files.records import (
    FIELDS,
    PROMPTS,
    RAW,
    is_file_of_records,
    load_records,
    read_records,
    side,
    unique_prompts,
)
from core.tokenizer import load_meta, read_meta


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
CHARACTERS = 100                         # of a token, at most, on average over a prompt
MODEL = "model"                          # the template that comes with a Hugging Face model


def as_messages(prompt, system_prompt=None):
    """A prompt, a text or messages already, as a list of {"role", "content"}."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": system_prompt}, *messages] if system_prompt else messages


def render(prompt, template="plain", system_prompt=None, response_prefix=""):
    """The text that a model reads. prompt: str or a list of {"role", "content"}; response_prefix begins the answer."""
    return TEMPLATES[template](as_messages(prompt, system_prompt)) + response_prefix


def as_columns(records):
    """(rendered prompts, {field: values}) of records of PromptConsumer: the arguments of rewards. If an answer was a
    number, the field RAW has all answers as they were."""
    fields = {field for record in records for field in record} - {"text", "tokens", "where", "split"}
    columns = {field: [r.get(field) for r in records] for field in fields}
    if RAW in columns:
        columns[RAW] = [r.get(RAW, r.get("answer")) for r in records]
    return [r["text"] for r in records], columns


class PromptConsumer:
    """Prompts as problems to complete, or records as supervised training examples.

    problems(split, step, micro) is {"input": (B, T) prompts padded on the left, "padding": (B,), "number": (B,),
    "record": (B,) objects}; batch(split, step, micro) is {"input", "target", "mask", "number"}, each (B, T): the whole
    text shifted by one, the mask True on its completion and stop token.
    Problem i of a step is drawn from (seed, step, its number in the step), however a step is cut into ranks and
    micro-batches, and no problem occurs twice in a step unless there are too few. Training prompts of more than
    max_prompt_length tokens are left out and counted.
    dataset: a prepared folder, a file of records, or hf:owner/name (core/files/records.py)
    tokenizer: that of the model; None: the one that meta.json of the folder describes
    template: a name of TEMPLATES, or model; chat_template_kwargs: arguments of the model's own template
    """

    def __init__(self, dataset, batch_size, seed=1337, rank=0, world=1, max_prompt_length=512, template="plain",
                 system_prompt=None, response_prefix="", block_size=None, tokenizer=None, chat_template_kwargs=None):
        self._open(dataset, tokenizer)
        if template == MODEL and not hasattr(self.tokenizer, "render_chat"):
            raise ValueError("template='model' is the chat template of a Hugging Face model, which this model is not; "
                             f"use one of {', '.join(TEMPLATES)}")
        if template != MODEL and chat_template_kwargs:
            raise ValueError(f"chat_template_kwargs={chat_template_kwargs} are arguments of the model's chat template, "
                             f"which template={template!r} does not use; set template='model' or leave them out")
        self.template = template
        self.block_size, self.batch_size, self.seed, self.rank, self.world = block_size, batch_size, seed, rank, world
        self.response_prefix = response_prefix
        most = CHARACTERS * max_prompt_length  # of a longer text only the beginning is read: it is too long in any case
        if system_prompt is not None and len(system_prompt) > most:
            raise ValueError(f"system_prompt has {len(system_prompt)} characters, more than fit into max_prompt_length="
                             f"{max_prompt_length} tokens; shorten it")
        records = read_records(self.source) if self.prepared else load_records(dataset)
        kept = records if self.prepared else unique_prompts(records)
        self.repeated = len(records) - len(kept)
        for record in kept:
            messages = as_messages(record["prompt"], system_prompt)
            if sum(message["role"] == "system" for message in messages) > 1 and system_prompt:
                raise ValueError(f"{record['where']}: the prompt has a system message, and system_prompt would be a "
                                 "second one; leave system_prompt out, or remove the message")
            if template == MODEL:  # it has the start token in its text
                record["text"] = self.tokenizer.render_chat(messages, **(chat_template_kwargs or {}))[:most]
                record["tokens"] = self.tokenizer.encode(record["text"] + response_prefix)
            else:
                record["text"] = TEMPLATES[template](messages)[:most]
                record["tokens"] = self.tokenizer.encode_prompt(record["text"] + response_prefix)
        self._sort(kept, max_prompt_length)

    def _open(self, dataset, tokenizer):
        """Finds the file of records and, if none is given, the tokenizer."""
        self.prepared = not is_file_of_records(dataset)
        self.folder = dataset_folder(dataset) if self.prepared else dataset
        self.source = os.path.join(self.folder, PROMPTS) if self.prepared else dataset
        self.tokenizer = tokenizer
        if self.prepared and tokenizer is None:
            self.tokenizer = load_meta(self.folder)[1]
        elif self.prepared:
            read_meta(self.folder)  # it was prepared; its text serves every tokenizer
        elif tokenizer is None:
            raise ValueError(f"dataset={dataset} has prompts but no tokenizer, which a model brings with it; to train "
                             "a new model: data/custom/prepare.py --input=FILE --tokenizer=NAME --out=FOLDER")
        if self.tokenizer.stop_token_id is None and tokenizer is None:
            raise ValueError(f"{self.folder}/meta.json has no stop_token_id: prepare it as a dataset of prompts, "
                             "for example with data/custom/prepare.py --input=FILE")
        if self.tokenizer.stop_token_id is None and self.tokenizer.mask_token_id is not None:
            raise ValueError(f"dataset={dataset} has prompts, which a causal model completes, but this model fills in "
                             "text: use a causal model, or running text (data/char_diffusion/prepare.py --tokenizer="
                             "MODEL --input=FILE --out=FOLDER)")
        if self.tokenizer.stop_token_id is None:
            raise ValueError(f"dataset={dataset} has prompts, but the model's tokenizer has no token that ends a "
                             "completion: use a causal model, with its eos_token_id in generation_config.json")

    def _sort(self, records, limit):
        """Sorts the records into splits, without the training prompts of more than `limit` tokens. Such a validation
        prompt is an error: figures over the short prompts alone would pass for figures over all."""
        self.records = {split: [] for split in SPLITS}
        for record in records:
            if not record["tokens"]:
                raise ValueError(f"{record['where']}: no usable characters in the prompt")
            split = record.get("split") or side(record["prompt"])
            self.records[split].append(record)
        for split in SPLITS:
            if not self.records[split]:
                raise ValueError(f"{self.source}: none of its {len(records)} prompts is in the split {split}; give "
                                 "more records (a hash puts a tenth into val), or set "
                                 f"\"split\": \"{split}\" in some")
        self._check_validation(limit)
        short = [record for record in self.records["train"] if len(record["tokens"]) <= limit]
        self.dropped, self.limit = len(self.records["train"]) - len(short), limit
        self.records["train"] = short
        if not short:
            raise ValueError(f"{self.source}: all training prompts are longer than max_prompt_length={limit}; "
                             "raise it")
        self.longest = max(len(r["tokens"]) for split in SPLITS for r in self.records[split])
        if self.block_size and self.longest >= self.block_size:
            raise ValueError(f"prompts of up to {self.longest} tokens leave no room for a completion in block_size="
                             f"{self.block_size}: raise block_size or lower max_prompt_length")
        self.order = (None, None)

    def _check_validation(self, limit):
        """Raises ValueError, naming file and line, for validation prompts of more than `limit` tokens."""
        too_long = [record for record in self.records["val"] if len(record["tokens"]) > limit]
        if too_long:
            lengths = [len(record["tokens"]) for record in too_long]
            raise ValueError(f"{too_long[0]['where']}: a validation prompt of {lengths[0]} tokens is longer than "
                             f"max_prompt_length={limit}; set max_prompt_length={max(lengths)} or more to keep all, or "
                             f"remove the {len(too_long)} validation records that are longer")

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
        dropped = f", {self.dropped} longer than max_prompt_length={self.limit} left out" if self.dropped else ""
        repeated = f", {self.repeated} repeated ones left out" if self.repeated else ""
        return (f"{len(self.records['train'])} training and {len(self.records['val'])} validation prompts of at most "
                f"{self.longest} tokens{dropped}{repeated}{cut}")

    def describe_prompts(self):
        """Lines for the start of a run: how the first prompt ends as the model reads it, and what ends a completion."""
        text = self.records["train"][0]["text"] + self.response_prefix
        ends = [f"{i} {name!r}" for i, name in zip(self.tokenizer.stop_token_ids, self.tokenizer.stop_token_names,
                                                   strict=True)]
        lines = [f"the first prompt ends in {text[-80:]!r}", f"a completion ends with token {' or '.join(ends)}"]
        if self.template != MODEL and getattr(self.tokenizer, "has_chat_template", False):
            lines.append(f"the tokenizer has a chat template, which template={self.template!r} does not use")
        return lines

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
