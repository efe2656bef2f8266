"""Models that are sharded over two and over four ranks train as a model on one rank does."""

import copy

import pytest
import torch

from core.huggingface.settings import LoraConfig
from core.model import MASKED_FILL
from core.models import load_model
from core.performance.sharding import weights_of
from tests.families import model_folder, write_sums
from tests.tiny import causal_model, model, run_script

SHARDED = [(2, "fill"), (2, "causal"), (2, "qwen3"), (2, "qwen3_5"), (2, "lora"), (4, "fill"), (4, "llama")]  # (ranks, model)


@pytest.fixture(scope="module")
def layouts(dataset, prompts, tmp_path_factory):
    """{number of ranks: what tests/grpo/shard_worker.py found}, and the folder that it wrote to."""
    folder, found = tmp_path_factory.mktemp("shards"), {}
    write_sums(folder / "sums.jsonl")
    for family in ("llama", "qwen3", "qwen3_5", "bert_reward"):
        model_folder(folder / family, family)
    done = run_script("tests/grpo/shard_worker.py", dataset, prompts, folder)
    assert done.returncode == 0, done.stderr
    for ranks in (1, 2, 4):
        found[ranks] = {}
        for rank in range(ranks):
            found[ranks] |= torch.load(folder / f"{ranks}-{rank}.pt")
    return found, folder


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks, name", [(2, "fill"), (2, "lora"), (4, "fill")])
def test_a_run_goes_on_from_the_state_of_fewer_ranks(layouts, ranks, name):
    way = layouts[0][1][f"{name}/way"]
    assert (layouts[0][ranks][f"{name}/other"] - way).norm() < 1e-4 * way.norm()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_work_takes_part(layouts, ranks):
    one, several = (layouts[0][n][f"alone/{8 // ranks}"] for n in (1, ranks))
    assert one.abs().max() > 1e-3 and (several - one).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fill", "lora"])
def test_in_bfloat16_the_gradient_is_that_of_autocast_but_for_rounding(layouts, name):
    one, several = (layouts[0][ranks][f"bfloat16/{name}"] for ranks in (1, 2))
    assert 0 < (several - one).norm() < 0.05 * one.norm()


@pytest.mark.slow
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


@pytest.mark.parametrize("net", [model(MASKED_FILL, tied=True), causal_model()], ids=["tied", "with a head"])
def test_the_weights_of_a_sharded_model_have_the_names_of_its_state(net):
    part = copy.deepcopy(net)
    part.register_buffer("count", torch.zeros(1))
    expected = part.state_dict()
    part.blocks[0].unshard = None  # as if it were a part of a sharded model
    assert {name: tuple(x.shape) for name, x in weights_of(part).items()} == {
        name: tuple(x.shape) for name, x in expected.items()}
    assert weights_of(net).keys() == net.state_dict().keys()
