"""The held-out evaluation of prompts: its figures are those of a loop over completions; what a sample holds."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from core.distributions import sampling_logp
from core.logger import GREEN, WIDTH
from grpo.evaluation.prompts import PromptEvaluation
from grpo.evaluation.samples import append_samples, format_samples
from grpo.rewards import Rewards, reward
from tests.tiny import CAUSAL, causal_policy, config, count_rows, prompt_consumer, read_records


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
    return PromptEvaluation(data, reference, rewards or Rewards(c), c)


def evaluated_rollouts(policy, evaluation, temperature=1.0):
    """The rollouts that an evaluation samples, all at once."""
    c, records = evaluation.config, evaluation.records
    batch = evaluation.data.pack(records, range(len(records)))
    return policy.sample(batch, 0, replace(c, batch_size=len(records), temperature=temperature))


def test_evaluation_counts_what_a_loop_counts(prompts):
    policy, reference = causal_policy(seed=4, scale=4.0), causal_policy(seed=5, scale=4.0).frozen()
    evaluation = evaluation_of(prompts, settings(eval_completions=6, eval_problems=4), reference)
    metrics, shown = evaluation(policy, 1.0)
    records = evaluation.records
    assert [r["text"] for r in records] == [r["text"] for r in evaluation.data.records["val"][:4]] and len(records) == 4
    greedy = [CAUSAL.decode(policy.model(torch.tensor([r["tokens"]]))[0, -1:].argmax(-1).tolist()) for r in records]
    assert metrics["greedy_accuracy"] == np.mean(early(None, greedy))

    rollouts = evaluated_rollouts(policy, evaluation)
    right = np.array(early(None, rollouts.texts.completions)).reshape(len(records), 6)
    assert 0 < right.mean() < 1 and metrics["sampled_accuracy"] == pytest.approx(right.mean())
    assert metrics["reward/early"] == pytest.approx(right.mean())
    assert metrics["pass_at_k"] == pytest.approx(np.mean([any(row) for row in right]))
    assert metrics["completion_length"] == pytest.approx(float(rollouts.mask.sum()) / right.size)
    assert metrics["truncated"] == pytest.approx(float(rollouts.truncated.float().mean()))
    for sample, completions in zip(shown, np.array(rollouts.texts.completions).reshape(4, 6), strict=False):
        assert sorted(about["text"] for about in sample["group"]) == sorted(completions)
        found = [about["reward"] for about in sample["group"]]
        assert found == sorted(found, reverse=True) == [float(about["right"]) for about in sample["group"]]
    assert len(shown) == 3


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


@pytest.mark.parametrize("rows, most", [(None, 4), (12, 12)])
def test_no_forward_reads_more_rows_than_training_or_sample_rows_allow(prompts, rows, most):
    """One problem of four completions is trained on at once."""
    found = []
    for settings_of_cut in ({"batch_size": 64}, {"batch_size": 1, "sample_rows": rows}):
        policy, reference = causal_policy(scale=3.0), causal_policy(seed=2, scale=3.0).frozen()
        read, reference_read = count_rows(policy.model), count_rows(reference.model)
        found.append(evaluation_of(prompts, settings(**settings_of_cut), reference)(policy, 1.0))
    assert max(read) == most and max(reference_read) == 4
    (whole, whole_shown), (metrics, shown) = found
    assert metrics == pytest.approx(whole, rel=1e-4) and shown == whole_shown, "the cut changes nothing"


def is_late(text):
    return sum(map(ord, text)) % 4 == 0


class WithDeadline(Rewards):
    """As if a worker did not finish some completions before reward_timeout, or none of them."""

    def __init__(self, config, late=is_late):
        super().__init__(config)
        self.late, self.asked = late, set()

    def score(self, texts, group_size, names=None):
        values, log = super().score(texts, group_size, names)
        self.asked |= {(name, group_size) for name in values}
        late = torch.tensor([self.late(text) for text in texts.completions])
        return {name: x.masked_fill(late, math.nan) for name, x in values.items()}, log


def test_late_completions_count_neither_right_nor_wrong(prompts):
    c = settings(reward_functions=("early", "length_penalty"), reward_settings={"length_min": 1, "length_max": 6})
    policy, rewards = causal_policy(scale=4.0), WithDeadline(c)
    evaluation = evaluation_of(prompts, c, rewards=rewards)
    metrics, _ = evaluation(policy, 1.0)

    def on_time(texts):
        return [float(text[:1] < "P") for text in texts if not is_late(text)]

    written = evaluated_rollouts(policy, evaluation).texts.completions
    groups = [on_time(written[4 * i : 4 * i + 4]) for i in range(6)]
    chances = [any(group) for group in groups if len(group) == 4]
    greedy = on_time(policy.greedy(evaluation.data.pack(evaluation.records, range(6)), evaluation.config).completions)
    assert 0 < len(chances) < 6 and 0 < len(greedy) < 6 and 0 < len(on_time(written)) < 24
    assert metrics["sampled_accuracy"] == pytest.approx(np.mean(on_time(written)))
    assert metrics["pass_at_k"] == pytest.approx(np.mean(chances)) and metrics["greedy_accuracy"] == np.mean(greedy)
    assert ("early", 1) in rewards.asked and ("length_penalty", 1) not in rewards.asked, "greedy needs no other"
    metrics, _ = evaluation_of(prompts, c, rewards=WithDeadline(c, lambda text: True))(policy, 1.0)
    assert "entropy" in metrics and not {"greedy_accuracy", "sampled_accuracy", "pass_at_k"} & set(metrics)


def test_rewards_see_the_response_prefix_as_part_of_the_completion(prompts):
    """Of those that are sampled and of the greedy ones: none begins early in the alphabet any more."""
    metrics, shown = evaluation_of(prompts, settings(response_prefix="so "))(causal_policy(), 1.0)
    assert metrics["greedy_accuracy"] == metrics["sampled_accuracy"] == 0.0
    assert all(record["problem"].endswith("=") for record in shown)
    assert all(about["text"].startswith("so ") for record in shown for about in record["group"])


def test_a_skipped_completion_is_neither_right_nor_wrong(prompts, tmp_path):
    @reward(0, 1)
    def odd(completions, log_metric):
        log_metric("entropy", -1.0)
        return [None if is_late(text) else 1.0 for text in completions]

    metrics, shown = evaluation_of(prompts, settings(reward_functions=("odd",)))(causal_policy(scale=4.0), 1.0)
    abouts = [about for sample in shown for about in sample["group"]]
    assert all(("right" in about) != is_late(about["text"]) for about in abouts) and metrics["entropy"] > 0
    assert all(about["reward"] == float("right" in about) for about in abouts)
    append_samples(str(tmp_path), 3, shown)
    append_samples(str(tmp_path), 6, shown[:1])
    kept = read_records(str(tmp_path / "samples.jsonl"))
    assert [(record["step"], record["problem"]) for record in kept] == [
        *((3, sample["problem"]) for sample in shown), (6, shown[0]["problem"])]


def test_the_console_shows_the_best_and_the_worst_and_the_ends_of_long_texts():
    long = "a" * 60 + "\x1b[2J\n" + "b" * 60
    texts = {long: 1.0, "middle": 0.5, "c": 0.0}
    group = [{"text": text, "reward": reward, "filled": [[0, 2]]} for text, reward in texts.items()]
    lines = format_samples([{"problem": "1+1=", "group": group}], True, 3).split("\n")
    assert [line.split()[0] for line in lines[1:]] == ["problem", "best", "worst"] and "middle" not in "".join(lines)
    assert lines[2].count(GREEN) == 2 and lines[2].endswith("b" * 30) and " ... " in lines[2]
    assert len(format_samples([{"problem": "p", "group": group}], False, 3).split("\n")[2]) <= WIDTH
    assert "equal" in format_samples([{"problem": "p", "group": group[:1]}], False, 1)
