"""The fill-in step, compared with one that reads every completion separately."""

import time

import numpy as np
import torch

from core.judge import calculate_judge_scores
from core.model import GPT, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, freeze
from grpo.benchmarks.comparison import TOKENIZER, Comparison, wait_for_device
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig
from grpo.scoring import with_reference

MASKED = 0.3  # share of a text


class Fill(Comparison):
    """Fill-in: one forward for the completions of a group (shared), or one for each completion (naive)."""

    def __init__(self, c):
        super().__init__(c)
        shape = (TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, c.block_size, c.n_layer, c.n_head, c.n_embd)
        model = GPT(GPTConfig(MASKED_FILL, *shape)).to(self.dist.device)
        self.judge = freeze(GPT(GPTConfig(SEQUENCE_SCORER, *shape)).to(self.dist.device))
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, block_size=c.block_size, top_p=1.0,
                                 temperature=1.0)
        self.policy = make_policy(model, TOKENIZER, self.config, self.dist)
        self.reference = self.policy.frozen()
        rng = np.random.default_rng(0)
        target = rng.integers(TOKENIZER.base_vocab_size, size=(c.batch_size, c.block_size))
        mask = rng.random((c.batch_size, c.block_size)).argsort(1) < round(MASKED * c.block_size)
        self.batch = {"input": np.where(mask, TOKENIZER.mask_token_id, target), "target": target, "mask": mask,
                      "number": np.arange(c.batch_size)}
        self.rollouts = self.collect()

    def collect(self):
        rollouts = self.policy.sample(self.batch, 0, self.config)
        return with_reference(rollouts, self.reference, "exact", self.config)

    def shared(self):
        """This project's step, up to the gradient: each model reads an input once."""
        rollouts = self.collect()
        start = self.now()
        with self.dist.autocast():
            calculate_judge_scores(self.judge, torch.stack(rollouts.texts.tokens), TOKENIZER.cls_token_id)
        judge = self.now() - start
        self.learn(rollouts)
        return judge

    def naive(self):
        """The usual step: every completion is a row of its own in every model, with logits at every position."""
        policy, reference = self.policy.model, self.reference.model
        texts = torch.stack(self.rollouts.texts.tokens)                              # (N, T)
        inputs = self.rollouts.reading.texts[:, 0].repeat_interleave(self.c.group_size, 0)  # (N, T)
        masked = inputs == TOKENIZER.mask_token_id                                   # (N, T)
        with self.dist.autocast():
            with torch.no_grad():
                torch.multinomial(policy(inputs).softmax(-1).flatten(0, 1), 1)       # sampling
                ref_logp = reference(inputs).log_softmax(-1)                         # (N, T, V)
                start = self.now()
                self.judge(texts).sigmoid().mean(1)
                judge = self.now() - start
            logp = policy(inputs).log_softmax(-1)                                    # (N, T, V)
        sampled = logp.gather(-1, texts[..., None]).squeeze(-1)                      # (N, T)
        term = -torch.exp(sampled - sampled.detach()) * self.advantage               # (N, T)
        term = term + self.config.kl_beta * (logp.exp() * (logp - ref_logp)).sum(-1)
        ((term * masked).sum(1) / masked.sum(1)).mean().backward()
        return judge

    def now(self):
        wait_for_device(self.dist.device)
        return time.perf_counter()


class Checkpointed(Fill):
    """The fill-in step: activations stored for the backward pass (naive) or computed again (shared)."""

    columns = ("stored", "again")

    def naive(self):
        self.policy.model.grad_checkpoint = False
        return super().shared()

    def shared(self):
        self.policy.model.grad_checkpoint = True
        return super().shared()
