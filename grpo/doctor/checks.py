"""--doctor=True: takes one step of the user's own run and checks what no metric shows.

A check takes a DoctorStep, and the name of a reward if it is about one. It returns the fault and its remedy; "" if
there is none; None where it does not apply. Its docstring is shown where there is no fault.
"""

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from math import inf, isfinite, isnan
from types import SimpleNamespace

import torch

from core.errors import Mistake, is_own_function, one_line
from core.generation import Stop
from core.prompts import PromptConsumer, as_columns, as_messages, plain, prefill
from core.records import answer_texts
from core.tokenizer import fold_to_ascii
from grpo.environments import Episode
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import REWARDS
from grpo.sampling_settings import SamplingSettings

MOST = 16    # problems of the step
RECORDS = 8  # training records that each verifier is tried on
# Texts before and after an answer in the forms in which a reward may expect it
FORMS = (
    ("", ""),
    ("...<end_working_out><SOLUTION>", "</SOLUTION>"),
    ("", "</SOLUTION>"),
    ("\\boxed{", "}"),
    ("```python\n", "\n```"),
    ("#### ", ""))
# Wrong answers: X is the answer of a record, Y that of another one. A verifier must not accept all of a row
WRONG = {
    "Y": ("{Y}",),
    "both 'X or Y' and 'Y or X'": ("{X} or {Y}", "{Y} or {X}"),
    "the prompt": ("{prompt}",)}


@dataclass
class DoctorStep:
    """The step that the checks read."""
    config: object
    models: object             # policy, reference, judge, gold_judge (grpo/build.py: Models)
    rewards: object
    data: object
    problems: dict             # columns of the problems
    rollouts: object           # Rollouts, with their texts
    gradient: dict             # {part of the model: norm}


def examine(config, models, rewards, data, dist):
    """The DoctorStep of the first optimizer step of a run, on at most MOST problems. Changes no weight and no file."""
    if dist.world > 1:
        raise Mistake(f"doctor=True examines a step in one process, not in {dist.world}: start it without torchrun")
    c = config.varied(
        batch_size=min(MOST, config.batch_size),
        gradient_accumulation_steps=1,
        ppo_epochs=1,
        minibatches=1,
        grad_clip=0.0)
    rounds = []

    def problems(again):
        columns = data.problems("train", 0, again)
        return {key: x[: c.batch_size] for key, x in columns.items()}

    def sample(problems, again):
        rollouts = models.policy.sample(problems, 0, SamplingSettings.of(c))
        rounds.append(rollouts)
        return rollouts, {}

    # Without an optimizer the gradient of the step stays in the model
    grpo_training_step(models.policy, models.reference, rewards, problems, [], 0, c, dist, sample=sample)
    gradient = gradient_norms(models.policy.model)
    return DoctorStep(config, models, rewards, data, problems(0), rounds[0], gradient)


