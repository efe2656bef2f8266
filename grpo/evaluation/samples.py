"""The parts that evaluations share: means over fixed problems, and samples for people."""

import json
import math
import os
import textwrap

import torch

from core.files import SAMPLES, writing
from core.logger import GREEN, PLAIN, WIDTH, format_number, visible
from grpo.losses import kl_per_token
from grpo.metrics import reward_statistics
from grpo.reference import with_reference
from grpo.rollout import join
from grpo.sums import taken
from grpo.sampling_settings import SamplingSettings

SHOWN = 3              # problems of an evaluation that are shown as samples
ROOM = WIDTH - 22      # characters of a text that is shown on one line, behind its title


class Evaluation:
    """Fixed problems and fixed noise, so that two policies are compared on the same draws.

    A kind of generator adds `columns` of the console line; `batches`, [(step of the noise, problems)]; and sums(policy,
    step, batch, rollouts, values, config), the {metric: (sum, count)} of a batch. values: {name of a reward: (N,)}
    """

    def __init__(self, reference, rewards, names, config):
        """rewards: a Rewards or None; names: those to compute; config: for evaluation"""
        self.reference = reference
        self.rewards = rewards
        self.names = names
        self.config = config

    @torch.no_grad()
    def __call__(self, policy, temperature):
        """Returns ({metric: mean over all completions of all problems}, samples to show). Raises Mistake if a reward
        logs a metric under the name of a held-out one."""
        config = self.config.varied(temperature=temperature)
        settings = SamplingSettings.of(config)
        sums, samples = [], []
        for step, batch in self.batches:
            rollouts = policy.sample(batch, step, settings)
            texts = rollouts.texts
            values, logged = {}, {}
            if self.names:
                values, logged = self.rewards.score(texts, rollouts.group_size, self.names)
            judged = self.judged(texts)
            measured = {}
            for name, scores in judged.items():
                measured[name] = scores.sum(), len(scores)
            measured |= self.sums(policy, step, batch, rollouts, values, config)
            trained, total = self.trained(judged | values, rollouts)
            if trained and config.rewarded:
                statistics = reward_statistics(rollouts.by_problem(total))
                measured |= in_numbers(statistics)
            clashes = logged.keys() & measured.keys()
            if clashes:
                raise taken(min(clashes))
            sums.append(logged | measured)
            shown = min(rollouts.problems, SHOWN - len(samples))
            for i in range(shown):
                sample = self.sample(batch, rollouts, i, total, trained)
                samples.append(sample)
        means = {}
        for name, (total, count) in join(sums).items():
            if count:
                means[name] = float(total / count)
        return means, samples

    def judged(self, texts):
        """{name of a judge: its scores (N,)}, of judges that are not among the reward functions"""
        return {}

    def trained(self, values, rollouts):
        """({name of a reward of the run: (N,)}, their weighted sum (N,), which orders the samples). Without rewards the
        dictionary is empty, and a judge orders the samples. values: of rewards and judges"""
        if self.rewards is None or not self.rewards.names:
            unordered = torch.zeros(len(rollouts.target))
            return {}, values.get("judge", unordered)
        trained = {name: values[name].cpu() for name in self.rewards.names}
        return trained, self.rewards.total(trained, rollouts.group_size)

    def model_sums(self, policy, rollouts, settings, every=1):
        """{metric: (sum, count)} of entropy and KL, of one completion in `every`. settings: StepSettings"""
        parts = []
        for problems in rollouts.micro_batches(settings.batch_size, settings.micro_batch_tokens):
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

    def sample(self, batch, rollouts, i, total, values):
        """Problem i: its texts and, in "group", its completions from the best to the worst by `total` (N,), each with
        its text, its reward, the value of each reward if there are several, or one with a weight, and what else is
        known about it. A skipped value is None."""
        texts = rollouts.texts
        first = i * rollouts.group_size
        end = first + rollouts.group_size
        prompts = texts.columns.get("prompt", texts.prompts)  # as the record has it, without the template
        sample = {"problem": last_question(prompts[first])}
        if "answer" in texts.columns:
            sample["answer"] = texts.columns["answer"][first]
        total = total.cpu()
        worth = total[first:end]
        worth = worth.masked_fill(worth.isnan(), -torch.inf)
        order = first + worth.argsort(descending=True, stable=True)
        has_terms = values and tuple(self.rewards.weights) != (1.0,)
        has_verdict = values and self.rewards.success in values
        sample["group"] = []
        for n in order.tolist():
            about = {"text": texts.completions[n], "reward": rounded(total[n])}
            if has_terms:
                about["rewards"] = {name: rounded(x[n]) for name, x in values.items()}
            if has_verdict:
                correct = self.rewards.correct(values)[n]
                if not correct.isnan():
                    about["right"] = bool(correct)
            about |= self.marks(batch, rollouts, n)
            sample["group"].append(about)
        return sample

    def marks(self, batch, rollouts, n):
        """More that a sample says about completion n."""
        return {}


