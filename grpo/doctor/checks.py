"""The doctor's checks of a step: prompts, ends of completions, gradient, environments, rewards.

A check takes an Examination, one of a single reward also its name, and returns (whether it is fine, a sentence, a
remedy), or None where it does not apply.
"""

import re
from collections import Counter
from inspect import signature
from math import inf, isfinite, isnan
from types import SimpleNamespace

import torch

from core.prompts import PromptConsumer, as_columns, as_messages, plain
from core.settings.user_code import one_line
from core.tokenizer import fold_to_ascii
from grpo.rewards import REWARDS
from grpo.rollout import TURNS

RECORDS = 8  # the number of training records that each verifier is given
# Forms in which an answer may be expected, if the records have no completion
FORMS = ("%s", "...<end_working_out><SOLUTION>%s</SOLUTION>", "%s</SOLUTION>", "\\boxed{%s}", "```python\n%s\n```")


def lost_characters(x):
    """The tokenizer can write the prompts."""
    if not isinstance(x.data, PromptConsumer):
        return None
    tokenizer = x.data.tokenizer
    text = "\n".join(plain(as_messages(record["prompt"])) for record in x.data.records["train"][:100])
    written = characters(text)
    lost = written - characters(tokenizer.decode(tokenizer.encode(text)))
    share = lost.total() / max(1, written.total())
    if share <= 1e-3:
        return True, "The tokenizer can write the prompts.", ""
    examples = ", ".join(repr(character) for character, _ in lost.most_common(5))
    return False, f"{share:.0%} of the characters in the prompts have no tokens, such as {examples}.", (
        "use a model whose tokenizer knows them, or write the prompts without them")


def characters(text):
    """Counts the characters of a text, without spaces, accents and case, which tokenizers may leave out."""
    return Counter("".join(fold_to_ascii(c)[0] or c for c in text.lower() if not c.isspace()))


def ends_of_completions(x):
    """The records' own completions are neither cut off nor end too early."""
    if not isinstance(x.data, PromptConsumer):
        return None
    own = [str(record["completion"]) for record in x.data.records["train"][:1000] if record.get("completion")]
    if not own:
        return None
    for stop in x.config.stop_sequences if x.config.environment is None else ():  # else they end turns
        cut = [text for text in own if text.partition(stop)[2].strip()]  # one that ends with it is whole
        if cut:
            return False, f"The text {stop!r} is inside {len(cut) / len(own):.0%} of the records' completions.", (
                f"leave {stop!r} out of stop_sequences: it ends a right completion too early")
    most = x.config.max_new_tokens
    lengths = sorted(len(x.data.tokenizer.encode(text)) + 1 for text in own)
    longer = sum(length > most for length in lengths) / len(own)
    if longer > 0.05:
        return False, f"{longer:.0%} of the records' completions are longer than max_new_tokens={most}.", (
            f"set max_new_tokens={lengths[int(0.95 * len(lengths))]}, which is enough for 95% of them")
    return True, f"The records' completions fit into max_new_tokens={most}, and no stop sequence cuts them.", ""


def gradient(x):
    """The loss has a gradient, and it reaches every part of the model."""
    total = sum(x.gradient.values())
    if total == 0 or not isfinite(total):
        return False, f"The gradient is {total:g}, so nothing is learned.", (
            "if it is 0, let the completions of a group get different rewards and see that tokens are in the loss "
            "(mask_truncated=True leaves cut completions out); if it is not finite, set dtype='float32'")
    dead = [part for part, size in x.gradient.items() if size == 0]
    if dead:
        return False, f"The gradient is 0 in {', '.join(dead)}.", "load the model without freezing these weights"
    return True, f"The gradient reaches all parts of the model, most {max(x.gradient, key=x.gradient.get)}.", ""


def equal_starts(x):
    """The environments of a group start in one state: those that hear the same texts answer the same."""
    if x.config.environment is None:
        return None
    P = len(x.problems["number"])
    twins = {key: column.repeat(2, axis=0) for key, column in x.problems.items()}  # two of a problem have equal noise
    settings = SimpleNamespace(**vars(x.config) | {"group_size": 1, "batch_size": 2 * P})
    rollouts = x.models.policy.sample(twins, 0, settings)
    unlike = sum(not alike(rollouts, n) for n in range(0, 2 * P, 2))
    if unlike:
        return False, (f"In {unlike} of {P} problems two environments heard the same texts and gave other answers or "
                       "rewards: the completions of a group do not start in one state."), (
            "draw what is random from random.Random(seed), with the seed that __init__ gets, and let an episode change "
            "nothing outside of its own environment")
    return True, f"Two environments of a problem that hear the same texts answer the same, in {P} of {P} problems.", ""


def alike(rollouts, n):
    """Tells whether the environments of completions n and n + 1 did the same while they heard the same."""
    rewards = rollouts.texts.columns[TURNS]
    target = rollouts.target[n : n + 2]
    mask = rollouts.mask[n : n + 2]
    other = ((target[0] != target[1]) | (mask[0] != mask[1])).nonzero().flatten()
    if len(other):  # on some devices rounding can make the policy itself write another token
        return bool(mask[:, other[0]].all())
    return rewards[n] == rewards[n + 1]


