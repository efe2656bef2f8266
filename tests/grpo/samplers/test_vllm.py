"""The vLLM sampler against a server that computes with transformers, token by token."""

import os

import pytest
import torch

pytest.importorskip("transformers")

from core.files.json_lines import read_records
from core.models import save_model
from grpo import train_grpo
from grpo.samplers.vllm import VllmSampler, prompts_of, seed_of
from grpo.scoring import score_in_batches
from tests.grpo.policies.test_turns import MADE, pieces
from tests.grpo.samplers.vllm_world import KINDS, URL, folders, world  # noqa: F401 fixtures
from tests.tiny import CAUSAL, causal_model, one_process, run_here, run_script
from tests.vllm_server import running

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


def apart(w, rollouts):
    """The largest difference of the policy's log-probabilities from those that came with the completions."""
    return float(((score_in_batches(w.policy, rollouts, w.config) - rollouts.old_logp) * rollouts.mask).abs().max())


@pytest.mark.parametrize("kind", [*KINDS, *(["real"] if URL else [])])
def test_a_sync_brings_the_weights_and_the_policy_scores_what_was_drawn_alike(world, kind):
    """Also in a second run of the same folder on the server that stays, which begins with other weights."""
    w = world(kind, max_new_tokens=12)
    close = 1e-3 if kind == "real" else 1e-4  # nats
    for run in range(2):
        for version in range(2):
            w.sync(version)
            rollouts = w.write(iteration=version)
            assert apart(w, rollouts) < close and rollouts.old_logp[rollouts.mask > 0].max() < 0
            w.move(seed=2 * run + version)
            assert apart(w, rollouts) > 10 * close, "the weights of the next version are others"
        w.sampler.close()
        w.connect()


@pytest.mark.parametrize("kind", ["ours", "qwen3"])
def test_completions_are_as_long_as_the_run_asks_for_and_stop_at_every_end_of_the_tokenizer(world, kind):
    w = world(kind, max_new_tokens=20, group_size=16, temperature=1.5)
    w.sync(0)
    rollouts, ends = w.write(), w.policy.tokenizer.stop_token_ids
    length, seen = rollouts.mask.sum(1).long(), set()
    for ids, n, truncated in zip(rollouts.target.tolist(), length.tolist(), rollouts.truncated.tolist(), strict=True):
        assert truncated == (n == 20 and ids[n - 1] not in ends)
        assert truncated or ids[n - 1] in ends
        assert not set(ids[: n - 1]) & set(ends)
        seen |= {ids[n - 1]} & set(ends)
    assert seen == set(ends), "each of them ended a completion"
    never = w.sampler.never
    assert (kind == "ours") == (not never) and not set(rollouts.target[rollouts.mask > 0].tolist()) & set(never)


def test_rewards_read_the_texts_of_the_ids_that_were_drawn_and_a_stop_sequence_ends_them(world):
    w = world(temperature=1.5, max_new_tokens=12)
    w.sync(0)
    texts = w.write().texts
    assert texts.prompts == [record["prompt"] for record in w.problems["record"] for _ in range(2)]
    assert texts.completions == [CAUSAL.decode(ids) for ids in texts.completion_ids]
    piece = next(text[2:4] for text in texts.completions if len(text) > 6)
    w = world(temperature=1.5, max_new_tokens=12, stop_sequences=(piece,))
    w.sync(0)
    shorter = w.write().texts
    assert all(piece not in text for text in shorter.completions)
    assert sum(map(len, shorter.completion_ids)) < sum(map(len, texts.completion_ids))


def test_completions_depend_on_seed_iteration_and_problem_alone(world):
    w = world()
    w.sync(0)
    whole = w.write(iteration=5)
    part = w.write({key: x[1:2] for key, x in w.problems.items()}, iteration=5)
    G, M = w.config.group_size, part.target.shape[1]
    assert torch.equal(part.target, whole.target[G : 2 * G, :M])
    other = w.write(iteration=6)
    assert other.target.shape != whole.target.shape or not torch.equal(other.target, whole.target)
    assert len({tuple(ids) for ids in whole.target[:G].tolist()}) > 1, "the completions of a group differ"
    assert len({seed_of(a, b, c) for a in range(5) for b in range(5) for c in range(5)}) == 125


