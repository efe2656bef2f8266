"""Prompts: records rendered by a template, and drawn as problems or training examples."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Self

import numpy as np

from core.data import OF_CONSUMER, PROBLEMS, SPLITS, dataset_folder, is_file_of_records, load_meta
from core.errors import Mistake
from core.records import in_words, load_records, splits_of, unique_records, with_completion
from core.settings.setting import Settings
from core.tokenizer import Tokenizer

Messages = list[dict[str, str]]       # {"role", "content"} each
Prompt = str | Messages
Batch = dict[str, np.ndarray]


def plain(messages: Messages) -> str:
    """The contents alone, a blank line between two messages: for a model that was trained on plain text."""
    return "\n\n".join(m["content"] for m in messages)


def chat(messages: Messages, rules: str = "") -> str:
    """Turns with the names of their roles. At the end the assistant's begins, or goes on if the last message is its.
    rules: a first system message"""
    if rules:
        messages = [{"role": "system", "content": rules}, *messages]
    turns = [f"{m['role'].capitalize()}: {m['content']}" for m in messages]
    if messages[-1]["role"] != "assistant":
        turns.append("Assistant: ")
    return "\n\n".join(turns)


MATH = ("Put your reasoning between <start_working_out> and <end_working_out>, "
        "then the final number between <SOLUTION> and </SOLUTION>.")
CODE = "Answer with one fenced block of Python code."
TEMPLATES = {"plain": plain, "chat": chat, "math": partial(chat, rules=MATH), "code": partial(chat, rules=CODE)}
OF_MODEL = {"model": "", "model_math": MATH, "model_code": CODE}  # the chat template of a tokenizer, with these rules
MOST_NAMES = 8      # special tokens that are named
SHORT = 300         # characters of the first prompt that the start of a run prints


def as_messages(prompt: Prompt, system_prompt: str | None = None, prompt_format: str | None = None) -> Messages:
    """A prompt, a text or messages, as a list of {"role", "content"}; prompt_format is for the last message, or for
    the one before it that is not the assistant's."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if prompt_format:
        last = -1 if len(messages) == 1 or messages[-1]["role"] != "assistant" else -2
        messages[last] = {**messages[last], "content": prompt_format.replace("{prompt}", messages[last]["content"])}
    return [{"role": "system", "content": system_prompt}, *messages] if system_prompt else messages


def with_rules(messages: Messages, rules: str, role: str) -> Messages:
    """The messages, of which the first one of the role begins with the rules of a task, in a message of its own if
    there is none before the assistant's."""
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            break
        if message["role"] == role:
            begun = {**message, "content": f"{rules}\n\n{message['content']}"}
            return [*messages[:i], begun, *messages[i + 1 :]]
    return [{"role": role, "content": rules}, *messages]


