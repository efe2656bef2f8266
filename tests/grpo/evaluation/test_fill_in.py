"""The held-out evaluation of fill-in: its figures against what is known, and how much it reads at once."""

import dataclasses

import numpy as np
import pytest
import torch

from core.dataset_consumer import DatasetConsumer
from core.distributions import sampling_logp
from core.model import freeze
from grpo.build import Models, fill_in_evaluation
from grpo.evaluation.fill_in import (NOISE_SEED, PROBLEMS_PER_STEP, FillInEvaluation, lexicon, touched_words,
                                     words_instead)
from grpo.evaluation.ngram import NGramModel
from grpo.policies.fill import FillPolicy
from grpo.reward_functions.judge import Judge
from grpo.rewards import Rewards, reward
from tests.tiny import TOKENIZER, config, consumer, count_rows, fill_policy, judge, model, write_text_dataset


def evaluation_of(dataset, reference=None, scorer=None, gold=None, rewards=None, **settings):
    c = config(**{"eval_problems": 6, "eval_completions": 3} | settings)
    data = consumer(dataset, dataclasses.replace(c, batch_size=PROBLEMS_PER_STEP))
    return FillInEvaluation(data, reference, {"judge": scorer, "gold_judge": gold}, rewards, c)


def reader(seed=5):
    return Judge(judge(seed), TOKENIZER, reads_ids=True)


class Knows(torch.nn.Module):
    """A model that knows the true texts of an evaluation's problems."""

    vocabulary, config = 96, model().config

    def __init__(self, evaluation):
        super().__init__()
        self.p, self.batches = torch.nn.Parameter(torch.zeros(1)), evaluation.batches

    def states(self, input, position):
        truth = [next(batch["target"][i] for _, batch in self.batches for i, shown in enumerate(batch["input"])
                      if (shown == x.numpy()).all()) for x in input]
        truth = torch.from_numpy(np.stack(truth)).gather(1, position)
        return torch.nn.functional.one_hot(truth, 96).float()

    def project(self, h):
        return 50.0 * h

    def forward(self, input, position):
        return self.project(self.states(input, position))


def test_words_are_those_of_the_true_text_that_a_mask_touches():
    truth = "ar the quick fox, go"
    mask = np.zeros(20, dtype=bool)
    mask[[0, 8, 9, 16, 19]] = True
    words = [truth[a:b] for a, b in touched_words(truth, mask)]
    assert words == ["quick"], "words cut by the window's edge do not count"
    assert lexicon("The quick, the_Dead 42") == {"the", "quick", "dead"}


def test_evaluation_of_a_policy_that_knows_the_truth(dataset):
    evaluation = evaluation_of(dataset, scorer=reader())
    policy = FillPolicy(Knows(evaluation), TOKENIZER)
    evaluation.reference = policy
    metrics, shown = evaluation(policy, 1.0)
    assert sum(len(batch["input"]) for _, batch in evaluation.batches) == 6
    assert shown[0]["best"] == shown[0]["truth"] != shown[0]["problem"]
    assert metrics["token_accuracy"] == 1 and metrics["words_recovered"] == 1 and metrics["unique_completions"] == 1
    assert metrics["word_validity"] == 1 and metrics["kl"] == 0 and metrics["entropy"] < 1e-6
    assert "judge" in metrics and "gold_judge" not in metrics
    noisy, _ = evaluation(fill_policy(scale=1.0), 1.0)
    assert noisy["token_accuracy"] < 0.2 and noisy["word_validity"] < 0.2
    assert noisy["unique_completions"] > 2 and noisy["kl"] > 1
    assert abs(noisy["entropy"] - np.log(96)) < 0.1
    assert evaluation(fill_policy(scale=1.0), 1.0)[0] == noisy, "the same problems and the same noise every time"


@pytest.mark.parametrize("truncation, passes", [({"top_k": 1}, 1), ({"min_p": 0.999}, 2), ({"top_p": 1e-6}, 2)])
def test_completions_are_sampled_as_in_training(dataset, truncation, passes):
    whole = evaluation_of(dataset)(fill_policy(), 1.0)[0]["unique_completions"]
    surest = evaluation_of(dataset, unmask_steps=passes, **truncation)
    found = surest(fill_policy(), 1.0)[0]["unique_completions"]
    assert found == 1 if passes == 1 else found < whole


