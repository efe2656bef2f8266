"""The doctor's checks of rewards: how much groups teach, each reward alone, and each verifier on right answers.

A check takes an Examination, one of a single reward also its name; it returns what those of checks.py do.
"""

import re
from inspect import signature
from math import inf, isfinite, isnan
from types import SimpleNamespace

import torch

from core.prompts import PromptConsumer, as_columns
from core.settings.user_code import one_line
from grpo.grpo_training_step import differ
from grpo.rewards import REWARDS

RECORDS = 8  # the number of training records that each verifier is given
# Forms in which an answer may be expected, if the records have no completion
FORMS = ("%s", "...<end_working_out><SOLUTION>%s</SOLUTION>", "%s</SOLUTION>", "\\boxed{%s}", "```python\n%s\n```")


def groups_differ(x):
    """Most groups teach something: their completions get different rewards. With a teacher those of equal ones do."""
    if x.config.teacher_checkpoint is not None:
        return None
    equal = 1 - float(differ(x.scored).float().mean())
    sentence = (f"The reward is {float(x.scored.reward.nanmean()):.3g} on average. Of {x.rollouts.problems} groups "
                f"{equal:.0%} have equal rewards and teach nothing.")
    remedy = "raise temperature or group_size, or add a reward that tells completions of a problem apart"
    if x.rewards.success in x.scored.values:
        too_hard = float(x.rewards.right(x.scored.values).nanmean()) < 0.5
        remedy = "too easy: take harder problems; zero_std='resample' looks for problems that teach"
        if too_hard:
            remedy = ("too hard: take easier problems, raise group_size, add a reward for a part of the way, or train "
                      "the model on right completions first; zero_std='resample' looks for problems that teach")
    return equal < 0.5, sentence, remedy


def values_seen(x, name):
    """A reward tells completions apart, and stays within its range."""
    if name not in x.scored.values:
        return None
    low, high = REWARDS[name].low, REWARDS[name].high
    values = x.scored.values[name].float()
    seen = values[~values.isnan()]
    if not len(seen):
        return False, f"{name} skipped all {len(values)} completions.", (
            "if it runs in workers, raise reward_timeout; otherwise see when it returns None")
    least, most = float(seen.min()), float(seen.max())
    if not isfinite(least + most):
        return False, f"{name} gave numbers that are not finite.", "return None to skip a completion"
    has_range = name != "environment"  # whose episodes may add up to anything; 1 or more is a success
    if has_range and (least < low - 1e-6 or most > high + 1e-6):
        return False, f"{name} gave {least:g} to {most:g}, but declares {low:g} to {high:g}.", (
            f"write its true range: @reward({min(least, low):g}, {max(most, high):g}); a completion is right at the "
            "highest value")
    if least == most and most < high - 1e-6:
        return False, f"{name} gave all {len(seen)} completions {most:g}: it teaches nothing.", (
            "look at completions (samples.jsonl of a short run): is what it looks for ever there? If not, ask for it "
            "in the prompt, or train the model on right completions first")
    if least == most:
        return None, f"{name} gave all {len(seen)} completions {most:g}, its highest value: it teaches nothing.", (
            "leave it out, or keep it to guard what the model can do already")
    skipped = 1 - len(seen) / len(values)
    return True, (f"{name} gave {least:.3g} to {most:.3g}, {float(seen.mean()):.3g} on average (possible: "
                  f"{REWARDS[name].range}), and skipped {skipped:.0%} of the completions."), ""


