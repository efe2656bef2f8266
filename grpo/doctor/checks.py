"""--doctor=True: takes one step of the user's own run and checks what no metric shows.

A check takes a DoctorStep, and the name of a reward if it is about one. It returns what is wrong, with a remedy; ""
where all is well; None where it does not apply. Its docstring says what is right.
"""

import re
import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from math import inf, isfinite
from types import SimpleNamespace

import torch

from core.errors import Mistake, one_line
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
FORMS = ("%s", "...<end_working_out><SOLUTION>%s</SOLUTION>", "%s</SOLUTION>", "\\boxed{%s}", "```python\n%s\n```",
         "#### %s")  # in which a reward may expect an answer
# Wrong answers: X is the answer of a record, Y that of another one. A verifier must not accept all of a row
WRONG = {"Y": ("{Y}",), "both 'X or Y' and 'Y or X'": ("{X} or {Y}", "{Y} or {X}"), "the prompt": ("{prompt}",)}


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
    c = replace(config, batch_size=min(MOST, config.batch_size), gradient_accumulation_steps=1, ppo_epochs=1,
                minibatches=1, grad_clip=0.0)

    def problems(again):
        return {key: x[: c.batch_size] for key, x in data.problems("train", 0, again).items()}

    rounds = []

    def sample(problems, again):
        rounds.append(models.policy.sample(problems, 0, SamplingSettings.of(c)))
        return rounds[-1], {}

    grpo_training_step(models.policy, models.reference, rewards, problems, [], 0, c, dist, sample=sample)
    gradient = gradient_norms(models.policy.model)  # without an optimizer it stays
    return DoctorStep(config, models, rewards, data, problems(0), rounds[0], gradient)


