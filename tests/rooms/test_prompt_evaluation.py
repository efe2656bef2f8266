"""The held-out evaluation of prompts: its figures are those of a loop over completions."""

import itertools
import math
import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.distributions import sampling_logp
from grpo.evaluation.prompts import PromptEvaluation
from grpo.rewards import Rewards, reward
from grpo.report import page
from grpo.sampling_settings import SamplingSettings
from tests.tiny import CAUSAL, causal_policy, config, count_rows, one_process, prompt_consumer, read_records
from tests.trainers import prompt_trainer, run


def early(prompts, completions, **columns):
    """A completion is right if its first character is early in the alphabet."""
    return [float(text[:1] < "P") for text in completions]


@pytest.fixture(autouse=True)
def early_reward():
    reward(0, 1)(early)


def settings(**changes):
    return config(**{"max_new_tokens": 5, "reward_functions": ("early",), "eval_problems": 6, "eval_completions": 4}
                  | changes)


def evaluation_of(prompts, c, reference=None, rewards=None):
    data = prompt_consumer(prompts, c)
    return PromptEvaluation(data, reference, rewards or Rewards(c), c, one_process())


def evaluated_rollouts(policy, evaluation, temperature=1.0):
    """The rollouts that an evaluation samples, here all at once."""
    c, records = evaluation.config, evaluation.records
    batch = evaluation.data.pack(records, range(len(records)))
    return policy.sample(batch, 0, replace(SamplingSettings.of(c), batch_size=len(records), temperature=temperature))


def test_evaluation_counts_what_a_loop_counts(prompts):
    policy, reference = causal_policy(seed=4, scale=4.0), causal_policy(seed=5, scale=4.0).frozen()
    evaluation = evaluation_of(prompts, settings(eval_completions=6, eval_problems=4, batch_size=1), reference)
    read = count_rows(reference.model)
    metrics, shown = evaluation(policy, 1.0)
    assert max(read) == 6, "the completions of one problem at a time"
    records = evaluation.records
    assert [r["text"] for r in records] == [r["text"] for r in evaluation.data.records["val"][:4]] and len(records) == 4
    greedy = [CAUSAL.decode(policy.model(torch.tensor([r["tokens"]]))[0, -1:].argmax(-1).tolist()) for r in records]
    assert metrics["greedy_accuracy"] == np.mean(early(None, greedy))

    rollouts = evaluated_rollouts(policy, evaluation)
    right = np.array(early(None, rollouts.texts.completions)).reshape(len(records), 6)
    assert 0 < right.mean() < 1 and metrics["sampled_accuracy"] == pytest.approx(right.mean())
    assert metrics["reward/early"] == metrics["mean_reward"] == pytest.approx(right.mean())
    assert metrics["std_reward"] == pytest.approx(right.std(1, ddof=1).mean())
    assert metrics["pass_at_k"] == pytest.approx(np.mean([any(row) for row in right]))
    assert metrics["completion_length"] == pytest.approx(float(rollouts.mask.sum()) / right.size)
    assert metrics["truncated"] == pytest.approx(float(rollouts.truncated.float().mean()))
    of_problems = {"sampled_accuracy": right.mean(1), "mean_reward": right.mean(1), "pass_at_k": right.max(1),
                   "greedy_accuracy": early(None, greedy),
                   "completion_length": rollouts.mask.view(4, -1).sum(1).numpy() / 6}
    about = shown[0]
    for name, x in of_problems.items():
        assert about["standard_errors"][name] == pytest.approx(np.std(x, ddof=1) / 2, abs=1e-4)
    assert {name: sum(x["counts"]) for name, x in about["histograms"].items()} == {
        "mean_reward": right.size, "completion_length": right.size}
    assert about["histograms"]["mean_reward"]["counts"][-1] == right.sum()
    for sample, completions in zip(shown, np.array(rollouts.texts.completions).reshape(4, 6), strict=False):
        assert sorted(about["text"] for about in sample["group"]) == sorted(completions)
        found = [about["reward"] for about in sample["group"]]
        assert found == sorted(found, reverse=True) == [float(about["right"]) for about in sample["group"]]
        assert all(about["rewards"] == {"early": about["reward"]} for about in sample["group"])