@pytest.mark.parametrize("kind", ["adapter", "ours"])
def test_starts_are_finished_in_their_order_with_the_weights_that_they_were_started_with(world, kind):
    w = world(kind, max_staleness=1)
    w.sync(0)
    later = w.data.problems("train", 1)
    w.sampler.start(w.problems, 0)
    w.sampler.start(later, 1)
    assert apart(w, w.sampler.finish()[0]) < 1e-4
    w.move()
    w.sync(1)  # all weights wait for what is being sampled
    second, _ = w.sampler.finish()
    assert prompts_of(later) != prompts_of(w.problems)
    assert apart(w, w.write(later, 1)) < 1e-4 < 1e-3 < apart(w, second), "the second was sampled before the sync"


@pytest.mark.parametrize("staleness", [0, 2])
def test_adapters_have_names_of_their_own_and_go_when_they_are_old_or_the_run_ends(world, staleness, capsys):
    w = world("adapter", max_staleness=staleness)
    for version in range(5):
        w.sync(version)
        w.move(seed=version)
        if version == 2:
            w.server.adapters.pop(next(iter(w.server.adapters)))  # one that the server has lost ends no run
            lost = f"{w.sampler.prefix}{2 - staleness}"
    names = [f"{w.sampler.prefix}{version}" for version in range(4 - staleness, 5)]
    assert list(w.server.adapters)[-len(names):] == names[-len(w.server.adapters):]
    assert sorted(os.listdir(w.sampler.folder)) == names
    assert not os.path.exists(os.path.join(w.sampler.folder, names[0], "model.safetensors")), "the adapter alone"
    w.sampler.close()
    assert not w.server.adapters and not os.path.exists(w.sampler.folder)
    warning, = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: vllm_url=") and f"'{lost}' cannot be found" in warning


def test_the_check_of_a_sync_leaves_ids_that_are_never_sampled_out(world):
    """The server scores them too; in a random model they have some of the probability."""
    w = world("qwen3", group_size=4)
    w.sync(0)
    check = w.sync_check
    theirs, = w.sampler.score(w.problems, check.rollouts)()
    torch.testing.assert_close(theirs * check.mask, check.now[1] * check.mask, rtol=0, atol=1e-4)
    assert (w.sampler._excluded(check.rollouts)[check.mask] < -1e-3).any(), "it matters"


@pytest.mark.parametrize("kind", ["adapter", "ours"])
def test_what_was_read_of_prompts_with_other_weights_is_never_used(world, kind):
    """Neither that of the version before nor that of an earlier run of the same folder, on a server that stays and that
    the earlier run left paused: the server notes the weights of each salt."""
    w = world(kind)
    for run in range(2):
        for version in range(2):
            w.sync(version)
            assert apart(w, w.write()) < 1e-4
            w.move(0.15, seed=2 * run + version)
        w.connect()
        w.server.paused = kind == "ours"
    assert len(w.server.salts) == 4


def test_completions_may_fill_the_window_of_the_server(world):
    """Those of the check of a sync too, which the server reads whole and goes on from with one more token."""
    w = world("ours")
    longest = max(map(len, prompts_of(w.problems))) + w.config.max_new_tokens
    narrow = world("ours", {"longest": longest})
    narrow.sync(0)
    assert narrow.write().truncated.any()


def test_all_weights_are_read_while_the_server_is_paused_and_leave_no_folder(world):
    w = world("ours")
    w.sync(0)
    assert [path for path in w.server.asked if "completions" not in path] == [
        "/v1/models", "/pause?mode=wait&clear_cache=true", "/collective_rpc", "/update_weight_version", "/resume",
        "/weight_info"]
    assert os.listdir(w.sampler.folder) == [] and not w.server.paused


@pytest.fixture
def settings(folders, prompts, tmp_path):
    """Settings of a short run on a model of ours; its reward differs within groups, without which nothing moves."""
    save_model(str(tmp_path / "generator.safetensors"), causal_model(scale=3.0), CAUSAL)
    (tmp_path / "rewards.py").write_text("def shape(prompts, completions, **columns):\n"
                                         "    return [sum(map(ord, text)) % 7 for text in completions]\n")
    return {"generator_checkpoint": tmp_path / "generator.safetensors", "dataset": prompts, "task_type": "general",
            "sampler": "vllm", "max_iters": 3, "batch_size": 2, "group_size": 4, "max_new_tokens": 6, "top_p": 1.0,
            "learning_rate": 0.01, "min_lr": 0.01, "warmup_iters": 0, "eval_problems": 2, "eval_completions": 2,
            "pass_k": 2, "device": "cpu", "kl_beta": 0.0, "reward_file": tmp_path / "rewards.py",
            "reward_functions": "('shape',)"}


