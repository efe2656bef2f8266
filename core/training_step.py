"""One supervised optimizer step, and its end, apply_gradients, which reinforcement learning shares."""

import math

import torch

from core.performance.sharding import is_sharded

NONFINITE = "nonfinite_"  # begins the name of a sum that counts numbers that are not finite


def build_optimizers(learner, config, device_type="cpu"):
    """AdamW, or Muon for the matrices of the blocks (Jordan et al. 2024) and AdamW for the rest.

    learner: a model or a policy, with parameters_by_kind; config: optimizer, learning_rate, weight_decay, beta1, beta2
    Muon's update is scaled to AdamW's size (arXiv 2502.16982), so one learning_rate serves both. Weight decay on
    matrices and embeddings alone.
    """
    kinds, muon = learner.parameters_by_kind(), []
    groups = [{"params": list(kinds["embeddings"]), "weight_decay": config.weight_decay},
              {"params": list(kinds["vectors"]), "weight_decay": 0.0}]
    if config.optimizer == "muon":
        muon = [torch.optim.Muon(kinds["matrices"], lr=config.learning_rate, weight_decay=config.weight_decay,
                                 adjust_lr_fn="match_rms_adamw")]
    elif config.optimizer == "adamw":
        groups[0]["params"] += kinds["matrices"]
    else:
        raise ValueError(f"optimizer={config.optimizer!r} is not one of adamw, muon")
    return [torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2),
                              fused=device_type != "mps"), *muon]


def set_learning_rate(optimizers, lr):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def apply_gradients(parameters, optimizers, grad_clip, sums, dist, count, mean=False, largest=None,
                    deciding=None):
    """Ends an optimizer step: gradients and sums are totalled over ranks, clipped, applied, cleared. One host sync.

    sums: {name: 0-d tensor or number} that add up over ranks; largest: {name: the same} whose maximum over ranks counts
    count: the name of the sum that counts the tokens in the loss; mean: whether the gradient is divided by its total
    deciding: the names of the sums that must be finite; None: all of them. The others are there to be looked at
    A step whose deciding sums or gradient are not finite on any rank, or with a sum "nonfinite_..." that is not 0,
    changes nothing on all ranks but the count of skipped steps. A step without a single token in the loss changes
    nothing either: momentum and weight decay alone must not move the weights.
    Returns {name: float} of both with grad_norm, and skipped_steps and empty_steps (0 or 1 each), added
    """
    parameters = [p for p in parameters if p.requires_grad]
    dist.sum_gradients(parameters)
    as_scalar = lambda x: torch.as_tensor(x).to(dist.device, torch.float32, non_blocking=True)
    totals = found = dist.total(torch.stack([as_scalar(x) for x in sums.values()]))
    if largest:
        found = torch.cat((totals, dist.largest(torch.stack([as_scalar(x) for x in largest.values()]))))
    if mean:
        torch._foreach_div_([p.grad for p in parameters], totals[list(sums).index(count)].clamp(min=1))
    norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip if grad_clip > 0 else math.inf)
    norm = norm.full_tensor() if is_sharded(norm) else norm
    *values, norm = torch.cat((found, norm.reshape(1).float())).tolist()
    out = dict(zip([*sums, *(largest or {})], values, strict=True))
    # Sums alone decide, which are equal on all ranks: a maximum over ranks with NaN on one of them may not be
    finite = all(math.isfinite(x) for x in (norm, *(out[name] for name in sums if name in (deciding or sums))))
    finite = finite and not any(out[name] for name in sums if name.startswith(NONFINITE))
    empty = finite and out[count] == 0
    for optimizer in optimizers:
        if finite and not empty:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return out | {"grad_norm": norm, "skipped_steps": int(not finite), "empty_steps": int(empty)}


def training_step(model, batches, optimizers, grad_clip, dist):
    """One optimizer step on micro-batches [(input, target, mask)]: the mean loss over all of them on all ranks.

    Returns {"loss", "accuracy", "grad_norm", "skipped_steps"}
    """
    from core.supervised.loss import supervised_sums  # reinforcement learning has a loss of its own
    sums = {"loss": 0.0, "correct": 0.0, "count": 0.0}
    for input, target, mask in batches:
        with dist.autocast():
            part = supervised_sums(model, input, target, mask)
        part["loss"].backward()
        sums = {name: sums[name] + part[name].detach() for name in sums}
    out = apply_gradients(model.parameters(), optimizers, grad_clip, sums, dist, "count", mean=True)
    count = max(1.0, out["count"])
    return {"loss": out["loss"] / count, "accuracy": out["correct"] / count,
            "grad_norm": out["grad_norm"], "skipped_steps": out["skipped_steps"]}
