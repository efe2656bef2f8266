"""--doctor=True: takes one step of the user's own run and checks what no metric shows.

A check takes a DoctorStep and, if it is about a reward, the name of the reward. It returns the fault and its remedy; ""
if there is none; None if it does not apply. Its docstring is shown if there is no fault.
"""

import re
import sys
import textwrap
import time
from collections import Counter
from dataclasses import dataclass
from math import inf, isfinite, isnan, prod
from types import SimpleNamespace

import torch

from core.errors import Mistake, is_own_function, one_line
from core.generation import Stop
from core.logger import console_width, fitted
from core.prompts import as_columns, as_messages, plain, prefill
from core.records import answer_texts
from core.tokenizer import fold_to_ascii
from grpo.environments import Episode
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import REWARDS
from grpo.plan import size_of_evaluation, sizes
from grpo.sampling_settings import SamplingSettings

try:
    import resource
except ImportError:  # Windows
    resource = None

MOST_PROBLEMS = 16  # of the step
MOST_RECORDS = 8    # training records on which a verifier is tried
# Forms of an answer that a reward may expect: the texts before and after it
FORMS = (
    ("", ""),
    ("...<end_working_out><SOLUTION>", "</SOLUTION>"),
    ("", "</SOLUTION>"),
    ("\\boxed{", "}"),
    ("```python\n", "\n```"),
    ("#### ", ""))
# Wrong answers to a record with the answer X; Y is the answer of another record. A kind counts as accepted if all its
# texts are accepted
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
    """Takes the first optimizer step of a run on at most MOST_PROBLEMS problems. Returns its DoctorStep.

    Changes no weight and no file.
    """
    if dist.world > 1:
        raise Mistake(f"doctor=True examines a step in one process, not in {dist.world}: start it without torchrun")
    c = config.varied(
        batch_size=min(MOST_PROBLEMS, config.batch_size),
        gradient_accumulation_steps=1,
        ppo_epochs=1,
        minibatches=1,
        grad_clip=0.0)
    rounds = []
    models.policy.model.zero_grad()

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


def time_and_memory(x, seconds, device):
    """Yields lines about the seconds and the memory of the step, and about the time of the whole run."""
    yield f"the step took {seconds:.3g} s; a step of the run has {x.config.problems} problems"
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated() / 2**30
        yield f"peak memory of the GPU: {most:.3g} GiB, without the optimizer's state"
    elif resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 2**30 if sys.platform == "darwin" else 2**20
        yield f"peak memory of this process: {used / unit:.3g} GiB, without the optimizer's state"
    of_steps, evaluations = sizes(x.config, 1)
    evaluated = evaluations * prod(size_of_evaluation(x.config, x.data, x.rewards))
    minutes = seconds / len(x.rollouts.target) * (of_steps * x.config.ppo_epochs + evaluated) / 60
    yield (f"at this speed per completion the whole run takes up to about {minutes:.1f} min in one process: "
           f"{of_steps:,} completions in {x.config.max_iters} steps and {evaluated:,} in evaluations")


def gradient_norms(model):
    """{layer, or module outside the layers: norm of its gradient}. With an adapter only its own weights count."""
    squares = Counter()
    parameters = dict(model.named_parameters())
    has_adapter = any("lora_" in name for name in parameters)
    for name, p in parameters.items():
        if has_adapter and not p.requires_grad:
            continue
        part, _, _ = name.rpartition(".")
        layer = re.match(r".*?\.\d+(?=\.)", name)  # up to the first number
        if layer:
            part = layer[0]
        square = 0.0
        if p.grad is not None:
            square = float(p.grad.float().square().sum())
        squares[part] += square
    return {part: square**0.5 for part, square in squares.items()}


def lost_characters(x):
    """The tokenizer can represent the prompts."""
    if not x.data.has_prompts:
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
    """Counter of the characters of a text without spaces, accents and case, which tokenizers may drop."""
    counts = Counter()
    for character in text.lower():
        if not character.isspace():
            letters, _, _ = fold_to_ascii(character)
            counts.update(letters or character)
    return counts


