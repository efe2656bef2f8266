"""The held-out evaluation of fill-in: its figures are those of a loop over completions."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.distributions import sampling_logp
from grpo.build import Models, fill_in_evaluation
from grpo.evaluation.fill_in import NOISE_SEED, PROBLEMS_PER_STEP, FillInEvaluation, touched_words
from grpo.reward_functions.judge import Judge
from grpo.rewards import Rewards, reward
from tests.tiny import TOKENIZER, config, consumer, count_rows, fill_policy, judge, write_text_dataset


def evaluation_of(dataset, reference=None, scorer=None, gold=None, rewards=None, **settings):
    c = config(**{"eval_problems": 6, "eval_completions": 3} | settings)
    data = consumer(dataset, dataclasses.replace(c, batch_size=PROBLEMS_PER_STEP))
    return FillInEvaluation(data, reference, {"judge": scorer, "gold_judge": gold}, rewards, c)


def share_of_vowels(text):
    return sum(c in "aeiou" for c in text) / len(text)


def texts_of(samples):
    return [[about["text"] for about in sample["group"]] for sample in samples]


def reader(seed=5):
    return Judge(judge(seed), TOKENIZER, reads_ids=True)


class Pieces:
    """A tokenizer whose tokens are pieces of text: an id is a piece."""

    def decode(self, pieces):
        return "".join(pieces)


@pytest.mark.parametrize("truth, masked, found", [
    (list("ar the quick fox, go"), (0, 8, 9, 16, 19), [(slice(7, 12), "", "quick", "")]),
    (list("a dog runs"), (2, 4), [(slice(2, 5), "", "dog", "")]),
    (["the", " dog", " runs."], (1,), [(slice(1, 2), " ", "dog", "")]),          # a word of one piece
    (["the", " d", "og", "s run"], (2,), [(slice(1, 4), " ", "dogs", " run")])])  # one goes on behind it
def test_words_are_those_that_a_mask_touches_with_the_tokens_that_they_are_made_of(truth, masked, found):
    assert touched_words(Pieces(), truth, [i in masked for i in range(len(truth))]) == found


def test_a_word_is_right_or_known_only_where_its_tokens_hold_what_was_around_it():
    batch = {"target": np.array([["the", " dog", " runs."]]), "mask": np.array([[0, 1, 0]])}
    pieces = [["the", x, " runs."] for x in (" dog", " cat", " Cat", "cat", " cats")]
    rollouts = SimpleNamespace(group_size=5, texts=SimpleNamespace(completion_ids=pieces))
    evaluation = SimpleNamespace(data=SimpleNamespace(tokenizer=Pieces()), words={"dog", "cat"})
    found = FillInEvaluation._word_sums(evaluation, batch, rollouts)
    assert found == {"word_validity": (3, 5), "words_recovered": (1, 5)}


@pytest.mark.parametrize("unmask_steps", [1, 2])
def test_the_figures_are_those_of_a_loop_over_completions(dataset, unmask_steps):
    policy, reference = fill_policy(scale=3.0), fill_policy(seed=2, scale=3.0).frozen()
    evaluation = evaluation_of(dataset, reference, reader(), reader(6), unmask_steps=unmask_steps,
                               credit_window=unmask_steps - 1)
    assert "words" not in vars(evaluation), "only the rank that evaluates reads the training text"
    metrics, shown = evaluation(policy, 0.7)
    batch = evaluation.data.batch("val", 0)
    batch = {key: x[:6] for key, x in batch.items()}
    c = dataclasses.replace(evaluation.config, batch_size=6, seed=evaluation.data.seed + NOISE_SEED, temperature=0.7)
    rollouts = policy.sample(batch, 0, c)
    text = torch.stack(rollouts.texts.tokens).view(6, 3, -1)
    kl, entropy, right, tokens, words, valid, recovered = [], [], 0, 0, 0, 0, 0
    known = {word.lower() for word in re.findall("[A-Za-z]+", evaluation.data.train_text())}
    for i in range(6):
        hidden, truth = torch.from_numpy(batch["mask"][i]), torch.from_numpy(batch["target"][i])
        read = torch.from_numpy(batch["input"][i])[None]
        p, q = (sampling_logp(x.model(read)[0][hidden], 0.7) for x in (policy, reference))
        kl += (p.exp() * (p - q)).sum(1).tolist()
        entropy += (-(p.exp() * p).sum(1)).tolist()
        whole = TOKENIZER.decode(truth.tolist())
        for completion in text[i]:
            right, tokens = right + int((completion == truth)[hidden].sum()), tokens + int(hidden.sum())
            filled = TOKENIZER.decode(completion.tolist())
            for match in re.finditer("[A-Za-z]+", whole):
                a, b = match.span()
                if a > 0 and b < len(whole) and hidden[a:b].any():
                    words, valid = words + 1, valid + (filled[a:b].lower() in known)
                    recovered += filled[a:b] == match[0]
    expected = {"kl": np.mean(kl), "entropy": np.mean(entropy), "token_accuracy": right / tokens,
                "word_validity": valid / words, "words_recovered": recovered / words}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    gold, score = (judge(seed)(text.flatten(0, 1)).sigmoid().mean(1).view(6, 3) for seed in (6, 5))
    assert metrics["gold_judge"] == pytest.approx(float(gold.mean()), rel=1e-4)
    assert metrics["judge"] == pytest.approx(float(score.mean()), rel=1e-4)
    assert metrics["unique_completions"] == np.mean([len({tuple(x) for x in group.tolist()}) for group in text])
    for i, record in enumerate(shown):
        assert record["problem"] == TOKENIZER.decode(batch["input"][i].tolist())
        assert record["answer"] == TOKENIZER.decode(batch["target"][i].tolist())
        places = np.flatnonzero(batch["mask"][i]).tolist()
        for about, n in zip(record["group"], score[i].argsort(descending=True).tolist(), strict=True):
            assert about["text"] == TOKENIZER.decode(text[i, n].tolist())
            assert about["reward"] == pytest.approx(float(score[i, n]), abs=1e-4)
            assert about["filled"] == [[place, place + 1] for place in places]
            odds = judge(5)(text[i])[n].clamp(-6.9, 6.9)                             # (T,)
            near = [float(odds[max(0, place - unmask_steps + 1) : place + unmask_steps].mean()) for place in places]
            assert about["credit"] == pytest.approx(near, rel=1e-2, abs=1e-2)
    assert len(shown) == 3


@pytest.mark.parametrize("unmask_steps, most", [(1, 2), (3, 8)])
def test_no_forward_reads_more_rows_than_batch_size_allows(dataset, unmask_steps, most):
    """A problem is read once in the first pass, and once for each of its 4 completions in the others. The judge
    reads 16 texts."""
    found = []
    for batch_size in (2, 64):
        policy, reference, scorer = fill_policy(scale=3.0), fill_policy(seed=2).frozen(), reader()
        read = [count_rows(net) for net in (policy.model, reference.model, scorer.model)]
        evaluation = evaluation_of(dataset, reference, scorer, eval_problems=21, eval_completions=4,
                                   batch_size=batch_size, unmask_steps=unmask_steps)
        found.append(evaluation(policy, 1.0))
        if batch_size == 2:
            assert list(map(max, read)) == [most, 2, 16] and sum(read[1]) == 21
    (metrics, shown), (whole_metrics, whole_shown) = found
    assert metrics == pytest.approx(whole_metrics, rel=1e-4), "the cut changes nothing"
    assert texts_of(shown) == texts_of(whole_shown)


def test_neither_the_estimator_nor_the_seed_of_training_changes_a_figure(dataset):
    def figures(**settings):
        c = config(dataset=dataset, eval_problems=4, unmask_steps=2, **settings)
        return fill_in_evaluation(c, Models(fill_policy(), fill_policy(seed=2), None, None))(fill_policy(), 1.0)[0]

    assert figures() == figures(fill_estimator="one_step", seed=7)


def test_without_a_judge_rewards_order_the_samples_and_are_metrics_with_what_they_log(dataset):
    @reward(0, 1)
    def vowels(completions, log_metric):
        log_metric("mean_length", sum(map(len, completions)) / len(completions))
        return [share_of_vowels(text) for text in completions]

    c = config(reward_functions=("exact_match", "vowels"), reward_weights=(1.0, -2.0))
    metrics, shown = evaluation_of(dataset, rewards=Rewards(c))(fill_policy(), 1.0)
    assert "judge" not in metrics and metrics["mean_length"] == 32
    assert metrics["reward/exact_match"] == metrics["words_recovered"] == 0.0 < metrics["reward/vowels"]
    for record in shown:
        total = [-2.0 * share_of_vowels(about["text"]) for about in record["group"]]
        assert [about["reward"] for about in record["group"]] == pytest.approx(total, abs=1e-4)
        assert total == sorted(total, reverse=True) and not record["group"][0]["right"]


def test_the_judges_reward_is_not_computed_twice_and_a_text_without_words_has_no_figures_of_words(tmp_path):
    write_text_dataset(tmp_path / "sums", "".join(f"{a}+{b}={a + b}\n" for a in range(30) for b in range(30)))
    rewards = Rewards(config(), reader())
    metrics, _ = evaluation_of(str(tmp_path / "sums"), scorer=reader(), rewards=rewards)(fill_policy(), 1.0)
    assert rewards.names == ("judge",) and "judge" in metrics and "reward/judge" not in metrics
    assert "token_accuracy" in metrics and not {"word_validity", "words_recovered"} & set(metrics)