def prefill(prompt: Prompt) -> str:
    """The beginning of the answer that a prompt has: the text of an assistant's message at its end, else ""."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return ""
    return prompt[-1]["content"]


@dataclass(frozen=True)
class PromptFormat:
    """Renders a prompt as the text that a model reads."""

    template: str = "plain"                    # a name of TEMPLATES or of OF_MODEL
    system_prompt: str | None = None           # a first message
    response_prefix: str = ""                  # the beginning of every answer
    max_prompt_length: int | float = 512       # tokens, or a share: longer training prompts are left out
    chat_template_kwargs: dict | None = None   # arguments of the model's own template
    prompt_format: str | None = None           # the text around the prompt, or around its last message

    @classmethod
    def of(cls, config: Settings) -> Self:
        """The format that the settings of these names describe; one that is None has the default."""
        settings = {f.name: getattr(config, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in settings.items() if value is not None})

    def encode(self, prompt: Prompt, tokenizer: Tokenizer, notes: Counter | None = None) -> tuple[str, list[int]]:
        """(text, token ids) of a prompt, a text or messages. The ids include the beginning of the answer, by prefill
        and response_prefix, the text does not. notes: as in core/records.py"""
        notes = Counter() if notes is None else notes
        text = self.render(as_messages(prompt, self.system_prompt, self.prompt_format), tokenizer)
        has_start = self.template in OF_MODEL  # the start token, which encode_prompt adds
        encode = tokenizer.encode if has_start else tokenizer.encode_prompt
        ids = encode(text + self.response_prefix)
        start = list(tokenizer.start_ids)
        if start and ids[: 2 * len(start)] == start + start:
            ids = ids[len(start) :]
            notes["the prompt begins with the start token itself: it is read once"] += 1
        begun = prefill(prompt)
        return text.removesuffix(begun if text.endswith(begun) else begun.strip()), ids

    def render(self, messages: Messages, tokenizer: Tokenizer) -> str:
        """The text of messages up to where the next answer begins or, behind an assistant's message, goes on."""
        if self.template in TEMPLATES:
            return TEMPLATES[self.template](messages)
        if not hasattr(tokenizer, "render_chat"):
            raise Mistake(f"template={self.template!r} is for Hugging Face models; use one of {', '.join(TEMPLATES)}")
        if rules := OF_MODEL[self.template]:
            messages = with_rules(messages, rules, "system" if tokenizer.shows_system else "user")
        return tokenizer.render_chat(messages, **(self.chat_template_kwargs or {}))

    def behind(self, messages: Messages, tokenizer: Tokenizer) -> str:
        """The text of messages that follow a turn of the model: from the end of it to the beginning of the next."""
        turn = "what the model wrote"
        before = [*as_messages("?", self.system_prompt), {"role": "assistant", "content": turn}]
        _, found, text = self.render([*before, *messages], tokenizer).partition(turn)
        if not found:
            raise Mistake(f"template={self.template!r} does not show the turns of a chat; use template='plain'")
        return text


def as_columns(records: Collection[dict]) -> tuple[list[str], dict[str, list]]:
    """(rendered prompts, {field: values}) of records of PromptConsumer: the arguments of rewards."""
    fields = {field for record in records for field in record} - OF_CONSUMER
    return [r["text"] for r in records], {field: [r.get(field) for r in records] for field in fields}


def as_problems(records: list[dict], numbers: np.ndarray, T: int, tokenizer: Tokenizer) -> Batch:
    """A batch of problems from B records with at most T "tokens" each, padded on the left."""
    padding = T - np.array([len(record["tokens"]) for record in records])            # (B,)
    input = np.full((len(records), T), tokenizer.pad_token_id)                       # (B, T)
    for row, start, record in zip(input, padding, records, strict=True):
        row[start:] = record["tokens"]
    records = np.array(records, dtype=object)
    return {"input": input, "padding": padding, "number": np.asarray(numbers), "record": records}


def percentile(lengths: Collection[int], share: float) -> int:
    """The smallest of the lengths that at least this share of them do not exceed."""
    for count, length in enumerate(sorted(lengths), 1):
        if count / len(lengths) >= share:
            return length


