"""The held-out evaluation of prompts: its figures against loops, and how much it reads at once."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from core.distributions import sampling_logp
from core.files.records import write_prompts
from grpo.evaluation.prompts import NOISE_SEED, PromptEvaluation, accuracy_sum, pass_at_k, pass_at_k_sum
from grpo.rewards import REWARDS, Rewards, reward
from tests.tiny import CAUSAL, causal_policy, config, count_rows, prompt_consumer


def early(prompts, completions, **columns):
    """A completion is right if its first character is early in the alphabet."""
    return [float(text[:1] < "P") for text in completions]


@pytest.fixture
def early_reward():
    reward(0, 1)(early)


def settings(**changes):
    return config(**{"max_new_tokens": 5, "reward_functions": ("early",), "eval_problems": 6, "eval_completions": 4,
                     "pass_k": 2} | changes)


def evaluation_of(prompts, c, reference=None, rewards=None):
    data = prompt_consumer(prompts, c)
    return PromptEvaluation(data, reference, rewards or Rewards(c), c)


def evaluated_rollouts(policy, evaluation, temperature=1.0):
    """The rollouts that an evaluation samples, all at once."""
    c, records = evaluation.config, evaluation.records
    batch = evaluation.data.pack(records, range(len(records)))
    return policy.sample(batch, 0, replace(c, batch_size=len(records), temperature=temperature))


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, right, k in ((5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 1), (6, 5, 6)):
        subsets = list(combinations([i < right for i in range(n)], k))
        assert pass_at_k(right, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_completions_that_were_not_scored_count_neither_right_nor_wrong():
    rng = np.random.default_rng(0)
    for k in (1, 2, 4):
        right = rng.choice([0.0, 1.0, math.nan], size=(30, 6), p=[0.4, 0.3, 0.3])
        right[0] = math.nan
        seen = [[x for x in row if not math.isnan(x)] for row in right]
        total, count = accuracy_sum(torch.tensor(right))
        assert (float(total), int(count)) == (sum(map(sum, seen)), sum(map(len, seen)))
        enough = [row for row in seen if len(row) >= k]
        chances = [np.mean([any(subset) for subset in combinations(row, k)]) for row in enough]
        total, count = pass_at_k_sum(torch.tensor(right), k)
        assert total == pytest.approx(sum(chances)) and count == len(enough) < 30


def test_evaluation_counts_what_a_loop_counts(prompts, early_reward):
    policy, reference = causal_policy(seed=4, scale=4.0), causal_policy(seed=5, scale=4.0).frozen()
    evaluation = evaluation_of(prompts, settings(eval_completions=6, pass_k=3, eval_problems=4), reference)
    metrics, shown = evaluation(policy, 1.0)
    records = evaluation.records
    assert [r["text"] for r in records] == [r["text"] for r in evaluation.data.records["val"][:4]] and len(records) == 4
    greedy = [CAUSAL.decode(policy.model(torch.tensor([r["tokens"]]))[0, -1:].argmax(-1).tolist()) for r in records]
    assert metrics["greedy_accuracy"] == np.mean(early(None, greedy))

    rollouts = evaluated_rollouts(policy, evaluation)
    right = np.array(early(None, rollouts.texts.completions)).reshape(len(records), 6)
    assert 0 < right.mean() < 1 and metrics["sampled_accuracy"] == pytest.approx(right.mean())
    assert metrics["reward/early"] == pytest.approx(right.mean())
    chance = [np.mean([any(subset) for subset in combinations(row, 3)]) for row in right]
    assert metrics["pass_at_k"] == pytest.approx(np.mean(chance))
    assert metrics["completion_length"] == pytest.approx(float(rollouts.mask.sum()) / right.size)
    assert metrics["truncated"] == pytest.approx(float(rollouts.truncated.float().mean()))
    assert metrics["kl"] > 0 and metrics["entropy"] > 0 and shown[0]["best_score"] >= shown[0]["worst_score"]


@pytest.mark.parametrize("estimator", ["k2", "k3", "exact"])
@torch.no_grad()
def test_kl_and_entropy_are_means_over_tokens(prompts, early_reward, estimator):
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


def test_no_forward_reads_more_rows_than_training_does(prompts, early_reward):
    """One problem of four completions is trained on at once, so four rows are the most, whatever is evaluated."""
    metrics, samples = [], []
    for batch_size in (1, 64):
        policy, reference = causal_policy(scale=3.0), causal_policy(seed=2, scale=3.0).frozen()
        read, reference_read = count_rows(policy.model), count_rows(reference.model)
        evaluation = evaluation_of(prompts, settings(batch_size=batch_size, group_size=4), reference)
        figures, shown = evaluation(policy, 1.0)
        metrics.append(figures)
        samples.append([(record["best"], record["worst"]) for record in shown])
        if batch_size == 1:
            assert max(read) == max(reference_read) == 4 and len(evaluation.records) == 6
        else:
            assert max(read) == 24, "a large batch_size is used"
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4), "the cut changes nothing"
    assert samples[0] == samples[1] and len(samples[0]) == 3


def test_late_completions_count_neither_right_nor_wrong(prompts, early_reward):
    c, asked = settings(reward_functions=("early", "length_penalty"), length_min=1, length_max=6), []
    policy = causal_policy(scale=4.0)

    class WithDeadline(Rewards):
        """As if a worker did not finish some completions before reward_timeout."""

        def score(self, texts, group_size, names=None):
            values, _, log = super().score(texts, group_size, names)
            asked.extend((name, group_size) for name in values)
            late = torch.tensor([is_late(text) for text in texts.completions])
            return {name: x.masked_fill(late, math.nan) for name, x in values.items()}, late, log

    evaluation = evaluation_of(prompts, c, rewards=WithDeadline(c))
    metrics, _ = evaluation(policy, 1.0)
    written = evaluated_rollouts(policy, evaluation).texts.completions
    groups = [[float(text[:1] < "P") for text in written[4 * i : 4 * i + 4] if not is_late(text)] for i in range(6)]
    seen = sum(groups, [])
    assert 0 < len(seen) < 24 and 0 < sum(seen) < len(seen)
    assert metrics["sampled_accuracy"] == pytest.approx(np.mean(seen)) != np.mean(early(None, written))
    chances = [np.mean([any(pair) for pair in combinations(group, 2)]) for group in groups if len(group) >= 2]
    assert 0 < len(chances) < 6 and metrics["pass_at_k"] == pytest.approx(np.mean(chances))
    greedy = policy.greedy(evaluation.data.pack(evaluation.records, range(6)), evaluation.config)
    on_time = [float(text[:1] < "P") for text in greedy if not is_late(text)]
    assert 0 < len(on_time) < 6 and metrics["greedy_accuracy"] == np.mean(on_time)
    assert ("early", 1) in asked and ("length_penalty", 1) not in asked, "greedy needs the success reward alone"


def is_late(text):
    return sum(map(ord, text)) % 2 == 0


def test_figures_without_a_scored_completion_are_left_out(prompts, early_reward):
    class Late(Rewards):
        def score(self, texts, group_size, names=None):
            values, late, log = super().score(texts, group_size, names)
            return {name: torch.full_like(x, math.nan) for name, x in values.items()}, ~late, log

    metrics, _ = evaluation_of(prompts, settings(), rewards=Late(settings()))(causal_policy(), 1.0)
    assert {"completion_length", "entropy"} <= set(metrics)
    assert not {"greedy_accuracy", "sampled_accuracy", "pass_at_k", "reward/early"} & set(metrics)
    assert all(map(math.isfinite, metrics.values()))


def test_without_a_success_reward_there_is_no_accuracy(prompts):
    c = settings(task_type="general", reward_functions=("length_penalty",), length_min=1, length_max=6)
    rewards = Rewards(c)
    rewards.success = None
    metrics, _ = evaluation_of(prompts, c, rewards=rewards)(causal_policy(), 1.0)
    assert "reward/length_penalty" in metrics
    assert not {"greedy_accuracy", "sampled_accuracy", "pass_at_k"} & set(metrics)


def test_the_seed_of_the_run_changes_no_figure(prompts, early_reward):
    first, second = (evaluation_of(prompts, settings(seed=seed))(causal_policy(), 1.0) for seed in (1, NOISE_SEED + 1))
    assert first == second


def test_samples_are_the_best_and_the_worst_completion_by_the_weighted_rewards(prompts, early_reward):
    c = settings(reward_functions=("early", "length_penalty"), reward_weights=(2.0, 0.5), length_min=1, length_max=6)
    evaluation, policy = evaluation_of(prompts, c), causal_policy(scale=4.0)
    _, shown = evaluation(policy, 1.0)
    texts = evaluated_rollouts(policy, evaluation).texts
    penalty = REWARDS["length_penalty"].fn(texts.prompts, texts.completions, length_min=1, length_max=6)
    total = [2.0 * a + 0.5 * b for a, b in zip(early(None, texts.completions), penalty, strict=True)]
    assert len(shown) == 3
    for i, record in enumerate(shown):
        group = slice(4 * i, 4 * i + 4)
        by_text = dict(zip(texts.completions[group], total[group], strict=True))
        assert record["best_score"] == pytest.approx(max(total[group]), abs=1e-4)
        assert by_text[record["best"]] == max(total[group]) and by_text[record["worst"]] == min(total[group])
        assert record["worst_score"] == pytest.approx(min(total[group]), abs=1e-4)
        assert record["problem"] == evaluation.records[i]["text"]
        assert record["answer"] == evaluation.records[i]["answer"]
        for name in ("best", "worst"):
            assert record[f"{name}_right"] == (early(None, [record[name]])[0] == REWARDS["early"].high)


def test_rewards_see_the_response_prefix_as_part_of_the_completion(prompts, early_reward):
    seen, c = [], settings(response_prefix="so ")

    class Watched(Rewards):
        def score(self, texts, group_size, names=None):
            seen.append((group_size, list(texts.prompts), list(texts.completions)))
            return super().score(texts, group_size, names)

    evaluation_of(prompts, c, rewards=Watched(c))(causal_policy(), 1.0)
    assert {group_size for group_size, *_ in seen} == {4, 1}, "sampled and greedy"
    for _, texts, completions in seen:
        assert all(text.endswith("=") for text in texts) and all(text.startswith("so ") for text in completions)


def test_pass_at_k_of_more_completions_than_are_sampled_is_refused(prompts, early_reward):
    with pytest.raises(ValueError, match="pass_k=5 must be at most eval_completions=4"):
        evaluation_of(prompts, settings(pass_k=5))


PLAIN = """
def of_ids(prompts, completions, completion_ids, answer, log_metric, log_extra, **kwargs):
    log_metric("mean_ids", sum(map(len, completion_ids)) / len(completion_ids))
    if "5+5=" in prompts:
        log_metric("seldom", 1.0)
    log_extra("all_of_it", [f"{p}{c}|{a}|{len(ids)}" for p, c, ids, a in
                            zip(prompts, completions, completion_ids, answer, strict=True)])
    return [float(len(ids)) for ids in completion_ids]