@pytest.mark.parametrize("unmask_steps", [1, 2])
def test_the_figures_are_those_of_a_loop_over_completions(dataset, unmask_steps):
    policy, reference = fill_policy(scale=3.0), fill_policy(seed=2, scale=3.0).frozen()
    evaluation = evaluation_of(dataset, reference, reader(), reader(6), unmask_steps=unmask_steps)
    metrics, _ = evaluation(policy, 0.7)
    batch = evaluation.data.batch("val", 0)
    batch = {key: x[:6] for key, x in batch.items()}
    c = dataclasses.replace(evaluation.config, batch_size=6, seed=evaluation.data.seed + NOISE_SEED, temperature=0.7)
    rollouts = policy.sample(batch, 0, c)
    text = torch.stack(rollouts.texts.tokens).view(6, 3, -1)
    kl, entropy, right, tokens, words, valid, recovered = [], [], 0, 0, 0, 0, 0
    known, bits = lexicon(evaluation.data.train_text()), []
    graded = NGramModel(evaluation.data.tokens["train"], TOKENIZER.vocab_size).bits(text.flatten(0, 1).numpy())
    for i in range(6):
        hidden, truth = torch.from_numpy(batch["mask"][i]), torch.from_numpy(batch["target"][i])
        read = torch.from_numpy(batch["input"][i])[None]
        p, q = (sampling_logp(x.model(read)[0][hidden], 0.7) for x in (policy, reference))
        kl += (p.exp() * (p - q)).sum(1).tolist()
        entropy += (-(p.exp() * p).sum(1)).tolist()
        for completion in text[i]:
            right, tokens = right + int((completion == truth)[hidden].sum()), tokens + int(hidden.sum())
            whole, filled = TOKENIZER.decode(truth.tolist()), TOKENIZER.decode(completion.tolist())
            for a, b in touched_words(whole, batch["mask"][i]):
                words, valid = words + 1, valid + (filled[a:b].lower() in known)
                recovered += filled[a:b] == whole[a:b]
        bits += [x for row in graded[3 * i : 3 * i + 3] for t, x in enumerate(row)
                 if hidden[max(0, t - 6) : t + 1].any()]
    assert metrics["kl"] == pytest.approx(np.mean(kl), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(np.mean(entropy), rel=1e-4)
    assert metrics["token_accuracy"] == pytest.approx(right / tokens)
    assert metrics["word_validity"] == pytest.approx(valid / words)
    assert metrics["words_recovered"] == pytest.approx(recovered / words)
    assert metrics["ngram_bits"] == pytest.approx(np.mean(bits))
    for name, seed in (("judge", 5), ("gold_judge", 6)):
        score = [float(judge(seed)(x[None]).sigmoid().mean()) for x in text.flatten(0, 1)]
        assert metrics[name] == pytest.approx(np.mean(score), rel=1e-4)
    assert metrics["unique_completions"] == np.mean([len({tuple(x) for x in group.tolist()}) for group in text])


@pytest.mark.parametrize("unmask_steps, most", [(1, 2), (3, 8)])
def test_no_forward_reads_more_rows_than_batch_size_allows(dataset, unmask_steps, most):
    """A problem is read once in the first pass, and once for each of its 4 completions in the others."""
    metrics, samples = [], []
    for batch_size in (2, 64):
        policy, reference, scorer = fill_policy(scale=3.0), fill_policy(seed=2).frozen(), reader()
        read = [count_rows(net) for net in (policy.model, reference.model, scorer.model)]
        evaluation = evaluation_of(dataset, reference, scorer, eval_problems=21, eval_completions=4,
                                   batch_size=batch_size, unmask_steps=unmask_steps)
        figures, shown = evaluation(policy, 1.0)
        metrics.append(figures)
        samples.append([(record["problem"], record["best"], record["worst"]) for record in shown])
        largest = [max(rows) for rows in read]
        if batch_size == 2:
            assert largest == [most, 2, 8] and sum(read[1]) == 21
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4), "the cut changes nothing"
    assert samples[0] == samples[1] and len(samples[0]) == 3


def test_only_the_rank_that_evaluates_decodes_the_training_text(dataset, monkeypatch):
    decoded = []
    text = DatasetConsumer.train_text
    monkeypatch.setattr(DatasetConsumer, "train_text", lambda self: decoded.append(1) or text(self))
    models = Models(fill_policy(), None, None, None)
    evaluations = [evaluation_of(dataset), fill_in_evaluation(config(dataset=dataset), models)]
    assert decoded == [], "building it, as every rank does, decodes nothing"
    for _ in range(2):
        evaluations[0](fill_policy(), 1.0)
    assert decoded == [1], "it is decoded once, by whoever evaluates"


@pytest.mark.parametrize("more", [{"fill_estimator": "coupled"}, {"seed": 7}])
def test_neither_the_estimator_nor_the_seed_of_training_changes_a_figure(dataset, more):
    def figures(**settings):
        c = config(dataset=dataset, eval_problems=4, unmask_steps=2, **settings)
        return fill_in_evaluation(c, Models(fill_policy(), fill_policy(seed=2), None, None))(fill_policy(), 1.0)[0]

    assert figures() == figures(**more)


class ShareOfE:
    """A judge that counts a letter."""
    model = freeze(model())

    def scores(self, texts):
        return torch.tensor([float((x == TOKENIZER.encode("e")[0]).float().mean()) for x in texts.tokens])


