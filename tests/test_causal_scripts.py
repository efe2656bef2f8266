"""Causal runs as a user starts them, rewards as a run calls them, and the mistakes that can be made with both."""

import json
import time
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from core.checkpoint_manager import freeze, load_model, save_model
from core.logger import Logger, read_records
from core.model import SEQUENCE_SCORER
from grpo.evaluate_prompts import PromptEvaluation, pass_at_k
from grpo.grpo_trainer import GRPOTrainer
from grpo.reference import build_reference
from grpo.rewards import PRESETS, Rewards, judge_texts, pass_k_weight
from grpo.rollout import collect
from grpo.verifiers import REWARDS, reward
from tests.tiny import (CAUSAL, TOKENIZER, causal_model, config, judge, model, one_process, prompt_consumer, run_script,
                        save, undocumented, write_prompt_dataset, write_text_dataset)

TRAIN = "grpo/train_grpo.py"


def run_config(**changes):
    return config(**{"max_new_tokens": 5, "task_type": "general", "eval_problems": 4, "eval_completions": 4,
                     "pass_k": 2, "length_min": 1, "length_max": 6, "learning_rate": 1e-3, "lr_decay_iters": 6,
                     "eval_interval": 3, "sample_interval": 3, "save_interval": 3} | changes)


def train(prompts, out_dir, resume=False, **changes):
    c, dist = run_config(out_dir=str(out_dir), success_reward="length_penalty", **changes), one_process()
    policy, data, rewards = causal_model(seed=1, scale=3.0), prompt_consumer(prompts, c), Rewards(c)
    reference = build_reference(policy, c, CAUSAL, dist.device)
    evaluation = PromptEvaluation(data, reference, rewards, c, dist, torch.float32)
    trainer = GRPOTrainer(policy, reference, rewards, data, evaluation, c,
                          Logger(c.out_dir, c.max_iters, evaluation.columns), dist, torch.float32)
    if resume:
        trainer.resume()
    trainer.run()
    return trainer


def test_a_resumed_causal_run_equals_the_uninterrupted_one_bit_for_bit(prompts, tmp_path):
    whole = train(prompts, tmp_path / "whole", max_iters=6)
    train(prompts, tmp_path / "cut", max_iters=3)
    resumed = train(prompts, tmp_path / "cut", max_iters=6, resume=True)
    for a, b in zip(whole.policy.state_dict().values(), resumed.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    clock = ("time/", "tokens_per_second")
    records = [[{k: v for k, v in r.items() if not k.startswith(clock)} for r in
                read_records(tmp_path / name / "metrics.jsonl")] for name in ("whole", "cut")]
    assert records[0] == records[1]
    canonical = {"completion_length", "truncated", "skipped_samples", "reward/length_penalty", "mean_kl", "entropy"}
    assert canonical <= set(records[0][1])
    assert {"eval/greedy_accuracy", "eval/pass_at_k", "eval/kl", "eval/reward/length_penalty"} <= set(records[0][0])
    assert not undocumented({key for record in records[0] for key in record} - {"step"})


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, right, k in ((5, 2, 3), (6, 1, 2), (4, 0, 2), (4, 4, 1), (6, 5, 6)):
        subsets = list(combinations([i < right for i in range(n)], k))
        assert pass_at_k(right, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_training_for_pass_at_k_weighs_a_right_completion_by_what_it_adds(k):
    """Over all sets of k completions that hold one right one: the share in which the others are all wrong, times k."""
    groups = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    for group, found in zip(groups, pass_k_weight(groups, k).flatten().tolist(), strict=True):
        others = group[1:].tolist()
        alone = [not any(chosen) for chosen in combinations(others, k - 1)]
        assert found == pytest.approx(k * np.mean(alone), abs=1e-6)


def test_hard_problems_count_more_when_training_for_pass_at_k():
    class Done:
        target, problems, tokens = torch.zeros(8, 1), 2, None

        def texts():
            return ["p"] * 8, ["7", "8", "8", "8", "7", "7", "7", "8"], {"answer": ["7"] * 8}

    reward, credit, _ = Rewards(run_config(reward_functions=("contains",), train_pass_k=2,
                                              advantage="group_mean"))(Done)
    assert reward.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]], "the reward that is logged stays as it is"
    assert credit[0, 0, 0] == 2 and credit[1, 0, 0] == pytest.approx(2 / 3)


