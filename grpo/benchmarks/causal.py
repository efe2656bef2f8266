"""Causal training, compared with reading the prompt again with every completion, or with all logits at once."""

from types import SimpleNamespace

import numpy as np
import torch

from core import distributions
from core.huggingface.model import HuggingFaceModel
from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from core.settings.optional import require
from grpo.advantages import compute_advantages
from grpo.benchmarks.comparison import TOKENIZER, Comparison
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig


class Causal(Comparison):
    """Causal training: the prompt is read once for its completions (shared), or again with each of them (naive)."""

    rows = {"time_ratio": ("seconds, training", {})}

    def __init__(self, c):
        super().__init__(c)
        model, tokenizer = self.generator(c.prompt_length + c.completion_length)
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, temperature=1.0, top_p=1.0,
                                 kl_beta=0.0, max_new_tokens=c.completion_length)
        self.policy = make_policy(model.to(self.dist.device), tokenizer, self.config, self.dist)
        prompts = np.random.default_rng(0).integers(96, size=(c.batch_size, c.prompt_length))
        self.batch = {"input": prompts, "padding": np.zeros(c.batch_size, dtype=np.int64),
                      "number": np.arange(c.batch_size), "record": np.array([{"text": ""}] * c.batch_size)}
        self.rollouts = self.collect()
        reward = torch.rand(c.batch_size, c.group_size, 1, device=self.dist.device)
        self.advantage = compute_advantages(reward, "group_std").view(-1, 1)

    def generator(self, length):
        """(model that reads `length` tokens, its tokenizer)"""
        c = self.c
        return GPT(GPTConfig(LANGUAGE_MODEL, TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, length, c.n_layer,
                             c.n_head, c.n_embd)), TOKENIZER

    def describe(self):
        return f"prompt {self.c.prompt_length}, completion {self.c.completion_length}"

    def collect(self):
        return self.policy.sample(self.batch, 0, self.config)

    def shared(self):
        """This project's forward and backward pass."""
        self.learn(self.rollouts)

    def naive(self):
        """The usual pass: every completion is a row of its own, behind its prompt."""
        model, target, mask = self.policy.model, self.rollouts.target, self.rollouts.mask  # (N, M) each
        model.zero_grad()
        prompts = torch.from_numpy(self.batch["input"]).to(target.device)
        prompts = prompts.repeat_interleave(self.c.group_size, 0)                    # (N, T)
        texts = torch.cat((prompts, target[:, :-1]), 1)                              # (N, T + M - 1)
        first = prompts.shape[1] - 1                 # the last token of a prompt predicts the first of its completion
        position = torch.arange(first, texts.shape[1], device=target.device).expand_as(target)
        with self.dist.autocast():
            logp = model.project(model.states(texts, position)).log_softmax(-1)      # (N, M, V)
        sampled = logp.gather(-1, target[..., None]).squeeze(-1)                     # (N, M)
        term = -torch.exp(sampled - sampled.detach()) * self.advantage               # (N, M)
        ((term * mask).sum(1) / mask.sum(1)).mean().backward()

    def report(self):
        result = super().report()
        tokens = float(self.rollouts.mask.sum())
        print(f"{'generation':<24}{tokens / self.seconds(self.collect):>24.0f} tokens per second; completions of "
              f"{tokens / len(self.advantage):.0f} tokens")
        return result


class Vocabulary(Causal):
    """Training of a Hugging Face model with a large vocabulary: all logits at once (naive), or in parts (shared)."""

    columns = ("whole", "parts")

    def generator(self, length):
        """A random model of Qwen2's shape. Its tokenizer knows ids only, and nothing ends a completion."""
        c = self.c
        transformers = require("transformers", "bench.py vocabulary")
        net = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=4 * c.n_embd, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_head, max_position_embeddings=length,
            tie_word_embeddings=True))
        tokenizer = SimpleNamespace(base_vocab_size=c.vocab_size, banned_token_ids=(), stop_token_ids=(),
                                    decode=str)
        return HuggingFaceModel(net, tokenizer, LANGUAGE_MODEL), tokenizer

    def describe(self):
        return f"{super().describe()}, vocabulary {self.c.vocab_size}"

    def naive(self):
        usual = distributions.LOGITS_AT_ONCE
        distributions.LOGITS_AT_ONCE = 2**62
        self.shared()
        distributions.LOGITS_AT_ONCE = usual
