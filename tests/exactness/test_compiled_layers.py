"""Compiled layers of Hugging Face models compute what plain ones do, by programs that all layers share."""

import copy
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

transformers = pytest.importorskip("transformers")

from core.cache import RowCache
from core.errors import Mistake
from core.huggingface.model import LayerOfRows
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import compiled
from core.models import load_model
from core.performance import decode
from core.performance.decode import Decoder
from grpo.build import build_data, build_models
from grpo.grpo_config import GRPOConfig
from grpo.policies.causal import CausalPolicy
from grpo.rewards import Scored
from tests.families import CAUSAL_FAMILIES, folder_maker, write_prose, write_sums
from tests.tiny import CAUSAL, Catcher, causal_model, grpo_step, one_process

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("backend")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


def programs():
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


class Gradient(Catcher):
    def step(self):
        self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])


def random_rewards(rollouts):
    generator = torch.Generator().manual_seed(7)
    return Scored(torch.rand(rollouts.problems, rollouts.group_size, generator=generator))


STEPS = [("qwen2", {"kl_beta": 0.1, "dtype": "bfloat16", "lora_rank": 4, "grad_checkpoint": True}),
         ("gemma3", {"kl_beta": 0.0}), ("bert", {"kl_beta": 0.1, "dtype": "bfloat16", "grad_checkpoint": True})]


@pytest.mark.parametrize("family, more", STEPS, ids=str)
def test_a_step_with_compiled_layers_is_the_step_without(family, more, folder, tmp_path, monkeypatch):
    """Sampled by the decoder where the family can be, trained on, and compared with the reference."""
    for name, value in {"POLL_STEPS": 3, "ROWS": 2, "COLUMNS": 16}.items():
        monkeypatch.setattr(decode, name, value)
    causal = family in CAUSAL_FAMILIES
    data = write_sums(tmp_path / "sums.jsonl")
    if not causal:
        data = write_prose(tmp_path / "prose", load_huggingface_tokenizer(folder(family)))
    more = more | {"max_new_tokens": 6, "task_type": "general"} if causal else more | {"block_size": 16}
    c = GRPOConfig(generator_checkpoint=folder(family), dataset=data, reward_functions=("length_penalty",),
                   device="cpu", batch_size=3, group_size=3, top_p=1.0, **more)
    steps = []
    for compile in (False, True):
        dist = one_process(c.dtype)
        consumer = build_data(c, dist)
        models = build_models(c.varied(compile=compile), consumer, dist)
        policy = models.policy
        if causal and policy.model.reads_columns:
            policy.decoder = Decoder(policy.model)
        catcher = Gradient(policy)
        metrics = grpo_step(policy, models.reference, random_rewards, consumer, c, optimizers=[catcher], dist=dist)
        assert metrics.get("mean_kl", 0.0) == 0.0, "to the last bit"
        assert bool(programs()) == compile
        steps.append((metrics, catcher.gradient))
    (plain, expected), (found, gradient) = steps
    close = 2e-2 if c.dtype == "bfloat16" else 1e-5
    assert found["loss"] == pytest.approx(plain["loss"], rel=close, abs=close * abs(plain["grad_norm"]))
    assert found["mismatch_max"] < (0.2 if c.dtype == "bfloat16" else 1e-4)
    assert (gradient - expected).norm() < close * expected.norm()
    assert expected.norm() > 1e-3


def test_all_layers_and_all_sizes_share_the_programs(folder):
    """Of two models, with two and with four layers; some sizes are those of the heads, which are constants."""
    counts = []
    for extra in (0, 2):
        net = with_more_layers(load_model(folder("llama"))[0], extra)
        net.compile_layers()
        for P, T, n, L in ((8, 8, 8, 32), (5, 9, 11, 7), (3, 32, 6, 8)):
            past = net.new_cache()
            tokens = torch.randint(20, 90, (P, T))
            net.states(tokens, past=past, padding=torch.arange(P) % 3)
            row = torch.arange(n) % P
            net.states(torch.randint(20, 90, (n, L)), None, past.expand(row), row % 3)
            with torch.no_grad():
                buffers = [tuple(x.new_zeros(n, x.shape[1], 2 * L, x.shape[3]) for x in pair) for pair in past.layers]
                rows = RowCache(buffers, column=row[:, None] % L)
                net.states(tokens[row, :1], None, rows, row % 3)
            counts.append(programs())
    assert counts == [3] * 6, "prompts, their completions, a token"


def with_more_layers(net, extra):
    """The model with `extra` copies of its layers at its end."""
    for i in range(extra):
        layer = copy.deepcopy(net.layers[i])
        layer.self_attn.layer_idx = net.config.num_hidden_layers
        net.layers.append(layer)
        net.config.num_hidden_layers += 1
    return net


def test_a_model_that_reads_both_ways_makes_no_cache_of_its_own(folder):
    """Each layer would need a program of its own, and grad_checkpoint would read every token twice."""
    tokens = torch.randint(20, 90, (3, 12))
    counts = []
    for extra in (0, 2):
        net = with_more_layers(load_model(folder("llada"))[0], extra)
        gradients = []
        for computes_again in (False, True):
            net.grad_checkpoint = computes_again
            net.zero_grad()
            net.states(tokens).square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        assert torch.equal(*gradients) and gradients[0].norm() > 0
        net.compile_layers()
        with torch.no_grad():
            net.states(tokens)
        counts.append(programs())
    assert counts[0] == counts[1] > 0


def fails(graph, inputs):
    raise RuntimeError("no compiler")


def test_what_cannot_be_compiled_ends_the_run_at_its_start_in_one_line(folder, backend):
    for family in ("qwen3_5", "mamba2"):
        with pytest.raises(Mistake, match="compile=False"):
            load_model(folder(family))[0].compile_layers()
    backend(fails)
    others = load_model(folder("llama"))[0], load_huggingface_tokenizer(folder("llama"))
    for net, tokenizer in (others, (causal_model(), CAUSAL)):
        policy = CausalPolicy(net, tokenizer)
        policy.compile()
        with pytest.raises(Mistake, match="compile=False"):
            policy.try_compiled()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@torch.no_grad()
def test_a_compiled_decoder_writes_keys_in_place(backend):
    """A program that copies the cache of a layer for each token would be slower than none."""
    backend("inductor")
    n, H, L, D = 5, 2, 12, 4
    all_rows = torch.zeros(2, n + 1, H, L + 3, D)
    layer = LayerOfRows()
    layer.buffers = all_rows[0, :n, :, :L], all_rows[1, :n, :, :L]
    column = torch.tensor([[3], [0], [L - 1], [5], [3]])
    layer.place = torch.arange(n)[:, None], torch.arange(H), column
    new = torch.randn(2, n, H, 1, D)
    _, (code,) = run_and_get_code(compiled(LayerOfRows.update), layer, *new)
    assert "= empty_strided" not in code, "no other tensor is allocated"
    expected = torch.zeros_like(all_rows)
    for i in range(n):
        expected[:, i, :, column[i, 0]] = new[:, i, :, 0]
    assert torch.equal(all_rows, expected)
