"""One supervised optimizer step, and the part of it that every kind of training shares: apply_gradients."""

import math

import torch

from core.losses import supervised_sums
from core.model import bare


def build_optimizers(model, config, device_type="cpu"):
    """AdamW, or Muon for the matrices of the blocks (Jordan et al. 2024) and AdamW for the rest.

    config: optimizer, learning_rate, weight_decay, beta1, beta2. Muon's update is scaled to AdamW's size
    (arXiv 2502.16982), so one learning_rate serves both. Weight decay on matrices alone.
    """
    named = list(bare(model).named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and name.startswith("blocks.")]
    others = [p for name, p in named if not (p.dim() == 2 and name.startswith("blocks."))]
    groups = [{"params": [p for p in others if p.dim() == 2], "weight_decay": config.weight_decay},
              {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0}]
    muon = []
    if config.optimizer == "muon":
        muon = [torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay,
                                 adjust_lr_fn="match_rms_adamw")]
    elif config.optimizer == "adamw":
        groups[0]["params"] += matrices
    else:
        raise ValueError(f"optimizer={config.optimizer!r} is not one of adamw, muon")
    return [torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2),
                              fused=device_type == "cuda"), *muon]


def apply_gradients(model, optimizers, lr, grad_clip, sums, dist, divide_by=None):
    """Ends an optimizer step: gradients and sums are totalled over ranks, clipped, applied, cleared.

    sums: {name: 0-d tensor} that add up over ranks; divide_by: the one whose total the gradient is divided by
    One host sync. A step whose sums or gradient are not finite changes nothing but the count.
    Returns {name: float} with grad_norm and skipped_steps (0 or 1) added
    """
    dist.sum_gradients(model)
    as_scalar = lambda x: x.float() if torch.is_tensor(x) else torch.full((), float(x), device=dist.device)
    totals = dist.total(torch.stack([as_scalar(x) for x in sums.values()]))
    if divide_by is not None:
        torch._foreach_div_([p.grad for p in model.parameters()], totals[list(sums).index(divide_by)])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip if grad_clip > 0 else math.inf)
    *values, norm = torch.cat((totals, norm.reshape(1).float())).tolist()
    finite = math.isfinite(norm) and all(map(math.isfinite, values))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return dict(zip(sums, values, strict=True)) | {"grad_norm": norm, "skipped_steps": int(not finite)}


def training_step(model, batches, optimizers, lr, grad_clip, dist, dtype=torch.float32):
    """One optimizer step on micro-batches [(input, target, mask)]: the mean loss over all of them on all ranks.

    Returns {"loss", "accuracy", "grad_norm", "skipped_steps"}
    """
    sums = {"loss": 0.0, "correct": 0.0, "count": 0.0}
    for input, target, mask in batches:
        with dist.autocast(dtype):
            part = supervised_sums(model, input, target, mask)
        part["loss"].backward()
        sums = {name: sums[name] + part[name].detach() for name in sums}
    out = apply_gradients(model, optimizers, lr, grad_clip, sums, dist, divide_by="count")
    return {"loss": out["loss"] / out["count"], "accuracy": out["correct"] / out["count"],
            "grad_norm": out["grad_norm"], "skipped_steps": out["skipped_steps"]}
