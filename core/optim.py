"""The learning rate, the optimizers, and the end of every optimizer step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.distributed import is_sharded
from core.settings.setting import Settings


def build_optimizers(
        learner: Any,
        config: Settings,
        device_type: str = "cpu") -> list:
    """Builds AdamW, or Muon for the matrices of the blocks (Jordan et al. 2024) and AdamW for the rest. Muon's update
    is scaled to AdamW's size (arXiv 2502.16982), so one learning_rate serves both. Vectors do not decay.

    learner: a model or a policy, with parameters_by_kind; config: optimizer, learning_rate, weight_decay, beta1, beta2
    """
    kinds = learner.parameters_by_kind()
    lr = config.learning_rate
    decay = config.weight_decay
    decayed = list(kinds["embeddings"])
    muon = []
    matrices = kinds["matrices"]
    if config.optimizer == "adamw":
        decayed += matrices
    else:
        muon = [torch.optim.Muon(matrices, lr, decay, adjust_lr_fn="match_rms_adamw")]
    vectors = list(kinds["vectors"])
    groups = [
        {"params": decayed, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0}]
    betas = config.beta1, config.beta2
    adamw = torch.optim.AdamW(groups, lr, betas, fused=device_type != "mps")
    return [adamw, *muon]


@dataclass(eq=False)
class CosineLRScheduler:
    """lr(step) is the learning rate of an optimizer step, counted from 0.

    It rises linearly to learning_rate in warmup_iters steps, falls along a half cosine to min_lr (None: a tenth
    of learning_rate) at step lr_decay_iters, and stays there.
    """

    learning_rate: float
    min_lr: float | None
    warmup_iters: int
    lr_decay_iters: int

    def lr(self, step: int) -> float:
        if step < self.warmup_iters:
            return self.learning_rate * (step + 1) / self.warmup_iters
        length = self.lr_decay_iters - self.warmup_iters
        decayed = step - self.warmup_iters
        share = min(1.0, decayed / max(1, length))
        height = 0.5 * (1 + math.cos(math.pi * share))
        lowest = self.min_lr
        if lowest is None:
            lowest = self.learning_rate / 10
        return lowest + height * (self.learning_rate - lowest)


def set_learning_rate(optimizers: list, lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def clip_gradients(parameters: Iterable[Tensor], grad_clip: float) -> Tensor:
    """Clips gradients, already summed over ranks, to a norm of grad_clip; 0: no clipping. Returns the unclipped
    norm."""
    limit = grad_clip if grad_clip > 0 else math.inf
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    if is_sharded(norm):
        return norm.full_tensor()
    return norm


def step_optimizers(optimizers: list, good: bool, tokens: float) -> dict:
    """Ends an optimizer step: updates the weights if the step is good, and frees the gradients. Without a token in the
    loss nothing is updated either: momentum and weight decay would move the weights.

    tokens: number of tokens in the loss, over all ranks
    Returns {"skipped_steps", "empty_steps"}, 0 or 1 each
    """
    empty = good and tokens == 0
    updates = good and not empty
    for optimizer in optimizers:
        if updates:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"skipped_steps": int(not good), "empty_steps": int(empty)}