def test_evaluation_counts_what_a_loop_counts(prompts):
    """Right is, here, a completion whose first character is early in the alphabet."""
    reward(0, 1)(early)
    c, dist = run_config(reward_functions=("early",), eval_completions=6, pass_k=3), one_process()
    data, policy = prompt_consumer(prompts, c), causal_model(seed=4, scale=4.0)
    reference = freeze(causal_model(seed=5, scale=4.0))
    metrics, shown = PromptEvaluation(data, reference, Rewards(c), c, dist, torch.float32)(policy, 1.0)
    records = data.records["val"][: c.eval_problems]
    greedy = [CAUSAL.decode(policy(torch.tensor([r["tokens"]]))[0, -1:].argmax(-1).tolist()) for r in records]
    assert metrics["greedy_accuracy"] == np.mean(early(None, greedy))

    batch = data.pack(records, range(len(records)))
    again = replace(c, group_size=6, seed=99)
    rollouts = collect(policy, batch, 0, again, CAUSAL, torch.device("cpu"), torch.autocast("cpu", enabled=False))
    right = np.array(early(None, rollouts.texts()[1])).reshape(len(records), 6)
    assert 0 < right.mean() < 1 and metrics["sampled_accuracy"] == pytest.approx(right.mean())
    chance = [np.mean([any(s) for s in combinations(row, 3)]) for row in right]
    assert metrics["pass_at_k"] == pytest.approx(np.mean(chance))
    assert metrics["completion_length"] == pytest.approx(float(rollouts.mask.sum()) / right.size)
    assert metrics["kl"] > 0 and metrics["entropy"] > 0 and shown[0]["best_score"] >= shown[0]["worst_score"]
    del REWARDS["early"]


def early(prompts, completions, **columns):
    return [float(text[:1] < "P") for text in completions]