@pytest.mark.parametrize("estimator", ["k2", "k3", "exact"])
@torch.no_grad()
def test_kl_and_entropy_are_means_over_tokens(prompts, estimator):
    policy, reference = causal_policy(seed=4, scale=4.0), causal_policy(seed=5, scale=4.0).frozen()
    evaluation = evaluation_of(prompts, settings(kl_estimator=estimator), reference)
    metrics, _ = evaluation(policy, 0.8)
    rollouts, kl, entropy = evaluated_rollouts(policy, evaluation, 0.8), [], []
    for n, record in enumerate(record for record in evaluation.records for _ in range(4)):
        ids = rollouts.target[n][rollouts.mask[n] > 0].tolist()
        text = torch.tensor([record["tokens"] + ids[:-1]])
        p, q = (sampling_logp(x.model(text)[0, -len(ids) :], 0.8) for x in (policy, reference))
        entropy += (-(p.exp() * p).sum(1)).tolist()
        for place, token in enumerate(ids):
            x = float(q[place, token] - p[place, token])
            kl.append({"k2": x * x / 2, "k3": math.exp(x) - x - 1,
                       "exact": float((p[place].exp() * (p[place] - q[place])).sum())}[estimator])
    assert metrics["kl"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert metrics["entropy"] == pytest.approx(np.mean(entropy), rel=1e-3)


def test_accuracies_and_pass_at_k_of_every_pattern_of_verdicts():
    """1 is correct, 0 is not, NaN was not scored: two problems of two completions, and a greedy one of each."""
    for pattern in itertools.product((0.0, 1.0, math.nan), repeat=6):
        sampled, greedy = torch.tensor(pattern[:4]), torch.tensor(pattern[4:])
        rewards = SimpleNamespace(success="x", correct=lambda values: values)
        rewards.score = lambda *_, greedy=greedy: (greedy, {})
        evaluation = SimpleNamespace(rewards=rewards, config=settings(group_size=2))
        policy = SimpleNamespace(greedy=lambda *_: None)
        found = PromptEvaluation._accuracy_sums(evaluation, policy, None, sampled)
        groups = [pair for pair in (pattern[:2], pattern[2:4]) if not any(map(math.isnan, pair))]
        expected = {
            "greedy_accuracy": [x for x in pattern[4:] if x == x],
            "sampled_accuracy": [x for x in pattern[:4] if x == x],
            "pass_at_k": [max(pair) for pair in groups]}
        for name, numbers in expected.items():
            of_problems = [float(x.sum()) for x in found[name]]
            assert of_problems == [sum(numbers), len(numbers)], (name, pattern)


def is_late(text):
    return sum(map(ord, text)) % 4 == 0


def deviation(numbers):
    """The standard deviation of G - 1; 0 of a number alone."""
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


class WithDeadline(Rewards):
    """As if a worker did not finish some completions before reward_timeout."""

    def score(self, texts, group_size, names=None):
        values, log = super().score(texts, group_size, names)
        late = torch.tensor([is_late(text) for text in texts.completions])
        return {name: x.masked_fill(late, math.nan) for name, x in values.items()}, log


def test_late_completions_count_neither_right_nor_wrong(prompts):
    policy, c = causal_policy(scale=4.0), settings()
    evaluation = evaluation_of(prompts, c, rewards=WithDeadline(c))
    metrics, shown = evaluation(policy, 1.0)

    def on_time(texts):
        return [float(text[:1] < "P") for text in texts if not is_late(text)]

    written = evaluated_rollouts(policy, evaluation).texts.completions
    groups = [on_time(written[4 * i : 4 * i + 4]) for i in range(6)]
    chances = [any(group) for group in groups if len(group) == 4]
    batch = evaluation.data.pack(evaluation.records, range(6))
    greedy = on_time(policy.greedy(batch, SamplingSettings.of(evaluation.config)).completions)
    assert 0 < len(chances) < 6 and 0 < len(greedy) < 6 and 0 < len(on_time(written)) < 24
    assert metrics["sampled_accuracy"] == pytest.approx(np.mean(on_time(written)))
    assert metrics["pass_at_k"] == pytest.approx(np.mean(chances)) and metrics["greedy_accuracy"] == np.mean(greedy)
    assert metrics["mean_reward"] == pytest.approx(np.mean(on_time(written)))
    assert metrics["std_reward"] == pytest.approx(np.mean([deviation(group) for group in groups if group]))
    assert all((about["reward"] is None) == is_late(about["text"]) for sample in shown for about in sample["group"])
    assert all(("right" in about) != is_late(about["text"]) for sample in shown for about in sample["group"])


def first_letter(text):
    """A value for a text, None for some."""
    return None if is_late(text) else ord(text[:1] or "a") / 8


@pytest.mark.parametrize(("names", "weights"), [
    (("early", "letter"), (2.0, -0.5)), (("letter",), (3.0,)), (("letter", "early"), (1.0, 0.0)), (("letter",), ())])
def test_samples_show_the_value_of_each_reward_and_held_out_metrics_those_of_their_sum(
        prompts, tmp_path, capsys, monkeypatch, names, weights):
    monkeypatch.setattr(page, "draw_curves", lambda runs, path: None)

    @reward
    def letter(completions):
        return [first_letter(text) for text in completions]

    t = run(prompt_trainer(prompts, tmp_path, reward_functions=names, reward_weights=weights, max_iters=1,
                           eval_problems=3, eval_completions=6, group_size=6))
    value = {"letter": first_letter, "early": lambda text: early(None, [text])[0]}
    found, shown = {0: [], 1: []}, re.sub("(?m)^[^|]*$", "", capsys.readouterr().out)
    with open(page.write_report(str(tmp_path)), encoding="utf-8") as f:
        html = re.sub("<[^>]*>", " ", f.read())
    several = len(names) > 1
    for sample in read_records(tmp_path / "samples.jsonl"):
        group = []
        for about in sample["group"]:
            values = {name: value[name](about["text"]) for name in names}
            terms = [w * values[name] for name, w in zip(names, weights or (1.0,), strict=True) if w and None not in
                     values.values()]
            group.append(sum(terms) if terms else None)
            assert about["reward"] == (None if group[-1] is None else pytest.approx(group[-1], abs=1e-4))
            assert about["rewards"] == values
            for name, x in values.items():
                in_words = "skipped" if x is None else f"{x:.4f}"
                assert (f"{name}: {in_words}" in html) == several
                if about in (sample["group"][0], sample["group"][-1]):
                    assert (f"{name} {in_words}" in shown) == several
        found[sample["step"]].append([x for x in group if x is not None])
    for evaluated in t.buffer.evaluations:
        groups = found[evaluated["step"]]
        assert any(len(group) < 6 for group in groups), "some are skipped"
        assert evaluated["eval/mean_reward"] == pytest.approx(np.mean(sum(groups, [])), rel=1e-5)
        expected = np.mean([deviation(group) for group in groups if group])
        assert evaluated["eval/std_reward"] == pytest.approx(expected, rel=1e-5)