def values_in_range(x, name):
    """The values of a reward are within its range. Those of an episode may add up to anything."""
    if name not in x.scored.values or name == "environment":
        return None
    low, high = REWARDS[name].low, REWARDS[name].high
    values = x.scored.values[name]
    values = values[values.isfinite()].tolist()
    least, most = min(values, default=low), max(values, default=high)
    if least < low - 1e-6 or most > high + 1e-6:
        return False, f"{name} gave {least:g} to {most:g}, but declares {low:g} to {high:g}.", (
            f"write its true range: @reward({min(least, low):g}, {max(most, high):g}); a completion is right at the "
            "highest value")
    return True, f"{name} stays within {REWARDS[name].range}.", ""


def own_answers(x, name):
    """A verifier finds the records' own completions, or their answers, right."""
    if not isfinite(REWARDS[name].high):
        return None
    tried = 0
    for record in verified_records(x, name):
        texts = right_completions(x, name, record)
        found = [value_or_error(x, name, record, text) for text in texts]
        errors = [value for value in found if isinstance(value, str)]
        values = [value for value in found if isinstance(value, float)]
        if errors and not values:
            return False, f"{name} fails on the right answer of {record['where']}: {errors[0]}.", (
                "correct the function or the records: the run would stop there")
        if values and max(values) < REWARDS[name].high - 1e-6:
            return False, (f"{name} does not find the answer of {record['where']} right: it gives {max(values):g} for "
                           f"{one_line(texts[0], 50, repr)}."), (
                "correct the records or the reward: now no completion of this problem can be right")
        tried += bool(values)
    return (True, f"{name} finds the records' own answers right: {tried} were tried.", "") if tried else None


def empty_completions(x, name):
    """A verifier does not find an empty completion right."""
    found = [value_or_error(x, name, record, x.data.format.response_prefix) for record in verified_records(x, name)]
    for value in found:
        if isinstance(value, str):
            return False, f"{name} fails on an empty completion: {value}.", (
                "return 0 or None there: a model samples such completions, and the run would stop")
    most = max((value for value in found if value is not None), default=-inf)
    if most >= REWARDS[name].high - 1e-6:
        return False, f"{name} gives its highest value, {most:g}, for an empty completion.", (
            "correct the reward or the records: the model would learn to write nothing")
    return (True, f"{name} gives {most:.3g} at most for an empty completion.", "") if found else None


def verified_records(x, name):
    """The first training records, if the reward is a verifier: its value depends on fields of the record. None of text
    to fill in."""
    takes = set(signature(REWARDS[name].fn).parameters)
    if not isinstance(x.data, PromptConsumer) or {"texts", "judge_model", "reward_scorer"} & takes:
        return []
    records = x.data.records["train"][:RECORDS]
    text = next(iter(right_completions(x, name, records[0])), "1")
    without = {key: records[0][key] for key in ("prompt", "text")}
    alike = value_or_error(x, name, records[0], text) == value_or_error(x, name, without, text)
    return [] if alike and REWARDS[name].check is None else records


def right_completions(x, name, record):
    """A record's own completion or, for the rewards of this project, its answer in all FORMS, cut before the first stop
    sequence, as a reward reads completions (core/generation.py: Stop.text)."""
    texts = []
    if record.get("completion") is not None:
        texts = [str(record["completion"])]
    elif record.get("answer") is not None and REWARDS[name].fn.__module__.startswith("grpo."):
        texts = [form % record["answer"] for form in FORMS]
    stops = "|".join(map(re.escape, x.config.stop_sequences)) or "(?!)"
    return [x.data.format.response_prefix + re.split(stops, text, maxsplit=1)[0] for text in texts]


def value_or_error(x, name, record, text):
    """Returns what a reward gives to a completion: None if it skips it, the error in words if it fails."""
    prompts, columns = as_columns([record])
    texts = SimpleNamespace(prompts=prompts, completions=[text], columns=columns,
                            completion_ids=[x.data.tokenizer.encode(text)])
    try:
        value = x.rewards.score(texts, 1, [name])[0][name].item()
    except ValueError as error:  # of a user's function too (core/settings/user_code.py)
        return str(error)
    return None if isnan(value) else value


def judge_on_true_texts(x):
    """A judge of fill-in prefers true texts to those that the generator filled in."""
    if isinstance(x.data, PromptConsumer) or x.models.judge is None:
        return None
    target = torch.from_numpy(x.problems["target"])
    true = float(x.models.judge.scores(SimpleNamespace(tokens=list(target))).mean())
    filled = float(x.models.judge.scores(x.rollouts.texts).mean())
    return true > filled, f"The judge gives {true:.3f} for the true texts and {filled:.3f} for filled ones.", (
        "take a judge that was trained on texts of this kind: its score does not tell true from filled text")
