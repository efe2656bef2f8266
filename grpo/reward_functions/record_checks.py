"""Checks before the first step that the rewards of a run can score every record of its data."""

from types import SimpleNamespace

import torch

from core.prompts import as_columns
from grpo.reward_functions.registry import IN_PROCESS, OF_PLAIN, REWARDS, check_filled, parameters

LONGEST = 16  # how many of the longest prompts are measured


def check_records(name, records, call):
    """Raises ValueError naming file and line of the first record that a reward cannot score.

    A function's own check sees every record. Without one, call(name, texts) is called with empty completions: of all
    records, or, if the function is slow, of one record of each set of fields.
    """
    if REWARDS[name].check:
        for record in records:
            named(record, check_record, name, record)
    elif not IN_PROCESS & set(parameters(name)):
        if REWARDS[name].slow:
            kinds = {frozenset(key for key, x in record.items() if x is not None): record for record in records}
            records = list(kinds.values())
        try:
            call(name, without_completions(records))
        except ValueError:
            for record in records:
                named(record, call, name, without_completions([record]))
            raise


def check_record(name, record):
    """Calls a reward's own check with the fields of a record. Raises ValueError if it does, or if a field that it needs
    is missing."""
    check = REWARDS[name].check
    fields = {key: x[0] for key, x in as_columns([record])[1].items() if key not in OF_PLAIN}
    check_filled(name, check, [key for key, x in fields.items() if x is not None])
    check(**fields)


def check_reader(model, records, max_new_tokens, tokenizer=None):
    """Raises ValueError naming file and line of a record that a judge or a reward model cannot read.

    It tries those with the longest prompts. A completion may have max_new_tokens if the model has the generator's
    tokens; otherwise its length is unknown and it counts as one token.
    model: has setting, room(), shares_tokens(tokenizer), token_ids(texts); tokenizer: the generator's
    """
    new = max_new_tokens if model.shares_tokens(tokenizer) else 1
    for record in sorted(records, key=lambda record: -len(record["text"]))[:LONGEST]:
        named(record, check_room, model, record, new)


def check_room(model, record, new):
    """Raises ValueError if a model has no room for a prompt and `new` more tokens."""
    texts = without_completions([record])
    texts.tokens = [torch.tensor(record["tokens"])]
    length, room = len(model.token_ids(texts)[0]), model.room()
    if length + new > room:
        raise ValueError(f"{model.setting} reads {room} tokens, but this prompt has {length} and its completion needs "
                         f"{new}: lower max_new_tokens or max_prompt_length, or take a model that reads longer texts")


def without_completions(records):
    """Texts of records whose completions are empty."""
    prompts, columns = as_columns(records)
    return SimpleNamespace(prompts=prompts, completions=[""] * len(records), columns=columns, tokens=None,
                           completion_ids=[[] for _ in records])


def named(record, function, *arguments):
    """Calls a function; a ValueError then begins with the file and the line of the record."""
    try:
        function(*arguments)
    except ValueError as error:
        raise ValueError(f"{record['where']}: {error}") from None
