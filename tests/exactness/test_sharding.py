"""Models that are sharded over two and over four ranks (FSDP) train as a model on one rank does."""

import pytest
import torch

from core.huggingface.settings import LoraConfig
from core.models import load_model
from tests.families import model_folder, write_sums
from tests.tiny import (
    TEXT, judge, model, read_records, run_here, run_script, save, without_clock, write_text_dataset)

pytestmark = pytest.mark.slow
SHARDED = [(2, "fill"), (2, "causal"), (2, "qwen3"), (2, "qwen3_5"), (2, "lora"), (4, "fill")]  # (ranks, model)


@pytest.fixture(scope="module")
def layouts(dataset, prompts, tmp_path_factory):
    """{number of ranks: what tests/exactness/shard_worker.py found}, and the folder that it wrote to."""
    folder, found = tmp_path_factory.mktemp("shards"), {}
    write_sums(folder / "sums.jsonl")
    for family in ("llama", "qwen3", "qwen3_5", "bert_reward"):
        model_folder(folder / family, family)
    done = run_script("tests/exactness/shard_worker.py", dataset, prompts, folder)
    assert done.returncode == 0, done.stderr
    for ranks in (1, 2, 4):
        found[ranks] = {}
        for rank in range(ranks):
            found[ranks] |= torch.load(folder / f"{ranks}-{rank}.pt")
    return found, folder


@pytest.mark.parametrize("ranks, name", SHARDED)
def test_a_sharded_run_equals_that_of_one_rank(layouts, ranks, name):
    one, several = layouts[0][1], layouts[0][ranks]
    gradient, way = one[f"{name}/gradient"], one[f"{name}/way"]
    assert gradient.abs().max() > 1e-2
    assert (several[f"{name}/gradient"] - gradient).abs().max() < 1e-6
    for key in ("metrics", "mean_kl"):
        torch.testing.assert_close(several[f"{name}/{key}"], one[f"{name}/{key}"], rtol=1e-4, atol=1e-6)
    assert several[f"{name}/mismatch"] < 2e-5, "rounding"
    assert (several[f"{name}/way"] - way).norm() < 1e-4 * way.norm(), "after three steps"
    texts, rewards = several[f"{name}/texts"], several[f"{name}/rewards"]
    assert texts == one[f"{name}/texts"][-len(texts):], "one rank alone samples with a model that is whole"
    torch.testing.assert_close(rewards, one[f"{name}/rewards"][-len(rewards):], rtol=1e-3, atol=1e-4)
    shares = [several[f"{name}/share/{rank}"] for rank in range(ranks)]
    assert sum(shares) == one[f"{name}/share/0"] and max(shares) < 1.1 / ranks * sum(shares), "weights and momentum"


@pytest.mark.parametrize("ranks, name", [(2, "fill"), (2, "lora"), (4, "fill")])
def test_a_sharded_run_goes_on_from_the_state_of_fewer_ranks(layouts, ranks, name):
    way = layouts[0][1][f"{name}/way"]
    assert (layouts[0][ranks][f"{name}/other"] - way).norm() < 1e-4 * way.norm()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_work_takes_part(layouts, ranks):
    one, several = (layouts[0][n][f"alone/{8 // ranks}"] for n in (1, ranks))
    assert one.abs().max() > 1e-3 and (several - one).abs().max() < 1e-6


def test_in_bfloat16_a_sharded_gradient_is_that_of_autocast_but_for_rounding(layouts):
    one, several = (layouts[0][ranks]["bfloat16/fill"] for ranks in (1, 2))
    assert 0 < (several - one).norm() < 0.05 * one.norm()


@pytest.mark.parametrize("name, suffix", [("fill", ".safetensors"), ("qwen3", ""), ("lora", "")])
def test_checkpoints_of_a_sharded_run_are_those_of_a_whole_one(layouts, name, suffix):
    found, folder = layouts
    states = [torch.load(folder / f"{ranks}-{name}" / "state.pt", weights_only=True) for ranks in (1, 2)]
    assert states[0]["layout"] == states[1]["layout"] and states[0].keys() == states[1].keys()
    for key, x in states[0]["model"].items():
        assert (states[1]["model"][key] - x).abs().max() < 1e-5, key
    path, adapter = folder / f"2-{name}" / f"model{suffix}", LoraConfig()
    if name == "lora":
        path, adapter = folder / "llama", LoraConfig(lora_init_from=str(path))
    opened = load_model(str(path), adapter=adapter)[0].weights()
    assert opened.keys() == states[1]["model"].keys()
    for key, x in opened.items():
        assert torch.equal(x, states[1]["model"][key])


def records(folder):
    """{step: metrics that do not depend on the clock or on rounding alone}, held-out ones among them."""
    found = {}
    for record in without_clock(read_records(str(folder / "metrics.jsonl"))):
        known = {key: x for key, x in record.items() if not key.startswith(("mismatch_", "ratio_minus_one"))}
        found.setdefault(record["step"], {}).update(known)
    return found


def test_a_command_on_two_sharded_ranks_equals_one_rank_which_can_go_on_for_it(tmp_path):
    write_text_dataset(tmp_path / "data", TEXT)
    base = {"dataset": tmp_path / "data", "block_size": 32, "dtype": "float32", "group_size": 3, "eval_problems": 4,
            "generator_checkpoint": save(tmp_path / "generator.safetensors", model(scale=3.0, n_layer=2)),
            "judge_checkpoint": save(tmp_path / "judge.safetensors", judge()), "eval_completions": 2,
            "eval_interval": 2, "log_interval": 1, "learning_rate": 1e-3, "min_lr": 1e-3, "warmup_iters": 0,
            "optimizer": "adamw", "parallel": "fsdp", "device": "cpu", "lr_decay_iters": 4}

    def run(start, name, **more):
        settings = base | {"out_dir": tmp_path / name} | more
        ranks = {"ranks": 2} if start is run_script else {}
        done = start("grpo/train_grpo.py", *(f"--{key}={value}" for key, value in settings.items()), **ranks)
        assert done.returncode == 0, done.stderr

    run(run_here, "alone", batch_size=4, max_iters=4)
    run(run_script, "shared", batch_size=2, max_iters=2)
    first, second = records(tmp_path / "alone"), records(tmp_path / "shared")
    run(run_here, "shared", batch_size=4, max_iters=4, resume=True)
    for found, steps in ((second, (0, 1, 2)), (records(tmp_path / "shared"), range(5))):
        for step in steps:
            assert found[step] == pytest.approx(first[step], rel=1e-4, abs=1e-6), step