def gradient_norms(model):
    """{layer, or module outside the layers: norm of its gradient}. With an adapter only its own weights count."""
    squares = Counter()
    has_adapter = any("lora_" in name for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        if has_adapter and not p.requires_grad:
            continue
        layer = re.match(r".*?\.\d+(?=\.)", name)  # up to the first number
        part = layer[0] if layer else name.rpartition(".")[0]
        square = 0.0
        if p.grad is not None:
            square = float(p.grad.float().square().sum())
        squares[part] += square
    return {part: square**0.5 for part, square in squares.items()}


def lost_characters(x):
    """The tokenizer can write the prompts."""
    if not isinstance(x.data, PromptConsumer):
        return None
    tokenizer = x.data.tokenizer
    records = x.data.records["train"][:100]
    text = "\n".join(plain(as_messages(record["prompt"])) for record in records)
    written = characters(text)
    lost = written - characters(tokenizer.decode(tokenizer.encode(text)))
    share = lost.total() / max(1, written.total())
    if share <= 1e-3:
        return ""
    examples = ", ".join(repr(character) for character, _ in lost.most_common(5))
    return (f"{share:.0%} of the characters in the prompts have no tokens, such as {examples} -> use a model whose "
            "tokenizer knows them, or write the prompts without them")


def characters(text):
    """Counts the characters of a text without spaces, accents and case, which tokenizers may drop."""
    counts = Counter()
    for character in text.lower():
        if not character.isspace():
            letters, _, _ = fold_to_ascii(character)
            counts.update(letters or character)
    return counts


def ends_of_completions(x):
    """Neither max_new_tokens nor a stop sequence cuts the records' own completions."""
    if not isinstance(x.data, PromptConsumer):
        return None
    own = []
    for record in x.data.records["train"][:1000]:
        if record.get("completion"):
            own.append(str(record["completion"]))
    if not own:
        return None
    if x.config.environment is None:  # in an environment stop sequences end turns
        for stop in x.config.stop_sequences:
            cut = [text for text in own if text.partition(stop)[2].strip()]
            if cut:
                return (f"The text {stop!r} is inside {len(cut) / len(own):.0%} of the records' completions -> leave "
                        f"{stop!r} out of stop_sequences: it ends a correct completion too early")
    most = x.config.max_new_tokens
    lengths = sorted(len(x.data.tokenizer.encode(text)) for text in own)
    enough = lengths[int(0.95 * len(lengths))] + 1  # with the stop token
    if enough <= most:
        return ""
    return (f"More than 5% of the records' completions are longer than max_new_tokens={most} -> set "
            f"max_new_tokens={enough}, which is enough for 95% of them")


def gradient(x):
    """The loss has a gradient, and it reaches every part of the model."""
    total = sum(x.gradient.values())
    if not 0 < total < inf:
        return (f"The gradient is {total:g}, so nothing is learned -> if it is 0, let the completions of a group get "
                "different rewards and see that tokens are in the loss (mask_truncated=True leaves cut completions "
                "out); if it is not finite, set dtype='float32'")
    dead = [part for part, size in x.gradient.items() if size == 0]
    if not dead:
        return ""
    return f"The gradient is 0 in {', '.join(dead)} -> load the model without freezing these weights"


def judge_on_true_texts(x):
    """The judge prefers true texts to those that the generator filled in."""
    if isinstance(x.data, PromptConsumer) or x.models.judge is None:
        return None
    target = torch.from_numpy(x.problems["target"])
    texts = SimpleNamespace(tokens=list(target))
    true = x.models.judge.scores(texts).mean()
    filled = x.models.judge.scores(x.rollouts.texts).mean()
    if true > filled:
        return ""
    return (f"The judge gives {true:.3f} for the true texts and {filled:.3f} for filled ones -> take a judge that was "
            "trained on texts of this kind")


def equal_starts(x):
    """Two environments of a problem that get the same texts give the same answers."""
    if x.config.environment is None:
        return None
    records = x.problems["record"]
    texts = x.rollouts.texts.completions[: x.config.max_turns]
    unlike = 0
    for seed, record in enumerate(records):
        answers = answers_to(x.config, seed, record, texts)
        unlike += answers != answers_to(x.config, seed, record, texts)
    if not unlike:
        return ""
    return (f"In {unlike} of {len(records)} problems two environments got the same texts and gave other answers or "
            "rewards: the completions of a group do not start in one state -> draw what is random from "
            "random.Random(seed), with the seed that __init__ gets, and let an episode change nothing outside of its "
            "own environment")


def answers_to(config, seed, record, texts):
    """The answers of a new environment to these texts, each with the reward so far."""
    episode = Episode(config)
    episode.begin(seed, record)
    turns = []
    for text in texts:
        answer = episode.step(text)
        turns.append((answer, episode.reward))
    episode.close()
    return turns


def own_answers(x, name):
    """A verifier gives the records' own answers its highest value."""
    high = REWARDS[name].high
    if not isfinite(high):
        return None
    verdict = None
    for record in verified_records(x, name):
        texts = correct_completions(name, record)
        values = values_of(x, name, record, texts) if texts else []
        if not values:
            continue
        verdict = ""
        if max(values) < high - 1e-6:
            given = f"{max(values):g} for {one_line(texts[0], 50, repr)}"
            return (f"{name} does not accept the answer of {record['where']}: it gives {given} -> correct the records "
                    "or the reward: now no completion of this problem can be correct")
    return verdict


def wrong_answers(x, name):
    """A verifier gives wrong answers less than the correct one, in the form in which that gets most."""
    high = REWARDS[name].high
    records = []
    for record in verified_records(x, name):
        if record.get("answer") not in (None, "") and answer_texts(record["answer"]):
            records.append(record)
    answers = [answer_texts(record["answer"]) for record in records]
    asked = 0
    accepted = Counter()
    for record, own in zip(records, answers, strict=True):
        others = [first for first, *_ in answers if first not in own]
        if not others:
            continue
        correct, other = own[0], others[0]

        def value(text):
            return max(values_of(x, name, record, [text]), default=-inf)

        forms = list(FORMS)
        before, found, after = str(record.get("completion", "")).rpartition(correct)
        if found:
            forms.append((before, after))
        values = [value(before + correct + after) for before, after in forms]
        highest = max(values)
        before, after = forms[values.index(highest)]
        of_nothing = value("")
        is_accepted = highest >= high - 1e-6 if isfinite(high) else highest > of_nothing
        if not is_accepted:
            continue
        asked += 1
        accepted["an empty completion"] += of_nothing >= highest
        for kind, patterns in WRONG.items():
            texts = [pattern.format(X=correct, Y=other, prompt=record["text"]) for pattern in patterns]
            accepted[kind] += all(value(before + text + after) >= highest for text in texts)
    if not asked:
        return None
    found = [kind for kind, times in accepted.items() if times > asked / 2]  # a few may be correct by chance
    if not found:
        return ""
    return (f"{name} accepts {', '.join(found)}: X is correct, Y another record's answer -> compare the answer as a "
            "whole: a model would name several, repeat the prompt, or write nothing")


def verified_records(x, name):
    """The first training records, if the reward is a verifier, which needs fields of a record; else none."""
    if not isinstance(x.data, PromptConsumer) or not REWARDS[name].fields:
        return []
    return x.data.records["train"][:RECORDS]


def correct_completions(name, record):
    """A record's own completion or, for our rewards, its answer in all FORMS."""
    if record.get("completion") is not None:
        return [str(record["completion"])]
    texts = []
    if record.get("answer") is not None and is_own_function(REWARDS[name].fn):
        for answer in answer_texts(record["answer"]):
            texts += [before + answer + after for before, after in FORMS]
    return texts


def values_of(x, name, record, texts):
    """The values that a reward gives a model that writes these texts after a record, without those that it skips.

    The reward gets each as it gets a completion of training: with the beginning that the prompt has, in tokens of the
    model, at most max_new_tokens, and cut before the first stop sequence.
    """
    tokenizer = x.data.tokenizer
    stop = Stop(tokenizer, x.config.stop_sequences, x.data.format.response_prefix)
    completions = []
    for text in texts:
        ids = tokenizer.encode(text)[: x.config.max_new_tokens]
        completions.append(prefill(record["prompt"]) + stop.text(ids))
    prompts, columns = as_columns([record] * len(texts))
    written = SimpleNamespace(prompts=prompts, completions=completions, columns=columns)
    written.completion_ids = [tokenizer.encode(completion) for completion in completions]
    scored, _ = x.rewards.score(written, 1, [name])
    return [value for value in scored[name].tolist() if not isnan(value)]


CHECKS = {
    "prompt": lost_characters,
    "end": ends_of_completions,
    "gradient": gradient,
    "judge": judge_on_true_texts,
    "equal starts": equal_starts}
OF_EACH_REWARD = {"right answers": own_answers, "wrong answers": wrong_answers}


def check_up(config, models, rewards, data, dist, holds):
    """Takes one step of a run in memory and checks it. Returns (whether nothing is wrong, lines to print).
    holds: the content of the run's buffer, in words"""
    found = []
    try:
        x = examine(config, models, rewards, data, dist)
        for title, check in CHECKS.items():
            found.append((title, check.__doc__, check(x)))
        for name in rewards.names:
            for title, check in OF_EACH_REWARD.items():
                found.append((title, f"{name}: {check.__doc__}", check(x, name)))
    finally:
        rewards.close()
    size = f"{x.rollouts.problems} problems x {x.rollouts.group_size} completions"
    lines = ["", f"doctor: one step of this run on {size}, in memory; out_dir stays as it is",
             f"buffer of the run: {holds}", ""]
    healthy = True
    for title, claim, fault in found:
        if fault is None:
            continue
        word = "fine"
        if fault:
            word = "WRONG"
            healthy = False
        start = f"  {word:<6} {title:<16}  "
        indent = " " * len(start)
        lines += textwrap.wrap(fault or claim, 120, initial_indent=start, subsequent_indent=indent)
    end = "change what the arrows say, and ask again"
    if healthy:
        end = "nothing is wrong: start the run without doctor=True"
    return healthy, [*lines, "", end]
