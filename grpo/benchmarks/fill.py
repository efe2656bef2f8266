"""The fill-in step, compared with one that reads every completion separately."""

import dataclasses

import numpy as np
import torch

from core.distributed import Distributed
from core.judge import calculate_judge_scores
from core.model import GPT, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, freeze
from grpo.advantages import compute_advantages
from grpo.benchmarks.comparison import TOKENIZER, Bench, row
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import rollout_loss
from grpo.objectives import token_weights
from grpo.scoring import with_reference


class Fill(Bench):
    """Fill-in: one forward for the completions of a group (shared), or one for each completion (naive)."""

    def __init__(self, c):
        self.c, self.dist = c, Distributed(c.device, c.dtype)
        torch.manual_seed(0)
        shape = (TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, c.block_size, c.n_layer, c.n_head, c.n_embd)
        model = GPT(GPTConfig(MASKED_FILL, *shape)).to(self.dist.device)
        self.judge = freeze(GPT(GPTConfig(SEQUENCE_SCORER, *shape)).to(self.dist.device))
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, block_size=c.block_size, top_p=1.0,
                                 temperature=1.0)
        self.policy = make_policy(model, TOKENIZER, self.config, self.dist)
        self.reference = self.policy.frozen()
        rng = np.random.default_rng(0)
        target = rng.integers(TOKENIZER.base_vocab_size, size=(c.batch_size, c.block_size))
        mask = rng.random((c.batch_size, c.block_size)).argsort(1) < round(c.masked * c.block_size)
        self.batch = {"input": np.where(mask, TOKENIZER.mask_token_id, target), "target": target, "mask": mask,
                      "number": np.arange(c.batch_size)}
        self.completions = self.collect()
        reward = torch.rand(c.batch_size, c.group_size, device=self.dist.device)
        self.advantage = compute_advantages(reward, "group_std").view(-1, 1)

    def collect(self):
        rollouts = self.policy.sample(self.batch, 0, self.config)
        return with_reference(rollouts, self.reference, "exact", self.config)

    def shared(self, judged):
        """This project's step, up to the gradient: each model reads an input once."""
        self.policy.model.zero_grad()
        rollouts = self.collect()
        if judged:
            with self.dist.autocast():
                calculate_judge_scores(self.judge, torch.stack(rollouts.texts.tokens), TOKENIZER.cls_token_id)
        weight = token_weights(rollouts.mask, "sequence", self.c.block_size)
        rollouts = dataclasses.replace(rollouts, advantage=self.advantage)
        rollout_loss(self.policy, rollouts, weight, self.config, self.config.kl_beta)[0].backward()

    def report(self):
        """Prints rows of the table. Returns entries of the JSON object."""
        result = {}
        for judged, key in ((True, "time_ratio"), (False, "time_ratio_without_judge")):
            naive, shared = self.seconds(self.naive, judged), self.seconds(self.shared, judged)
            result[key] = round(naive / shared, 2)
            row("seconds, judge" if judged else "seconds, no judge", naive, shared, 3)
        return result

    def naive(self, judged):
        """The usual step: every completion is a row of its own in every model, with logits at every position."""
        done, c, policy, reference = self.completions, self.config, self.policy.model, self.reference.model
        policy.zero_grad()
        texts = torch.stack(done.texts.tokens)                                       # (N, T)
        inputs = done.reading.texts[:, 0].repeat_interleave(c.group_size, 0)         # (N, T)
        masked = inputs == TOKENIZER.mask_token_id                                   # (N, T)
        with self.dist.autocast():
            with torch.no_grad():
                torch.multinomial(policy(inputs).softmax(-1).flatten(0, 1), 1)       # sampling
                ref_logp = reference(inputs).log_softmax(-1)                         # (N, T, V)
                if judged:
                    self.judge(texts).sigmoid().mean(1)
            logp = policy(inputs).log_softmax(-1)                                    # (N, T, V)
        sampled = logp.gather(-1, texts[..., None]).squeeze(-1)                      # (N, T)
        term = -torch.exp(sampled - sampled.detach()) * self.advantage               # (N, T)
        term = term + c.kl_beta * (logp.exp() * (logp - ref_logp)).sum(-1)
        ((term * masked).sum(1) / masked.sum(1)).mean().backward()


class Checkpointed(Fill):
    """The fill-in step without a judge: activations stored for the backward pass (naive) or computed again (shared)."""

    columns = ("stored", "again")

    def naive(self, _):
        self.policy.model.grad_checkpoint = False
        Fill.shared(self, False)

    def shared(self, _):
        self.policy.model.grad_checkpoint = True
        Fill.shared(self, False)

    def report(self):
        """Prints rows of the table. Returns entries of the JSON object."""
        stored, again = self.seconds(self.naive, False), self.seconds(self.shared, False)
        row("seconds", stored, again, 3)
        return {"time_ratio": round(stored / again, 2)}
