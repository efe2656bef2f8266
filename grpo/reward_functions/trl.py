"""Rewards as TRL users have them: plain functions of reward_file, without @reward, called with what TRL 1.x gives them.

def right(prompts, completions, completion_ids, answer, **kwargs):
    return [float(text.strip() == truth) for text, truth in zip(completions, answer)]
"""

import copy
import math
from dataclasses import dataclass

from core.files.records import FIELDS, RAW
from grpo.reward_functions.registry import OF_THE_RUN, REWARDS, Reward, check_filled, gets

NOT_GIVEN = ("prompt", "completion", RAW, *OF_THE_RUN)  # fields that are not arguments


@dataclass
class TrainerState:
    """The facts about the run that a reward may read, under the names of transformers' TrainerState."""
    global_step: int = 0   # optimizer steps that are done
    max_steps: int = 0
    logging_steps: int = 0
    eval_steps: int = 0
    save_steps: int = 0


def register_functions(names, functions, path):
    """Puts the functions of reward_file that a run asks for by name, and that have no @reward, into the table.

    functions: {name: function} of the file; path: of the file, for the error
    Raises ValueError if one has the name of another reward.
    """
    for name in names:
        fn, taken = functions.get(name), REWARDS.get(name)
        if fn is None or (taken and taken.fn is fn):  # it has @reward, here or where the file imports it from
            continue
        if taken and not taken.plain:
            raise ValueError(f"reward_functions: {name!r} is a function of reward_file={path}, but also a reward that "
                             "is defined elsewhere; give the function another name")
        REWARDS[name] = Reward(fn, -math.inf, math.inf, slow=False, whole_group=True, check=None, plain=True)


def plain_arguments(name, texts, known, all_fields=()):
    """The arguments that TRL gives a function: ({parameter: list of N}, {other parameter: value}). Without **kwargs it
    gets only those that its signature names.

      prompts                  as the records have them: texts, or lists of messages
      completions              texts; for a prompt of messages, [{"role": "assistant", "content": text}]
      completion_ids           lists of token ids, as sampled
      a field of the records   a list of N values, None where a record lacks it; "prompt" and "completion" are left out.
                               Prompt and answer are also given under their other names (records.py: FIELDS); an
                               answer is a number where the record's is one
      trainer_state            known["trainer_state"]
    The function may change the values of the records: each completion has a copy.
    all_fields: the fields that any record of the data has
    Raises ValueError if a parameter without a default is none of these.
    """
    columns = {field: [None] * len(texts.completions) for field in all_fields} | dict(texts.columns)
    if RAW in texts.columns:
        columns["answer"] = texts.columns[RAW]
    aliases = {other: columns[field] for field, names in FIELDS.items() for other in names if field in columns}
    prompts = own_prompts(texts)
    given = {key: x for key, x in (aliases | columns).items() if key not in NOT_GIVEN}
    given["prompts"] = prompts
    given["completions"] = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                            for prompt, text in zip(prompts, texts.completions, strict=True)]
    # Copies, because a list of a record is one object for all completions and steps
    fields = {key: [copy.deepcopy(value) for value in x] for key, x in given.items() if gets(name, key)}
    settings = {}
    if gets(name, "completion_ids"):
        fields["completion_ids"] = texts.completion_ids
    if gets(name, "trainer_state"):
        settings["trainer_state"] = known["trainer_state"]
    check_filled(name, REWARDS[name].fn, fields)
    return fields, settings


def own_prompts(texts):
    """The prompts of N completions as their records have them, before a template: texts, or lists of messages."""
    return texts.columns.get("prompt", texts.prompts)
