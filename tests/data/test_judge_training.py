"""The texts that a judge learns from, and how it is measured: against loops, and by frequencies."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from core.data import unpack_batch
from core.distributions import draw_uniforms
from core.model import SEQUENCE_SCORER
from core.supervised.build import build_judge_batches
from core.supervised.config import PretrainConfig
from core.supervised.judge_training import auc, average_ranks, filled_batch, judge_report
from tests.tiny import TOKENIZER, config, consumer, judge, model, one_process, save


class Writer:
    """A generator that writes the first of two tokens, whatever it reads, with the log-odds `odds`."""

    vocabulary = TOKENIZER.base_vocab_size

    def __init__(self, tokens, odds):
        self.tokens, self.odds = TOKENIZER.encode(tokens), odds

    def states(self, input, position, padding=None):
        return torch.zeros(*position.shape, 1)

    def project(self, h):
        logits = torch.full((len(h), self.vocabulary), -torch.inf)
        logits[:, self.tokens] = torch.tensor([self.odds, 0.0])
        return logits

    def __call__(self, text):
        return self.project(text.flatten()).unflatten(0, text.shape)


def settings(**more):
    return PretrainConfig(mode=SEQUENCE_SCORER, **more)


def filled_by_a_loop(filler, target, hidden, uniform, temperature):
    """A text (T,) whose hidden tokens are each drawn where the cumulative probability first exceeds the noise."""
    masked = target.masked_fill(hidden, TOKENIZER.mask_token_id)
    logits = filler(masked[None])[0].double() / temperature                          # (T, V)
    filled = target.clone()
    for t in hidden.nonzero().flatten().tolist():
        cumulative = 0.0
        for token, p in enumerate(logits[t].softmax(0).tolist()):
            cumulative += p
            if cumulative > uniform[t]:
                filled[t] = token
                break
    return filled


def same_in_pairs(positive, negative):
    """AUC from all pairs."""
    pairs = [1.0 if x > y else 0.5 if x == y else 0.0 for x in positive for y in negative]
    return sum(pairs) / len(pairs)


def ranks(values):
    return [1 + sum(y < x for y in values) + (sum(y == x for y in values) - 1) / 2 for x in values]


def pearson(xs, ys):
    x, y = (np.array(values) - sum(values) / len(values) for values in (xs, ys))
    return float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))


def test_auc_and_ranks_are_those_of_loops():
    a = np.round(np.random.default_rng(0).normal(1, 1, 40), 1)
    b = np.round(np.random.default_rng(1).normal(0, 1, 30), 1)
    assert abs(auc(a, b) - same_in_pairs(a, b)) < 1e-12 and np.isnan(auc(a, b[:0])) and np.isnan(auc(a[:0], b))
    assert average_ranks(np.array([3, 1, 3, 2])).tolist() == [3.5, 1, 3.5, 2]
    assert average_ranks(a).tolist() == ranks(a.tolist())


@pytest.mark.parametrize("head", ["realness", "cls"])
def test_a_judge_learns_from_fills_of_every_generator_and_from_clean_text(dataset, head):
    fillers, c = [model(seed=1), model(seed=2)], settings(judge_head=head, clean_share=0.3)

    def batch(fillers):
        return filled_batch(consumer(dataset, config(batch_size=64)), fillers, "cpu", c, "train", 0)

    filled, target, mask = batch(fillers)
    if head == "cls":
        assert (filled[:, 0] == TOKENIZER.cls_token_id).all()
        filled = filled[:, 1:]
    assert torch.equal(filled[~mask], target[~mask]) and filled.max() < TOKENIZER.base_vocab_size
    assert 0.1 < (filled == target).all(1).float().mean() < 0.5
    assert torch.equal(batch(fillers)[0][:, -32:], filled), "pure in (seed, rank, step)"
    assert not torch.equal(batch(fillers[::-1])[0][:, -32:], filled)


def test_a_judge_with_a_teacher_gets_its_log_odds_of_the_same_texts(dataset, tmp_path):
    filler, teacher = save(tmp_path / "filler.safetensors", model()), judge(3)
    teacher.head.weight.mul_(300)  # certain of some tokens: these are clamped to probabilities of .001 and .999
    path = save(tmp_path / "teacher.safetensors", teacher)
    c = settings(fill_checkpoints=(filler,), block_size=32, dtype="float32")
    without, _ = build_judge_batches(c, consumer(dataset, config(batch_size=8)), one_process())
    c = dataclasses.replace(c, teacher_checkpoint=path)
    batches, _ = build_judge_batches(c, consumer(dataset, config(batch_size=8)), one_process())
    filled, found, _ = batches("train", 4)
    assert torch.equal(filled, without("train", 4)[0])
    expected = torch.stack([teacher(text[None])[0] for text in filled])
    assert 0.01 < (expected.abs() > 7).float().mean() < 0.99
    torch.testing.assert_close(found, expected.clamp(-math.log(999), math.log(999)), rtol=1e-3, atol=1e-3)


def test_the_texts_of_a_judge_are_those_of_a_loop(dataset):
    """Of each text a loop chooses the generator, its temperature and whether it stays true, then draws its tokens."""
    data = consumer(dataset, config(batch_size=24))
    fillers = [model(seed=seed, scale=2.0) for seed in (1, 2, 3)]
    c = settings(clean_share=0.2, fill_temperature_low=0.3, fill_temperature_high=2.0)
    filled, target, mask = filled_batch(data, fillers, "cpu", c, "train", 5)
    clean = 0
    for i, number in enumerate(data.batch("train", 5)["number"]):
        *uniform, of_temperature, of_clean, of_filler = draw_uniforms(data.seed + 1, 5, [number], (35,))[0].tolist()
        if of_clean < 0.2:
            clean += 1
            assert torch.equal(filled[i], target[i])
            continue
        filler = fillers[int(3 * of_filler)]
        expected = filled_by_a_loop(filler, target[i], mask[i], uniform, 0.3 + 1.7 * of_temperature)
        assert torch.equal(filled[i], expected)
    assert 0 < clean < 12


def test_the_generators_temperatures_and_clean_texts_of_a_judge_have_their_frequencies(dataset):
    """Every generator writes tokens of its own, which no text has, so that each text tells who has filled it in."""
    count, pairs, odds = 2000, ("01", "23", "45"), 1.5
    data = consumer(dataset, config(batch_size=count))
    c = settings(clean_share=0.3, fill_temperature_low=0.25, fill_temperature_high=2.0)
    filled, target, mask = filled_batch(data, [Writer(pair, odds) for pair in pairs], "cpu", c, "train", 0)
    is_clean = (filled == target).all(1)
    assert abs(int(is_clean.sum()) - 0.3 * count) < 4 * math.sqrt(count * 0.3 * 0.7)
    written, firsts = [], []
    for pair in pairs:
        first, second = ((filled == token) for token in TOKENIZER.encode(pair))
        own = (first | second).any(1)
        assert torch.equal((first | second)[own], mask[own]), "one generator fills in all that is masked"
        written.append(int(own.sum()))
        firsts += (first[own].sum(1) / mask[own].sum(1)).tolist()
    filled_in = sum(written)
    assert filled_in == count - int(is_clean.sum())
    for times in written:
        assert abs(times - filled_in / 3) < 4 * math.sqrt(filled_in * 2 / 9)
    temperatures = np.linspace(0.25, 2.0, 1001)
    expected = (1 / (1 + np.exp(-odds / temperatures))).mean()                       # about .79; at 1.0 it is .82
    assert abs(np.mean(firsts) - expected) < 4 * np.std(firsts) / math.sqrt(filled_in)


def test_the_texts_of_a_judge_are_the_same_however_a_step_is_cut(dataset):
    fillers, c = [model(seed=1), model(seed=2)], settings()
    whole = filled_batch(consumer(dataset, config(batch_size=8)), fillers, "cpu", c, "train", 3)
    parts = []
    for micro in range(2):
        for rank in range(2):
            data = consumer(dataset, config(batch_size=2), rank=rank, world=2)
            parts.append(filled_batch(data, fillers, "cpu", c, "train", 3, micro))
    for found, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(found), expected)


def test_the_report_of_a_judge_that_knows_the_true_texts(dataset):
    data = consumer(dataset, config(batch_size=16, mask_low=0.05, mask_high=0.6))
    truths = torch.cat([unpack_batch(data.batch("val", s), "cpu")[1] for s in range(2)])

    class Knowing:
        judge_head = "realness"

        def __call__(self, text):
            known = (text[:, None] == truths).float()                                # against the nearest true text
            return 20 * known[torch.arange(len(text)), known.mean(2).argmax(1)] - 10

    report = judge_report(Knowing(), data, model(scale=1.0), one_process(), batches=2)
    assert report["auc"] == report["token_auc"] == 1 and report["pearson"] > 0.99 and report["spearman"] > 0.99


@pytest.mark.parametrize("head", ["realness", "cls"])
def test_the_report_of_a_judge_equals_loops(dataset, head):
    data = consumer(dataset, config(batch_size=7, mask_low=0.1, mask_high=0.6))
    filler, scorer = Writer(" e", 0.5), judge(judge_head=head)  # which are true now and then
    cls = torch.tensor([TOKENIZER.cls_token_id])

    def realness(text):
        """Of each token or, by a cls judge, of the whole text."""
        if head == "cls":
            return [1 - float(scorer(torch.cat((cls, text))[None]).sigmoid())]
        return scorer(text[None])[0].sigmoid().tolist()

    def score(text):
        found = realness(text)
        return sum(found) / len(found)

    shares, scores, of_true, of_thirty, true_tokens, false_tokens = [], [], [], [], [], []
    for step in range(3):
        batch = data.batch("val", step)
        _, target, mask = unpack_batch(batch, "cpu")
        for text, hidden, number in zip(target, mask, batch["number"], strict=True):
            uniform, place = draw_uniforms(data.seed + 7, step, [number], (2, 32))[0].tolist()
            filled = filled_by_a_loop(filler, text, hidden, uniform, 0.8)
            thirty = torch.tensor([p in sorted(place)[:10] for p in place])          # 30% of 32 tokens
            shares.append(sum(int(a != b) for a, b in zip(filled, text, strict=True)) / 32)
            scores.append(score(filled))
            of_true.append(score(text))
            of_thirty.append(score(filled_by_a_loop(filler, text, thirty, uniform, 0.8)))
            for t in hidden.nonzero().flatten().tolist() if head == "realness" else ():
                tokens = true_tokens if filled[t] == text[t] else false_tokens
                tokens.append(realness(filled)[t])
    replaced = [1 - x for x in scores]
    expected = {"pearson": pearson(shares, replaced), "spearman": pearson(ranks(shares), ranks(replaced)),
                "auc": same_in_pairs(of_true, of_thirty), "mean_score": sum(scores) / len(scores)}
    if head == "realness":
        expected["token_auc"] = same_in_pairs(true_tokens, false_tokens)
        assert min(len(true_tokens), len(false_tokens)) > 5
    assert judge_report(scorer, data, filler, one_process(), batches=3) == pytest.approx(expected, rel=1e-4, abs=1e-5)
