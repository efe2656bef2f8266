"""The one place where a batch of numpy arrays becomes tensors on a device."""

import torch


def unpack_batch(batch, device):
    """Returns input, target (B, T) int64 on `device`, and mask (B, T) bool, which stays on the CPU: indices are built
    from it there, without waiting for the device. Raises ValueError if a text has nothing masked."""
    if not batch["mask"].any(axis=1).all():
        raise ValueError("a batch without masks: every text needs at least one masked position to fill in "
                         "(mask_low and mask_high set how many)")
    move = lambda x: torch.from_numpy(x).to(device, non_blocking=True)
    return move(batch["input"]), move(batch["target"]), torch.from_numpy(batch["mask"])


def masked_positions(mask, device):
    """Where each row is masked, as indices on `device`.

    mask: (B, T) bool on the CPU
    Returns position (B, M) int64, the masked positions in order, then padding; chosen (B, M) float32, 0.0 on padding.
    """
    M = int(mask.sum(1).max())
    order = mask.int().argsort(dim=1, descending=True, stable=True)                  # (B, T) masked ones first
    return order[:, :M].to(device), mask.gather(1, order[:, :M]).float().to(device)
