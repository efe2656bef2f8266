"""--doctor=True: takes one step of the user's own run and checks what no metric shows.

A check takes a DoctorStep, and the name of a reward if it is about one. It returns (whether all is well, a sentence, a
remedy), or None where it does not apply.
"""

import re
import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan
from types import SimpleNamespace

import torch

from core.prompts import PromptConsumer, as_columns, as_messages, plain
from core.settings.user_code import one_line
from core.tokenizer import fold_to_ascii
from grpo.grpo_training_step import Timer, collect_rollouts, sampler_of, train_on_rollouts
from grpo.rewards import REWARDS
from grpo.rollout import TURNS

MOST = 16    # problems of the step
RECORDS = 8  # training records that each verifier is tried on
# Forms in which a reward may expect an answer; tried where records have no completion
FORMS = ("%s", "...<end_working_out><SOLUTION>%s</SOLUTION>", "%s</SOLUTION>", "\\boxed{%s}", "```python\n%s\n```")
# Wrong answers: X is the answer of a record, Y that of another one. A verifier must not accept all of a row
WRONG = {"Y": ("{Y}",), "both 'X or Y' and 'Y or X'": ("{X} or {Y}", "{Y} or {X}"), "the prompt": ("{prompt}",)}
ODD = {"'not X'": ("not {X}",), "'X X'": ("{X} {X}",)}  # how a verifier reads; a model gains nothing from them


@dataclass
class DoctorStep:
    """The step that the checks read."""
    config: object
    models: object             # policy, reference, judge, gold_judge (grpo/build.py: Models)
    rewards: object
    data: object
    problems: dict             # columns of the problems
    rollouts: object           # Rollouts, with their texts
    scored: object             # Scored: their rewards
    gradient: dict             # {part of the model: norm}


def examine(config, models, rewards, data, dist):
    """The DoctorStep of the first optimizer step of a run, on at most MOST problems. Changes no weight and no file."""
    if dist.world > 1:
        raise ValueError(f"doctor=True examines a step in one process, not in {dist.world}: start it without torchrun")
    c = replace(config, batch_size=min(MOST, config.batch_size), gradient_accumulation_steps=1, ppo_epochs=1,
                minibatches=1, grad_clip=0.0)

    def problems(again):
        return {key: x[: c.batch_size] for key, x in data.problems("train", 0, again).items()}

    sample = sampler_of(models.policy, problems, 0, c)
    trained, sums, first = collect_rollouts(models.policy, models.reference, rewards, sample, c, dist, Timer())
    train_on_rollouts(models.policy, trained, sums, [], c, dist)  # without an optimizer the gradient stays
    return DoctorStep(config, models, rewards, data, problems(0), *first, gradient_norms(models.policy.model))


