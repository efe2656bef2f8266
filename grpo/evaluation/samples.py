"""The parts that evaluations share: means over fixed problems, and samples for people."""

import json
import math
import os
import textwrap
from functools import partial

import numpy as np
import torch

from core.files import SAMPLES, writing
from core.logger import DIM, GREEN, PLAIN, console_width, format_number, visible
from grpo.losses import kl_per_token
from grpo.metrics import reward_statistics
from grpo.reference import with_reference
from grpo.rewards import Rewards
from grpo.rollout import TURNS, join
from grpo.sums import taken
from grpo.sampling_settings import SamplingSettings

SHOWN = 3  # problems of an evaluation that are shown as samples
BINS = 12  # bars of a histogram
LARGEST = 1e12  # in a histogram: beyond some 1e15, equal numbers have no bars that differ


class Evaluation:
    """An evaluation on fixed problems with fixed noise, so that two policies are compared on the same draws.

    The subclass for a kind of generator adds
        columns: the metrics of a line of the console
        batches: [(step of the noise, problems)]
        sums(policy, step, batch, rollouts, values, config): {metric: (sum, count)} of a batch, or those of each
            problem, (P,) each, so that the metric has a standard error
            values: {name of a reward: (N,)}
    """

    def __init__(self, reference, rewards, config, dist):
        """rewards: a Rewards or None; config: for evaluation; dist: the ranks, which share the problems"""
        self.reference = reference
        self.rewards = rewards
        self.config = config
        self.dist = dist
        self.doing = str  # called with a text about what is being done; the trainer's shows it

    @torch.no_grad()
    def __call__(self, policy, temperature):
        """Returns {metric: mean over all completions of all problems} and samples to show. The first sample also has
        the "standard_errors" of metrics, and "histograms" of rewards and lengths of all completions.

        The ranks share the problems. The sums are added in the order of the problems: with at least as many batches as
        ranks, the number of ranks changes no mean. Raises Mistake if a reward logs a metric under the name of a
        held-out metric.
        """
        config = self.config.varied(temperature=temperature)
        parts = list(enumerate(self.parts(), 1))

        def measure(part):
            number, (step, batch) = part
            self.doing(f"evaluating {number}/{len(parts)}")
            return self.measure(policy, config, step, batch)

        found = self.dist.map(measure, parts)
        sums, samples, by_problem, numbers = map(join, zip(*found, strict=True))
        means = {}
        for name, (total, count) in sums.items():
            if count:
                means[name] = float(total / count)
        samples[0] |= {
            "standard_errors": {name: rounded(standard_error(x)) for name, x in by_problem.items()},
            "histograms": {name: histogram(x) for name, x in numbers.items()}}
        return means, samples[:SHOWN]

    def parts(self):
        """[(step of the noise, problems)]: the batches, cut if they are fewer than the ranks. Noise belongs to a
        problem, so a cut changes only rounding."""
        batches = list(self.batches)
        pieces = math.ceil(self.dist.world / len(batches))
        parts = []
        for step, batch in batches:
            count = len(batch["number"])
            for rows in np.array_split(np.arange(count), min(pieces, count)):
                part = {key: x[rows] for key, x in batch.items()}
                parts.append((step, part))
        return parts

    def measure(self, policy, config, step, batch):
        """Returns {metric: (sum, count)} of a part, samples to show, {metric: (P, 2) sum and count of each problem},
        and {metric: (N,)} for histograms. step, batch: the step of the noise, and the problems"""
        rollouts = policy.sample(batch, step, SamplingSettings.of(config))
        texts = rollouts.texts
        judged = self.judge_scores(texts)
        names = []
        if self.rewards is not None:
            names = [name for name in self.rewards.names if name not in judged]
        values = {}
        logged = {}
        if names:
            values, logged = self.rewards.score(texts, rollouts.group_size, names)
        measured = {}
        for name, scores in judged.items():
            measured[name] = scores.sum(), len(scores)
        measured |= self.sums(policy, step, batch, rollouts, values, config)
        of_run, total = self.rewards_of_run(judged | values, rollouts)
        numbers = {}
        if of_run and config.rewarded:
            statistics = reward_statistics(rollouts.by_problem(total))
            measured |= in_numbers(statistics)
            numbers["mean_reward"] = total
        if "completion_length" in measured:
            numbers["completion_length"] = rollouts.mask.sum(1)
        of_rewards = {f"reward/{name}": x for name, x in values.items()}
        by_problem = {}
        for name, x in (judged | of_rewards | numbers).items():
            by_problem[name] = torch.stack(sum_and_count(x.view(rollouts.problems, -1)), 1)
        for name, pair in measured.items():
            if isinstance(pair[0], torch.Tensor) and pair[0].dim():
                by_problem[name] = torch.stack(pair, 1)
                measured[name] = tuple(by_problem[name].sum(0).tolist())
        clashes = logged.keys() & measured.keys()
        if clashes:
            raise taken(min(clashes))
        samples = []
        for i in range(min(rollouts.problems, SHOWN)):
            sample = sample_of(self.rewards, rollouts, i, total, of_run, partial(self.marks, batch, rollouts))
            samples.append(sample)
        return logged | measured, samples, by_problem, numbers

    def judge_scores(self, texts):
        """{name of a judge: its scores (N,)}. A judge that is also a reward of the run is called only once."""
        return {}

    def rewards_of_run(self, values, rollouts):
        """Returns {name of a reward of the run: (N,)} and their weighted sum (N,), which orders the samples.

        Without rewards the dictionary is empty, and a judge orders the samples. values: of rewards and judges
        """
        names = getattr(self.rewards, "names", ())  # a function has none
        if not names:
            unordered = torch.zeros(len(rollouts.target))
            return {}, values.get("judge", unordered)
        of_run = {name: values[name].cpu() for name in names}
        return of_run, self.rewards.total(of_run, rollouts.group_size)

    def model_sums(self, policy, rollouts, settings, every=1):
        """{metric: (sum, count)} of entropy and KL. settings: StepSettings; every: scores every n-th completion"""
        parts = []
        micro_batches = rollouts.micro_batches(settings.batch_size, settings.micro_batch_tokens)
        for problems in micro_batches:
            part, _ = rollouts.select(problems)
            part = with_reference(part, self.reference, settings)
            scores = policy.score(part, settings.temperature)
            mask = part.mask[::every]
            tokens = mask.sum()
            entropy = scores.entropy[::every] * mask
            sums = {"entropy": (entropy.sum(), tokens)}
            kl = kl_per_token(scores, part, settings.kl_estimator)
            if kl is not None:
                kl = kl[::every] * mask
                sums["kl"] = kl.sum(), tokens
            parts.append(sums)
        return join(parts)

    def marks(self, batch, rollouts, n):
        """Further keys of completion n in a sample."""
        return {}


