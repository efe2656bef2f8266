"""The parts that evaluations share: means over fixed problems, and samples for people."""

import itertools
import json
import os
from operator import itemgetter

import torch

from core.files import SAMPLES, writing
from core.logger import WIDTH, format_number, highlight
from grpo.losses import kl_per_token
from grpo.reference import with_reference
from grpo.rollout import REWARD, join

SHOWN = 3              # problems of an evaluation that are shown as samples
ROOM = WIDTH - 22      # characters of a text that is shown on one line, behind its title


class Evaluation:
    """Fixed problems and fixed noise, so that two policies are compared on the same draws.

    A kind adds `columns` of the console line; `batches`, [(step of the noise, problems)]; and sums(policy, step, batch,
    rollouts, values, judged, config), the {metric: (sum, count)} of a batch. values, judged: of rewards and judges,
    {name: (N,)} each
    """

    def __init__(self, reference, rewards, names, judges, config):
        """rewards: a Rewards or None; names: those to compute; judges: {name: Judge}; config: for evaluation"""
        self.reference, self.config = reference, config
        self.rewards, self.names, self.judges = rewards, names, judges

    @torch.no_grad()
    def __call__(self, policy, temperature):
        """Returns ({metric: mean over all completions of all problems}, samples to show)."""
        config = self.config.varied(temperature=temperature)
        sums, logged = [], [{}]
        shown = []
        for step, batch in self.batches:
            rollouts = policy.sample(batch, step, config)
            values, log = {}, None
            if self.names:
                values, log = self.rewards.score(rollouts.texts, rollouts.group_size, self.names)
                logged.append(log.metrics)
            judged = {name: judge.scores(rollouts.texts) for name, judge in self.judges.items()}
            sums.append(self.sums(policy, step, batch, rollouts, values, judged, config))
            if len(shown) < SHOWN:
                samples = best_and_worst(policy, rollouts, judged.get("judge"), self.rewards, values, log)
                shown += self.to_show(samples, batch, rollouts)
        return means_of(sums, logged), shown[:SHOWN]

    def model_sums(self, policy, rollouts, estimator, config, every=1):
        """{metric: (sum, count)} of entropy and KL, of one completion in `every`."""
        parts = []
        for problems in rollouts.micro_batches(config):
            part = with_reference(rollouts.select(problems)[0], self.reference, estimator, config)
            scores = policy.score(part, config.temperature)
            found, mask = {"entropy": scores.entropy, "kl": kl_per_token(scores, part, estimator)}, part.mask[::every]
            parts.append({name: masked_sum(x[::every], mask) for name, x in found.items() if x is not None})
        return join(parts)

    def to_show(self, samples, batch, rollouts):
        """The records of the samples that best_and_worst chose."""
        return [record for record, _ in samples]


def sum_and_count(x):
    """(sum, count) of the values that are not NaN."""
    return x.nansum(), (~x.isnan()).sum()


def masked_sum(x, mask):
    """(sum, count) of x where the mask is 1.0; x, mask: of the same shape."""
    return (x * mask).sum(), mask.sum()


def reward_sums(values):
    """{metric: (sum, count)} of rewards {name: (N,)}, which are NaN where they skipped a completion."""
    return {f"reward/{name}": sum_and_count(x) for name, x in values.items()}


def means_of(sums, logged):
    """{metric: mean} of what was counted in each batch, {metric: (sum, count)}, and of what rewards logged likewise.
    Raises ValueError if a reward logs under the name of a held-out metric."""
    sums, logged = join(sums), join(logged)
    for name in logged:
        if name in sums:
            raise ValueError(f"log_metric({name!r}, ...): the held-out metrics have one of this name; give it another")
    return {name: float(total / count) for name, (total, count) in (sums | logged).items() if count}


