"""The vLLM sampler against a server that computes with transformers, token by token."""

import os
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from core.files.json_lines import read_records
from core.models import save_model
from grpo import train_grpo
from grpo.samplers.vllm import VllmSampler, every_token, prompts_of, seed_of
from grpo.scoring import score_in_batches
from tests.grpo.samplers.vllm_world import KINDS, folders, world  # noqa: F401 fixtures
from tests.tiny import CAUSAL, causal_model, one_process, run_here, run_script
from tests.vllm_server import running

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_brings_the_weights_and_the_policy_scores_what_was_drawn_alike(world, kind):
    w = world(kind)
    for version in range(2):
        w.sync(version)
        rollouts = w.write(version, iteration=version)
        logp = score_in_batches(w.policy, rollouts, w.config)
        torch.testing.assert_close(logp * rollouts.mask, rollouts.old_logp, rtol=0, atol=1e-4)
        assert rollouts.old_logp[rollouts.mask > 0].max() < 0
        w.move(seed=version)
        moved = score_in_batches(w.policy, rollouts, w.config)
        assert ((moved - logp) * rollouts.mask).abs().max() > 1e-3, "the weights of the next version are others"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "qwen3"])
def test_completions_are_as_long_as_the_run_asks_for_and_stop_at_every_end_of_the_tokenizer(world, kind):
    w = world(kind, max_new_tokens=20, group_size=16, temperature=1.5)
    w.sync(0)
    rollouts, ends = w.write(0), w.policy.tokenizer.stop_token_ids
    length, seen = rollouts.mask.sum(1).long(), set()
    for ids, n, truncated in zip(rollouts.target.tolist(), length.tolist(), rollouts.truncated.tolist(), strict=True):
        assert truncated == (n == 20 and ids[n - 1] not in ends)
        assert truncated or ids[n - 1] in ends
        assert not set(ids[: n - 1]) & set(ends)
        seen |= {ids[n - 1]} & set(ends)
    assert seen == set(ends), "each of them ended a completion"
    assert len(rollouts.target) == len(w.problems["number"]) * 16 and len(set(length.tolist())) > 2
    never = w.sampler.never
    assert (kind == "ours") == (not never) and not set(rollouts.target[rollouts.mask > 0].tolist()) & set(never)


def test_rewards_read_the_texts_of_the_ids_that_were_drawn(world):
    w = world(max_new_tokens=6)
    w.sync(0)
    rollouts = w.write(0)
    prompts = [text for record in w.problems["record"] for text in [record["prompt"]] * w.config.group_size]
    assert rollouts.texts.prompts == prompts
    for text, ids in zip(rollouts.texts.completions, rollouts.texts.completion_ids, strict=True):
        assert text == CAUSAL.decode(ids)


def test_a_stop_sequence_ends_completions(world):
    plain = world(temperature=1.5, max_new_tokens=12)
    plain.sync(0)
    found = plain.write(0)
    piece = next(text[2:4] for text in found.texts.completions if len(text) > 6)
    w = world(temperature=1.5, max_new_tokens=12, stop_sequences=(piece,))
    w.sync(0)
    rollouts = w.write(0)
    assert all(piece not in text for text in rollouts.texts.completions)
    assert rollouts.mask.sum() < found.mask.sum()


def test_completions_depend_on_seed_iteration_and_problem_alone(world):
    w = world()
    w.sync(0)
    whole = w.write(0, iteration=5)
    part = w.write(0, {key: x[1:2] for key, x in w.problems.items()}, iteration=5)
    G, M = w.config.group_size, part.target.shape[1]
    assert torch.equal(part.target, whole.target[G : 2 * G, :M])
    other = w.write(0, iteration=6)
    assert other.target.shape != whole.target.shape or not torch.equal(other.target, whole.target)
    assert len({tuple(ids) for ids in whole.target[:G].tolist()}) > 1, "the completions of a group differ"
    assert len({seed_of(a, b, c) for a in range(5) for b in range(5) for c in range(5)}) == 125
    assert 0 <= seed_of(0, 0, 0) < 2**62


def test_starts_are_finished_in_their_order_with_the_version_that_wrote_them(world):
    w = world("adapter", max_staleness=1)
    w.sync(0)
    w.sampler.start(w.problems, 0, 0)
    w.sampler.start(w.data.problems("train", 1), 1, 0)
    first = w.sampler.finish()
    w.move()
    w.sync(1)
    second = w.sampler.finish()
    assert (first.version, second.version) == (0, 0)
    assert prompts_of(w.data.problems("train", 1)) != prompts_of(w.problems)
    fresh = w.write(1, w.data.problems("train", 1), 1)
    mismatch = lambda rollouts: float((score_in_batches(w.policy, rollouts, w.config) - rollouts.old_logp).abs().max())
    assert mismatch(fresh) < 1e-4 < 1e-3 < mismatch(second.rollouts), "the second was written before the sync"