def own_answers(x, name):
    """A verifier finds the records' own completions, or their answers, right."""
    tried = 0
    for record in verified_records(x, name):
        texts = right_completions(x, record)
        found = [value_or_error(x, name, record, text) for text in texts]
        values = [value for value, _ in found if value is not None]
        errors = [error for _, error in found if error is not None]
        if errors and not values:
            return False, f"{name} fails on the right answer of {record['where']} ({errors[0]}).", (
                "correct the function or the records: the run would stop there")
        if not values:
            continue  # no answer is known, or the function skips it
        tried += 1
        if max(values) >= lowest_right(x, name, record):
            continue
        sentence = (f"{name} does not find the answer of {record['where']} right: it gives {max(values):g} for "
                    f"{one_line(texts[0], 50, repr)}.")
        built_in = REWARDS[name].fn.__module__.startswith("grpo.")
        if built_in or record.get("completion") is not None:
            return False, sentence, "correct the records or the reward: now no completion of this problem can be right"
        return None, sentence, ("give the records a completion that is right, in the form that your function expects, "
                                "and this is checked")
    if tried:
        return True, f"{name} finds the records' own answers right: {tried} were tried.", ""
    if verified_records(x, name):
        return None, f"{name} was not tried on right completions: the records have neither completion nor answer.", (
            "give the records a completion that is right, and this is checked")
    return None


def lowest_right(x, name, record):
    """The lowest value of a right completion: a reward's highest or, where it has none, more than that of an empty
    completion."""
    if isfinite(REWARDS[name].high):
        return REWARDS[name].high - 1e-6
    empty, _ = value_or_error(x, name, record, "")
    return -inf if empty is None else empty + 1e-6


def empty_completions(x, name):
    """A verifier does not find an empty completion right."""
    found = [value_or_error(x, name, record, x.data.format.response_prefix) for record in verified_records(x, name)]
    if not found:
        return None
    errors = [error for _, error in found if error is not None]
    if errors:
        return False, f"{name} fails on an empty completion ({errors[0]}).", (
            "return 0 or None there: a model samples such completions, and the run would stop")
    most = max((value for value, _ in found if value is not None), default=-inf)
    if most >= REWARDS[name].high - 1e-6:
        return False, f"{name} gives its highest value, {most:g}, for an empty completion.", (
            "correct the reward or the records: the model would learn to write nothing")
    return True, f"{name} gives {most:.3g} at most for an empty completion.", ""


def verified_records(x, name):
    """The first training records, if the reward is a verifier: its value depends on fields of the record. None of text
    to fill in."""
    takes = set(signature(REWARDS[name].fn).parameters)
    if not isinstance(x.data, PromptConsumer) or {"texts", "judge_model", "reward_scorer"} & takes:
        return []
    records = x.data.records["train"][:RECORDS]
    text = (right_completions(x, records[0]) or ["1"])[0]
    without = {key: records[0][key] for key in ("prompt", "text")}
    if REWARDS[name].check is None and (value_or_error(x, name, records[0], text) ==
                                        value_or_error(x, name, without, text)):
        return []
    return records


def right_completions(x, record):
    """A record's own completion, or its answer in all FORMS, cut before the first stop sequence, as a reward reads
    completions (core/generation.py: Stop.text)."""
    texts = []
    if record.get("completion") is not None:
        texts = [str(record["completion"])]
    elif record.get("answer") is not None:
        texts = [form % record["answer"] for form in FORMS]
    stops = "|".join(map(re.escape, x.config.stop_sequences)) or "(?!)"
    return [x.data.format.response_prefix + re.split(stops, text, maxsplit=1)[0] for text in texts]


def value_or_error(x, name, record, text):
    """(what a reward gives to a completion, or None if it skips it or fails; the error in words, or None)"""
    prompts, columns = as_columns([record])
    texts = SimpleNamespace(prompts=prompts, completions=[text], columns=columns,
                            completion_ids=[x.data.tokenizer.encode(text)])
    try:
        value = x.rewards.score(texts, 1, [name])[0][name].item()
    except ValueError as error:  # of a user's function too (core/settings/user_code.py)
        return None, str(error)
    return (None if isnan(value) else value), None


def judge_on_true_texts(x):
    """A judge of fill-in prefers true texts to those that the generator filled in."""
    if isinstance(x.data, PromptConsumer) or x.models.judge is None:
        return None
    target = torch.from_numpy(x.problems["target"])
    true = float(x.models.judge.scores(SimpleNamespace(tokens=list(target))).mean())
    filled = float(x.models.judge.scores(x.rollouts.texts).mean())
    return true > filled, f"The judge gives {true:.3f} for the true texts and {filled:.3f} for filled ones.", (
        "take a judge that was trained on texts of this kind: its score does not tell true from filled text")
