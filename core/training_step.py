"""The optimizers, and the end of an optimizer step, which supervised and reinforcement learning share."""

import math

import torch

from core.distributed import is_sharded

NONFINITE = "nonfinite_"  # begins the name of a sum that counts numbers that are not finite


def build_optimizers(learner, config, device_type="cpu"):
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


def set_learning_rate(optimizers, lr):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def total_over_ranks(sums, dist, largest=()):
    """Adds the numbers of all ranks up.

    sums: {name: 0-d tensor or number}; largest: the names of which the largest over ranks counts, not the sum
    Returns {name: 0-d float32 tensor on the device}
    """
    x = torch.stack([torch.as_tensor(x).to(dist.device, torch.float32, non_blocking=True) for x in sums.values()])
    totals = dict(zip(sums, dist.total(x), strict=True))
    if set(largest) & set(sums):
        most = dict(zip(sums, dist.largest(x), strict=True))
        totals |= {name: most[name] for name in largest if name in sums}
    return totals


def apply_gradients(parameters, optimizers, grad_clip, totals, count, deciding=("loss",)):
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
    good = may_step(out, deciding)
    empty = good and out[count] == 0
    for optimizer in optimizers:
        if good and not empty:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return out | {"skipped_steps": int(not good), "empty_steps": int(empty)}


def may_step(numbers, deciding):
    """True if the norm of the gradient and the deciding sums are finite, and no sum counts numbers that are not."""
    counted = any(x for name, x in numbers.items() if name.startswith(NONFINITE))
    return not counted and all(math.isfinite(numbers[name]) for name in ("grad_norm", *deciding))
