"""Models of Qwen's shapes with random weights, and steps on random prompts: their speed and memory are measured."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from bench.sides import problems, started
from core.distributed import Distributed
from core.huggingface.lora import add_adapter
from core.huggingface.model import HuggingFaceModel
from core.model import LANGUAGE_MODEL
from core.optim import build_optimizers
from core.settings.optional import quiet_transformers
from grpo.build import LEFT_TO_RIGHT, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import Scored
from grpo.sampling_settings import SamplingSettings


@dataclass(frozen=True)
class Size:
    """The shape of a model, and the lengths of the texts that it reads and writes."""

    hidden: int
    inner: int                    # width within an MLP
    layers: int
    heads: int
    key_heads: int                # heads of keys and values
    vocabulary: int = 151_936
    head: int | None = None       # size of a head; None: Qwen2.5, whose heads divide the states
    is_tied: bool = True          # the output layer has the weights of the embedding
    prompt_length: int = 64       # tokens of each prompt
    completion_length: int = 256  # tokens of each completion: none ends by itself

    @property
    def head_size(self):
        return self.head or self.hidden // self.heads


SIZES = {
    "0.5B": Size(896, 4864, 24, 14, 2),
    "1.5B": Size(1536, 8960, 28, 12, 2),
    "3B": Size(2048, 11008, 36, 16, 2),
    "7B": Size(3584, 18944, 28, 28, 4, vocabulary=152_064, is_tied=False),
    "Qwen3-0.6B": Size(1024, 3072, 28, 16, 8, head=128),
    "Qwen3-1.7B": Size(2048, 6144, 28, 16, 8, head=128),
    "mini": Size(32, 64, 2, 4, 2, vocabulary=500, prompt_length=4, completion_length=8)}


def random_net(size, device):
    """A Qwen2.5 or Qwen3 of transformers with random weights, which has no token that ends a text."""
    transformers = quiet_transformers("Qwen", "model")
    torch.manual_seed(0)
    settings = {
        "vocab_size": size.vocabulary, "hidden_size": size.hidden, "intermediate_size": size.inner,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.key_heads,
        "tie_word_embeddings": size.is_tied, "bos_token_id": None, "eos_token_id": None}
    with torch.device(device):  # a CPU draws the weights of 1.5B in half a minute
        if size.head is None:
            return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, head_dim=size.head))


class Trial:
    """A policy with random weights, its optimizers, and prompts: all that a step needs."""

    def __init__(self, size, device, dtype, **settings):
        """settings: of GRPOConfig"""
        self.size = size
        self.dist = Distributed(device, dtype)
        self.config = GRPOConfig(max_new_tokens=size.completion_length, temperature=1.0, top_p=1.0, kl_beta=0.0,
                                 **settings)
        tokenizer = SimpleNamespace(
            base_vocab_size=size.vocabulary, vocab_size=size.vocabulary, banned_token_ids=(), mask_token_id=None,
            stop_token_ids=(), decode=str)
        net = random_net(size, self.dist.device)
        if self.config.has_adapter:
            net = add_adapter(net.to(self.dist.dtype), self.config)
        model = HuggingFaceModel(net, tokenizer, LANGUAGE_MODEL, self.config.has_adapter)
        self.policy = make_policy(LEFT_TO_RIGHT, model.to(self.dist.device), tokenizer, self.config, self.dist)
        if self.config.compile:
            self.policy.compile()
        self.optimizers = build_optimizers(self.policy, self.config, self.dist.device.type)
        self.steps = 0  # taken so far

    def problems(self, count):
        prompts = np.random.default_rng(0).integers(self.size.vocabulary, size=(count, self.size.prompt_length))
        return problems(prompts)

    def sample(self, **changes):
        """Rollouts of config.batch_size problems, and the seconds that they took. changes: of the config"""
        config = self.config.varied(**changes)
        batch = self.problems(config.batch_size)
        start = started(self.dist.device)
        rollouts = self.policy.sample(batch, self.steps, SamplingSettings.of(config))
        self.steps += 1
        return rollouts, started(self.dist.device) - start

    def train(self, when_sampled=lambda: None):
        """Takes a step. Returns the seconds of sampling and of training. when_sampled: called in between"""
        batch = self.problems(self.config.batch_size)
        times = [started(self.dist.device)]

        def rewards(rollouts):
            times.append(started(self.dist.device))
            when_sampled()
            return Scored(torch.rand(self.config.batch_size, self.config.group_size, device=self.dist.device))

        grpo_training_step(
            self.policy, None, rewards, lambda again: batch, self.optimizers, self.steps, self.config, self.dist)
        self.steps += 1
        times.append(started(self.dist.device))
        return np.diff(times).tolist()

    @property
    def has_graphs(self):
        """True if completions are sampled in CUDA graphs."""
        decoder = self.policy.decoder
        return self.dist.device.type == "cuda" and decoder is not None and decoder.captures
