"""Causal training, compared with reading the prompt again with every completion, or with all logits at once."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch

from core import distributions
from core.distributed import Distributed
from core.huggingface.model import HuggingFaceModel
from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from core.settings.optional import require
from grpo.advantages import compute_advantages
from grpo.benchmarks.comparison import TOKENIZER, Bench, row
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import rollout_loss
from grpo.objectives import token_weights


class Causal(Bench):
    """Causal training: the prompt is read once for its completions (shared), or again with each of them (naive)."""

    def __init__(self, c):
        self.c, self.dist = c, Distributed(c.device, c.dtype)
        torch.manual_seed(0)
        model, tokenizer = self.generator(c.prompt_length + c.completion_length)
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, temperature=1.0, top_p=1.0,
                                 kl_beta=0.0, max_new_tokens=c.completion_length)
        self.policy = make_policy(model.to(self.dist.device), tokenizer, self.config, self.dist)
        prompts = np.random.default_rng(0).integers(96, size=(c.batch_size, c.prompt_length))
        self.batch = {"input": prompts, "padding": np.zeros(c.batch_size, dtype=np.int64),
                      "number": np.arange(c.batch_size), "record": np.array([None] * c.batch_size)}
        self.rollouts = self.collect()
        reward = torch.rand(c.batch_size, c.group_size, 1, device=self.dist.device)
        self.advantage = compute_advantages(reward, "group_std").view(-1, 1)

    def generator(self, length):
        """(model that reads `length` tokens, its tokenizer)"""
        c = self.c
        return GPT(GPTConfig(LANGUAGE_MODEL, TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, length, c.n_layer,
                             c.n_head, c.n_embd)), TOKENIZER

    def collect(self):
        return self.policy.sample(self.batch, 0, self.config)

    def train(self, shared):
        """Forward and backward pass on the completions. shared: whether their prompt is read once."""
        self.policy.model.zero_grad()
        self.policy.shared_prompt = shared
        weight = token_weights(self.rollouts.mask, "sequence", self.c.completion_length)
        rollouts = dataclasses.replace(self.rollouts, advantage=self.advantage)
        rollout_loss(self.policy, rollouts, weight, self.config, 0.0)[0].backward()

    def naive(self, _):
        self.train(False)

    def shared(self, _):
        self.train(True)

    def report(self):
        """Prints rows of the table. Returns entries of the JSON object."""
        naive, shared = self.seconds(self.train, False), self.seconds(self.train, True)
        writing, tokens = self.seconds(self.collect), float(self.rollouts.mask.sum())
        row("seconds, training", naive, shared, 3)
        row("tokens per second", tokens / naive, tokens / shared, 0)
        print(f"{'generation':<24}{tokens / writing:>24.0f} tokens per second; completions of "
              f"{tokens / len(self.advantage):.0f} tokens")
        return {"time_ratio": round(naive / shared, 2)}


class Vocabulary(Causal):
    """Training of a Hugging Face model with a large vocabulary: all logits at once (whole), or in parts."""

    columns = ("whole", "parts")

    def generator(self, length):
        """A random model of Qwen2's shape. Its tokenizer knows ids only, and nothing ends a completion."""
        transformers, c = require("transformers", "bench.py vocabulary"), self.c
        net = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=4 * c.n_embd, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_head, max_position_embeddings=length,
            tie_word_embeddings=True))
        tokenizer = SimpleNamespace(base_vocab_size=c.vocab_size, banned_token_ids=(), stop_token_ids=())
        return HuggingFaceModel(net, tokenizer, LANGUAGE_MODEL), tokenizer

    def train(self, parts):
        """Forward and backward pass on the completions. parts: whether logits are made in parts."""
        usual = distributions.LOGITS_AT_ONCE
        distributions.LOGITS_AT_ONCE = usual if parts else 2**62
        Causal.train(self, True)
        distributions.LOGITS_AT_ONCE = usual