def test_samples_are_the_best_and_the_worst_completion_by_the_judge(dataset):
    evaluation = evaluation_of(dataset, scorer=ShareOfE(), eval_completions=12)
    _, shown = evaluation(fill_policy(scale=1.0), 1.0)
    texts = fill_policy(scale=1.0).sample(evaluation.batches[0][1], 0, dataclasses.replace(evaluation.config)).texts
    share = [text.count("e") / len(text) for text in texts.completions]
    assert len(shown) == 3 and max(share[:12]) > min(share[:12])
    for i, record in enumerate(shown):
        group = slice(12 * i, 12 * i + 12)
        assert record["best_score"] == round(max(share[group]), 4) == round(record["best"].count("e") / 32, 4)
        assert record["worst_score"] == round(min(share[group]), 4) == round(record["worst"].count("e") / 32, 4)
        assert record["best"] in texts.completions[group] and record["worst"] in texts.completions[group]
        assert (record["problem"], record["truth"]) == (texts.prompts[12 * i], texts.columns["answer"][12 * i])
        assert all(mask == evaluation.batches[0][1]["mask"][i].tolist() for mask in record["mask"].values())


def test_without_a_judge_rewards_order_the_samples_and_are_metrics(dataset):
    c = config(reward_functions=("length_penalty", "exact_match"), reward_weights=(1.0, -2.0), length_max=40)
    evaluation = evaluation_of(dataset, rewards=Rewards(c), eval_completions=4)
    knows = FillPolicy(Knows(evaluation), TOKENIZER)
    metrics, shown = evaluation(knows, 1.0)
    assert metrics["reward/exact_match"] == 1.0 and "judge" not in metrics
    assert metrics["reward/length_penalty"] == pytest.approx(0.8), "32 characters, where 20 to 40 are allowed"
    assert shown[0]["best_score"] == pytest.approx(0.8 - 2.0), "the weighted sum"
    assert {record["best_right"] for record in shown} == {False}, "a penalty of 0.8 is not the highest"


def test_a_filled_in_text_is_right_if_its_success_reward_is_at_its_highest(dataset):
    c = config(reward_functions=("exact_match", "length_penalty"), length_max=40)
    evaluation = evaluation_of(dataset, rewards=Rewards(c), eval_completions=4)
    for model, right in ((Knows(evaluation), True), (fill_policy().model, False)):
        _, shown = evaluation(FillPolicy(model, TOKENIZER), 1.0)
        assert [record["worst_right"] for record in shown] == [right] * 3
        assert all((record["worst"] == record["truth"]) == right for record in shown)


def test_the_judges_reward_is_not_computed_twice(dataset):
    rewards = Rewards(config(), reader())
    evaluation = evaluation_of(dataset, scorer=reader(), rewards=rewards)
    metrics, _ = evaluation(fill_policy(), 1.0)
    assert rewards.names == ("judge",) and "judge" in metrics and "reward/judge" not in metrics


def test_a_text_without_words_has_no_figures_of_words(tmp_path):
    write_text_dataset(tmp_path / "sums", "".join(f"{a}+{b}={a + b}\n" for a in range(30) for b in range(30)))
    metrics, _ = evaluation_of(str(tmp_path / "sums"))(fill_policy(), 1.0)
    assert "token_accuracy" in metrics and not {"word_validity", "words_recovered"} & set(metrics)


def test_the_exact_kl_of_an_evaluation_needs_no_room_among_the_stored_distributions(dataset, monkeypatch):
    """Training with k3 stores no distributions, so its limit must not end the first evaluation."""
    def check(states, vocabulary, config, exact, truncated, kept=None):
        stored = states * vocabulary * 4
        assert stored < config.stored_megabytes * 50_000, "a megabyte that is small enough to matter here"

    monkeypatch.setattr("grpo.scoring.check_stored", check)
    evaluation = evaluation_of(dataset, reference=fill_policy(seed=3), kl_estimator="k3", stored_megabytes=1,
                               eval_problems=16, batch_size=16)
    assert evaluation(fill_policy(), 1.0)[0]["kl"] > 0


def test_what_other_rewards_log_is_evaluated_and_shown(dataset):
    @reward
    def logs(completions, log_metric, log_extra):
        log_metric("mean_length", sum(map(len, completions)) / len(completions))
        log_extra("text", completions)
        return [0.0] * len(completions)

    c = config(reward_functions=("logs",), task_type="general")
    metrics, shown = evaluation_of(dataset, rewards=Rewards(c))(fill_policy(), 1.0)
    assert metrics["mean_length"] == pytest.approx(np.mean([len(r["best"]) for r in shown])) and shown
    for record in shown:
        assert record["best_extra"] == {"text": record["best"]} and record["worst_extra"] == {"text": record["worst"]}


@pytest.mark.parametrize("truth, filled, found", [
    (["the", " dog", " runs"], ["the", " cat", " runs"], ["cat"]),         # a word of one piece
    (["the", " d", "og", "s run"], ["the", " c", "at", "s run"], ["cats"]),  # a piece that goes on behind the word
    (["the", " dog", " runs"], ["the", "m", " runs"], [""])])              # joined to the word before it
def test_words_are_compared_by_the_tokens_that_they_are_made_of(truth, filled, found):
    true_text, spans = "".join(truth), [(4, 8 if "s run" in truth else 7)]
    ends, filled_ends = ([len("".join(pieces[: i + 1])) for i in range(len(pieces))] for pieces in (truth, filled))
    assert list(words_instead(spans, true_text, ends, "".join(filled), filled_ends)) == found