def gradient_norms(model):
    """{layer, or module outside the layers: norm of its gradient}. With an adapter only its own weights count."""
    squares = Counter()
    adapter = any("lora_" in name for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        if p.requires_grad or not adapter:
            layer = re.search(r"\.\d+\.", name)
            part = name[: layer.end() - 1] if layer else name.rpartition(".")[0]
            squares[part] += 0.0 if p.grad is None else float(p.grad.float().square().sum())
    return {part: square**0.5 for part, square in squares.items()}


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
        return ""
    examples = ", ".join(repr(character) for character, _ in lost.most_common(5))
    return (f"{share:.0%} of the characters in the prompts have no tokens, such as {examples} -> use a model whose "
            "tokenizer knows them, or write the prompts without them")


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
        cut = sum(bool(text.partition(stop)[2].strip()) for text in own)
        if cut:
            return (f"The text {stop!r} is inside {cut / len(own):.0%} of the records' completions -> leave {stop!r} "
                    "out of stop_sequences: it ends a right completion too early")
    most = x.config.max_new_tokens
    lengths = sorted(len(x.data.tokenizer.encode(text)) + 1 for text in own)
    enough = lengths[int(0.95 * len(lengths))]
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
    return f"The gradient is 0 in {', '.join(dead)} -> load the model without freezing these weights" if dead else ""


def judge_on_true_texts(x):
    """The judge prefers true texts to those that the generator filled in."""
    if isinstance(x.data, PromptConsumer) or x.models.judge is None:
        return None
    target = torch.from_numpy(x.problems["target"])
    true = float(x.models.judge.scores(SimpleNamespace(tokens=list(target))).mean())
    filled = float(x.models.judge.scores(x.rollouts.texts).mean())
    if true > filled:
        return ""
    return (f"The judge gives {true:.3f} for the true texts and {filled:.3f} for filled ones -> take a judge that was "
            "trained on texts of this kind")


def equal_starts(x):
    """Two environments of a problem that hear the same texts answer the same."""
    if x.config.environment is None:
        return None
    records = x.problems["record"]
    texts = x.rollouts.texts.completions[: x.config.max_turns]
    unlike = 0
    for seed, record in enumerate(records):
        one, other = (played(x.config, seed, record, texts) for _ in range(2))
        unlike += one != other
    if not unlike:
        return ""
    return (f"In {unlike} of {len(records)} problems two environments heard the same texts and gave other answers or "
            "rewards: the completions of a group do not start in one state -> draw what is random from "
            "random.Random(seed), with the seed that __init__ gets, and let an episode change nothing outside of its "
            "own environment")


def played(config, seed, record, texts):
    """The answers of an environment that hears these texts, each with the reward so far."""
    episode = Episode(config)
    episode.begin(seed, record)
    turns = []
    for text in texts:
        answer = episode.step(text)
        turns.append((answer, episode.reward))
    episode.close()
    return turns


def own_answers(x, name):
    """A verifier finds the records' own answers right."""
    if not isfinite(REWARDS[name].high):
        return None
    tried = None
    for record in verified_records(x, name):
        texts = right_completions(x, name, record)
        values = values_of(x, name, record, texts)
        if values and max(values) < REWARDS[name].high - 1e-6:
            given = f"{max(values):g} for {one_line(texts[0], 50, repr)}"
            return (f"{name} does not find the answer of {record['where']} right: it gives {given} -> correct the "
                    "records or the reward: now no completion of this problem can be right")
        tried = "" if values else tried
    return tried


def wrong_answers(x, name):
    """A verifier gives wrong answers less than the right one, in the form in which that gets most."""
    records = [record for record in verified_records(x, name)
               if record.get("answer") not in (None, "") and answer_texts(record["answer"])]
    answers = [answer_texts(record["answer"]) for record in records]
    accepted, asked, high = Counter(), 0, REWARDS[name].high
    for record, (own, *alternatives) in zip(records, answers, strict=True):
        others = [other for other, *_ in answers if other not in (own, *alternatives)]
        if not others:
            continue

        def value(text):
            return max(values_of(x, name, record, [as_written(x, record, text)]), default=-inf)

        before, found, after = str(record.get("completion", "")).replace("%", "%%").rpartition(own)
        forms = [*FORMS, f"{before}%s{after}"] if found else FORMS
        form = max(forms, key=lambda form: value(form % own))
        right = value(form % own)
        if right < high - 1e-6 if isfinite(high) else right <= value(""):
            continue
        asked += 1
        tried = {"an empty completion": [""]}
        for what, texts in WRONG.items():
            tried[what] = [form % text.format(X=own, Y=others[0], prompt=record["text"]) for text in texts]
        for what, texts in tried.items():
            accepted[what] += all(value(text) >= right for text in texts)
    if not asked:
        return None
    found = [what for what in accepted if accepted[what] > asked / 2]  # a few may be right by chance
    if not found:
        return ""
    return (f"{name} accepts {', '.join(found)}: X is right, Y another record's answer -> compare the answer as a "
            "whole: a model would name several, repeat the prompt, or write nothing")


def verified_records(x, name):
    """The first training records, if the reward is a verifier: it needs fields of a record."""
    of_prompts = isinstance(x.data, PromptConsumer)
    return x.data.records["train"][:RECORDS] if of_prompts and REWARDS[name].fields else []


def right_completions(x, name, record):
    """A record's own completion or, for our rewards, its answer in all FORMS."""
    texts = []
    if record.get("completion") is not None:
        texts = [str(record["completion"])]
    elif record.get("answer") is not None and REWARDS[name].fn.__module__.startswith("grpo."):
        texts = [form % answer for answer in answer_texts(record["answer"]) for form in FORMS]
    return [as_written(x, record, text) for text in texts]


def as_written(x, record, text):
    """A text as rewards get the completion of a model that writes it: with the beginning that the prompt has, in tokens
    of the model, at most max_new_tokens, and cut before the first stop sequence."""
    tokenizer = x.data.tokenizer
    ids = tokenizer.encode(text)[: x.config.max_new_tokens]
    stop = Stop(tokenizer, x.config.stop_sequences, x.data.format.response_prefix)
    return prefill(record["prompt"]) + stop.text(ids)


def values_of(x, name, record, texts):
    """The values that a reward gives these completions of a record, without those that it skips."""
    prompts, columns = as_columns([record])
    values = []
    for text in texts:
        completion = SimpleNamespace(prompts=prompts, completions=[text], columns=columns,
                                     completion_ids=[x.data.tokenizer.encode(text)])
        values += x.rewards.score(completion, 1, [name])[0][name].tolist()
    return [value for value in values if value == value]


CHECKS = {"prompt": lost_characters, "end": ends_of_completions, "gradient": gradient, "judge": judge_on_true_texts,
          "equal starts": equal_starts}
OF_EACH_REWARD = {"right answers": own_answers, "wrong answers": wrong_answers}


def check_up(config, models, rewards, data, dist, holds):
    """Takes one step of a run in memory and checks it. Returns (whether nothing is wrong, lines to print).
    holds: the content of the run's buffer, in words"""
    try:
        x = examine(config, models, rewards, data, dist)
        found = [(title, check.__doc__, check(x)) for title, check in CHECKS.items()]
        for name in rewards.names:
            found += [(title, f"{name}: {check.__doc__}", check(x, name)) for title, check in OF_EACH_REWARD.items()]
    finally:
        rewards.close()
    size = f"{x.rollouts.problems} problems x {x.rollouts.group_size} completions"
    lines = ["", f"doctor: one step of this run on {size}, in memory; out_dir stays as it is",
             f"buffer of the run: {holds}", ""]
    for title, right, wrong in found:
        if wrong is not None:
            start = f"  {'WRONG' if wrong else 'fine':<6} {title:<16}  "
            lines += textwrap.wrap(wrong or right, 120, initial_indent=start, subsequent_indent=" " * len(start))
    healthy = not any(wrong for *_, wrong in found)
    end = "change what the arrows say, and ask again"
    if healthy:
        end = "nothing is wrong: start the run without doctor=True"
    return healthy, [*lines, "", end]