@pytest.mark.parametrize("staleness", [0, 2])
def test_adapters_have_names_of_their_own_and_old_ones_are_let_go(world, staleness):
    w = world("adapter", max_staleness=staleness)
    for version in range(5):
        w.sync(version)
        w.move(seed=version)
    names = [f"{w.sampler.prefix}{version}" for version in range(4 - staleness, 5)]
    assert list(w.server.loaded) == names
    assert sorted(os.listdir(w.sampler.folder)) == names
    assert not os.path.exists(os.path.join(w.sampler.folder, names[0], "model.safetensors")), "the adapter alone"


def test_what_an_earlier_run_of_the_folder_left_is_removed_first(world, prompts, folders):
    w = world("adapter")
    w.sync(3)
    again = VllmSampler(w.policy, w.config, one_process())
    assert not w.server.loaded and not os.path.exists(w.sampler.folder)
    again.sync(w.policy.weights(), 3)
    assert list(w.server.loaded) == [f"{again.prefix}3"]


@pytest.mark.parametrize("kind", ["adapter", "ours"])
def test_what_was_read_of_prompts_with_other_weights_is_never_used(world, kind):
    """Neither that of the version before nor that of an earlier run of the same folder, on a server that stays."""
    w = world(kind)
    w.server.forgets = False
    for _ in range(2):
        w.sampler.first = True
        for version in range(2):
            w.sync(version)
            rollouts = w.write(version)
            away = score_in_batches(w.policy, rollouts, w.config) - rollouts.old_logp
            assert (away * rollouts.mask).abs().max() < 1e-4
            w.move(0.15, seed=version)
        w.sampler = w.sync_check.sampler = VllmSampler(w.policy, w.config, one_process())
    assert w.server.hits, "the completions of a group do use it"


def test_the_end_of_a_run_leaves_nothing(world):
    w = world("adapter", max_staleness=1)
    w.sync(0)
    w.move()
    w.sync(1)
    assert len(w.server.loaded) == 2
    w.sampler.close()
    assert not w.server.loaded and not os.path.exists(w.sampler.folder)


def test_an_adapter_that_cannot_be_unloaded_is_a_warning(world, capsys):
    w = world("adapter")
    w.sync(0)
    w.server.loaded.clear()
    w.move()
    w.sync(1)
    line = capsys.readouterr().err
    assert line.startswith("warning: vllm_url=http://127.0.0.1:") and "cannot be found" in line
    assert line.count("\n") == 1
    assert list(w.server.loaded) == [f"{w.sampler.prefix}1"]


def test_a_server_that_an_earlier_run_left_paused_goes_on(world):
    w = world("ours")
    w.server.paused = True
    VllmSampler(w.policy, w.config, one_process())
    assert not w.server.paused and w.server.asked[-1] == "/resume"


def test_completions_may_fill_the_window_of_the_server(world):
    """Those of the check of a sync too, which the server reads whole and goes on from with one more token."""
    w = world("ours")
    longest = max(map(len, prompts_of(w.problems))) + w.config.max_new_tokens
    narrow = world("ours", {"longest": longest})
    narrow.sync(0)
    assert narrow.write(0).truncated.any()


def test_the_check_of_a_sync_leaves_ids_that_are_never_written_out_of_account(world):
    """The server scores them too; in a random model they have some of the probability."""
    w = world("qwen3", group_size=4)
    w.sync(0)
    theirs, = w.sampler.score(w.problems, w.sync_check.written)()
    away = (theirs - w.sync_check.now[1])[w.sync_check.mask].abs()
    assert w.sampler.never and away.max() < 1e-4
    rollouts = w.policy.rollouts(w.problems, w.sync_check.written, w.config)
    with every_token(w.policy):
        every = score_in_batches(w.policy, rollouts, w.sync_check.config)
    assert torch.equal(score_in_batches(w.policy, rollouts, w.sync_check.config), w.sync_check.now[1]), "only within"
    assert (every - w.sync_check.now[1])[w.sync_check.mask].abs().mean() > 1e-3, "it matters"


def test_all_weights_are_read_while_the_server_is_paused_and_leave_no_folder(world):
    w = world("ours")
    w.sync(0)
    assert [path for path in w.server.asked if "completions" not in path] == [
        "/v1/models", "/is_paused", "/pause?mode=wait&clear_cache=true", "/collective_rpc", "/update_weight_version",
        "/resume", "/weight_info"]
    assert os.listdir(w.sampler.folder) == [] and not w.server.paused


