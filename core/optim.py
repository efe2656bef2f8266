"""The learning rate, the optimizers, and the end of every optimizer step."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.distributed import Distributed, is_sharded
from core.settings.setting import Settings


def build_optimizers(learner: Any, config: Settings, device_type: str = "cpu") -> list:
    """AdamW, or Muon for the matrices of the blocks (Jordan et al. 2024) and AdamW for the rest. Muon's update is
    scaled to AdamW's size (arXiv 2502.16982), so one learning_rate serves both. Vectors do not decay.

    learner: a model or a policy, with parameters_by_kind; config: optimizer, learning_rate, weight_decay, beta1, beta2
    """
    kinds = learner.parameters_by_kind()
    decayed, muon = list(kinds["embeddings"]), []
    if config.optimizer == "adamw":
        decayed += kinds["matrices"]
    else:
        muon.append(torch.optim.Muon(kinds["matrices"], lr=config.learning_rate, weight_decay=config.weight_decay,
                                     adjust_lr_fn="match_rms_adamw"))
    groups = [{"params": decayed, "weight_decay": config.weight_decay},
              {"params": list(kinds["vectors"]), "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2),
                              fused=device_type != "mps")
    return [adamw, *muon]


class CosineLRScheduler:
    """lr(step) is the learning rate of an optimizer step, counted from 0.

    It rises linearly to learning_rate in warmup_iters steps, falls along a half cosine to min_lr (None: a tenth
    of learning_rate) at step lr_decay_iters, and stays there.
    """

    def __init__(self, learning_rate: float, min_lr: float | None, warmup_iters: int, lr_decay_iters: int):
        self.learning_rate = learning_rate
        self.min_lr = learning_rate / 10 if min_lr is None else min_lr
        self.warmup_iters, self.lr_decay_iters = warmup_iters, lr_decay_iters

    def lr(self, step: int) -> float:
        if step < self.warmup_iters:
            return self.learning_rate * (step + 1) / self.warmup_iters
        length = max(1, self.lr_decay_iters - self.warmup_iters)
        share = min(1.0, (step - self.warmup_iters) / length)
        height = 0.5 * (1 + math.cos(math.pi * share))
        return self.min_lr + height * (self.learning_rate - self.min_lr)


def set_learning_rate(optimizers: list, lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def total_over_ranks(sums: dict, dist: Distributed, largest: Sequence[str] = ()) -> dict:
    """Adds the numbers of all ranks up.

    sums: {name: 0-d tensor or number}; largest: the names of which the largest over ranks counts, not the sum
    Returns {name: 0-d float32 tensor on the device}
    """
    numbers = [0.0 if torch.is_tensor(x) else x for x in sums.values()]
    numbers = torch.tensor(numbers).to(dist.device, non_blocking=True)  # all in one copy
    pairs = zip(sums.values(), numbers, strict=True)
    x = torch.stack([x.to(number, non_blocking=True) if torch.is_tensor(x) else number for x, number in pairs])
    totals = dict(zip(sums, dist.total(x), strict=True))
    if set(largest) & set(sums):
        most = dict(zip(sums, dist.largest(x), strict=True))
        totals |= {name: most[name] for name in largest if name in sums}
    return totals


def apply_gradients(parameters: Iterable[Tensor], optimizers: list, grad_clip: float, totals: dict, count: str,
                    deciding: Sequence[str] = ("loss",)) -> dict:
    """Ends an optimizer step whose gradients are summed over ranks: clips them, then steps or skips. One host sync.

    totals: {name: 0-d tensor} of `total_over_ranks`; count: the name of the one that counts the tokens in the loss
    deciding: names of sums that skip the step if they are NaN or infinite
    A step without a token in the loss changes nothing either: momentum and weight decay alone must not move weights.
    Returns {name: float} of totals with grad_norm, and skipped_steps and empty_steps (0 or 1 each), added
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip if grad_clip > 0 else math.inf)
    if is_sharded(norm):
        norm = norm.full_tensor()
    numbers = torch.stack([*totals.values(), norm.float()]).tolist()
    out = dict(zip([*totals, "grad_norm"], numbers, strict=True))
    wrong = [name for name in not_finite(out) if name in ("grad_norm", *deciding)]
    good = not wrong
    empty = good and out[count] == 0
    for optimizer in optimizers:
        if good and not empty:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return out | {"skipped_steps": int(not good), "empty_steps": int(empty)}


def not_finite(metrics: dict) -> list[str]:
    """The names of the metrics {name: number} that are not finite."""
    return [name for name, x in metrics.items() if not math.isfinite(x)]
