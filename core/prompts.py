"""Prompts: records rendered by a template, and drawn as problems or training examples."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from core.data import (
    NOT_FOR_REWARDS, SPLITS, dataset_folder, is_file_of_records, load_meta, numbers_of_rank, rng_of)
from core.errors import Mistake, one_line
from core.records import choose_splits, in_words, load_records, of_split, unique_records, with_completion
from core.settings.setting import Settings
from core.tokenizer import Tokenizer

Messages = list[dict[str, str]]       # {"role", "content"} each
Prompt = str | Messages
Batch = dict[str, np.ndarray]

MATH = ("Put your reasoning between <start_working_out> and <end_working_out>, "
        "then the final number between <SOLUTION> and </SOLUTION>.")
CODE = "Answer with one fenced block of Python code."
TEMPLATES = {"plain": "", "chat": "", "math": MATH, "code": CODE}  # {name: rules}
MODEL_TEMPLATES = {"model": "", "model_math": MATH, "model_code": CODE}  # the tokenizer's chat template, with rules
MOST_SHOWN = 300  # characters of the first prompt that the start of a run shows


# Templates

def plain(messages: Messages) -> str:
    """Joins the contents, with a blank line between messages: for a model that was trained on plain text."""
    return "\n\n".join(message["content"] for message in messages)


def chat(messages: Messages, rules: str = "") -> str:
    """Renders turns with the names of their roles, up to the beginning of the assistant's next turn. If the last
    message is the assistant's, the model continues it. rules: a first system message"""
    turns = []
    if rules:
        turns.append(f"System: {rules}")
    for message in messages:
        role = message["role"].capitalize()
        turns.append(f"{role}: {message['content']}")
    if messages[-1]["role"] != "assistant":
        turns.append("Assistant: ")
    return "\n\n".join(turns)


def with_rules(messages: Messages, rules: str, role: str) -> Messages:
    """Adds the rules of a task to the first message of the role, if it precedes the assistant's; otherwise puts them in
    their own message at the start."""
    messages = list(messages)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            break
        if message["role"] == role:
            content = f"{rules}\n\n{message['content']}"
            messages[i] = message | {"content": content}
            return messages
    return [{"role": role, "content": rules}, *messages]