def ends_of_completions(x):
    """Neither max_new_tokens nor a stop sequence cuts the records' own completions."""
    if not x.data.has_prompts:
        return None
    own = []
    for record in x.data.records["train"][:1000]:
        if record.get("completion"):
            own.append(str(record["completion"]))
    if not own:
        return None
    stops = x.config.stop_sequences
    if x.config.environment is not None:
        stops = ()  # they end turns, and a completion may have several turns
    for stop in stops:
        cut = 0
        for text in own:
            _, _, after = text.partition(stop)
            cut += after.strip() != ""
        if cut:
            return (f"The text {stop!r} occurs in {cut / len(own):.0%} of the records' completions -> leave {stop!r} "
                    "out of stop_sequences: it ends a correct completion too early")
    lengths = [len(x.data.tokenizer.encode(text)) for text in own]
    lengths.sort()
    needed = lengths[int(0.95 * len(lengths))] + 1  # with the stop token
    limit = x.config.max_new_tokens
    if needed <= limit:
        return ""
    return (f"More than 5% of the records' completions are longer than max_new_tokens={limit} -> set "
            f"max_new_tokens={needed}, which is enough for 95% of them")


def gradient(x):
    """The loss has a gradient, and it reaches every part of the model."""
    total = sum(x.gradient.values())
    if not 0 < total < inf:
        return (f"The gradient is {total:g}, so nothing is learned -> if it is 0, make sure that the completions of "
                "a group get different rewards and that their tokens are in the loss (mask_truncated=True leaves out "
                "completions that were cut off); if it is not finite, set dtype='float32'")
    dead = [part for part, size in x.gradient.items() if size == 0]
    if not dead:
        return ""
    return f"The gradient is 0 in {', '.join(dead)} -> load the model without freezing these weights"


def judge_on_true_texts(x):
    """The judge gives true texts higher scores than texts that the generator filled in."""
    if x.data.has_prompts or x.models.judge is None:
        return None
    target = torch.from_numpy(x.problems["target"])
    texts = SimpleNamespace(tokens=list(target))
    true = x.models.judge.scores(texts).mean()
    filled = x.models.judge.scores(x.rollouts.texts).mean()
    if true > filled:
        return ""
    return (f"The judge gives {true:.3f} for the true texts and {filled:.3f} for filled ones -> use a judge that was "
            "trained on texts of this kind")


def equal_starts(x):
    """Environments of the same problem give the same answers to the same texts."""
    if x.config.environment is None:
        return None
    records = x.problems["record"]
    texts = x.rollouts.texts.completions[: x.config.max_turns]
    different = 0
    for seed, record in enumerate(records):
        first = answers_to(x.config, seed, record, texts)
        second = answers_to(x.config, seed, record, texts)
        different += first != second
    if not different:
        return ""
    return (f"In {different} of {len(records)} problems two environments got the same texts and gave different answers "
            "or rewards, so the completions of a group do not start in the same state -> draw random values from "
            "random.Random(seed), with the seed that __init__ gets, and let an episode change nothing outside its "
            "environment")


def answers_to(config, seed, record, texts):
    """The answers of a new environment to these texts, and the reward after each."""
    episode = Episode(config)
    episode.begin(seed, record)
    answers, rewards = [], []
    for text in texts:
        answers.append(episode.step(text))
        rewards.append(episode.reward)
    episode.close()
    return answers, rewards


def own_answers(x, name):
    """A verifier gives the records' own answers its highest value."""
    high = REWARDS[name].high
    if not isfinite(high):
        return None
    fault = None
    for record in verified_records(x, name):
        texts = correct_completions(name, record)
        values = [value_of(x, name, record, text) for text in texts]
        highest = max(values, default=-inf)
        if highest == -inf:
            continue
        fault = ""
        if highest < high - 1e-6:
            given = f"{highest:g} for {one_line(texts[0], 50, repr)}"
            return (f"{name} does not accept the answer of {record['where']}: it gives {given} -> correct the records "
                    "or the reward: as it is, no completion of this problem can be correct")
    return fault


def wrong_answers(x, name):
    """A verifier gives wrong answers a lower value than the correct one, all in the form that it values most."""
    high = REWARDS[name].high
    records, answers = [], []
    for record in verified_records(x, name):
        if record.get("answer") not in (None, ""):
            texts = answer_texts(record["answer"])
            if texts:
                records.append(record)
                answers.append(texts)
    tried = 0
    accepted = Counter()  # {kind of wrong answer: number of records}
    for record, own in zip(records, answers, strict=True):
        of_others = [first for first, *_ in answers if first not in own]
        if not of_others:
            continue
        before, after = best_form(x, name, record, own[0])
        highest = value_of(x, name, record, before + own[0] + after)
        of_nothing = value_of(x, name, record, "")
        is_accepted = highest > of_nothing
        if isfinite(high):
            is_accepted = highest >= high - 1e-6
        if not is_accepted:
            continue
        tried += 1
        accepted["an empty completion"] += of_nothing >= highest
        for kind, patterns in WRONG.items():
            values = []
            for pattern in patterns:
                wrong = pattern.format(X=own[0], Y=of_others[0], prompt=record["text"])
                values.append(value_of(x, name, record, before + wrong + after))
            accepted[kind] += min(values) >= highest
    if not tried:
        return None
    found = [kind for kind, times in accepted.items() if times > tried / 2]  # a few may be correct by chance
    if not found:
        return ""
    return (f"{name} accepts {', '.join(found)}: X is correct, Y another record's answer -> compare whole "
            "answers: otherwise a model learns to list several, repeat the prompt, or write nothing")