def test_all_weights_wait_for_what_is_being_written(world):
    w = world("ours", max_staleness=1)
    w.sync(0)
    w.sampler.start(w.problems, 0, 0)
    w.move()
    w.sampler.sync(w.policy.weights(), 1)
    asked = w.server.asked
    assert max(i for i, path in enumerate(asked) if path == "/v1/completions") < asked.index("/collective_rpc", 8)
    w.sampler.first = False  # the policy has moved
    assert w.sampler.finish().version == 0


@pytest.fixture
def rewarded(tmp_path):
    """Settings of a reward that differs within groups: a step without any moves nothing, and has no mismatch."""
    (tmp_path / "rewards.py").write_text("def shape(prompts, completions, **columns):\n"
                                         "    return [sum(map(ord, text)) % 7 for text in completions]\n")
    return {"reward_file": str(tmp_path / "rewards.py"), "reward_functions": "('shape',)"}


@pytest.mark.slow
@pytest.mark.parametrize("settings, staleness", [((), [0, 0, 0, 0]),
                                                 (("--max_staleness=1", "--importance=token"), [0, 1, 1, 1])])
def test_a_run_trains_on_what_the_server_writes(folders, prompts, rewarded, tmp_path, settings, staleness):
    save_model(str(tmp_path / "generator.safetensors"), causal_model(scale=3.0), CAUSAL)
    out = tmp_path / "out"
    with running(folders["ours"]) as server:
        train_grpo.main([f"--generator_checkpoint={tmp_path / 'generator.safetensors'}", f"--dataset={prompts}",
                         "--task_type=general", "--sampler=vllm", f"--vllm_url={server.url}", f"--out_dir={out}",
                         "--max_iters=4", "--batch_size=2", "--group_size=4", "--max_new_tokens=6", "--top_p=1.0",
                         "--learning_rate=0.01", "--min_lr=0.01", "--warmup_iters=0", "--eval_problems=2",
                         "--eval_completions=2", "--pass_k=2", "--device=cpu", "--kl_beta=0.0", *settings,
                         *(f"--{key}={value}" for key, value in rewarded.items())])
        assert server.asked.count("/collective_rpc") == 4
    steps = [record for record in read_records(str(out / "metrics.jsonl")) if "loss" in record]
    assert [step["staleness"] for step in steps] == staleness
    for step, old in zip(steps, staleness, strict=True):
        assert (step["mismatch_max"] < 1e-4) == (old == 0), "older weights, and only they, make a difference"
        assert step["dropped_rollouts"] == 0 and ("importance_capped" in step) == bool(settings)


@pytest.mark.parametrize("kind, parallel", [("ours", "ddp"), ("adapter", "fsdp")])
def test_two_ranks_train_on_what_the_server_writes_as_one_does(folders, prompts, rewarded, tmp_path, kind, parallel):
    save_model(str(tmp_path / "generator.safetensors"), causal_model(scale=3.0), CAUSAL)
    settings = {"generator_checkpoint": tmp_path / "generator.safetensors", "dataset": prompts}
    if kind == "adapter":
        settings = {"generator_checkpoint": folders[kind], "dataset": folders["sums"], "lora_rank": 4}
    settings |= {"task_type": "general", "sampler": "vllm", "max_iters": 3, "group_size": 4, "max_new_tokens": 6,
                 "learning_rate": 0.01, "min_lr": 0.01, "warmup_iters": 0, "eval_problems": 2, "eval_completions": 2,
                 "pass_k": 2, "device": "cpu", "kl_beta": 0.0, "optimizer": "adamw", "top_p": 1.0, "parallel": parallel,
                 **rewarded}
    weights = []
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        with running(folders[kind]) as server:
            own = settings | {"batch_size": 4 // ranks, "vllm_url": server.url, "out_dir": out}
            start = run_here if ranks == 1 else partial(run_script, ranks=ranks)
            done = start("grpo/train_grpo.py", *(f"--{key}={value}" for key, value in own.items()))
            assert done.returncode == 0, done.stderr
            brought = "/v1/load_lora_adapter" if kind == "adapter" else "/collective_rpc"
            assert server.asked.count(brought) == 3, "rank 0 alone brings them"
        weights.append(torch.load(out / "state.pt", weights_only=True)["model"])
    for name, x in weights[0].items():
        torch.testing.assert_close(weights[1][name], x, rtol=1e-3, atol=1e-4)
