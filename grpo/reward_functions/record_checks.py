"""Checks before the first step that the rewards of a run can score every record of its data."""

from types import SimpleNamespace

import torch

from core.prompts import as_columns
from grpo.reward_functions.registry import IN_PROCESS, OF_PLAIN, REWARDS, parameters

LONGEST = 16  # how many of the longest prompts are measured


def check_records(name, records, call):
    """Raises ValueError naming file and line of the first record that a reward cannot score.

    A function's own check sees every record. Without one, call(name, texts) is called with empty completions: of all
    records, or, if the function is slow, of one record of each set of fields.
    """
    columns = as_columns(records)[1]
    check = REWARDS[name].check
    if check:
        for i, record in enumerate(records):
            named(record, check, **{key: x[i] for key, x in columns.items() if key not in OF_PLAIN})
    elif not IN_PROCESS & set(parameters(name)):
        if REWARDS[name].slow:
            records = one_of_each_kind(records)
        check_calls(records, lambda part: call(name, unwritten(part)))


def check_reader(model, records, max_new_tokens, tokenizer=None):
    """Raises ValueError naming file and line of a record that a judge or a reward model cannot read.

    It tries one record of each sequence of roles and those with the longest prompts. A completion may have
    max_new_tokens if the model has the generator's tokens; otherwise its length is unknown and it counts as one token.
    model: has setting, room(), shares_tokens(tokenizer), token_ids(texts); tokenizer: the generator's
    """
    new = max_new_tokens if model.shares_tokens(tokenizer) else 1

    def check(record):
        texts = unwritten([record])
        texts.tokens = [torch.tensor(record["tokens"])]
        length, room = len(model.token_ids(texts)[0]), model.room()
        if length + new > room:
            raise ValueError(f"{model.setting} reads {room} tokens, but this prompt has {length} and its completion "
                             f"{f'up to {new}' if new > 1 else 'at least 1'}: lower max_new_tokens or "
                             "max_prompt_length, or take a model that reads longer texts")

    for record in telling(records):
        named(record, check, record)


def telling(records):
    """One record of each sequence of roles, and the longest: a mistake shows in one of them."""
    first = {}
    for record in records:
        prompt = record["prompt"]
        first.setdefault(None if isinstance(prompt, str) else tuple(m["role"] for m in prompt), record)
    return [*first.values(), *sorted(records, key=lambda record: -len(record["text"]))[:LONGEST]]


def check_calls(records, call):
    """call(records); after an error, call([record]) for one after the other, to find the first that raises one."""
    try:
        call(records)
    except ValueError:
        for record in records:
            named(record, call, [record])
        raise


def unwritten(records):
    """Texts of records whose completions are empty."""
    prompts, columns = as_columns(records)
    return SimpleNamespace(prompts=prompts, completions=[""] * len(records), columns=columns, tokens=None,
                           completion_ids=[[] for _ in records])


def one_of_each_kind(records):
    """The first record of each set of fields that have a value."""
    first = {}
    for record in records:
        first.setdefault(frozenset(key for key, x in record.items() if x is not None), record)
    return list(first.values())


def named(record, function, /, *arguments, **fields):
    """Calls a function; a ValueError then begins with the file and the line of the record."""
    try:
        function(*arguments, **fields)
    except ValueError as error:
        raise ValueError(f"{record['where']}: {error}") from None