def test_rewards_are_weighted_added_and_may_skip(prompts, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("from grpo.verifiers import reward\n\nHALF = 0.5\n\n"
                    "@reward(0, 1)\ndef half_or_none(prompts, completions, *, length_min=0, **columns):\n"
                    "    return [None if i % 2 else HALF * length_min for i in range(len(completions))]\n"
                    "@reward(0, 1)\ndef wrong_count(prompts, completions, **columns):\n    return [1.0]\n"
                    "@reward(0, 1)\ndef not_a_number(prompts, completions, **columns):\n"
                    "    return [float('nan')] * len(completions)\n")
    c = run_config(reward_file=str(mine), reward_functions=("half_or_none", "contains"), reward_weights=(2.0, 1.0))
    rewards = Rewards(c)
    texts = (["p"] * 4, {"answer": ["7"] * 4}, ["7", "7", "8", "8"], 4)
    values = [rewards.of_texts(name, *texts) for name in rewards.names]
    assert values[0].nan_to_num(-1).tolist() == [0.5, -1, 0.5, -1] and values[1].tolist() == [1, 1, 0, 0]

    class Done:
        target, problems, tokens = torch.zeros(4, 1), 1, None

        def texts():
            return ["p"] * 4, ["7", "7", "8", "8"], {"answer": ["7"] * 4}

    total, credit, _ = rewards(Done)
    assert total.tolist() == [[2.0, 1.0, 1.0, 0.0]] and credit.shape == (1, 4, 1)
    alone, _, _ = Rewards(run_config(reward_file=str(mine), reward_functions=("half_or_none",)))(Done)
    assert alone.isnan().tolist() == [[False, True, False, True]], "what no reward scores is skipped"
    for name, message in (("wrong_count", "returned 1 values for 4"), ("not_a_number", "returned nan")):
        with pytest.raises(ValueError, match=message):
            Rewards(run_config(reward_file=str(mine), reward_functions=(name,)))(Done)
    for name in ("half_or_none", "wrong_count", "not_a_number"):
        del REWARDS[name]


@pytest.mark.slow
def test_slow_rewards_run_in_a_pool_with_a_deadline(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import time\nfrom grpo.verifiers import reward\n\n@reward(0, 9, slow=True)\n"
                    "def sleepy(prompts, completions, **columns):\n"
                    "    time.sleep(60 if 'late' in completions else 0)\n    return [len(x) for x in completions]\n")
    c = run_config(reward_file=str(mine), reward_functions=("sleepy",), reward_workers=2, reward_timeout=20.0)
    rewards, texts = Rewards(c), ["a", "bb", "ccc", "dddd"]
    assert rewards.of_texts("sleepy", texts, {}, texts, 4).tolist() == [1, 2, 3, 4]
    rewards.config = run_config(reward_workers=2, reward_timeout=2.0, reward_file=str(mine))
    started = time.monotonic()
    values = rewards.of_texts("sleepy", texts, {}, ["a", "bb", "late", "dddd"], 4)
    assert values.nan_to_num(-1).tolist() == [1, 2, -1, 4] and rewards.late == {2}
    assert time.monotonic() - started < 40 and rewards.pool is None, "late workers are gone"
    del REWARDS["sleepy"]


def test_the_judge_scores_texts_of_any_length_as_if_each_were_alone():
    scorer, texts = judge(), ["the quick", "a", "the quick", "seven wise owls"]
    scores = judge_texts(scorer, TOKENIZER, ["so "] * 4, texts)
    for text, found in zip(texts, scores.tolist(), strict=True):
        assert found == pytest.approx(float(scorer(torch.tensor([TOKENIZER.encode("so " + text)])).sigmoid().mean()),
                                      rel=1e-4)


def test_the_list_of_rewards_and_presets():
    done = run_script("grpo/rewards.py")
    assert done.returncode == 0, done.stderr
    for name in (*REWARDS, *PRESETS):
        assert name in done.stdout
    assert {name for names in PRESETS.values() for name in names} <= set(REWARDS)
    assert "[-4.5, 5]" in done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    write_prompt_dataset(folder / "sums")
    write_text_dataset(folder / "text", "the quick brown fox jumps over the lazy dog\n" * 40)
    save_model(str(folder / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    save(folder / "fill.safetensors", model())
    save(folder / "judge.safetensors", model(SEQUENCE_SCORER))
    save(folder / "short.safetensors", model(SEQUENCE_SCORER, block_size=4))
    base = {"dataset": folder / "sums", "generator_checkpoint": folder / "g.safetensors", "task_type": "general",
            "max_new_tokens": 5, "batch_size": 4, "group_size": 3, "max_iters": 3, "eval_problems": 4,
            "log_interval": 1, "sample_interval": 3, "device": "cpu", "out_dir": folder / "out"}
    return folder, base


def run(base, ranks=1, **changes):
    return run_script(TRAIN, *(f"--{k}={v}" for k, v in (base | changes).items()), ranks=ranks)


@pytest.mark.slow
def test_a_causal_job_from_start_to_finish(world):
    folder, base = world
    done = run(base, reward_functions="('length_penalty','exact_match','judge')", success_reward="exact_match",
               judge_checkpoint=folder / "judge.safetensors")
    assert done.returncode == 0, done.stderr
    for expected in ("training and", "validation prompts", "1 x exact_match [0, 1]", "completion_length", "problem  ",
                     "greedy_accuracy", "pass_at_k", "reward/judge", "curves.png"):
        assert expected in done.stdout, expected
    sample = json.loads(open(folder / "out" / "samples.jsonl").readline())
    assert sample["problem"].endswith("=") and {"answer", "best", "worst", "best_score"} <= set(sample)
    load_model(str(folder / "out" / "model.safetensors"), tokenizer=CAUSAL)
    done = run(base, ranks=2, out_dir=folder / "two")
    assert done.returncode == 0, done.stderr
    done = run(base, out_dir=folder / "dry", dry_run=True)
    assert done.returncode == 0 and "nothing was trained" in done.stdout and not (folder / "dry").exists()


def broken(world, name):
    """(changed settings, what the line has to say) of a mistake."""
    folder, _ = world
    lines = (folder / "sums" / "prompts.jsonl").read_text().split("\n")
    if name == "no answer":
        (folder / "lacking").mkdir(exist_ok=True)
        (folder / "lacking" / "meta.json").write_text((folder / "sums" / "meta.json").read_text())
        lines[6] = json.dumps({k: v for k, v in json.loads(lines[6]).items() if k != "answer"})
        (folder / "lacking" / "prompts.jsonl").write_text("\n".join(lines))
    return {
        "fill-in on prompts": ({"generator_checkpoint": folder / "fill.safetensors"}, "another vocabulary"),
        "causal on text": ({"dataset": folder / "text"}, "another vocabulary"),
        "no room": ({"max_new_tokens": 500}, "do not fit the model's block_size=64"),
        "unknown reward": ({"reward_functions": "('exact',)"}, "'exact' is not one of"),
        "unknown preset": ({"task_type": "poetry"}, "task_type='poetry' is not one of"),
        "weights": ({"reward_weights": "(1.0, 2.0)"}, "must be as many as the rewards"),
        "judge without one": ({"reward_functions": "('judge',)"}, "judge_checkpoint is not set"),
        "credit": ({"credit_window": 2}, "credit_window=2 is for fill-in"),
        "k1": ({"kl_estimator": "k1"}, "kl_estimator='k1' is refused"),
        "pass_k": ({"pass_k": 9}, "pass_k=9 must be at most eval_completions=4"),
        "success": ({"success_reward": "countdown"}, "success_reward='countdown' is not one of the rewards"),
        "pass@k": ({"train_pass_k": 2}, "set advantage='group_mean'"),
        "empty stop": ({"stop_sequences": "('',)"}, "stop_sequences=('',) must be texts"),
        "unwritable stop": ({"stop_sequences": "('\\u00e9',)"}, "a text that the tokenizer cannot write"),
        "gold judge": ({"gold_judge_checkpoint": folder / "judge.safetensors"}, "is for fill-in"),
        "short judge": ({"reward_functions": "('judge',)", "judge_checkpoint": folder / "short.safetensors"},
                        "judge_checkpoint reads 4 tokens"),
        "template": ({"template": "poem"}, "template='poem' is not one of plain, chat, math, code"),
        "no answer": ({"dataset": folder / "lacking", "reward_functions": "('exact_match',)"},
                      "prompts.jsonl, line 7: reward exact_match needs the field 'answer'"),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "fill-in on prompts", "causal on text", "no room", "unknown reward", "unknown preset", "weights",
    "judge without one", "credit", "k1", "pass_k", "success", "pass@k", "empty stop", "unwritable stop",
    "gold judge", "short judge", "template", "no answer"])
def test_a_mistake_is_one_clear_line(world, name):
    changes, message = broken(world, name)
    done = run(world[1], **changes)
    errors = [line for line in done.stderr.strip().split("\n") if line]
    assert done.returncode == 1 and len(errors) == 1 and message in errors[0], done.stderr


@pytest.mark.slow
def test_a_text_is_completed(world):
    done = run_script("core/sample.py", f"--checkpoint={world[0]}/g.safetensors", "--text=7+8=", "--num_samples=3")
    lines = done.stdout.strip("\n").split("\n")
    assert done.returncode == 0 and len(lines) == 3 and all(x.startswith("7+8=") and len(x) > 4 for x in lines)
    done = run_script("core/sample.py", f"--checkpoint={world[0]}/g.safetensors", "--text=")
    assert done.returncode == 1 and "must have 1 to 63 tokens" in done.stderr


@pytest.mark.slow
def test_the_causal_benchmark_prints_a_table_and_one_json_object():
    done = run_script("grpo/bench.py", "causal", "--n_layer=1", "--n_head=2", "--n_embd=16", "--prompt_length=20",
                      "--completion_length=4", "--batch_size=2", "--group_size=3", "--repeats=1", "--device=cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    assert set(result) == {"time_ratio", "memory_ratio", "gradient_difference"}
    assert result["gradient_difference"] < 1e-5 and "tokens per second" in done.stdout


def test_rewards_see_the_response_prefix_as_part_of_the_completion(prompts):
    c = run_config(response_prefix="so ")
    data = prompt_consumer(prompts, c, response_prefix=c.response_prefix)
    rollouts = collect(causal_model(), data.problems("train", 0), 0, c, CAUSAL, torch.device("cpu"),
                       torch.autocast("cpu", enabled=False))
    texts, completions, _ = rollouts.texts()
    assert all(text.endswith("=") for text in texts) and all(text.startswith("so ") for text in completions)