def sample_of(rewards, rollouts, i, total, values, marks=lambda n: {}):
    """Problem i of rollouts as a record for people: its texts and, in "group", its completions from the best to the
    worst by `total` (N,).

    A completion has its text, its reward, the value of each reward, and the turns of its episode. A skipped value is
    None. values: {name of a reward: (N,)}; marks: a function of n that returns further keys of completion n
    """
    texts = rollouts.texts
    columns = texts.columns
    first = i * rollouts.group_size
    end = first + rollouts.group_size
    prompts = columns.get("prompt", texts.prompts)  # as the record has it, without the template
    sample = {"problem": last_question(prompts[first])}
    if "answer" in columns:
        sample["answer"] = columns["answer"][first]
    total = total.cpu()
    worth = total[first:end]
    worth = worth.masked_fill(worth.isnan(), -torch.inf)
    order = first + worth.argsort(descending=True, stable=True)
    has_verdict = isinstance(rewards, Rewards) and rewards.success in values
    if has_verdict:
        correct = rewards.correct(values)                                            # (N,)
    sample["group"] = []
    for n in order.tolist():
        completion = {"text": texts.completions[n], "reward": rounded(total[n])}
        if values:
            completion["rewards"] = {name: rounded(x[n]) for name, x in values.items()}
        if has_verdict and not correct[n].isnan():
            completion["right"] = bool(correct[n])
        if TURNS in columns:
            completion["turns"] = columns[TURNS][n]
        completion |= marks(n)
        sample["group"].append(completion)
    return sample


def last_question(prompt):
    """The text of a prompt; if it is messages, the text of the last message that is not the assistant's."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message["role"] != "assistant":
            return message["content"]
    return ""


def rounded(reward):
    """A reward for samples.jsonl: None if it was skipped, a text if it is infinite, for which JSON has no number."""
    if reward.isnan():
        return None
    number = round(float(reward), 4)
    return number if math.isfinite(number) else str(number)


def in_numbers(sums):
    """{metric: (sum, count)} in Python's numbers, so that their quotient is rounded to float64."""
    numbers = {}
    for name, (total, count) in sums.items():
        numbers[name] = float(total), float(count)
    return numbers


def sum_and_count(x):
    """(sum, count) of the values that are not NaN, along the last axis."""
    measured = ~x.isnan()
    return x.nansum(-1), measured.sum(-1)


def standard_error(by_problem):
    """The standard error of a mean over all numbers, if problems are drawn independently but the numbers of a problem
    are not: that of a ratio (Cochran, Sampling Techniques, section 6.3). NaN for a single problem.

    by_problem: (P, 2) sum and count of the numbers of each problem
    """
    total, count = by_problem.sum(0)
    left = by_problem[:, 0] - by_problem[:, 1] * total / count                       # (P,)
    problems = len(left)
    if problems == 1:
        return torch.tensor(math.nan)
    return left.norm() / count * math.sqrt(problems / (problems - 1))


