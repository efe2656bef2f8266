"""Causal training, compared with reading the prompt again with every completion."""

import numpy as np
import torch

from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from grpo.benchmarks.comparison import TOKENIZER, Comparison
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig


class Causal(Comparison):
    """Causal training: the prompt is read once for its completions (shared), or again with each of them (naive)."""

    def __init__(self, c):
        super().__init__(c)
        longest = c.prompt_length + c.completion_length
        model = GPT(GPTConfig(LANGUAGE_MODEL, TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, longest, c.n_layer,
                              c.n_head, c.n_embd))
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, temperature=1.0, top_p=1.0,
                                 kl_beta=0.0, max_new_tokens=c.completion_length)
        self.policy = make_policy(model.to(self.dist.device), TOKENIZER, self.config, self.dist)
        self.prompts = np.random.default_rng(0).integers(96, size=(c.batch_size, c.prompt_length))
        batch = {"input": self.prompts, "padding": np.zeros(c.batch_size, dtype=np.int64),
                 "number": np.arange(c.batch_size), "record": np.array([{"text": ""}] * c.batch_size)}
        self.rollouts = self.policy.sample(batch, 0, self.config)

    def shared(self):
        """This project's forward and backward pass."""
        self.learn(self.rollouts)

    def naive(self):
        """The usual pass: every completion is a row of its own, behind its prompt."""
        model, target, mask = self.policy.model, self.rollouts.target, self.rollouts.mask  # (N, M) each
        prompts = torch.from_numpy(self.prompts).to(target.device)
        prompts = prompts.repeat_interleave(self.c.group_size, 0)                    # (N, T)
        texts = torch.cat((prompts, target[:, :-1]), 1)                              # (N, T + M - 1)
        first = prompts.shape[1] - 1                 # the last token of a prompt predicts the first of its completion
        position = torch.arange(first, texts.shape[1], device=target.device).expand_as(target)
        with self.dist.autocast():
            logp = model.project(model.states(texts, position)).log_softmax(-1)      # (N, M, V)
        sampled = logp.gather(-1, target[..., None]).squeeze(-1)                     # (N, M)
        term = -torch.exp(sampled - sampled.detach()) * self.advantage               # (N, M)
        ((term * mask).sum(1) / mask.sum(1)).mean().backward()
