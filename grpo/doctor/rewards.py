"""The doctor's checks of rewards: how much groups teach, each reward alone, and each verifier on right answers.

A check takes an Examination, one of OF_EACH also the name of a reward; it returns what those of checks.py do.
"""

import re
from dataclasses import dataclass, replace
from inspect import signature
from math import inf, isfinite, isnan
from types import SimpleNamespace

import torch

from core.prompts import PromptConsumer, as_columns
from grpo.grpo_training_step import differ
from grpo.rewards import REWARDS

RECORDS = 8   # the number of training records that each verifier is given
SHOWN = 50    # characters of a text that are shown
FORMS = {     # forms in which an answer may be expected, if the records have no completion
    "alone": lambda answer: answer,
    "between tags": lambda answer: f"...<end_working_out><SOLUTION>{answer}</SOLUTION>",
    "as the end of a tag": lambda answer: f"{answer}</SOLUTION>",
    "in a box": lambda answer: f"\\boxed{{{answer}}}",
    "in a code block": lambda answer: f"```python\n{answer}\n```"}


def groups_differ(x):
    """Most groups teach something: their completions get different rewards."""
    rewards = torch.cat([scored.reward.float().cpu() for _, scored in x.sampled])    # (P, G)
    compared = torch.cat([scored.compared.float().cpu() for _, scored in x.sampled])  # (P, G)
    seen = ~rewards.isnan()
    if not seen.any():
        return False, "No completion got a reward: every reward skipped all of them.", "see each reward below"
    mean = (rewards.nansum(1) / seen.sum(1).clamp(min=1))[:, None]                   # (P, 1)
    std = ((rewards - mean).square().nansum(1) / (seen.sum(1) - 1).clamp(min=1)).sqrt()  # (P,)
    equal = float((~differ(compared)).float().mean())
    sentence = (f"The reward is {float(rewards.nanmean()):.3g} on average over {len(rewards)} problems; within a group "
                f"its standard deviation is {float(std.mean()):.2g}. {equal:.0%} of the groups have equal rewards and "
                "teach nothing.")
    return equal < 0.5, sentence, remedy_of_equal(success_rates(x)[1])


def expected_equal_groups(x):
    """At this success rate, few groups of this size are all right or all wrong."""
    rates, overall = success_rates(x)
    if rates is None:
        return None
    G, alone = x.config.group_size, len(x.rewards.names) == 1
    share, twice = (float((rates**size + (1 - rates) ** size).mean()) for size in (G, 2 * G))
    sentence = (f"{x.rewards.success} finds {overall:.0%} of the completions right. At that rate {share:.0%} of the "
                f"groups of {G} will be all right or all wrong, {twice:.0%} of groups of {2 * G} (the mean of p^G + "
                f"(1-p)^G, where p of a problem is its right completions + {overall:.2f}, divided by {G} + 1)")
    if share < 0.5:
        return True, sentence + ".", ""
    if not alone:
        return None, f"{sentence}; the other rewards may still tell them apart.", remedy_of_equal(overall)
    return False, sentence + ".", remedy_of_equal(overall)


def success_rates(x):
    """(estimated success rate of each problem (P,), of all problems), or (None, None) without a success reward.

    A problem's own few completions alone would make p 0 or 1 too often, so the rate of all counts as one completion.
    """
    if not x.rewards.success:
        return None, None
    values = values_of(x, x.rewards.success)
    if values is None or values.isnan().all():
        return None, None
    right = x.rewards.right({x.rewards.success: values}).view(-1, x.config.group_size)  # (P, G)
    overall = float(right.nanmean())
    return (right.nansum(1) + overall) / ((~right.isnan()).sum(1) + 1), overall


def remedy_of_equal(overall):
    """What helps where groups teach nothing. overall: the success rate, or None if it is not known"""
    if overall is None:
        return "raise temperature or group_size, or add a reward that tells completions of a problem apart"
    if overall < 0.5:
        return ("too hard: take easier problems, raise group_size, add a reward for a part of the way, or train the "
                "model on right completions first; zero_std='resample' looks for problems that teach")
    return "too easy: take harder problems; zero_std='resample' looks for problems that teach"


def values_of(x, name):
    """(N,) of a reward over all sampled completions, on the CPU; None if the sampling did not keep it."""
    parts = [scored.values[name].float().cpu() for _, scored in x.sampled if name in scored.values]
    return torch.cat(parts) if parts else None