def last_question(prompt):
    """The text of a prompt, which may be messages: of the last one that is not the assistant's."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        if message["role"] != "assistant":
            return message["content"]
    return ""


def rounded(reward):
    """A reward for people; None if it was skipped, a text if it is infinite, for which JSON has no number."""
    if reward.isnan():
        return None
    number = round(float(reward), 4)
    return number if math.isfinite(number) else str(number)


def in_numbers(sums):
    """{metric: (sum, count)} as Python's numbers, whose quotient has the precision of float64."""
    return {name: tuple(map(float, pair)) for name, pair in sums.items()}


def sum_and_count(x):
    """(sum, count) of the values that are not NaN."""
    measured = ~x.isnan()
    return x.nansum(), measured.sum()


def reward_sums(values):
    """{metric: (sum, count)} of rewards {name: (N,)}, which are NaN where they skipped a completion."""
    return {f"reward/{name}": sum_and_count(x) for name, x in values.items()}


def format_samples(records, color, completions):
    """The lines of samples for the console. color: colours what was sampled; completions: of each problem"""
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        problem = shortened(record["problem"], (), color)
        lines.append(f"  {'problem':<15} | {problem}")
        for title, place in (("best", 0), ("worst", -1)):
            about = record["group"][place]
            text = shortened(about["text"], about.get("filled", ()), color)
            lines.append(f"  {title:<8}{format_reward(about['reward']):>7} | {text}")
            rewards = about.get("rewards", {})
            values = ", ".join(f"{name} {format_reward(x)}" for name, x in rewards.items())
            for line in textwrap.wrap(values, ROOM):
                lines.append(f"  {'':<15} | {line}")
    return "\n".join(lines)


def format_reward(reward):
    """A reward of a sample for people."""
    return "skipped" if reward is None else format_number(float(reward))


def shortened(text, spans, color):
    """A text on one line, without its middle if it is longer than ROOM. spans: [[first, end]] to colour"""
    shown = list(visible(text.replace("\n", "\u21b5")))
    if color:
        for first, end in spans:
            shown[first:end] = [f"{GREEN}{c}{PLAIN}" for c in shown[first:end]]
    if len(shown) > ROOM:
        half = (ROOM - 5) // 2
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
    rows = [("held-out", "before", "after", "change"), *compared(before, after)]
    longest = max(len(name) for name, *_ in rows)
    width = max(20, longest + 1)
    lines = []
    for name, first, last, change in rows:
        lines.append(f"  {name:<{width}}{first:>9}{last:>9}{change:>9}")
    return "\n".join(lines)


def compared(before, after):
    """[(metric, before, after, change)] of held-out metrics, as texts; the change is "" without two measurements."""
    rows = []
    for name in before | after:
        first, last = before.get(name), after.get(name)
        change = ""
        if is_finite(first) and is_finite(last):
            change = f"{round(last - first, 4) + 0.0:+.4f}"  # no -0.0
        metric = name.removeprefix("eval/")
        rows.append((metric, format_number(first), format_number(last), change))
    return rows


def is_finite(number):
    """False for None too, which was not measured."""
    return number is not None and math.isfinite(number)


def held_out(record):
    """The held-out metrics of a record of metrics.jsonl."""
    return {name: x for name, x in record.items() if name.startswith("eval/")}


def evaluations(records):
    """The records that have held-out metrics."""
    return [record for record in records if held_out(record)]