def test_a_run_trains_on_what_the_server_writes(folders, settings, tmp_path):
    out = tmp_path / "out"
    with running(folders["ours"]) as server:
        settings |= {"vllm_url": server.url, "out_dir": out, "max_staleness": 1}
        train_grpo.main([f"--{key}={value}" for key, value in settings.items()])
        assert server.asked.count("/collective_rpc") == 3
    steps = [record for record in read_records(str(out / "metrics.jsonl")) if "loss" in record]
    assert [step["staleness"] for step in steps] == [0, 1, 1]
    assert [step["mismatch_max"] < 1e-4 for step in steps] == [True, False, False], "older weights make a difference"


def test_two_sharded_ranks_train_an_adapter_on_what_the_server_writes_as_one_does(folders, settings, tmp_path):
    settings |= {"generator_checkpoint": folders["adapter"], "dataset": folders["sums"], "lora_rank": 4,
                 "optimizer": "adamw", "parallel": "fsdp", "max_iters": 2}
    weights = []
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        with running(folders["adapter"]) as server:
            own = settings | {"batch_size": 4 // ranks, "vllm_url": server.url, "out_dir": out}
            arguments = [f"--{key}={value}" for key, value in own.items()]
            if ranks == 1:
                done = run_here("grpo/train_grpo.py", *arguments)
            else:
                done = run_script("grpo/train_grpo.py", *arguments, ranks=2)
            assert done.returncode == 0, done.stderr
            assert server.asked.count("/v1/load_lora_adapter") == 2, "rank 0 alone brings them"
        weights.append(torch.load(out / "state.pt", weights_only=True)["model"])
    for name, x in weights[0].items():
        torch.testing.assert_close(weights[1][name], x, rtol=1e-3, atol=1e-4)


EPISODES = {"environment": "Echo", "max_turns": 3, "max_new_tokens": 24, "group_size": 4, "temperature": 1.0, "top_p": 1.0,
            "reward_functions": ("environment",), "stop_sequences": tuple("abcdefghijklmnopqrstuvwxyz")}


@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_requests_whose_tokens_the_policy_scores_alike(world, kind):
    w = world(kind, **EPISODES)
    w.sync(0)
    MADE.clear()
    rollouts = w.write()
    assert apart(w, rollouts) < 1e-4
    several = 0
    for n, one in enumerate(MADE):
        parts = pieces(rollouts, n)
        answers = [ids for chosen, ids in parts if not chosen]
        whole = answers[:-1] if rollouts.truncated[n] else answers
        assert whole == [w.policy.tokenizer.encode(x) for x in one.answers[: len(whole)]]
        assert all(ids == w.policy.tokenizer.encode(one.answers[k])[: len(ids)] for k, ids in enumerate(answers))
        several += len(answers) > 1
        over = bool(one.answers) and (one.answers[-1] is None or len(one.answers) == 3)
        assert bool(rollouts.truncated[n]) != over
        assert rollouts.texts.columns["environment_reward"][n] == pytest.approx(sum(map(len, one.heard)) / 10)
    assert several > 1 and not rollouts.truncated.all()
    w.sync(0)
    again = w.write()
    assert again.texts.completion_ids == rollouts.texts.completion_ids, "the seeds of turns are the same again"
    MADE.clear()
    w.sampler.start(w.problems, 0)
    w.sampler.close()
    assert all(one.closed for one in MADE) and len(MADE) == 8, "also those of a run that ends early"
    w.connect()


def test_a_run_of_several_turns_trains_on_what_the_server_writes(folders, settings, tmp_path):
    out = tmp_path / "out"
    with running(folders["ours"]) as server:
        settings |= {"vllm_url": server.url, "out_dir": out, "max_staleness": 1}
        settings |= EPISODES | {"reward_file": None, "environment_file": None, "max_iters": 3}
        train_grpo.main([f"--{key}={value}" for key, value in settings.items()])
    steps = [record for record in read_records(str(out / "metrics.jsonl")) if "loss" in record]
    assert [step["staleness"] for step in steps] == [0, 1, 1] and steps[0]["mismatch_max"] < 1e-4
    assert all(step["environment/turns"] > 1 for step in steps)
