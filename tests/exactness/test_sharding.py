"""Models that are sharded over two and over four ranks (FSDP) train as a model on one rank does."""

import pytest
import torch

from core.models import load_model
from core.supervised.config import PretrainConfig
from tests.families import model_folder, write_sums
from tests.tiny import run_script

pytestmark = pytest.mark.slow
SHARDED = [(2, "fill"), (2, "causal"), (2, "qwen3"), (2, "lora"), (4, "fill")]  # (ranks, model)


@pytest.fixture(scope="module")
def layouts(dataset, prompts, tmp_path_factory):
    """{number of ranks: what tests/exactness/shard_worker.py found}, and the folder that it wrote to."""
    folder, found = tmp_path_factory.mktemp("shards"), {}
    write_sums(folder / "sums.jsonl")
    for family in ("llama", "qwen3"):
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
    torch.testing.assert_close(several[f"{name}/mean_kl"], one[f"{name}/mean_kl"], rtol=1e-4, atol=1e-6)
    assert (several[f"{name}/way"] - way).norm() < 1e-4 * way.norm(), "after three steps"
    texts, rewards = several[f"{name}/texts"], several[f"{name}/rewards"]
    assert texts == one[f"{name}/texts"][-len(texts):], "one rank alone samples with a model that is whole"
    torch.testing.assert_close(rewards, one[f"{name}/rewards"][-len(rewards):], rtol=1e-3, atol=1e-4)
    shares = [several[f"{name}/share/{rank}"] for rank in range(ranks)]
    assert sum(shares) == one[f"{name}/share/0"] and max(shares) < 1.1 / ranks * sum(shares), "weights and momentum"


@pytest.mark.parametrize("name, suffix", [("fill", ".safetensors"), ("qwen3", ""), ("lora", "")])
def test_checkpoints_of_a_sharded_run_are_those_of_a_whole_one(layouts, name, suffix):
    found, folder = layouts
    states = [torch.load(folder / f"{ranks}-{name}" / "state.pt", weights_only=True) for ranks in (1, 2)]
    assert states[0]["layout"] == states[1]["layout"] and states[0].keys() == states[1].keys()
    for key, x in states[0]["model"].items():
        assert (states[1]["model"][key] - x).abs().max() < 1e-5, key
    path, adapter = folder / f"2-{name}" / f"model{suffix}", PretrainConfig()
    if name == "lora":
        path, adapter = folder / "llama", PretrainConfig(lora_init_from=str(path))
    opened = load_model(str(path), adapter=adapter)[0].weights()
    assert opened.keys() == states[1]["model"].keys()
    for key, x in opened.items():
        assert torch.equal(x, states[1]["model"][key])