def histogram(x):
    """The numbers of x (N,) up to LARGEST, counted in BINS equal parts from the lowest to the highest."""
    drawn = x[x.abs() < LARGEST]
    counts, edges = np.histogram(drawn.double(), BINS)
    low, *_, high = edges.tolist()
    return {"low": low, "high": high, "counts": counts.tolist()}


def reward_sums(values):
    """{metric: (sum, count)} of rewards {name: (N,)}, which are NaN where they skipped a completion."""
    return {f"reward/{name}": sum_and_count(x) for name, x in values.items()}


def format_samples(records, color, completions):
    """The lines of samples for the console. color: colours the sampled tokens; completions: number for each problem"""
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        problem = shortened(record["problem"], (), color)
        lines.append(f"  {'problem':<15} | {problem}")
        group = record["group"]
        different = [completion for completion in group if completion != group[0]]
        ends = [(f"all {len(group)}", group[0])]
        if different:
            ends = [("best", group[0]), ("worst", different[-1])]
        for title, completion in ends:
            spans = completion.get("filled", ())
            text, answers = with_answers(completion)
            text = shortened(text, spans, color, answers)
            reward = format_reward(completion["reward"])
            lines.append(f"  {title:<8}{reward:>7} | {text}")
            rewards = completion.get("rewards", {})
            if len(rewards) < 2:
                continue
            values = ", ".join(f"{name} {format_reward(x)}" for name, x in rewards.items())
            for line in textwrap.wrap(values, room()):
                lines.append(f"  {'':<15} | {line}")
    return "\n".join(lines)


def with_answers(completion):
    """The text of a completion, in which an environment's answers are in brackets, and their spans [[first, end]]."""
    text = ""
    answers = []
    for written, answer, _ in completion.get("turns", [[completion["text"], None, None]]):
        text += written
        if answer is not None:
            from core.prompts import as_messages, plain  # here: only a run with an environment needs them
            first = len(text)
            text += f" [{plain(as_messages(answer))}] "
            answers.append([first, len(text)])
    return text, answers


def format_reward(reward):
    """A reward of a sample for people."""
    return "skipped" if reward is None else format_number(float(reward))


def room():
    """Characters of a line of the console after a title."""
    return console_width() - 22


def shortened(text, spans, color, dim=()):
    """A text on one line, without its middle if it is longer than the room. spans: [[first, end]] to colour; dim: to
    dim"""
    text = text.replace("\n", "\u21b5")
    shown = list(visible(text))
    if color:
        for escape, marked in ((GREEN, spans), (DIM, dim)):
            for first, end in marked:
                shown[first:end] = [f"{escape}{c}{PLAIN}" for c in shown[first:end]]
    most = room()
    if len(shown) > most:
        half = (most - 5) // 2
        shown[half:-half] = " ... "
    return "".join(shown)


def append_samples(out_dir, step, records):
    """Adds samples to <out_dir>/samples.jsonl."""
    path = os.path.join(out_dir, SAMPLES)
    with writing(path), open(path, "a") as f:
        for record in records:
            line = json.dumps({"step": step, **record}, default=str)
            f.write(line + "\n")


def comparison_table(before, after):
    """A table of held-out metrics before and after training, one line for each metric."""
    head = "held-out", "before", "after", "change"
    rows = [head, *compared(before, after)]
    longest = max(len(name) for name, *_ in rows)
    width = max(20, longest + 1)
    lines = []
    for name, first, last, change in rows:
        lines.append(f"  {name:<{width}}{first:>9}{last:>9}{change:>9}")
    return "\n".join(lines)


def compared(before, after):
    """[(metric, before, after, change)] of held-out metrics as texts; the change is "" unless both are finite."""
    rows = []
    for name in before | after:
        first = before.get(name)
        last = after.get(name)
        change = ""
        if is_finite(first) and is_finite(last):
            change = f"{round(last - first, 4) + 0.0:+.4f}"  # no -0.0
        metric = name.removeprefix("eval/")
        row = metric, format_number(first), format_number(last), change
        rows.append(row)
    return rows


def is_finite(number):
    """True for a finite number; False for None, a metric that was not measured."""
    return number is not None and math.isfinite(number)


def held_out(record):
    """The held-out metrics of a record of metrics.jsonl."""
    return {name: x for name, x in record.items() if name.startswith("eval/")}


def evaluations(records):
    """The records that have held-out metrics, the last of each step: keep_best may evaluate a step again."""
    return list({record["step"]: record for record in records if held_out(record)}.values())