def as_messages(prompt: Prompt, system_prompt: str | None = None, prompt_format: str | None = None) -> Messages:
    """Converts a prompt to a list of messages, with a system message if there is a system_prompt. prompt_format changes
    the last message, or the message before an answer that the prompt begins."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = list(prompt)
    if prompt_format:
        begins_answer = len(messages) > 1 and messages[-1]["role"] == "assistant"
        index = -2 if begins_answer else -1
        message = messages[index]
        content = prompt_format.replace("{prompt}", message["content"])
        messages[index] = message | {"content": content}
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def prefill(prompt: Prompt) -> str:
    """Returns the beginning of the answer if a prompt ends with an assistant message, else ""."""
    match prompt:
        case [*_, {"role": "assistant", "content": begun}]:
            return begun
    return ""


@dataclass(frozen=True)
class PromptFormat:
    """Renders a prompt as the text that a model reads."""

    template: str = "plain"                    # a name of TEMPLATES or of MODEL_TEMPLATES
    system_prompt: str | None = None           # a first message
    response_prefix: str = ""                  # the beginning of every answer
    max_prompt_length: int | float = 512       # tokens, or a share: longer training prompts are left out
    chat_template_kwargs: dict | None = None   # arguments of the model's own template
    prompt_format: str | None = None           # the text around the prompt, or around its last message

    @classmethod
    def of(cls, config: Settings) -> Self:
        """Builds the format from the settings of the same names. Settings that are None or missing keep their
        defaults."""
        settings = {}
        for f in fields(cls):
            value = getattr(config, f.name, None)
            if value is not None:
                settings[f.name] = value
        return cls(**settings)

    def encode(self, prompt: Prompt, tokenizer: Tokenizer, notes: Counter | None = None) -> tuple[str, list[int]]:
        """Returns (text, token ids) of a prompt. The beginning of the answer (prefill and response_prefix) is in the
        ids but not in the text. notes: as in core/records.py"""
        messages = as_messages(prompt, self.system_prompt, self.prompt_format)
        text = self.render(messages, tokenizer)
        input = text + self.response_prefix
        if self.template in MODEL_TEMPLATES:  # a chat template writes the start token itself
            ids = tokenizer.encode(input)
        else:
            ids = tokenizer.encode_prompt(input)
        start = list(tokenizer.start_ids)
        if start and ids[: 2 * len(start)] == start + start:
            ids = ids[len(start) :]
            if notes is not None:
                notes["the prompt begins with the start token itself: it is read once"] += 1
        begun = prefill(prompt)
        if not text.endswith(begun):  # some chat templates strip it
            begun = begun.strip()
        return text.removesuffix(begun), ids

    def render(self, messages: Messages, tokenizer: Tokenizer) -> str:
        """Renders messages up to the beginning of the next answer, or up to the end of an assistant message that is
        continued."""
        if self.template == "plain":
            return plain(messages)
        if self.template in TEMPLATES:
            return chat(messages, TEMPLATES[self.template])
        if not hasattr(tokenizer, "render_chat"):
            raise Mistake(f"template={self.template!r} is for Hugging Face models; use one of {', '.join(TEMPLATES)}")
        rules = MODEL_TEMPLATES[self.template]
        if rules:
            role = "system" if tokenizer.shows_system else "user"
            messages = with_rules(messages, rules, role)
        settings = self.chat_template_kwargs or {}
        return tokenizer.render_chat(messages, **settings)

    def after_turn(self, messages: Messages, tokenizer: Tokenizer) -> str:
        """Renders messages that follow a turn of the model, from the end of this turn to the beginning of the next.

        Only the template knows the text between two turns. A chat is therefore rendered with a mark as the model's
        turn, and cut at the mark.
        """
        mark = "what the model wrote"
        turn = {"role": "assistant", "content": mark}
        before = as_messages("?", self.system_prompt)
        text = self.render([*before, turn, *messages], tokenizer)
        _, found, text = text.partition(mark)
        if not found:
            raise Mistake(f"template={self.template!r} does not show the turns of a chat; use template='plain'")
        return text


# Prompts as problems and as training examples

def as_columns(records: Collection[dict]) -> tuple[list[str], dict[str, list]]:
    """Returns the arguments of rewards for records of PromptConsumer: (rendered prompts, {field: values})."""
    prompts = [record["text"] for record in records]
    columns = {}
    for field in set().union(*records) - NOT_FOR_REWARDS:
        columns[field] = [record.get(field) for record in records]
    return prompts, columns


def percentile(lengths: Collection[int], share: float) -> int:
    """Returns the smallest length such that at least this share of the lengths are not longer."""
    for count, length in enumerate(sorted(lengths), 1):
        if count / len(lengths) >= share:
            return length


@dataclass(eq=False)
class PromptConsumer:
    """Prompts as problems to complete, or records as supervised training examples.

    problems(split, step, micro) is {"input": (B, T) prompts padded on the left, "padding": (B,), "number": (B,),
    "record": (B,) objects}; batch(split, step, micro) is {"input", "target", "mask", "number"}, each (B, T): the whole
    text shifted by one, the mask True on its completion and stop token.
    Problem i of a step is drawn from (seed, step, its number in the step), for any number of ranks and micro-batches,
    and no problem occurs twice in a step unless there are too few.
    """

    dataset: str | list                  # a folder, a file, hf:owner/name, or a list of records (core/records.py)
    batch_size: int
    seed: int = 1337
    rank: int = 0
    world: int = 1
    tokenizer: Tokenizer | None = None   # the model's; None: from the folder's meta.json
    format: PromptFormat = PromptFormat()
    block_size: int | None = None        # the longest input of a supervised model
    masked: bool = False                 # `batch` is for a model that fills in masks

    has_prompts = True

    def __post_init__(self):
        self.most_tokens = self.block_size  # of an example
        if self.block_size and not self.masked:
            self.most_tokens += 1  # a causal model does not read the last token of an example, which is only a target
        self.folder = self.dataset
        named = f"dataset={self.dataset}" if isinstance(self.dataset, str) else "dataset"
        if isinstance(self.dataset, str) and not is_file_of_records(self.dataset):
            self.folder = dataset_folder(self.dataset)
            _, self.tokenizer = load_meta(self.folder, self.tokenizer)
        if self.tokenizer is None or self.tokenizer.stop_token_id is None:
            raise Mistake(f"{named} has prompts, but there is no tokenizer with a token that ends a "
                          "completion; use data/custom/prepare.py, or set tokenizer.eos_token")
        self.notes = Counter()  # {a change of records, in words: number of records}
        records = unique_records(load_records(self.dataset, self.notes), self.notes)
        choose_splits(records, self.notes)
        for record in records:
            self._encode(record)
        self.records = {}
        for split in SPLITS:
            self.records[split] = of_split(records, split)
            if not self.records[split]:
                raise Mistake(f"{named}: none of its {len(records)} records is in the split {split}; mark some "
                              f'"split": "{split}"')
        self._leave_out_long(evaluates_on_training="split" not in records[0])
        self.longest = max(len(record["tokens"]) for record in self._all())
        if self.block_size and self.longest >= self.block_size:
            raise Mistake(f"prompts of {self.longest} tokens leave no room in texts of {self.block_size} tokens; raise "
                          "block_size")

    def _all(self):
        """The records of both splits."""
        return [*self.records["train"], *self.records["val"]]

    def _encode(self, record):
        """Adds the text and the tokens that a model reads to a record."""
        prompt = record["prompt"]
        roles = [message["role"] for message in as_messages(prompt)]
        if self.format.system_prompt and "system" in roles:
            raise Mistake(f"{record['where']}: the prompt has a system message already; leave system_prompt out")
        record["text"], record["tokens"] = self.format.encode(prompt, self.tokenizer, self.notes)
        if not record["tokens"]:
            raise Mistake(f"{record['where']}: no usable characters in the prompt")

    def _leave_out_long(self, evaluates_on_training):
        """Leaves out training prompts above max_prompt_length.

        A validation prompt above a limit in tokens is an error: metrics over only the short prompts would pass for
        metrics over all. If the limit is a share, validation prompts of any length stay.
        """
        train = self.records["train"]
        most = self.format.max_prompt_length
        is_share = most < 1
        if is_share:
            lengths = [len(record["tokens"]) for record in train]
            self.limit = percentile(lengths, most)
        else:
            self.limit = most
        kept = [record for record in train if len(record["tokens"]) <= self.limit]
        if not kept:
            raise Mistake(f"all {len(train)} training prompts are above max_prompt_length={most}; raise it")
        self.records["train"] = kept
        self.dropped = len(train) - len(kept)
        if is_share:
            if evaluates_on_training and self.dropped:
                self.notes[f"longer than {self.limit} tokens (max_prompt_length={most}), so that the run is evaluated "
                           "on it but does not train on it"] += self.dropped
            return
        if evaluates_on_training:
            self.records["val"] = kept
        for record in self.records["val"]:
            if len(record["tokens"]) > self.limit:
                raise Mistake(f"{record['where']}: a validation prompt is above max_prompt_length={most}; set it to "
                              f"{len(record['tokens'])} or more, or remove the prompt")

    def require_completions(self) -> None:
        """Raises Mistake, naming file and line, for a record without a completion, or an answer in its place."""
        for record in self._all():
            record |= with_completion(record)
            if "completion" not in record:
                raise Mistake(f"{record['where']}: no completion, which supervised training needs")

    def size(self) -> str:
        """Describes the numbers of prompts, for the start of a run."""
        train = len(self.records["train"])
        val = len(self.records["val"])
        described = f"{train} training and {val} validation prompts of at most {self.longest} tokens"
        if self.dropped:
            described += (f"; left out: {self.dropped} training prompts of more than {self.limit} tokens "
                          f"(max_prompt_length={self.format.max_prompt_length})")
        return described

    def describe_prompts(self, problems: int) -> Iterator[str]:
        """Yields lines for the start of a run: the notes on records, repetitions of prompts in a step, the end of the
        first prompt, and the tokens that end a completion. problems: number of problems in a step"""
        yield from in_words(self.notes)
        tokenizer = self.tokenizer
        if MODEL_TEMPLATES.get(self.format.template):
            message = "system message" if tokenizer.shows_system else "user's, as the chat template shows no other"
            yield f"the rules of template={self.format.template!r} begin the {message}"
        train = self.records["train"]
        if len(train) < problems:
            yield f"a step needs {problems} problems but there are only {len(train)} training prompts, so some repeat"
        first = train[0]
        text = first["text"] + prefill(first["prompt"]) + self.format.response_prefix
        ends = "ends in" if len(text) > MOST_SHOWN else "is"
        yield f"the first prompt {ends} {text[-MOST_SHOWN:]!r}"
        if tokenizer.shown_tokens:
            names = one_line(", ".join(map(repr, tokenizer.shown_tokens)))
            count = len(tokenizer.shown_tokens)
            yield f"special tokens ({count}) that stay in the texts of completions: {names}"
        stops = []
        for number, name in zip(tokenizer.stop_token_ids, tokenizer.stop_token_names, strict=True):
            stops.append(f"{number} {name!r}")
        yield f"a completion ends with token {' or '.join(stops)}"

    def _drawn(self, split, step, micro):
        """Draws this rank's share of a micro-batch. Returns (records, numbers)."""
        numbers = numbers_of_rank(self, split, micro)
        records = self.records[split]
        rng = rng_of(self.seed, split, step)
        order = rng.permutation(len(records))
        drawn = order[numbers % len(order)]  # a step with more problems than records takes some again
        return [records[i] for i in drawn], numbers

    def problems(self, split: str, step: int, micro: int = 0) -> Batch:
        """Draws this rank's share of a micro-batch, as prompts to complete."""
        records, numbers = self._drawn(split, step, micro)
        return self.pack(records, numbers)

    def pack(self, records: list[dict], numbers: np.ndarray) -> Batch:
        """Packs records into a batch of problems, padded on the left."""
        shape = len(records), self.longest
        lengths = [len(record["tokens"]) for record in records]
        padding = self.longest - np.array(lengths)                                   # (B,)
        input = np.full(shape, self.tokenizer.pad_token_id)                          # (B, T)
        for row, start, record in zip(input, padding, records, strict=True):
            row[start:] = record["tokens"]
        records = np.array(records, dtype=object)
        return {"input": input, "padding": padding, "number": np.asarray(numbers), "record": records}

    def _example(self, record):
        """Encodes prompt, completion and stop token, cut to the block size of the model."""
        completion = str(record.get("completion", ""))
        ids = [*record["tokens"], *self.tokenizer.encode(completion), self.tokenizer.stop_token_id]
        return ids[: self.most_tokens]

    def _masked_batch(self, split, step, micro):
        """Draws training examples for a masked-fill model: the prompt, the record's "completion", and stop tokens up to
        block_size. A share t of the positions after the prompt, uniform in (0, 1], is masked, and each masked token
        weighs 1 / t: the likelihood bound of arXiv 2406.07524 and 2502.09992."""
        records, numbers = self._drawn(split, step, micro)
        shape = len(records), self.block_size
        target = np.full(shape, self.tokenizer.stop_token_id)                        # (B, T)
        weight = np.zeros(shape, dtype=np.float32)                                   # (B, T)
        for i, record in enumerate(records):
            text = self._example(record)
            target[i, : len(text)] = text
            rng = rng_of(self.seed, split, step, int(numbers[i]))
            positions = np.arange(len(record["tokens"]), self.block_size)
            order = rng.permutation(positions)
            count = rng.integers(len(order)) + 1
            weight[i, order[:count]] = 1 / count
        input = np.where(weight > 0, self.tokenizer.mask_token_id, target)
        return {"input": input, "target": target, "mask": weight, "number": numbers}

    def batch(self, split: str, step: int, micro: int = 0) -> Batch:
        """Draws training examples: the prompt, the record's "completion" and the stop token."""
        if self.masked:
            return self._masked_batch(split, step, micro)
        records, numbers = self._drawn(split, step, micro)
        texts = [self._example(record) for record in records]
        shape = len(texts), max(map(len, texts))
        ids = np.full(shape, self.tokenizer.pad_token_id)                            # (B, T)
        mask = np.zeros(shape, dtype=bool)                                           # (B, T)
        for i, text in enumerate(texts):
            begin = len(records[i]["tokens"])
            end = len(text)
            ids[i, :end] = text
            mask[i, begin:end] = True
        mask = mask[:, 1:]
        target = np.where(mask, ids[:, 1:], 0)
        return {"input": ids[:, :-1], "target": target, "mask": mask, "number": numbers}