"""


def test_what_plain_functions_log_is_evaluated_and_shown(prompts, tmp_path):
    """Their token ids are those that were sampled, one problem after another."""
    (tmp_path / "plain.py").write_text(PLAIN)
    c = settings(reward_functions=("of_ids",), reward_file=str(tmp_path / "plain.py"), batch_size=1, group_size=2)
    policy, evaluation = causal_policy(seed=4, scale=4.0), evaluation_of(prompts, c)
    metrics, shown = evaluation(policy, 1.0)
    assert metrics["mean_ids"] == pytest.approx(metrics["completion_length"]) == pytest.approx(metrics["reward/of_ids"])
    assert ("seldom" in metrics) == any(r["prompt"] == "5+5=" for r in evaluation.records)
    assert len(shown) == 3 and "greedy_accuracy" not in metrics
    for record in shown:
        for which in ("best", "worst"):
            begin = f"{record['problem']}{record[which]}|{record['answer']}|"
            assert record[f"{which}_extra"]["all_of_it"].startswith(begin)
            assert float(record[f"{which}_extra"]["all_of_it"].removeprefix(begin)) == record[f"{which}_score"]


def test_a_plain_function_gets_the_messages_of_the_records(tmp_path):
    """Whatever the template made of them; and the answer under the name that TRL's own rewards read."""
    records = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)}
               for a in range(5, 13) for b in range(5, 13)]
    write_prompts(str(tmp_path / "chats"), records, CAUSAL)
    (tmp_path / "plain.py").write_text(
        "SEEN = []\n\ndef of_chats(prompts, completions, solution, **kwargs):\n"
        "    SEEN.extend(zip(prompts, completions, solution))\n    return [0.0] * len(prompts)\n")
    c = settings(reward_functions=("of_chats",), reward_file=str(tmp_path / "plain.py"), template="chat")
    data = prompt_consumer(str(tmp_path / "chats"), c)
    evaluation = PromptEvaluation(data, None, Rewards(c), c)
    seen = REWARDS["of_chats"].fn.__globals__["SEEN"]
    evaluation.rewards.check(data.records["train"] + data.records["val"])
    assert not seen, "not called with empty completions"
    evaluation(causal_policy(), 1.0)
    written = evaluated_rollouts(causal_policy(), evaluation).texts.completions
    records = [r for r in evaluation.records for _ in range(4)]
    assert seen == [(r["prompt"], [{"role": "assistant", "content": text}], r["answer"])
                    for r, text in zip(records, written, strict=True)]