def best_and_worst(policy, rollouts, total, rewards, values, log):
    """The first SHOWN problems with their completions, and what is known about these (reward, whether it is correct,
    what rewards logged): [(record, {"best": n, "worst": n, "1 of G": n, ...})], n numbers of completions.

    total: (N,) the reward that orders completions; None: the weighted sum of values
    values: {name of a reward: (N,)}; rewards: a Rewards, log: its Log, or None
    """
    texts, G = rollouts.texts, rollouts.group_size
    if total is None:
        total = rewards.total(values) if values else torch.zeros(len(rollouts.mask))
    total = total.nan_to_num(0.0).cpu()
    right = torch.full_like(total, torch.nan)                                        # (N,) NaN: neither right nor wrong
    if rewards is not None and rewards.success in values:
        right = rewards.right(values)
    found = []
    for first in range(0, len(total), G)[:SHOWN]:
        of_group = total[first : first + G]
        order = (first + of_group.argsort(descending=True, stable=True)).tolist()
        group = {f"{i} of {len(order)}": n for i, n in enumerate(order, 1)}
        numbers = {"best": first + int(of_group.argmax()), "worst": first + int(of_group.argmin())} | group
        prompt = texts.columns.get("prompt", texts.prompts)[first]  # as the record has it, without the template
        record = {"problem": prompt if isinstance(prompt, str) else prompt[-1]["content"]}
        if "answer" in texts.columns:
            record["answer"] = texts.columns["answer"][first]
        for name, n in numbers.items():
            record[name] = texts.completions[n]
            if REWARD in texts.columns:
                record[name] = turn_by_turn(policy.tokenizer, rollouts, n)
            record[f"{name}_score"] = round(float(total[n]), 4)
            if not right[n].isnan():
                record[f"{name}_right"] = bool(right[n])
            if log is not None and log.columns and name not in group:
                record[f"{name}_extra"] = {column: x[n] for column, x in log.columns.items()}
        found.append((record | {"group": list(group)}, numbers))
    return found


def turn_by_turn(tokenizer, rollouts, n):
    """The text of completion n, in which each answer of the environment stands on a line of its own behind a >."""
    ids = rollouts.texts.completion_ids[n]
    chosen = rollouts.mask[n, : len(ids)].tolist()
    turns = []
    for own, part in itertools.groupby(zip(chosen, ids, strict=True), key=itemgetter(0)):
        text = tokenizer.decode([token for _, token in part]).strip("\n")
        turns.append(text if own else f"> {text}")
    return "\n".join(turns)


def format_samples(records, color, completions):
    """The lines of samples for the console.

    records: those of best_and_worst, in fill-in with "filled": for each text, [[first, end]] of its sampled characters
    color: whether these are coloured, except in the problem itself; completions: of each problem
    """
    lines = [f"  best and worst of {completions} completions, by reward"]
    for record in records:
        rows = [("problem", "problem"), ("best", "best"), ("worst", "worst")]
        if record["best_score"] == record["worst_score"]:  # one completion stands for all
            rows = [("problem", "problem"), ("best", "equal")]
        for name, title in rows:
            score = format_number(record[f"{name}_score"]) if name != "problem" else ""
            lines.append(f"  {title:<8}{score:>7} | {shortened(record, name, color and name != 'problem')}")
    return "\n".join(lines)


def shortened(record, name, color):
    """A text of a sample on one line; of one that is longer than ROOM its beginning and end."""
    text, spans = record[name], record.get("filled", {}).get(name, ())
    if len(text) <= ROOM:
        return highlight(text, spans, color)
    half = (ROOM - 5) // 2
    tail = len(text) - half
    ending = [[first - tail, end - tail] for first, end in spans if first >= tail]
    return highlight(text[:half], [span for span in spans if span[1] <= half], color) + " ... " + highlight(
        text[tail:], ending, color)


def append_samples(out_dir, step, records):
    """Adds samples to <out_dir>/samples.jsonl."""
    path = os.path.join(out_dir, SAMPLES)
    with writing(path), open(path, "a") as f:
        for record in records:
            f.write(json.dumps({"step": step, **record}, default=str) + "\n")


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
        if first is not None and last is not None:
            difference = round(last - first, 4) + 0.0  # no -0.0
            change = f"{difference:+.4f}" if abs(difference) < 1e6 else f"{difference:+.2g}"
        rows.append((name.removeprefix("eval/"), format_number(first), format_number(last), change))
    return rows


def held_out(record):
    """The held-out metrics of a record of metrics.jsonl."""
    return {name: x for name, x in record.items() if name.startswith("eval/")}


def evaluations(records):
    """The records that have held-out metrics."""
    return [record for record in records if held_out(record)]