def gradient_norms(model):
    """{part of a model: norm of its gradient}. With an adapter only its own weights count."""
    squares = {}
    adapter = any("lora_" in name for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        if p.requires_grad or not adapter:
            square = 0.0 if p.grad is None else float(p.grad.float().square().sum())
            squares[part_of(name)] = squares.get(part_of(name), 0.0) + square
    return {part: square**0.5 for part, square in squares.items()}


def part_of(name):
    """The part of a model that holds a parameter: its layer, or the module outside the layers."""
    layer = re.search(r"\.(\d+)\.", name)
    module = re.sub(r"\.(weight|bias)$", "", name).split(".")[-1]
    return f"layer {layer[1]}" if layer else module


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
    """Counts the characters of a text without spaces, accents and case, which tokenizers may drop."""
    return Counter("".join(fold_to_ascii(c)[0] or c for c in text.lower() if not c.isspace()))


def ends_of_completions(x):
    """Neither max_new_tokens nor a stop sequence cuts the records' own completions."""
    if not isinstance(x.data, PromptConsumer):
        return None
    own = [str(record["completion"]) for record in x.data.records["train"][:1000] if record.get("completion")]
    if not own:
        return None
    for stop in x.config.stop_sequences if x.config.environment is None else ():  # in an environment they end turns
        cut = [text for text in own if text.partition(stop)[2].strip()]
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
    if not 0 < total < inf:
        return False, f"The gradient is {total:g}, so nothing is learned.", (
            "if it is 0, let the completions of a group get different rewards and see that tokens are in the loss "
            "(mask_truncated=True leaves cut completions out); if it is not finite, set dtype='float32'")
    dead = [part for part, size in x.gradient.items() if size == 0]
    if dead:
        return False, f"The gradient is 0 in {', '.join(dead)}.", "load the model without freezing these weights"
    return True, f"The gradient reaches all parts of the model, most {max(x.gradient, key=x.gradient.get)}.", ""


def equal_starts(x):
    """Environments of a group start in the same state: given the same texts, they answer the same."""
    if x.config.environment is None:
        return None
    P = len(x.problems["number"])
    twins = {key: column.repeat(2, axis=0) for key, column in x.problems.items()}  # twins have equal noise
    settings = x.config.varied(group_size=1, sample_rows=2 * P)
    rollouts = x.models.policy.sample(twins, 0, settings)
    unlike = sum(not alike(rollouts, n) for n in range(0, 2 * P, 2))
    if unlike:
        return False, (f"In {unlike} of {P} problems two environments heard the same texts and gave other answers or "
                       "rewards: the completions of a group do not start in one state."), (
            "draw what is random from random.Random(seed), with the seed that __init__ gets, and let an episode change "
            "nothing outside of its own environment")
    return True, f"Two environments of a problem that hear the same texts answer the same, in {P} of {P} problems.", ""


def alike(rollouts, n):
    """True if the environments of completions n and n + 1 answered the same, as long as they were told the same."""
    rewards = rollouts.texts.columns[TURNS]
    target = rollouts.target[n : n + 2]
    mask = rollouts.mask[n : n + 2]
    other = ((target[0] != target[1]) | (mask[0] != mask[1])).nonzero().flatten()
    if len(other):  # rounding may make the policy itself sample another token
        return bool(mask[:, other[0]].all())
    return rewards[n] == rewards[n + 1]


def values_in_range(x, name):
    """A reward stays within its declared range. The sum over an episode may be any number."""
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
    """A verifier accepts the records' own completions or answers."""
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
            given = f"{max(values):g} for {one_line(texts[0], 50, repr)}"
            return False, f"{name} does not find the answer of {record['where']} right: it gives {given}.", (
                "correct the records or the reward: now no completion of this problem can be right")
        tried += bool(values)
    return (True, f"{name} finds the records' own answers right: {tried} were tried.", "") if tried else None


def empty_completions(x, name):
    """A verifier rejects an empty completion."""
    found = [value_or_error(x, name, record, x.data.format.response_prefix) for record in verified_records(x, name)]
    errors = [value for value in found if isinstance(value, str)]
    if errors:
        return False, f"{name} fails on an empty completion: {errors[0]}.", (
            "return 0 or None there: a model samples such completions, and the run would stop")
    most = max((value for value in found if value is not None), default=-inf)
    if most >= REWARDS[name].high - 1e-6:
        return False, f"{name} gives its highest value, {most:g}, for an empty completion.", (
            "correct the reward or the records: the model would learn to write nothing")
    return (True, f"{name} gives {most:.3g} at most for an empty completion.", "") if found else None


def wrong_answers(x, name):
    """A verifier gives wrong answers less than the right one, in the form in which that gets most."""
    records = [record for record in verified_records(x, name) if record.get("answer") not in (None, "")]
    answers = [str(record["answer"]) for record in records]
    if len(set(answers)) < 2:
        return None
    accepted, asked, high = Counter(), 0, REWARDS[name].high
    for record, own in zip(records, answers, strict=True):
        def value(text):
            found = value_or_error(x, name, record, as_written(x, text))
            return found if isinstance(found, float) else -inf  # of an error, or skipped

        form = max(usual_forms(record), key=lambda form: value(form % own))
        right = value(form % own)
        if right < high - 1e-6 if isfinite(high) else right <= value(""):
            continue
        asked += 1
        other = next(answer for answer in answers if answer != own)
        for what, texts in (WRONG | ODD).items():
            texts = [form % text.format(X=own, Y=other, prompt=record["text"]) for text in texts]
            accepted[what] += all(value(text) >= right for text in texts)
    found = [what for what in accepted if accepted[what] > asked / 2]  # a few may be right by chance
    return not WRONG.keys() & set(found), (
        f"{name} accepts {', '.join(found) or 'no wrong answer'}: X is right, Y another record's answer; {asked} were "
        "tried."), "compare the answer as a whole: a model would name several, or repeat the prompt"


def usual_forms(record):
    """FORMS and more with a place, %s, for an answer: the record's own completion too, if its answer is in it."""
    before, found, after = str(record.get("completion", "")).rpartition(str(record["answer"]))
    own = [before.replace("%", "%%") + "%s" + after.replace("%", "%%")] if found else []
    return [*FORMS, "#### %s", *own]


def verified_records(x, name):
    """The first training records, if the reward is a verifier: its value depends on fields of the record."""
    if not isinstance(x.data, PromptConsumer) or {"texts", "judge_model", "reward_scorer"} & REWARDS[name].settings:
        return []
    records = x.data.records["train"][:RECORDS]
    text = next(iter(right_completions(x, name, records[0])), "1")
    without = {key: records[0][key] for key in ("prompt", "text")}
    alike = value_or_error(x, name, records[0], text) == value_or_error(x, name, without, text)
    return [] if alike and REWARDS[name].check is None else records


def right_completions(x, name, record):
    """A record's own completion or, for our rewards, its answer in all FORMS."""
    texts = []
    if record.get("completion") is not None:
        texts = [str(record["completion"])]
    elif record.get("answer") is not None and REWARDS[name].fn.__module__.startswith("grpo."):
        texts = [form % record["answer"] for form in FORMS]
    return [as_written(x, text) for text in texts]


def as_written(x, text):
    """A text as rewards get completions: cut before the first stop sequence (core/generation.py: Stop.text)."""
    stops = "|".join(map(re.escape, x.config.stop_sequences)) or "(?!)"
    return x.data.format.response_prefix + re.split(stops, text, maxsplit=1)[0]


def value_or_error(x, name, record, text):
    """The value that a reward gives a completion, None if it skips it, or the text of its error."""
    prompts, columns = as_columns([record])
    texts = SimpleNamespace(prompts=prompts, completions=[text], columns=columns,
                            completion_ids=[x.data.tokenizer.encode(text)])
    try:
        value = x.rewards.score(texts, 1, [name])[0][name].item()
    except ValueError as error:  # user functions raise it too (core/settings/user_code.py)
        return str(error)
    return None if isnan(value) else value


def judge_on_true_texts(x):
    """The judge prefers true texts to those that the generator filled in."""
    if isinstance(x.data, PromptConsumer) or x.models.judge is None:
        return None
    target = torch.from_numpy(x.problems["target"])
    true = float(x.models.judge.scores(SimpleNamespace(tokens=list(target))).mean())
    filled = float(x.models.judge.scores(x.rollouts.texts).mean())
    return true > filled, f"The judge gives {true:.3f} for the true texts and {filled:.3f} for filled ones.", (
        "take a judge that was trained on texts of this kind")


CHECKS = {"prompt": lost_characters, "end": ends_of_completions, "gradient": gradient, "judge": judge_on_true_texts,
          "equal starts": equal_starts}
OF_EACH_REWARD = {"range": values_in_range, "right answers": own_answers, "wrong answers": wrong_answers,
                  "empty completion": empty_completions}


def check_up(config, models, rewards, data, dist):
    """Takes one step of a run in memory and checks it. Returns (whether nothing is wrong, lines to print)."""
    try:
        x = examine(config, models, rewards, data, dist)
        found = [(title, check(x)) for title, check in CHECKS.items()]
        for name in rewards.names:
            found += [(title, check(x, name)) for title, check in OF_EACH_REWARD.items()]
    finally:
        rewards.close()
    found = [(title, result) for title, result in found if result is not None]
    wrong = sum(not fine for _, (fine, *_) in found)
    size = f"{x.rollouts.problems} problems x {x.rollouts.group_size} completions"
    start = f"doctor: one step of this run on {size}, in memory; out_dir stays as it is"
    end = "nothing is wrong: start the run without doctor=True"
    if wrong:
        end = f"{wrong} of {len(found)} checks found something wrong: change what the arrows say, and ask again"
    return not wrong, ["", start, "", *page(found), "", end]


def page(found):
    """The lines of the page: a sentence for each check, and a remedy if it found something."""
    lines = []
    for title, (fine, sentence, remedy) in found:
        text = sentence if fine else f"{sentence} -> {remedy}"
        start = f"  {'fine' if fine else 'WRONG':<6} {title:<16}  "
        lines += textwrap.wrap(text, 120, initial_indent=start, subsequent_indent=" " * len(start))
    return lines
