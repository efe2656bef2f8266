"""Rewards as TRL users have them: plain functions of reward_file, without @reward, called with what TRL 1.x gives them.

def right(prompts, completions, completion_ids, answer, **kwargs):
    return [float(text.strip() == truth) for text, truth in zip(completions, answer)]
"""

import inspect
import math
from dataclasses import dataclass
from types import SimpleNamespace

from core.files.records import FIELDS, RAW
from grpo.reward_functions.registry import REWARDS, Reward, arguments


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
        if inspect.isclass(fn):
            continue
        if fn is None or (taken and taken.fn is fn):  # it has @reward, here or where the file imports it from
            continue
        if getattr(fn, "__module__", "") == "grpo.environments":  # what registers classes, beside a reward of this name
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
    all_fields: the fields that any record of the data has
    Raises ValueError if a parameter without a default is none of these.
    """
    columns = {field: [None] * len(texts.completions) for field in all_fields if field != RAW} | texts.columns
    columns.pop("completion", None)
    columns = under_all_names(columns)
    prompts, completions = own_prompts(texts), []
    for prompt, text in zip(prompts, texts.completions, strict=True):
        is_chat = not isinstance(prompt, str)
        completions.append([{"role": "assistant", "content": text}] if is_chat else text)
    as_trl = SimpleNamespace(prompts=prompts, completions=completions, completion_ids=texts.completion_ids,
                             columns=columns)
    return arguments(name, as_trl, {"trainer_state": known["trainer_state"]})


def under_all_names(columns):
    """The fields of records, or of one, as their file may name them: prompt and answer under their other names too, and
    an answer as it was there, a number or a text."""
    columns = dict(columns)
    if RAW in columns:
        columns["answer"] = columns.pop(RAW)
    for field, names in FIELDS.items():
        if field in columns:
            columns = dict.fromkeys(names, columns[field]) | columns
    return columns


def own_prompts(texts):
    """The prompts of N completions as their records have them, before a template: texts, or lists of messages."""
    return texts.columns.get("prompt", texts.prompts)