def values_seen(x, name):
    """A reward tells completions apart, and stays within its range."""
    values, low, high = values_of(x, name), REWARDS[name].low, REWARDS[name].high
    if values is None:
        return None
    seen = values[~values.isnan()]
    skipped = ""
    if len(seen) < len(values):
        skipped = f" It skipped {1 - len(seen) / len(values):.0%} of the completions."
    if not len(seen):
        return False, f"{name} skipped all {len(values)} completions.", (
            "if it runs in workers, raise reward_timeout; otherwise see when it returns None")
    least, most = float(seen.min()), float(seen.max())
    if not isfinite(least + most):
        return False, f"{name} gave numbers that are not finite.", "return None to skip a completion"
    if least < low - 1e-6 or most > high + 1e-6:
        return False, f"{name} gave {least:g} to {most:g}, but declares {low:g} to {high:g}.{skipped}", (
            f"write its true range: @reward({min(least, low):g}, {max(most, high):g}); a completion is right at the "
            "highest value")
    if least == most and most < high - 1e-6:
        return False, f"{name} gave all {len(seen)} completions {most:g}: it teaches nothing.{skipped}", (
            "look at completions (samples.jsonl of a short run): is what it looks for ever there? If not, ask for it "
            "in the prompt, or train the model on right completions first")
    if least == most:
        return None, f"{name} gave all {len(seen)} completions {most:g}, its highest value: it teaches nothing.", (
            "leave it out, or keep it to guard what the model can do already")
    return True, (f"{name} gave {least:.3g} to {most:.3g}, {float(seen.mean()):.3g} on average (possible: {low:g} to "
                  f"{high:g}).{skipped}"), ""


def own_answers(x, name):
    """A verifier finds the records' own completions, or their answers, right."""
    examples = right_examples(x)
    if not reads_records(x, name, examples):
        return None
    examples = [example for example in examples if example.texts]
    if not examples:
        return None, f"{name} was not tried on right completions: the records have neither completion nor answer.", (
            "give the records a completion that is right, and this is checked")
    known, wrong, forms = 0, [], []
    for example in examples:
        value, form, error = best_try(x, name, example)
        if value is None and error is not None:
            return False, f"{name} fails on {shortened(example)!r}, a right completion of {example.where}: {error}.", (
                "correct the function or the records: the run would stop there")
        if value is not None:
            known += 1
            forms.append(form)
            if not is_right(x, name, example, value):
                wrong.append((example, value))
    high, own = REWARDS[name].high, examples[0].own
    what = "completions" if own else f"answers ({', '.join(dict.fromkeys(forms))})"
    if not wrong:
        most = f"its highest value, {high:g}," if isfinite(high) else "more than for an empty completion"
        return True, f"{name} gives {most} for the records' own {what}: {known} were tried.", ""
    example, value = wrong[0]
    of_high = f" of {high:g}" if isfinite(high) else ""
    sentence = (f"{name} does not find {len(wrong)} of {known} of the records' own {what} right: it gives "
                f"{value:g}{of_high} for {shortened(example)!r} of {example.where}.")
    if not own and not REWARDS[name].fn.__module__.startswith("grpo.reward_functions."):
        return None, sentence, ("give the records a completion that is right, in the form that your function expects, "
                                "and this is checked")
    return False, sentence, "correct the records or the reward: now no completion of these problems can be right"


def is_right(x, name, example, value):
    """Whether a value is the highest of a reward or, where it has none, above that of an empty completion."""
    if isfinite(REWARDS[name].high):
        return value >= REWARDS[name].high - 1e-6
    least, _ = value_or_error(x, name, example, "")
    return least is None or value > least


def empty_completions(x, name):
    """A verifier does not find an empty completion right."""
    examples = right_examples(x)
    if not isinstance(x.data, PromptConsumer) or not reads_records(x, name, examples):
        return None
    values = []
    for example in examples:
        value, error = value_or_error(x, name, example, x.data.format.response_prefix)
        if error is not None:
            return False, f"{name} fails on an empty completion ({error}).", (
                "return 0 or None there: a model samples such completions, and the run would stop")
        if value is not None:
            values.append(value)
    most = max(values, default=0.0)
    if isfinite(REWARDS[name].high) and most >= REWARDS[name].high - 1e-6:
        return False, f"{name} gives its highest value, {most:g}, for an empty completion.", (
            "correct the reward or the records: the model would learn to write nothing")
    return True, f"{name} gives {most:.3g} at most for an empty completion.", ""