class PromptConsumer:
    """Prompts as problems to complete, or records as supervised training examples.

    problems(split, step, micro) is {"input": (B, T) prompts padded on the left, "padding": (B,), "number": (B,),
    "record": (B,) objects}; batch(split, step, micro) is {"input", "target", "mask", "number"}, each (B, T): the whole
    text shifted by one, the mask True on its completion and stop token.
    Problem i of a step is drawn from (seed, step, its number in the step), however a step is cut into ranks and
    micro-batches, and no problem occurs twice in a step unless there are too few.
    dataset: a prepared folder, a file of records, or hf:owner/name (core/records.py)
    tokenizer: that of the model; None: the one that meta.json of the folder describes
    format: a PromptFormat; block_size: the longest input of a supervised model
    masked: whether `batch` is for a model that fills in masks
    """

    has_prompts = True

    def __init__(self, dataset: str, batch_size: int, seed: int = 1337, rank: int = 0, world: int = 1,
                 tokenizer: Tokenizer | None = None, format: PromptFormat | None = None, block_size: int | None = None,
                 masked: bool = False):
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world = rank, world
        self.block_size, self.masked = block_size, masked
        # Tokens of a training example, None: all. The last one of a causal model's is a target alone
        self.room = None if block_size is None else block_size + (not masked)
        self.format = format or PromptFormat()
        self.folder, self.tokenizer = dataset, tokenizer
        if not is_file_of_records(dataset):
            self.folder = dataset_folder(dataset)
            self.tokenizer = load_meta(self.folder, tokenizer)[1]
        if self.tokenizer is None or self.tokenizer.stop_token_id is None:
            raise Mistake(f"dataset={dataset} has prompts, but there is no tokenizer with a token that ends a "
                          "completion; use data/custom/prepare.py")
        self.notes = Counter()  # {what was done with records, in words: how many}
        found = load_records(dataset, self.notes)
        records = unique_records(found)
        self.repeated = len(found) - len(records)
        splits = splits_of(records, self.notes)
        for record in records:
            self._encode(record)
        self.records = {name: [record for record, split in zip(records, splits, strict=True) if split in (name, None)]
                        for name in SPLITS}
        for split, named in self.records.items():
            if not named:
                raise Mistake(f"dataset={dataset}: none of its {len(records)} records is in the split {split}; mark "
                              f'some "split": "{split}"')
        self._leave_out_long(evaluates_on_training=None in splits)
        self.longest = max(len(record["tokens"]) for record in self._all())
        if block_size and self.longest >= block_size:
            raise Mistake(f"prompts of {self.longest} tokens leave no room in texts of {block_size} tokens; raise "
                          "block_size")

    def _all(self):
        """The records of both splits."""
        return [record for records in self.records.values() for record in records]

    def _encode(self, record):
        """Adds the text and the tokens that a model reads, and the split, to a record."""
        prompt = record["prompt"]
        roles = [] if isinstance(prompt, str) else [message["role"] for message in prompt]
        if self.format.system_prompt and "system" in roles:
            raise Mistake(f"{record['where']}: the prompt has a system message already; leave system_prompt out")
        record["text"], record["tokens"] = self.format.encode(prompt, self.tokenizer, self.notes)
        if not record["tokens"]:
            raise Mistake(f"{record['where']}: no usable characters in the prompt")

    def _leave_out_long(self, evaluates_on_training):
        """Leaves out training prompts above max_prompt_length. Such a validation prompt is an error: metrics over the
        short prompts alone would pass for metrics over all. With a share as max_prompt_length validation prompts stay,
        so that no length is an error."""
        limit, train = self.format.max_prompt_length, self.records["train"]
        is_share = limit < 1
        if is_share:
            limit = percentile([len(record["tokens"]) for record in train], limit)
        self.limit = limit
        self.records["train"] = [record for record in train if len(record["tokens"]) <= limit]
        self.dropped = len(train) - len(self.records["train"])
        if is_share:
            if evaluates_on_training and self.dropped:
                self.notes[f"longer than {limit} tokens (max_prompt_length={self.format.max_prompt_length}), so that "
                           "the run is evaluated on it but does not train on it"] += self.dropped
            return
        if not self.records["train"]:
            raise Mistake(f"all {len(train)} training prompts are above max_prompt_length={limit}; raise it")
        if evaluates_on_training:
            self.records["val"] = self.records["train"]
        for record in self.records["val"]:
            if len(record["tokens"]) > limit:
                raise Mistake(f"{record['where']}: a validation prompt is above max_prompt_length={limit}; set it "
                              f"to {len(record['tokens'])} or more, or remove the prompt")

    def require_completions(self) -> None:
        """Raises Mistake, naming file and line, unless every record has a completion, or an answer in its place."""
        for record in self._all():
            record |= with_completion(record)
            if "completion" not in record:
                raise Mistake(f"{record['where']}: no completion, which supervised training needs")

    def size(self) -> str:
        """The numbers of prompts, in words."""
        repeated = f", {self.repeated} records equal to another left out" if self.repeated else ""
        return (f"{len(self.records['train'])} training and {len(self.records['val'])} validation prompts of at most "
                f"{self.longest} tokens; training prompts of more than {self.limit} tokens "
                f"(max_prompt_length={self.format.max_prompt_length}) left out: {self.dropped}{repeated}")

    def describe_prompts(self, problems: int) -> Iterator[str]:
        """Yields lines for the start of a run: what was done with records, how often a step of so many problems
        repeats them, the end of the first prompt, and what ends a completion."""
        yield from in_words(self.notes)
        if OF_MODEL.get(self.format.template):
            begun = "system message" if self.tokenizer.shows_system else "user's, as the chat template shows no other"
            yield f"the rules of template={self.format.template!r} begin the {begun}"
        t, train = self.tokenizer, self.records["train"]
        if len(train) < problems:
            yield (f"a step takes {problems} problems, more than the {len(train)} training prompts, so that it takes "
                   "some more than once")
        text = train[0]["text"] + prefill(train[0]["prompt"]) + self.format.response_prefix
        yield f"the first prompt ends in {text[-SHORT:]!r}"
        if t.shown_tokens:
            names, more = t.shown_tokens[:MOST_NAMES], len(t.shown_tokens) - MOST_NAMES
            yield ("special tokens that stay in the texts of completions: " + ", ".join(map(repr, names))
                   + f" and {more} more" * (more > 0))
        ends = [f"{i} {name!r}" for i, name in zip(t.stop_token_ids, t.stop_token_names, strict=True)]
        yield f"a completion ends with token {' or '.join(ends)}"

    def _drawn(self, split, step, micro):
        """(records, numbers) of this rank's share of a micro-batch."""
        records = self.records[split]
        rng = np.random.default_rng([PROBLEMS, self.seed, SPLITS.index(split), step])
        order = rng.permutation(len(records))
        first = (micro * self.world + self.rank) * self.batch_size
        numbers = np.arange(first, first + self.batch_size)
        return [records[i] for i in order[numbers % len(order)]], numbers

    def problems(self, split: str, step: int, micro: int = 0) -> Batch:
        """Prompts to complete, this rank's share of a micro-batch."""
        return self.pack(*self._drawn(split, step, micro))

    def pack(self, records: list[dict], numbers: np.ndarray) -> Batch:
        """The records as a batch of problems."""
        return as_problems(records, numbers, self.longest, self.tokenizer)

    def _example(self, record):
        """Prompt, completion and stop token, as token ids."""
        completion = self.tokenizer.encode(str(record.get("completion", "")))
        return [*record["tokens"], *completion, self.tokenizer.stop_token_id]

    def masked_batch(self, split: str, step: int, micro: int) -> Batch:
        """Training examples for a masked-fill model: the prompt, the record's "completion", and stop tokens up to
        block_size. A share t of the positions after the prompt, uniform in (0, 1], is masked, and each masked token
        weighs 1 / t: the likelihood bound of arXiv 2406.07524 and 2502.09992."""
        records, numbers = self._drawn(split, step, micro)
        target = np.full((len(records), self.block_size), self.tokenizer.stop_token_id)
        weight = np.zeros(target.shape, dtype=np.float32)
        for record, number, ids, weights in zip(records, numbers, target, weight, strict=True):
            text = self._example(record)[: self.room]
            ids[: len(text)] = text
            positions = np.arange(len(record["tokens"]), self.block_size)
            rng = np.random.default_rng([PROBLEMS, self.seed, SPLITS.index(split), step, int(number)])
            chosen = rng.permutation(positions)[: rng.integers(len(positions)) + 1]
            weights[chosen] = 1 / len(chosen)
        input = np.where(weight > 0, self.tokenizer.mask_token_id, target)
        return {"input": input, "target": target, "mask": weight, "number": numbers}

    def batch(self, split: str, step: int, micro: int = 0) -> Batch:
        """Training examples: the prompt, the record's "completion" and the stop token."""
        if self.masked:
            return self.masked_batch(split, step, micro)
        records, numbers = self._drawn(split, step, micro)
        texts = [self._example(record)[: self.room] for record in records]
        ids = np.full((len(texts), max(map(len, texts))), self.tokenizer.pad_token_id)
        mask = np.zeros(ids.shape, dtype=bool)
        for i, (record, text) in enumerate(zip(records, texts, strict=True)):
            ids[i, : len(text)] = text
            mask[i, len(record["tokens"]) : len(text)] = True
        mask = mask[:, 1:]
        target = np.where(mask, ids[:, 1:], 0)
        return {"input": ids[:, :-1], "target": target, "mask": mask, "number": numbers}
