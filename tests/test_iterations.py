"""Several steps per rollout, groups replaced, references that move, and what is kept between."""

import copy
import dataclasses
import math

import pytest
import torch

from core.checkpoint_manager import freeze
from core.logger import Logger, read_records
from core.prompts import write_prompts
from core.training_step import build_optimizers
from grpo.data_buffer import DataBuffer
from grpo.grpo_trainer import GRPOTrainer
from grpo.grpo_training_step import compute_rewards, compute_rollout_advantages, gather_experience, train_on_rollouts
from grpo.objectives import OBJECTIVES, Objective, token_weights
from grpo.reference import ADAPT_RANGE, adapted, build_reference, ema, periodic
from grpo.rollout import Rollouts, collect, join_rollouts
from grpo.scoring import score, visiting, with_reference
from grpo.step_metrics import rollout_sums
from tests.test_step import CountingModel, step, whole
from tests.tiny import (CAUSAL, TOKENIZER, causal_model, config, consumer, judge, model, one_process,
                        prompt_consumer, rewards, undocumented)

CPU, NO_CAST = torch.device("cpu"), torch.autocast("cpu", enabled=False)


class Calls:
    """Something that counts how often it is called."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0

    def __call__(self, *arguments):
        self.count += 1
        return self.inner(*arguments)

    def close(self):
        pass


def no_evaluation(policy, temperature):
    return {"kl": 0.0}, []


no_evaluation.columns = ("loss",)


def trainer(dataset, out_dir, reward=None, policy=None, resume=False, **settings):
    c = config(dataset=dataset, out_dir=str(out_dir), eval_interval=100, sample_interval=100, **settings)
    dist, policy = one_process(), policy or model(seed=1, scale=3.0)
    reference = build_reference(policy, c, TOKENIZER, dist.device)
    reference = reference if reference is None else CountingModel(reference)
    t = GRPOTrainer(policy, reference, reward or Calls(rewards(c, judge())), consumer(dataset, c), no_evaluation, c,
                    Logger(c.out_dir, c.max_iters, no_evaluation.columns), dist, torch.float32)
    if resume:
        t.resume()
    return t


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def training_records(out_dir):
    return [r for r in read_records(str(out_dir / "metrics.jsonl")) if "loss" in r]


def test_a_rollout_serves_all_its_epochs_and_everything_else_runs_once(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=12, ppo_epochs=3, minibatches=2, learning_rate=1e-2, min_lr=1e-2)
    t.policy = CountingModel(t.policy)
    t.run()
    assert t.rewards.count == 2 and t.iteration == 2 and t.step == 12
    B = t.config.batch_size
    assert t.reference.rows == 2 * B, "once per problem and rollout, not per epoch"
    assert t.policy.rows == 2 * (B + B + 3 * B), "sampling, old log-probabilities, and one shared read per epoch"
    records = training_records(tmp_path)
    assert [r["step"] for r in records] == list(range(1, 13))
    assert records[0]["kl_to_old"] == 0 and records[6]["kl_to_old"] == 0, "the first step of an iteration has ratio 1"
    assert records[5]["kl_to_old"] > records[1]["kl_to_old"] > 0
    assert max(r["clip_fraction"] for r in records) > 0


def test_one_epoch_of_one_minibatch_is_the_on_policy_step(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=3)
    t.run()
    c, policy = t.config, model(seed=1, scale=3.0)
    reference, optimizers = freeze(copy.deepcopy(policy)), build_optimizers(policy, c)
    for number in range(3):
        step(policy, reference, judge(), dataset, c, number, optimizers=optimizers)
    assert same(policy, t.policy)


def test_minibatches_share_the_problems_out_and_leave_groups_whole(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=6, ppo_epochs=2, minibatches=3, batch_size=5)
    t.collect()
    whole_rollout = t.buffer.rollouts[1][0]
    seen = [t.buffer.next_minibatch()[0] for _ in range(6)]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(r.problems for r in epoch) == [1, 2, 2]
        for name in ("inputs", "target", "advantage"):
            rows = sorted(map(tuple, torch.cat([getattr(r, name) for r in epoch]).tolist()))
            assert rows == sorted(map(tuple, getattr(whole_rollout, name).tolist()))
    assert [r.inputs.tolist() for r in seen[:3]] != [r.inputs.tolist() for r in seen[3:]], "shuffled anew"
    assert not t.buffer.rollouts and not t.buffer.queue


def test_epochs_stop_when_the_policy_has_moved_too_far(dataset, tmp_path):
    far = trainer(dataset, tmp_path / "a", max_iters=6, ppo_epochs=6, learning_rate=3e-2, min_lr=3e-2,
                  max_kl_to_old=1e-4)
    far.run()
    assert far.step == 6 and far.iteration > 1
    near = trainer(dataset, tmp_path / "b", max_iters=6, ppo_epochs=6, learning_rate=3e-2, min_lr=3e-2)
    near.run()
    assert near.iteration == 1


MOVING = [{"ppo_epochs": 2, "minibatches": 2}, {"reference_mode": "ema", "ema_alpha": 0.8},
          {"reference_mode": "periodic", "reference_update_freq": 2}, {"kl_target": 1e-3},
          {"kl_in_reward": True}, {"reference_mode": "none", "kl_beta": 0.0, "ppo_epochs": 3}]


@pytest.mark.parametrize("settings", MOVING, ids=lambda s: "-".join(map(str, s.values())))
def test_a_resumed_run_equals_the_uninterrupted_one(dataset, tmp_path, settings):
    uncut = trainer(dataset, tmp_path / "uncut", max_iters=8, lr_decay_iters=8, **settings)
    uncut.run()
    trainer(dataset, tmp_path / "cut", max_iters=5, lr_decay_iters=8, **settings).run()
    resumed = trainer(dataset, tmp_path / "cut", max_iters=8, lr_decay_iters=8, resume=True, **settings)
    assert "ppo_epochs" not in settings or resumed.buffer.queue, "it was cut within an iteration"
    resumed.run()
    assert same(uncut.policy, resumed.policy) and uncut.kl_beta == resumed.kl_beta
    assert uncut.iteration == resumed.iteration and uncut.buffer.stored == resumed.buffer.stored
    assert uncut.reference is None or same(uncut.reference, resumed.reference)


def test_an_ema_reference_follows_by_its_formula():
    policy, reference = model(seed=1), freeze(model(seed=2))
    before = [p.clone() for p in reference.parameters()]
    ema(reference, policy, 1, config(reference_mode="ema", ema_alpha=0.9))
    for old, new, p in zip(before, reference.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * p)


def test_the_reference_moves_once_after_each_iteration(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=4, ppo_epochs=2, reference_mode="ema", ema_alpha=0.75)
    expected = [p.clone() for p in t.reference.parameters()]
    for number in range(4):
        fresh = not t.buffer.queue
        if fresh:
            t.collect()
        t.train(fresh)
        if number % 2:
            expected = [0.75 * e + 0.25 * p for e, p in zip(expected, t.policy.parameters(), strict=True)]
        for p, e in zip(t.reference.parameters(), expected, strict=True):
            torch.testing.assert_close(p, e)


def test_kl_beta_moves_once_after_each_iteration(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=6, ppo_epochs=2, kl_beta=0.1, kl_target=1e-3, learning_rate=3e-2)
    t.run()
    records, kl_beta, moved = training_records(tmp_path), 0.1, 0
    for number, record in enumerate(records):
        assert record["kl_beta"] == pytest.approx(kl_beta, rel=1e-12)
        if number % 2:  # the controller of arXiv 1909.08593 section 2.2
            error = record["mean_kl"] / 1e-3 - 1
            kl_beta, moved = kl_beta * (1 + 0.1 * min(0.2, max(-0.2, error))), moved + (record["mean_kl"] > 0)
    assert moved == 3 and t.kl_beta == pytest.approx(kl_beta, rel=1e-12) and t.kl_beta != 0.1


def test_a_periodic_reference_becomes_the_policy_when_its_time_comes():
    policy, reference = model(seed=1), freeze(model(seed=2))
    c, before = config(reference_mode="periodic", reference_update_freq=3), copy.deepcopy(reference)
    for iteration in (1, 2):
        periodic(reference, policy, iteration, c)
        assert same(reference, before)
    periodic(reference, policy, 3, c)
    assert same(reference, policy) and not any(p.requires_grad for p in reference.parameters())


def test_no_reference_is_built_where_none_is_needed():
    for settings in ({}, {"reference_mode": "none"}, {"ref_offload": True}):
        settings = {"kl_beta": 0.0} | settings
        assert build_reference(model(), config(**settings), TOKENIZER, CPU) is None
    assert build_reference(model(), config(kl_beta=0.1), TOKENIZER, CPU) is not None


def test_kl_beta_moves_towards_its_target_and_is_clamped():
    c = config(kl_beta=0.1, kl_target=0.5)
    assert adapted(0.1, 0.5, c) == 0.1
    assert adapted(0.1, 0.55, c) == pytest.approx(0.1 * 1.01), "10% too far raises it by a tenth of 10%"
    assert adapted(0.1, 50.0, c) == pytest.approx(0.1 * 1.02), "the error counts at most 20%"
    assert adapted(0.1, 1e-9, c) == pytest.approx(0.1 * 0.98)
    assert adapted(0.1, 0.0, c) == adapted(0.1, float("nan"), c) == 0.1, "nothing measured, nothing moved"
    assert adapted(0.1 * ADAPT_RANGE, 50.0, c) == 0.1 * ADAPT_RANGE
    assert adapted(0.1 / ADAPT_RANGE, 1e-9, c) == 0.1 / ADAPT_RANGE


def test_a_reference_that_waits_elsewhere_visits_and_goes_back():
    class Watched(torch.nn.Module):  # only one device here, so `to` is watched
        def __init__(self):
            super().__init__()
            self.p, self.places, self.config = torch.nn.Parameter(torch.zeros(1)), [], model().config

        def to(self, device):
            self.places.append(torch.device(device))
            return self

    reference = Watched()
    with visiting(reference, torch.device("cuda", 0)):
        assert reference.places == [torch.device("cuda", 0)]
    assert reference.places[-1] == CPU
    build_reference(Watched(), config(ref_offload=False), TOKENIZER, CPU)
    offloaded = build_reference(Watched(), config(ref_offload=True), TOKENIZER, CPU)
    assert offloaded.places == [CPU] and not offloaded.p.requires_grad


def test_the_reference_visits_for_as_long_as_it_is_read(dataset, monkeypatch):
    c, policy = config(ref_offload=True), model()
    reference, places = build_reference(policy, c, TOKENIZER, CPU), []
    monkeypatch.setattr(reference, "to", lambda device: places.append(torch.device(device)))
    rollouts = collect(policy, consumer(dataset, c).problems("train", 0), 0, c, TOKENIZER, CPU, NO_CAST)
    known = with_reference(rollouts, reference, 1.0, 4, NO_CAST)
    assert places == [CPU, CPU] and known.ref_full is not None


def scorer_by_problem(flat):
    """A reward that is all equal in the groups of `flat` and differs in the others."""
    def reward(rollouts):
        r = torch.rand(rollouts.problems, 4, generator=torch.Generator().manual_seed(len(rollouts.target)))
        for i in flat:
            if i < rollouts.problems and rollouts.problems == 4:
                r[i] = 0.5
        return whole(r)
    return reward


def experience(dataset, c, reward, spare=None, policy=None):
    policy, data = policy or model(seed=1, scale=3.0), consumer(dataset, c)
    return gather_experience(policy, None, reward, data.problems("train", 0), 0, c, TOKENIZER, one_process(),
                             spare=spare or (lambda again: data.problems("train", 0, 1 + again)))


def test_groups_of_equal_rewards_are_dropped_from_the_normaliser(dataset):
    kept, sums, _ = experience(dataset, config(zero_std="keep", kl_beta=0.0), scorer_by_problem([1, 2]))
    dropped, same_sums, _ = experience(dataset, config(zero_std="drop", kl_beta=0.0), scorer_by_problem([1, 2]))
    assert kept.problems == 4 and dropped.problems == 2
    assert torch.equal(dropped.target, kept.select(torch.tensor([0, 3]))[0].target)
    written = dropped.mask.sum(1, keepdim=True)
    for average, share in (("sequence", dropped.mask / written / 8), ("token", dropped.mask / written.sum()),
                           ("sum", dropped.mask / 8)):
        torch.testing.assert_close(token_weights(dropped.mask, average, 1), share)
    assert sums["frac_reward_zero_std"] == same_sums["frac_reward_zero_std"] == 2


def test_groups_of_equal_rewards_are_replaced_by_other_problems(dataset):
    c = config(zero_std="resample", kl_beta=0.0)
    rollouts, sums, _ = experience(dataset, c, scorer_by_problem([0, 2]))
    assert rollouts.problems == 4 and sums["resampled"] == 2
    first, _, _ = experience(dataset, config(kl_beta=0.0), scorer_by_problem([]))
    assert torch.equal(rollouts.inputs[:2], first.inputs[[1, 3]])
    assert not torch.equal(rollouts.inputs[2], first.inputs[0])
    assert (rollouts.advantage.view(4, 4).abs().sum(1) > 0).all()


def test_resampling_is_bounded_and_what_is_left_is_dropped(dataset):
    reward = Calls(lambda rollouts: whole(torch.full((rollouts.problems, 4), 0.5)))
    c = config(zero_std="resample", max_resamples=2, kl_beta=0.0, weight_decay=0.0)
    policy = model(seed=1, scale=3.0)
    before = copy.deepcopy(policy)
    rollouts, sums, _ = experience(dataset, c, reward, policy=policy)
    assert reward.count == 3 and sums["resampled"] == 8 and rollouts.problems == 0
    metrics = train_on_rollouts(policy, rollouts, sums, build_optimizers(policy, c), 1e-2, c, one_process(),
                                on_policy=True)
    assert metrics["grad_norm"] == 0 and metrics["frac_reward_zero_std"] == 1 and same(policy, before)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("problems", [1, 4])
def test_joined_rollouts_score_as_they_did_apart(prompts, shared, problems):
    c, policy = config(shared_prompt=shared, max_new_tokens=6, batch_size=problems), causal_model()
    parts, widths = [], set()
    for number in range(12 // problems):  # single prompts are of different widths, and none is padded
        data = prompt_consumer(prompts, c)
        rollouts = collect(policy, data.problems("train", number), number, c, CAUSAL, CPU, NO_CAST)
        rollouts = with_reference(rollouts, freeze(causal_model(seed=4)), 1.0, 4, NO_CAST)
        reward = torch.rand(problems, 4)
        parts.append((rollouts, reward, reward[..., None]))
        widths.add((rollouts.prompt if shared else rollouts.inputs).shape[1])
    nothing = rollouts.select(torch.arange(0))[0], reward[:0], reward[:0, :, None]
    joined, reward, credit = join_rollouts([nothing, *parts])
    assert problems > 1 or len(widths) > 1
    assert joined.problems == 12 and reward.shape == (12, 4) and credit.shape == (12, 4, 1)
    apart = torch.cat([score(policy, r, 1.0).logp.sum(1) for r, *_ in parts])
    torch.testing.assert_close(score(policy, joined, 1.0).logp.sum(1), apart, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined.ref_logp.sum(1), torch.cat([r.ref_logp.sum(1) for r, *_ in parts]))


def test_prompts_of_one_token_join_longer_ones(tmp_path):
    records = [{"prompt": text, "split": split} for text, split in (("7", "train"), ("7+8=", "train"), ("9", "val"))]
    write_prompts(str(tmp_path), records, CAUSAL)
    c, policy = config(max_new_tokens=6, batch_size=1), causal_model()
    data, parts = prompt_consumer(str(tmp_path), c), []
    for record in sorted(data.records["train"], key=lambda r: len(r["tokens"])):
        rollouts = collect(policy, data.pack([record], [0]), 0, c, CAUSAL, CPU, NO_CAST)
        parts.append((rollouts, torch.rand(1, 4), torch.rand(1, 4, 1)))
    assert [len(r.texts()[0][0]) for r, *_ in parts] == [1, 4]
    joined = join_rollouts(parts)[0]
    apart = torch.cat([score(policy, r, 1.0).logp.sum(1) for r, *_ in parts])
    torch.testing.assert_close(score(policy, joined, 1.0).logp.sum(1), apart, rtol=1e-5, atol=1e-5)


def test_kl_in_the_reward_moves_the_advantage_and_not_the_loss(dataset):
    policy, reference = model(seed=1), freeze(model(seed=2))
    c = config(kl_in_reward=True, kl_beta=0.5)
    rollouts = collect(policy, consumer(dataset, c).problems("train", 0), 0, c, TOKENIZER, CPU, NO_CAST)
    rollouts = with_reference(rollouts, reference, 1.0, 4, NO_CAST)
    reward, credit, values = compute_rewards(lambda _: whole(torch.zeros(4, 4)), rollouts, c, 0.5)
    expected = -0.5 * ((rollouts.old_logp - rollouts.ref_logp) * rollouts.mask).sum(1)
    assert (reward == 0).all(), "what the metrics and zero_std see is the reward of the task"
    torch.testing.assert_close(credit.flatten(), expected)
    torch.testing.assert_close(values["kl"], expected)
    rollouts = compute_rollout_advantages(rollouts, reward, credit, c, one_process())
    sums = rollout_sums(rollouts, reward, values, torch.ones(4, dtype=torch.bool))
    metrics = train_on_rollouts(policy, rollouts, sums, build_optimizers(policy, c), 0.0, c, one_process(),
                                on_policy=True)
    assert metrics["kl_penalty"] == 0 and metrics["loss"] == metrics["pg_loss"] and metrics["mean_kl"] > 0


@pytest.mark.parametrize("causal", [False, True])
def test_grad_checkpoint_keeps_the_gradient_and_less_memory(dataset, prompts, causal):
    build = causal_model if causal else model
    policy, c = build(n_layer=3, seed=1), config(max_new_tokens=6)
    data = prompt_consumer(prompts, c) if causal else consumer(dataset, c)
    rollouts = collect(policy, data.problems("train", 0), 0, c, CAUSAL if causal else TOKENIZER, CPU, NO_CAST)
    gradients, kept = [], []
    for policy.grad_checkpoint in (False, True):
        saved = {}

        def pack(x):
            saved[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = (score(policy, rollouts, 1.0).logp * rollouts.mask).sum()
        kept.append(sum(saved.values()))
        policy.zero_grad()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
    assert kept[1] < 0.7 * kept[0]


def test_the_trainer_calls_the_buffer_in_order(dataset, tmp_path):
    calls = []

    class Recorder(DataBuffer):
        def __getattribute__(self, name):
            if name in ("store_rollout_data", "prepare_training_batch", "next_minibatch", "store_evaluation_data"):
                calls.append(name)
            return super().__getattribute__(name)

    t = trainer(dataset, tmp_path, max_iters=4, ppo_epochs=2)
    t.buffer = Recorder()
    t.run()
    one = ["store_rollout_data", "prepare_training_batch", "next_minibatch", "next_minibatch"]
    assert calls == ["store_evaluation_data", *one, *one, "store_evaluation_data"]
    assert t.buffer.get_buffer_statistics() == {"rollouts": 0, "completions": 0, "minibatches": 0, "stored": 2,
                                                "evaluations": 2}


@pytest.mark.parametrize("zero_std", ["drop", "resample"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_step_in_which_no_group_is_left_goes_by(prompts, zero_std, epochs):
    c = config(zero_std=zero_std, max_resamples=2, max_new_tokens=4, kl_beta=0.0, minibatches=epochs, weight_decay=0.0)
    policy, data = causal_model(), prompt_consumer(prompts, c)
    before = copy.deepcopy(policy)
    flat = lambda rollouts: whole(torch.ones(rollouts.problems, 4))
    rollouts, sums, _ = gather_experience(policy, None, flat, data.problems("train", 0), 0, c, CAUSAL, one_process(),
                                          spare=lambda again: data.problems("train", 0, 1 + again))
    buffer = DataBuffer()
    buffer.prepare_training_batch(buffer.store_rollout_data(rollouts, sums), minibatches=epochs)
    for part, sums in buffer:
        metrics = train_on_rollouts(policy, part, sums, build_optimizers(policy, c), 1e-2, c, one_process(),
                                    on_policy=True)
        assert metrics["grad_norm"] == 0 and metrics["skipped_steps"] == 0
    assert same(policy, before)


def test_every_key_of_every_setting_is_documented(dataset, prompts, tmp_path):
    for i, settings in enumerate(({"objective": "dr_grpo", "kl_in_reward": True, "zero_std": "resample"},
                                  {"kl_target": 0.1, "ppo_epochs": 2, "minibatches": 2, "entropy_bonus": 0.01})):
        trainer(dataset, tmp_path / str(i), max_iters=2, **settings).run()
        logged = {key for r in read_records(str(tmp_path / str(i) / "metrics.jsonl")) for key in r} - {"step"}
        assert "loss" in logged and not undocumented(logged)
    c, policy = config(overlong_buffer=4, max_new_tokens=6, kl_beta=0.0), causal_model()
    batch = prompt_consumer(prompts, c).problems("train", 0)
    _, sums, _ = gather_experience(policy, None, lambda r: whole(torch.rand(4, 4)), batch, 0, c, CAUSAL, one_process())
    assert "reward/overlong" in sums and not undocumented(["reward/overlong"]) and undocumented(["loss2", "eval/x"])


def test_the_step_alone_refuses_what_needs_the_trainer(dataset):
    for settings in ({"ppo_epochs": 2}, {"minibatches": 2}, {"zero_std": "resample"}):
        with pytest.raises(ValueError, match="use GRPOTrainer"):
            step(model(), None, judge(), dataset, config(kl_beta=0.0, **settings))


def rollouts_with_advantage(dataset, c):
    rollouts = collect(model(), consumer(dataset, c).problems("train", 0), 0, c, TOKENIZER, CPU, NO_CAST)
    return dataclasses.replace(rollouts, advantage=torch.randn(len(rollouts.target), 1))


@pytest.mark.parametrize("settings", [{"zero_std": "drop"}, {"mask_truncated": True}, {"minibatches": 2}])
def test_means_are_over_the_tokens_they_speak_of(prompts, settings):
    c, policy = config(max_new_tokens=30, kl_beta=0.0, objective="reinforce++", **settings), causal_model(scale=3.0)
    batch, reward = prompt_consumer(prompts, c).problems("train", 0), torch.rand(4, 4)
    reward[1:3] = 0.5
    rollouts, sums, _ = gather_experience(policy, None, lambda r: whole(reward[: r.problems]), batch, 0, c, CAUSAL,
                                          one_process())
    rollouts.old_logp -= 0.25 * rollouts.mask  # what a sampler that disagrees would have said
    metrics = train_on_rollouts(policy, rollouts, sums, build_optimizers(policy, c), 1e-2, c, one_process(),
                                on_policy=True)
    trained = rollouts.mask > 0
    assert trained.any() and (settings.keys() == {"minibatches"} or trained.sum() < sums["tokens"])
    mean = float(rollouts.advantage.expand_as(rollouts.mask)[trained].mean())
    assert metrics["mean_advantage"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    if "minibatches" not in settings:
        assert metrics["ratio_minus_one"] == pytest.approx(math.exp(0.25) - 1, rel=1e-3)


def test_a_later_step_needs_no_settings_of_several_steps(dataset):
    c, policy = config(kl_beta=0.0), model()
    rollouts, sums, _ = experience(dataset, c, lambda r: whole(torch.rand(4, 4)), policy=policy)
    metrics = train_on_rollouts(policy, rollouts, sums, build_optimizers(policy, c), 1e-2, c, one_process(),
                                on_policy=False)
    assert "ratio_minus_one" not in metrics and metrics["grad_norm"] > 0


def test_an_older_state_is_refused_in_one_line(dataset, tmp_path):
    trainer(dataset, tmp_path, max_iters=1).run()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    del state["buffers"]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="not saved by this version"):
        trainer(dataset, tmp_path, max_iters=2, resume=True)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_bandit_is_solved_in_several_steps_per_rollout(dataset, tmp_path, name):
    """The reward is the share of hidden places filled with 'e'; ratios leave 1 and are clipped on the way."""
    def share_of_e(rollouts):
        right = (rollouts.target == TOKENIZER.encode("e")[0]) * rollouts.mask
        return whole((right.sum(1) / rollouts.mask.sum(1)).view(rollouts.problems, -1))

    t = trainer(dataset, tmp_path, Calls(share_of_e), model(scale=1.0), objective=name, kl_beta=0.0, ppo_epochs=2,
                minibatches=2, max_iters=320, learning_rate=2e-2, min_lr=2e-2, batch_size=8, group_size=8,
                log_interval=1000, save_interval=1000)
    t.run()
    records = training_records(tmp_path)
    assert records[-1]["mean_reward"] > 0.9 and max(r["kl_to_old"] for r in records) > 1e-3


def test_the_trainer_passes_grad_checkpoint_on(dataset, tmp_path):
    assert trainer(dataset, tmp_path / "a", grad_checkpoint=True).policy.grad_checkpoint
    assert not trainer(dataset, tmp_path / "b").policy.grad_checkpoint


def test_the_overlong_penalty_is_in_the_credit_and_not_in_the_reward(prompts):
    c, policy = config(overlong_buffer=4, overlong_penalty=0.5, max_new_tokens=6, kl_beta=0.0), causal_model()
    rollouts = collect(policy, prompt_consumer(prompts, c).problems("train", 0), 0, c, CAUSAL, CPU, NO_CAST)
    given = torch.rand(4, 4)
    reward, credit, values = compute_rewards(lambda _: whole(given), rollouts, c, 0.0)
    lengths = rollouts.mask.sum(1).tolist()
    spent = torch.tensor([0.5 * min(0.0, (6 - 4 - n) / 4) for n in lengths])
    assert torch.equal(reward, given) and len(set(lengths)) > 1
    torch.testing.assert_close(credit.flatten(), given.flatten() + spent)
    torch.testing.assert_close(values["overlong"], spent)


def test_the_buffer_is_bounded_and_refuses_without_a_trace(dataset):
    good = rollouts_with_advantage(dataset, config())
    buffer = DataBuffer(capacity=1)
    bad = [dataclasses.replace(good, advantage=None), dataclasses.replace(good, mask=good.mask[:-1]),
           dataclasses.replace(good, problems=3), dataclasses.replace(good, advantage=good.advantage[:-1])]
    for rollouts in bad:
        with pytest.raises(ValueError):
            buffer.store_rollout_data(rollouts, {})
    with pytest.raises(ValueError, match="no rollouts with id 1"):
        buffer.prepare_training_batch(1)
    with pytest.raises(ValueError, match="reward is not a number"):
        buffer.store_evaluation_data(3, {"loss": 1.0, "reward": float("nan")})
    assert buffer.get_buffer_statistics() == dict.fromkeys(
        ("rollouts", "completions", "minibatches", "stored", "evaluations"), 0)
    id = buffer.store_rollout_data(good, {"reward": 1.0})
    with pytest.raises(ValueError, match="holds 1 rollouts already"):
        buffer.store_rollout_data(good, {})
    with pytest.raises(ValueError, match="epochs=0"):
        buffer.prepare_training_batch(id, epochs=0)
    assert not buffer.queue
    buffer.prepare_training_batch(id, epochs=2)
    with pytest.raises(ValueError, match="queued already"):
        buffer.prepare_training_batch(id)
    assert [sums for _, sums in buffer] == [{"reward": 1.0}] * 2 and not buffer.rollouts
    for number in range(1200):
        buffer.store_evaluation_data(number, {"x": 1.0})
    assert len(buffer.evaluations) == 1000 and buffer.evaluations[-1]["step"] == 1199


def test_a_buffer_read_back_hands_out_the_same_minibatches(dataset, tmp_path):
    buffer = DataBuffer(seed=3)
    id = buffer.store_rollout_data(rollouts_with_advantage(dataset, config()), {"a": 1.0})
    buffer.prepare_training_batch(id, 2, 2)
    buffer.next_minibatch()
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    twin = DataBuffer(seed=3)
    twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for (a, sums), (b, twin_sums) in zip(buffer, twin, strict=True):
        assert sums == twin_sums
        for field in dataclasses.fields(Rollouts):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(x, y) if torch.is_tensor(x) else x == y


def test_a_new_algorithm_is_a_row(dataset, monkeypatch):
    """Ten lines: GRPO with a soft ratio (SAPO-like): sigmoid(4 (r - 1)) A instead of a clip."""
    from grpo import objectives

    def soft(r, clipped, logp, advantage, clip_cap):
        return (4 * (r - 1)).sigmoid() * advantage

    monkeypatch.setitem(objectives.SURROGATES, "soft", soft)
    row = Objective("-mean sigmoid(4 (r - 1)) A", "none", "group_std", "sequence", surrogate="soft")
    monkeypatch.setitem(OBJECTIVES, "soft_grpo", row)
    policy = model(seed=1, scale=3.0)
    before = copy.deepcopy(policy)
    metrics = step(policy, freeze(copy.deepcopy(policy)), judge(), dataset, config(objective="soft_grpo"))
    assert metrics["grad_norm"] > 0 and not same(policy, before)