def judge_on_true_texts(x):
    """A judge of fill-in prefers true texts to those that the generator filled in."""
    if isinstance(x.data, PromptConsumer) or x.models.judge is None:
        return None
    rollouts = x.sampled[0][0]
    true = float(x.models.judge.scores(SimpleNamespace(tokens=list(torch.from_numpy(x.problems["target"])))).mean())
    filled = float(x.models.judge.scores(rollouts.texts).mean())
    return true > filled, f"The judge gives {true:.3f} for the true texts and {filled:.3f} for filled ones.", (
        "take a judge that was trained on texts of this kind: its score does not tell true from filled text")


@dataclass
class Example:
    """A problem with completions that should be right."""
    where: str    # the line of the record
    prompt: str
    columns: dict # {field of the record: value}
    own: bool     # whether the completion is the record's own, and not made of its answer
    texts: dict   # {form: completion}
    ids: list | None = None  # of a filled-in text


def right_examples(x):
    """An Example for each of the first records, or texts of the step."""
    if isinstance(x.data, PromptConsumer):
        records = x.data.records["train"][:RECORDS]
        prompts, columns = as_columns(records)
        return [Example(record["where"], prompts[i], {key: values[i] for key, values in columns.items()},
                        record.get("completion") is not None, right_texts(x, record))
                for i, record in enumerate(records)]
    texts, G, examples = x.sampled[0][0].texts, x.config.group_size, []
    for i in range(min(RECORDS, len(texts.prompts) // G)):
        columns = {key: values[i * G] for key, values in texts.columns.items()}
        examples.append(Example(f"text {i + 1} of the step", texts.prompts[i * G], columns, True,
                                {"own": columns["answer"]}, x.problems["target"][i].tolist()))
    return examples


def right_texts(x, record):
    """{form: completion} of a record's own completion, or of its answer in all FORMS; {} if it has neither. They are
    cut before the first stop sequence, as a reward reads them (core/generation.py: Stop.text)."""
    if record.get("completion") is not None:
        forms = {"own": str(record["completion"])}
    elif record.get("answer") is not None:
        forms = {form: make(str(record["answer"])) for form, make in FORMS.items()}
    else:
        return {}
    stops = "|".join(map(re.escape, x.config.stop_sequences)) or "(?!)"
    return {form: x.data.format.response_prefix + re.split(stops, text, maxsplit=1)[0] for form, text in forms.items()}


def value_or_error(x, name, example, text):
    """(value of a completion, or None if the reward skips it or fails; the error in words, or None)"""
    encode = x.data.tokenizer.encode
    ids, tokens = example.ids, example.ids
    if ids is None:
        ids = encode(text)
        tokens = encode(example.prompt) + ids
    texts = SimpleNamespace(prompts=[example.prompt], completions=[text], tokens=[torch.tensor(tokens)],
                            completion_ids=[ids], columns={key: [value] for key, value in example.columns.items()})
    try:
        value = x.rewards.score(texts, 1, [name])[0][name].item()
    except ValueError as error:  # of a user's function too (core/settings/user_code.py)
        return None, str(error)
    if abs(value) == inf:
        return None, "its value is not finite"
    return None if isnan(value) else value, None


def best_try(x, name, example):
    """(the highest value that a reward gives to one of an example's texts or None, the form of that text, an error)"""
    best, form, error = None, None, None
    for tried, text in example.texts.items():
        value, failed = value_or_error(x, name, example, text)
        error = error or failed
        if value is not None and (best is None or value > best):
            best, form = value, tried
    return best, form, error


def shortened(example):
    """The first completion of an example, at most SHOWN characters."""
    text = next(iter(example.texts.values()))
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def reads_records(x, name, examples):
    """Whether a reward is a verifier: its value depends on fields of the record."""
    parameters = set(signature(REWARDS[name].fn).parameters)
    if not examples or {"texts", "judge_model", "reward_scorer"} & parameters:
        return False
    example = examples[0]
    if REWARDS[name].check is not None or (set(example.columns) - {"prompt"}) & parameters:
        return True
    prompt = {key: value for key, value in example.columns.items() if key == "prompt"}
    text = next(iter(example.texts.values()), "1")
    without, error = value_or_error(x, name, replace(example, columns=prompt), text)
    return error is not None or without != value_or_error(x, name, example, text)[0]


OF_EACH = {"reward": values_seen, "right answers": own_answers, "empty completion": empty_completions}