def best_form(x, name, record, answer):
    """The texts to put before and after an answer so that a reward values it most."""
    forms = list(FORMS)
    before, found, after = str(record.get("completion", "")).rpartition(answer)
    if found:
        forms.append((before, after))
    values = [value_of(x, name, record, before + answer + after) for before, after in forms]
    return forms[values.index(max(values))]


def verified_records(x, name):
    """The first training records for a verifier, a reward that needs fields of a record; none for another reward."""
    if not x.data.has_prompts or not REWARDS[name].fields:
        return []
    return x.data.records["train"][:MOST_RECORDS]


def correct_completions(name, record):
    """A record's own completion or, for our rewards, its answer in all FORMS."""
    if record.get("completion") is not None:
        return [str(record["completion"])]
    texts = []
    if record.get("answer") is not None and is_own_function(REWARDS[name].fn):
        for answer in answer_texts(record["answer"]):
            texts += [before + answer + after for before, after in FORMS]
    return texts


def value_of(x, name, record, text):
    """The value of a reward for a text as the completion of a record's prompt; -inf if the reward skips it.

    The reward gets the text as it gets a completion in training: after the prompt's prefill, with at most
    max_new_tokens of the model's tokens, and cut before the first stop sequence.
    """
    tokenizer = x.data.tokenizer
    stop = Stop(tokenizer, x.config.stop_sequences, x.data.format.response_prefix)
    ids = tokenizer.encode(text)[: x.config.max_new_tokens]
    completion = prefill(record["prompt"]) + stop.text(ids)
    prompts, columns = as_columns([record])
    texts = SimpleNamespace(
        prompts=prompts,
        completions=[completion],
        completion_ids=[tokenizer.encode(completion)],
        columns=columns)
    scored, _ = x.rewards.score(texts, 1, [name])
    value = scored[name].item()
    return -inf if isnan(value) else value


CHECKS = {
    "prompt": lost_characters,
    "end": ends_of_completions,
    "gradient": gradient,
    "judge": judge_on_true_texts,
    "equal starts": equal_starts}
OF_EACH_REWARD = {"correct answers": own_answers, "wrong answers": wrong_answers}


def check_up(config, models, rewards, data, dist, holds):
    """Takes one step of a run in memory and checks it. Returns True if nothing is wrong, and lines to print.

    holds: the content of the run's buffer, in words
    """
    findings = []
    try:
        examine(config, models, rewards, data, dist)  # the first step of a process is slower than the others
        since = time.monotonic()
        x = examine(config, models, rewards, data, dist)
        seconds = time.monotonic() - since
        for title, check in CHECKS.items():
            findings.append((title, check.__doc__, check(x)))
        for name in rewards.names:
            for title, check in OF_EACH_REWARD.items():
                findings.append((title, f"{name}: {check.__doc__}", check(x, name)))
    finally:
        rewards.close()
    size = f"{x.rollouts.problems} problems x {x.rollouts.group_size} completions"
    lines = [
        "",
        f"doctor: one step of this run on {size}, in memory; out_dir is not changed",
        f"buffer of the run: {holds}",
        *time_and_memory(x, seconds, dist.device),
        ""]
    lines = [fitted(line) for line in lines]
    healthy = True
    for title, claim, fault in findings:
        if fault is None:
            continue
        word = "fine"
        if fault:
            word = "WRONG"
            healthy = False
        start = f"  {word:<6} {title:<16}  "
        indent = " " * len(start)
        lines += textwrap.wrap(fault or claim, console_width(), initial_indent=start, subsequent_indent=indent)
    end = "make the changes after the arrows, then run the doctor again"
    if healthy:
        end = "nothing is wrong: start the run without doctor=True"
    return healthy, [*lines, "", end]
