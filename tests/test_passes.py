"""Fill-in in several passes, and the ways to estimate how likely it was."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from core.batch import masked_positions
from core.checkpoint_manager import freeze, save_model
from core.losses import sampling_logp
from core.sampling import draw_turns, draw_uniforms, fill_in_passes, predict_and_sample_tokens
from core.training_step import build_optimizers
from grpo.fill_views import FILL_ESTIMATORS, PROMPT_MASKED
from grpo.grpo_training_step import compute_rollout_advantages, gather_experience, mismatch
from grpo.models import load_models
from grpo.rollout import collect, join_rollouts
from grpo.scoring import score, with_old_policy, with_reference
from grpo.verifiers import equations, is_true
from tests.test_step import CountingModel, step, whole
from tests.tiny import (CAUSAL, TOKENIZER, causal_model, config, consumer, judge, model, one_process, rewards,
                        run_script, save)

CPU, NO_CAST, MASK = torch.device("cpu"), torch.autocast("cpu", enabled=False), TOKENIZER.mask_token_id


def problem(dataset, c):
    batch = consumer(dataset, c).problems("train", 0)
    input, mask = torch.from_numpy(batch["input"]), torch.from_numpy(batch["mask"])
    return batch, input, *masked_positions(mask, CPU)


def passes(net, dataset, c, S, **more):
    batch, input, position, chosen = problem(dataset, c)
    noise = draw_uniforms(c.seed, 0, batch["number"], (2, c.group_size, c.block_size))
    return fill_in_passes(net, input, position, chosen, noise[:, 0], noise[:, 1], S, **more)


def gathered(policy, dataset, c):
    return collect(policy, consumer(dataset, c).problems("train", 0), 0, c, TOKENIZER, CPU, NO_CAST)


def test_one_pass_is_the_one_pass_sampler(dataset):
    c, net = config(top_p=0.9, temperature=0.8), model()
    batch, input, position, chosen = problem(dataset, c)
    noise = draw_uniforms(c.seed, 0, batch["number"], (c.group_size, c.block_size))
    target, logp = predict_and_sample_tokens(net, input, position, noise, 0.8, 0.9)
    again, logp_again, turn, read, _ = passes(net, dataset, c, 1, temperature=0.8, top_p=0.9)
    hidden = chosen.repeat_interleave(4, 0) > 0
    assert torch.equal(target.flatten(0, 1)[hidden], again[hidden])
    torch.testing.assert_close(logp.flatten(0, 1)[hidden], logp_again[hidden])
    assert (turn[hidden] == 0).all() and torch.equal(read[:, 0], input.repeat_interleave(4, 0))
    one = gathered(net, dataset, c)
    assert torch.equal(one.target[hidden], again[hidden])


@pytest.mark.parametrize("S", [2, 3, 40])
def test_every_hidden_place_has_its_turn_in_random_order(S):
    chosen = torch.zeros(500, 12)
    chosen[:, :10] = 1.0
    turn = draw_turns(torch.rand(500, 12), chosen, S)
    assert (turn[:, 10:] == -1).all() and turn[:, :10].min() == 0 and turn.max() < S
    for row in turn[:5, :10]:
        counts = [int((row == s).sum()) for s in range(S)]
        assert sum(counts) == 10 and max(counts) - min(counts) <= 1
    share = (turn[:, :10] == 0).float().mean(0)
    assert (share - share.mean()).abs().max() < 0.1, "each place comes first equally often"


def test_a_pass_reads_what_the_ones_before_have_written(dataset):
    c, net = config(), model()
    target, logp, turn, read, _ = passes(net, dataset, c, 3)
    _, input, position, chosen = problem(dataset, c)
    for n in range(len(target)):
        text = input[n // 4].clone()
        for s in range(3):
            assert torch.equal(read[n, s], text)
            p = sampling_logp(net(text[None]), 1.0)[0]
            for m in range(target.shape[1]):
                if turn[n, m] == s:
                    place, token = position[n // 4, m], target[n, m]
                    assert abs(float(p[place, token] - logp[n, m])) < 1e-4
                    text[place] = token
        assert not (text == MASK).any()


def test_several_passes_sample_the_chain_rule():
    """Two places whose tokens depend on each other: frequencies equal the product of reported conditionals."""
    class Coupled(torch.nn.Module):
        def forward(self, input, position):
            logits = torch.zeros(len(input), 2, 2)
            logits[:, 0, 1] = 1.0
            other = input.gather(1, torch.tensor([[1, 0]]).expand(len(input), -1))   # what stands at the other place
            logits[..., 1] += torch.where(other == 9, 0.0, torch.where(other == 1, 2.0, -2.0))
            return logits

    N = 20_000
    noise = torch.rand(2, 1, N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    input, position, chosen = torch.full((1, 2), 9), torch.tensor([[0, 1]]), torch.ones(1, 2)
    target, logp, turn, _, _ = fill_in_passes(Coupled(), input, position, chosen, noise[0], noise[1], 2)
    for first in (0, 1):
        rows = turn[:, first] == 0
        for a in (0, 1):
            for b in (0, 1):
                these = rows & (target[:, 0] == a) & (target[:, 1] == b)
                p = float(logp[these][0].sum().exp())
                seen = int(these.sum()) / int(rows.sum())
                assert abs(seen - p) < 4 * math.sqrt(p * (1 - p) / int(rows.sum())), (first, a, b)


@pytest.mark.parametrize("S", [1, 2, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_trajectory_scores_what_was_sampled(dataset, S, top_p):
    c, policy = config(unmask_steps=S, top_p=top_p, temperature=0.7), model()
    rollouts = gathered(policy, dataset, c)
    said = score(policy, rollouts, c.temperature)
    torch.testing.assert_close(said.logp * rollouts.mask, rollouts.old_logp * rollouts.mask, rtol=1e-4, atol=1e-4)
    found = mismatch(said.logp, rollouts)
    assert found["ratio_minus_one"] < 1e-3 and found["ratio_tokens"] == rollouts.mask.sum()


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("estimator", FILL_ESTIMATORS)
def test_first_ratio_is_one_and_kl_zero_for_every_estimator(dataset, S, estimator):
    c = config(unmask_steps=S, fill_estimator=estimator)
    policy = model()
    metrics = step(policy, freeze(copy.deepcopy(policy)), judge(), dataset, c)
    assert metrics["clip_fraction"] == 0 and metrics["kl_to_old"] == 0 and metrics["mean_kl"] == 0
    assert metrics["grad_norm"] > 0
    if estimator == "trajectory" or S == 1 and estimator == "one_step":
        assert metrics["ratio_minus_one"] < 1e-4
    epochs = dataclasses.replace(c, ppo_epochs=2, kl_beta=0.0)
    rollouts, _, _ = gather_experience(policy, None, lambda r: whole(torch.rand(4, 4)),
                                       consumer(dataset, c).problems("train", 0), 0, epochs, TOKENIZER, one_process())
    assert torch.equal(score(policy, rollouts, 1.0).logp, rollouts.old_logp)


@pytest.mark.parametrize("estimator, texts", [("trajectory", 1 + 2 * 4), ("one_step", 1), ("prompt_mask", 1),
                                              ("random_mask", 4), ("coupled", 2 * 4)])
def test_an_estimator_reads_as_many_texts_as_it_says(dataset, estimator, texts):
    c = config(unmask_steps=3, fill_estimator=estimator, group_size=4)
    rollouts = gathered(model(), dataset, c)
    reader = CountingModel(model())
    score(reader, rollouts, 1.0)
    assert reader.rows == texts * c.batch_size


def views_of(dataset, estimator, S=3):
    c, policy = config(unmask_steps=S, fill_estimator=estimator, batch_size=3), model()
    rollouts = gathered(policy, dataset, c)
    return c, policy, rollouts, problem(dataset, c)[1:]


def test_coupled_reads_every_token_hidden_exactly_once(dataset):
    c, policy, r, (input, position, chosen) = views_of(dataset, "coupled")
    T = c.block_size
    for n in range(len(r.target)):
        first, second = r.inputs[n, :T], r.inputs[n, T:]
        hidden = position[n // 4][chosen[n // 4] > 0]
        assert ((first[hidden] == MASK) != (second[hidden] == MASK)).all()
        for m, place in enumerate(hidden):
            view, where = divmod(int(r.position[n, m]), T)
            assert where == place and (first, second)[view][place] == MASK
            assert (second, first)[view][place] == r.tokens[n, place]
    assert torch.equal(r.mask, chosen.repeat_interleave(4, 0))


def test_random_mask_scores_what_it_hides_and_nothing_else(dataset):
    c, policy, r, (input, position, chosen) = views_of(dataset, "random_mask")
    shares = []
    for n in range(len(r.target)):
        hidden = (r.inputs[n] == MASK).nonzero().flatten().tolist()
        assert sorted(r.position[n][r.scored[n] > 0].tolist()) == hidden and hidden
        shares.append(len(hidden) / int(chosen[n // 4].sum()))
    assert min(shares) < 0.4 and max(shares) > 0.6
    assert torch.equal(r.mask, chosen.repeat_interleave(4, 0)), "what was written is counted whole"
    trained = compute_rollout_advantages(r, torch.rand(3, 4), torch.rand(3, 4, 1), c, one_process()).mask
    assert torch.equal(trained, r.mask * r.scored)


def test_prompt_mask_hides_some_of_the_visible_text_for_the_whole_group(dataset):
    c, policy, r, (input, position, chosen) = views_of(dataset, "prompt_mask")
    visible = input != MASK
    share = float(((r.inputs == MASK) & visible).sum() / visible.sum())
    assert r.inputs.shape == input.shape and 0.3 * PROMPT_MASKED < share < 2 * PROMPT_MASKED


@pytest.mark.parametrize("estimator", FILL_ESTIMATORS)
def test_scores_equal_reading_each_text_on_its_own(dataset, estimator):
    c, policy, r, (input, position, chosen) = views_of(dataset, estimator)
    said, T = score(policy, r, 1.0).logp, c.block_size
    for n in range(0, len(r.target), 3):
        row = n * len(r.inputs) // len(r.target)
        texts = list(r.inputs[row].view(-1, T))
        if r.prompt is not None:
            texts.insert(0, r.prompt[n // 4])
        p = [sampling_logp(policy(text[None]), 1.0)[0] for text in texts]
        for m in range(r.target.shape[1]):
            if r.mask[n, m]:
                view, place = divmod(int(r.position[row, m]), T)
                assert place == position[n // 4, m]
                assert abs(float(p[view][place, r.target[n, m]] - said[n, m])) < 1e-4


@pytest.mark.parametrize("estimator", FILL_ESTIMATORS)
def test_a_bandit_is_solved_in_several_passes(dataset, estimator):
    e = TOKENIZER.encode("e")[0]

    def share_of_e(rollouts):
        return whole(((rollouts.target == e) * rollouts.mask).sum(1).div(rollouts.mask.sum(1)).view(-1, 8))

    c = config(objective="plain", kl_beta=0.0, learning_rate=3e-2, batch_size=8, group_size=8, unmask_steps=3,
               fill_estimator=estimator)
    policy = model(scale=1.0)
    optimizers, seen = build_optimizers(policy, c), []
    for number in range(60):
        seen.append(step(policy, None, share_of_e, dataset, c, number, optimizers=optimizers)["mean_reward"])
    assert sum(seen[-5:]) / 5 > sum(seen[:5]) / 5 + 0.3


def test_joined_and_selected_rollouts_score_as_they_did(dataset):
    for estimator in FILL_ESTIMATORS:
        c, policy, _, _ = views_of(dataset, estimator)
        data = consumer(dataset, c)
        parts = []
        for number in range(2):
            r = collect(policy, data.problems("train", number), number, c, TOKENIZER, CPU, NO_CAST)
            r = with_old_policy(with_reference(r, freeze(model(seed=3)), 1.0, 2, NO_CAST), policy, 1.0, 2, NO_CAST)
            reward = torch.rand(3, 4)
            parts.append((r, reward, reward[..., None]))
        joined, _, _ = join_rollouts(parts)
        torch.testing.assert_close(score(policy, joined, 1.0).logp * joined.mask, joined.old_logp * joined.mask,
                                   rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", FILL_ESTIMATORS)
def test_credit_near_a_token_finds_its_place_in_the_text(dataset, estimator):
    c, scorer = config(unmask_steps=3, fill_estimator=estimator, credit_window=0), judge()
    rollouts = gathered(model(), dataset, c)
    _, credit, _ = rewards(c, scorer)(rollouts)
    odds = scorer(rollouts.tokens).clamp(-6.9, 6.9)
    places = problem(dataset, c)[2].repeat_interleave(4, 0)
    torch.testing.assert_close(credit.flatten(0, 1), odds.gather(1, places), rtol=1e-2, atol=1e-2)


def test_equations_checks_the_lines_that_were_touched():
    truth = "3\n1+2=3\n10+5=15\n4+4"
    prompt = "3\n1+_=3\n10+5=15\n_+4"
    given = lambda text: equations(["" if text is None else prompt], [text or ""], answer=[truth])
    assert given("3\n1+2=3\n10+5=15\n4+4") == [1.0]
    assert given("3\n1+3=3\n10+5=15\n4+4") == [0.0]
    assert equations([truth], [truth], answer=[truth]) == [None], "nothing was hidden in a whole line"
    assert equations(["3\n_+_=3\n1_+5=15\n"], ["3\n2+1=3\n11+5=15\n"], answer=["3\n1+2=3\n10+5=15\n"]) == [0.5]
    for line, worth in (("\n1+2=3\n", 1.0), ("\n2+1=37", 0.0), ("71+2=3\n", 0.0), ("\n+3=3 \n", 0.0),
                        ("\n3=3  \n", 0.0), ("\n 1+2=3", 0.0), ("\n01+2=", 0.0), ("\n3+0=3\n", 1.0),
                        ("\n3=3+0\n", 0.0)):
        assert equations(["_______7"], [line + "7"], answer=["\n1+2=3\n7"]) == [worth], line
    assert equations(["4_1+2=3\n"], ["441+2=3\n"], answer=["4\n1+2=3\n"]) == [0.0], "its line break was hidden"


def test_equation_lines_are_true_and_on_one_side_each(tmp_path):
    done = run_script("data/equations/prepare.py", "--largest=30", "--copies=3", f"--out={tmp_path}")
    assert done.returncode == 0 and "lines" in done.stdout, done.stderr
    lines = {}
    for split in ("train", "val"):
        text = TOKENIZER.decode(np.fromfile(tmp_path / f"{split}.bin", dtype=np.uint16).tolist())
        lines[split] = set(text.strip().split("\n"))
        assert all(is_true(line) for line in lines[split])
    assert len(lines["train"] | lines["val"]) == 31 * 31 and not lines["train"] & lines["val"]
    assert 0.05 < len(lines["val"]) / 31**2 < 0.2


def test_settings_of_the_other_kind_of_generator_are_refused(tmp_path):
    save_model(str(tmp_path / "causal.safetensors"), causal_model(), CAUSAL)
    fill = save(tmp_path / "fill.safetensors", model())
    for path, tokenizer, settings, message in (
            ("causal.safetensors", CAUSAL, {"unmask_steps": 2}, "unmask_steps=2 is for fill-in"),
            ("causal.safetensors", CAUSAL, {"fill_estimator": "coupled"}, "use fill_estimator=trajectory"),
            ("fill.safetensors", TOKENIZER, {"overlong_buffer": 4}, "overlong_buffer=4 is for prompts"),
            ("fill.safetensors", TOKENIZER, {"mask_truncated": True}, "use mask_truncated=False")):
        with pytest.raises(ValueError, match=message):
            load_models(config(generator_checkpoint=str(tmp_path / path), **settings), tokenizer, CPU)
    assert load_models(config(generator_checkpoint=fill, unmask_steps=2), TOKENIZER, CPU)[0].config == model().config
