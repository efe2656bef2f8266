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
        self.reference, self.rewards = reference, rewards
        self.names, self.config = names, config

    @torch.no_grad()
    def __call__(self, policy, temperature):
        """Returns ({metric: mean over all completions of all problems}, samples to show). Raises Mistake if a reward
        logs a metric under the name of a held-out one."""
        config = self.config.varied(temperature=temperature)
        settings = SamplingSettings.of(config)
        sums, samples = [], []
        for step, batch in self.batches:
            rollouts = policy.sample(batch, step, settings)
            values, metrics = {}, {}
            if self.names:
                values, metrics = self.rewards.score(rollouts.texts, rollouts.group_size, self.names)
            judged = self.judged(rollouts.texts)
            own = {name: (x.sum(), len(x)) for name, x in judged.items()}
            own |= self.sums(policy, step, batch, rollouts, values, config)
            trained, total = self.trained(judged | values, rollouts)
            if trained and config.rewarded:
                statistics = reward_statistics(total.view(rollouts.problems, -1))
                own |= {name: tuple(map(float, pair)) for name, pair in statistics.items()}
            if clashes := metrics.keys() & own.keys():
                raise taken(min(clashes))
            sums.append(metrics | own)
            for i in range(min(rollouts.problems, SHOWN - len(samples))):
                samples.append(self.sample(batch, rollouts, i, total, trained))
        return {name: float(total / count) for name, (total, count) in join(sums).items() if count}, samples

    def judged(self, texts):
        """{name of a judge: its scores (N,)}, of those that are no function among the rewards"""
        return {}

    def trained(self, values, rollouts):
        """({name of a reward of the run: (N,)}, their weighted sum (N,), which orders the samples). Without rewards
        those are none, and a judge orders the samples. values: of rewards and judges"""
        trained = {name: values[name].cpu() for name in getattr(self.rewards, "names", ())}
        if trained:
            return trained, self.rewards.total(trained, rollouts.group_size)
        return {}, values.get("judge", torch.zeros(len(rollouts.target)))

    def model_sums(self, policy, rollouts, settings, every=1):
        """{metric: (sum, count)} of entropy and KL, of one completion in `every`. settings: StepSettings"""
        parts = []
        for problems in rollouts.micro_batches(settings.batch_size, settings.micro_batch_tokens):
            part = with_reference(rollouts.select(problems)[0], self.reference, settings)
            scores = policy.score(part, settings.temperature)
            mask = part.mask[::every]
            sums = {"entropy": ((scores.entropy[::every] * mask).sum(), mask.sum())}
            if (kl := kl_per_token(scores, part, settings.kl_estimator)) is not None:
                sums["kl"] = (kl[::every] * mask).sum(), mask.sum()
            parts.append(sums)
        return join(parts)

    def sample(self, batch, rollouts, i, total, values):
        """Problem i: its texts and, in "group", its completions from the best to the worst by `total` (N,), each with
        its text, its reward, the values of the rewards in it unless it is the value of one, and what else is known
        about it. What was skipped is None."""
        texts, G = rollouts.texts, rollouts.group_size
        prompt = texts.columns.get("prompt", texts.prompts)[i * G]  # as the record has it, without the template
        if not isinstance(prompt, str):
            prompt = next((m["content"] for m in reversed(prompt) if m["role"] != "assistant"), "")
        sample = {"problem": prompt}
        if "answer" in texts.columns:
            sample["answer"] = texts.columns["answer"][i * G]
        total = total.cpu()
        worth = total[i * G : i * G + G].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        order = i * G + worth.argsort(descending=True, stable=True)
        sample["group"] = []
        several = values and tuple(self.rewards.weights) != (1.0,)
        for n in order.tolist():
            about = {"text": texts.completions[n], "reward": rounded(total[n])}
            if several:
                about["rewards"] = {name: rounded(x[n]) for name, x in values.items()}
            if values and self.rewards.success in values and not (right := self.rewards.right(values)[n]).isnan():
                about["right"] = bool(right)
            sample["group"].append(about | self.marks(batch, rollouts, n))
        return sample

    def marks(self, batch, rollouts, n):
        """More that a sample says about completion n."""
        return {}


def rounded(reward):
    """A reward for people; None if it was skipped."""
    return None if reward.isnan() else round(float(reward), 4)


def sum_and_count(x):
    """(sum, count) of the values that are not NaN."""
    return x.nansum(), (~x.isnan()).sum()


def reward_sums(values):
    """{metric: (sum, count)} of rewards {name: (N,)}, which are NaN where they skipped a completion."""
    return {f"reward/{name}": sum_and_count(x) for name, x in values.items()}


def format_samples(records, color, completions):
    """The lines of samples for the console. color: colours what was sampled; completions: of each problem"""
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        best, worst = record["group"][0], record["group"][-1]
        lines.append(f"  {'problem':<15} | {shortened(record['problem'], (), color)}")
        for title, about in (("best", best), ("worst", worst)):
            text = shortened(about["text"], about.get("filled", ()), color)
            lines.append(f"  {title:<8}{format_reward(about['reward']):>7} | {text}")
            values = ", ".join(f"{name} {format_reward(x)}" for name, x in about.get("rewards", {}).items())
            lines += [f"  {'':<15} | {line}" for line in textwrap.wrap(values, ROOM)]
    return "\n".join(lines)


def format_reward(reward):
    """A reward of samples; one of samples.jsonl is a text where it was infinite."""
    return "skipped" if reward is None else format_number(float(reward))


def shortened(text, spans, color):
    """A text on one line, without its middle if it is longer than ROOM. spans: [[first, end]] to colour"""
    shown = list(visible(text.replace("\n", "\u21b5")))
    for first, end in spans if color else ():
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
            group = [for_json(about) for about in record["group"]]
            f.write(json.dumps({"step": step, **record, "group": group}, default=str) + "\n")


def for_json(x):
    """A value, or a dictionary of them, for JSON, which has no NaN and nothing infinite."""
    if isinstance(x, dict):
        return {key: for_json(part) for key, part in x.items()}
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else str(x)
    return x


def finite(number):
    """The number, or None for one that JSON cannot hold."""
    return number if number is not None and math.isfinite(number) else None


def comparison_table(before, after):
    """A table of held-out metrics before and after training, one line for each metric."""
    rows = [("held-out", "before", "after", "change"), *compared(before, after)]
    width = max(20, *(len(row[0]) + 1 for row in rows))
    return "\n".join(f"  {name:<{width}}{first:>9}{last:>9}{change:>9}" for name, first, last, change in rows)


def compared(before, after):
    """[(metric, before, after, change)] of held-out metrics, as texts; the change is "" without two measurements."""
    rows = []
    for name in dict.fromkeys((*before, *after)):
        first, last, change = before.get(name), after.get(name), ""
        if finite(first) is not None and finite(last) is not None:
            change = f"{round(last - first, 4) + 0.0:+.4f}"  # no -0.0
        rows.append((name.removeprefix("eval/"), format_number(first), format_number(last), change))
    return rows


def held_out(record):
    """The held-out metrics of a record of metrics.jsonl."""
    return {name: x for name, x in record.items() if name.startswith("eval/")}


def evaluations(records):
    """The records that have held-out metrics."""
    return [record for record in records if held_out(record)]
