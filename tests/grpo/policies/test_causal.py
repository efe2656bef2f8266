"""The causal policy: the shared prompt, the texts that it writes, and greedy completions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.files.records import write_prompts
from core.tokenizer import CharTokenizer
from grpo.policies import causal
from grpo.policies.causal import CausalPolicy, CausalReading
from grpo.rollout import Rollouts
from grpo.scoring import score
from tests.tiny import (
    CAUSAL,
    causal_model,
    causal_policy,
    clear_gradient,
    flat_gradient,
    prompt_config,
    prompt_consumer,
    sampled,
)


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}])
def test_a_prompt_that_is_shared_gives_the_gradient_of_repeating_it(prompts, truncation):
    net, c = causal_model(seed=1).double(), prompt_config(temperature=0.7, **truncation)
    rollouts = sampled(causal_policy(seed=1), prompts, c)
    weight = torch.rand(rollouts.target.shape, dtype=torch.float64) * rollouts.mask
    found, read = [], []
    hook = net.embed.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    for shared in (True, False):
        policy = CausalPolicy(net, CAUSAL)
        policy.shared_prompt = shared
        clear_gradient(policy)
        scores = score(policy, rollouts, 0.7, learn_entropy=True)
        ((scores.logp + 0.1 * scores.entropy) * weight).sum().backward()
        found.append((scores.logp.detach() * rollouts.mask, flat_gradient(policy)))
    hook.remove()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)
    assert (found[0][1] - found[1][1]).norm() < 1e-9 * found[1][1].norm()
    (P, S), (N, M) = rollouts.reading.prompt.shape, rollouts.target.shape
    assert read == [P * S, N * M, N * (S + M)], "tokens of each forward: prompts once, then completions; all at once"


def unequal_rollouts(seed=1):
    """Rollouts of prompts of 1 to 9 tokens with completions of 1 to 7."""
    rng, (P, G, M, T) = np.random.default_rng(seed), (5, 4, 7, 9)
    length, padding = torch.from_numpy(rng.integers(1, M + 1, (P, G))), torch.from_numpy(rng.integers(0, T, P))
    padding[0] = 0
    ids = lambda *shape: torch.from_numpy(rng.integers(0, CAUSAL.base_vocab_size, shape))
    reading = CausalReading(G, None, ids(P, T), padding, ids(P, G, M), length)
    mask, target = reading.chosen.float(), ids(P * G, M)
    return Rollouts(G, target, mask, mask, torch.zeros(P * G, M), torch.zeros(P * G, dtype=torch.bool), M, reading)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("overhead", [1, 8])
@pytest.mark.parametrize("again", [False, True])
def test_reading_like_lengths_together_gives_the_gradient_of_padding_them(monkeypatch, overhead, shared, again):
    monkeypatch.setattr(causal, "PART_TOKENS", overhead)
    net, rollouts, found, read = causal_model(seed=1).double(), unequal_rollouts(), [], []
    weight = torch.rand(rollouts.target.shape, dtype=torch.float64) * rollouts.mask
    net.embed.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    for like in (True, False):
        policy = CausalPolicy(net, CAUSAL, grad_checkpoint=again)
        policy.shared_prompt, policy.like_lengths = shared, like
        clear_gradient(policy), read.append("forwards")
        logp = score(policy, rollouts, 0.7).logp
        (logp * weight).sum().backward()
        found.append((logp.detach(), flat_gradient(policy)))
    # Less padding moves a prompt to other positions, and the rotary table is in float32
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-6)
    assert (found[0][1] - found[1][1]).norm() < 1e-6 * found[1][1].norm()
    second = read.index("forwards", 1)
    alike, padded = read[1:second], read[second + 1 :]
    assert len(alike) > len(padded) and sum(alike) < 0.8 * sum(padded)


def test_each_completion_alone_has_the_log_probabilities_of_those_read_together():
    net, rollouts = causal_model(seed=1).double(), unequal_rollouts()
    found, reading = score(CausalPolicy(net, CAUSAL), rollouts, 1.0).logp, rollouts.reading
    for n, row in enumerate(found):
        p, g = divmod(n, 4)
        length = int(reading.length[p, g])
        text = torch.cat((reading.prompt[p, reading.padding[p] :], reading.inputs[p, g, :length]))
        logp = net(text[None])[0, -length:].log_softmax(-1)
        truth = logp.gather(1, rollouts.target[n, :length, None])[:, 0]
        torch.testing.assert_close(row[:length], truth, rtol=1e-6, atol=1e-6)
        assert not row[length:].any()


def test_sizes_are_the_tokens_of_prompt_and_completions():
    reading = unequal_rollouts().reading
    for p, size in enumerate(reading.sizes().tolist()):
        assert size == 9 - int(reading.padding[p]) + int(reading.length[p].sum())


def test_prompts_of_one_token_are_read_with_their_completions(tmp_path):
    records = [{"prompt": text, "split": split} for text, split in (("7", "train"), ("8", "train"), ("9", "val"))]
    write_prompts(str(tmp_path), records, CAUSAL)
    c, policy = prompt_config(batch_size=2), causal_policy()
    rollouts = sampled(policy, str(tmp_path), c)
    assert rollouts.reading.prompt.shape == (2, 0)
    for shared in (True, False):
        policy.shared_prompt = shared
        logp = score(policy, rollouts, 1.0).logp
        torch.testing.assert_close(logp * rollouts.mask, rollouts.old_logp, rtol=1e-4, atol=1e-4)


def test_texts_are_prompt_and_completion_without_padding_and_stop_token(prompts):
    c = prompt_config(max_new_tokens=30, batch_size=8)
    policy = causal_policy(scale=3.0)
    batch, rollouts = prompt_consumer(prompts, c).problems("train", 0), sampled(policy, prompts, c)
    texts, ended, lengths = rollouts.texts, 0, set()
    for n in range(len(rollouts.target)):
        record = batch["record"][n // 4]
        written = rollouts.target[n, : int(rollouts.mask[n].sum())].tolist()
        stopped = written[-1] == CAUSAL.stop_token_id
        assert CAUSAL.stop_token_id not in written[:-1] and stopped != bool(rollouts.truncated[n])
        assert texts.tokens[n].tolist() == [*record["tokens"], *(written[:-1] if stopped else written)]
        assert texts.completions[n] == CAUSAL.decode(written) and texts.prompts[n] == record["prompt"]
        assert texts.columns["answer"][n] == record["answer"]
        for m in range(len(written) - stopped):
            assert texts.tokens[n][int(texts.place[n, m])] == rollouts.target[n, m]
        ended += stopped
        lengths.add(len(record["tokens"]))
    assert 0 < ended < len(rollouts.target) and len(lengths) > 1, "with and without a stop token, of several lengths"
    assert texts.metrics["truncated"][0] == len(rollouts.target) - ended
    assert [float(x) for x in texts.metrics["completion_length"]] == [float(rollouts.mask.sum()), 32.0]
    assert texts.size == rollouts.mask.sum() and rollouts.max_tokens == 30


def test_padding_in_every_row_is_left_out(prompts):
    c = prompt_config(batch_size=1)
    for number in range(6):
        rollouts = sampled(causal_policy(), prompts, c, number)
        tokens = prompt_consumer(prompts, c).problems("train", number)["record"][0]["tokens"]
        assert rollouts.reading.prompt.tolist() == [tokens[:-1]] and not rollouts.reading.padding.any()
        assert rollouts.reading.inputs[0, :, 0].tolist() == [tokens[-1]] * 4
        assert rollouts.reading.length.flatten().tolist() == rollouts.mask.sum(1).tolist()


@torch.no_grad()
def test_greedy_completions_are_the_likeliest_tokens_one_by_one(prompts):
    c, policy = prompt_config(batch_size=8, max_new_tokens=9), causal_policy(scale=4.0)
    batch = prompt_consumer(prompts, c).problems("train", 0)
    for record, text in zip(batch["record"], policy.greedy(batch, c), strict=True):
        ids = list(record["tokens"])
        for _ in range(9):
            ids.append(int(policy.model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == CAUSAL.stop_token_id:
                break
        assert text == CAUSAL.decode(ids[len(record["tokens"]) :])


def test_stop_sequences_and_the_response_prefix_are_the_configs(prompts):
    c, policy = prompt_config(max_new_tokens=20, response_prefix="so "), causal_policy(scale=3.0)
    data = prompt_consumer(prompts, c)
    problems = data.problems("train", 0)
    free = policy.sample(problems, 0, c)
    assert all(text.startswith("so ") for text in free.texts.completions)
    assert all(text.endswith("=") for text in free.texts.prompts)
    letter = max("abcdefghijklmnopqrstuvwxyz", key=lambda x: sum(x in text[3:] for text in free.texts.completions))
    cut = policy.sample(problems, 0, replace(c, stop_sequences=(letter,)))
    for whole, short in zip(free.texts.completions, cut.texts.completions, strict=True):
        assert short == "so " + whole[3:].split(letter)[0]
    assert any(letter in text[3:] for text in free.texts.completions)


def test_no_problem_has_more_states_than_are_planned_for(prompts):
    c, policy = prompt_config(), causal_policy()
    rollouts = sampled(policy, prompts, c)
    assert rollouts.reading.counts().max() <= policy.stored_states(c) == 4 * 6


class SeveralEnds(CharTokenizer):
    """A tokenizer in which the digits 0 to 4 end a completion too."""

    def __init__(self):
        super().__init__(stop=True)
        self.stop_token_ids = (self.stop_token_id, *self.encode("01234"))


def test_a_completion_ends_at_any_stop_token_and_its_whole_text_leaves_it_out(prompts):
    tokenizer, c = SeveralEnds(), prompt_config(max_new_tokens=30, batch_size=8)
    rollouts = CausalPolicy(causal_model(scale=2.0), tokenizer).sample(prompt_consumer(prompts, c).problems("train", 0),
                                                                       0, c)
    ends, M = set(), rollouts.target.shape[1]
    for n, ids in enumerate(rollouts.texts.completion_ids):
        ended = ids[-1] in tokenizer.stop_token_ids
        assert not set(ids[:-1]) & set(tokenizer.stop_token_ids) and ended == (not rollouts.truncated[n])
        assert ids == rollouts.target[n, : int(rollouts.mask[n].sum())].tolist() and len(ids) <= M
        first = int(rollouts.texts.place[n, 0])
        assert rollouts.texts.tokens[n][first:].tolist() == ids[: len(ids) - ended]
        ends |= {ids[-1]} if ended else set()
    assert len(ends) > 2 and 0 < rollouts.truncated.sum()


def test_what_fills_a_row_behind_its_end_can_be_embedded_and_changes_no_score(prompts):
    c, policy = prompt_config(max_new_tokens=12, batch_size=8), causal_policy(scale=3.0)
    rollouts = sampled(policy, prompts, c)
    inputs, length = rollouts.reading.inputs, rollouts.reading.length
    behind = torch.arange(inputs.shape[2]) >= length[..., None]
    assert behind.any() and 0 <= inputs.min() and inputs.max() < CAUSAL.vocab_size
    other = replace(rollouts, reading=replace(rollouts.reading, inputs=inputs.masked_fill(behind, 7)))
    assert torch.equal(score(policy, other, 1.0).logp, score(policy, rollouts, 1.0).logp)
