"""Data without state: a problem depends on (seed, split, step, its number) alone; there is nothing to checkpoint."""

import numpy as np
import torch

from core.files.datasets import SPLITS, check_meta, dataset_folder, open_tokens
from core.masking import draw_mask
from core.model import LANGUAGE_MODEL
from core.tokenizer import load_meta

PROBLEMS = 0  # the first number of the seeds of problems, so that sampling draws other noise (core/distributions.py)


def unpack_batch(batch, device):
    """A batch of numpy arrays as tensors.

    Returns input, target (B, T) int64 on `device`, and mask (B, T) bool, which stays on the CPU: indices are built from
    it there, without waiting for the device.
    """
    if not batch["mask"].any(axis=1).all():
        raise ValueError("a batch without masks: every text needs at least one masked position to fill in")
    input, target, mask = (torch.from_numpy(batch[key]) for key in ("input", "target", "mask"))
    input = input.to(device, non_blocking=True)
    target = target.to(device, non_blocking=True)
    return input, target, mask


class DatasetConsumer:
    """Windows of a token file as training problems.

    batch(split, step) is {"input", "target", "mask"}, each (batch_size, block_size), and "number", (batch_size,).
    MASKED_FILL replaces target's tokens by MASK in input where mask is True; LANGUAGE_MODEL shifts by one.
    Problem i of a step is drawn from (seed, step, its number in the step), however a step is cut into ranks and
    micro-batches. A window starts at a multiple of meta.json's "stride", if it has one: texts of one length, such as
    the boards of a game, are then read whole.
    tokenizer: the one that is used, whose vocabulary must be that of the files; None: the one that wrote them
    """

    def __init__(self, dataset, mode, block_size, batch_size, seed=1337, rank=0, world=1, masks=None, mask_low=0.2,
                 mask_high=0.5, tokenizer=None):
        self.folder = dataset_folder(dataset)
        self.meta, self.tokenizer = load_meta(self.folder, tokenizer)
        self.mode = mode
        self.block_size = block_size
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world = rank, world
        self.masks = None if mode == LANGUAGE_MODEL else masks or {"random": 1.0}
        self.mask_low, self.mask_high = mask_low, mask_high
        check_meta(self.folder, self.meta, self.tokenizer, self.masks)
        self.stride = self.meta.get("stride", 1)
        self.tokens = {split: open_tokens(self.folder, split, self.tokenizer, block_size) for split in SPLITS}

    def batch(self, split, step, micro=0):
        """Micro-batch `micro` of `step` as numpy arrays; this rank's share of it."""
        first = (micro * self.world + self.rank) * self.batch_size
        problems = [self._problem(split, step, first + i) for i in range(self.batch_size)]
        return {key: np.stack([p[key] for p in problems]) for key in problems[0]}

    def problems(self, split, step, micro=0):
        """Problems for reinforcement learning: for fill-in the same as for supervised training."""
        return self.batch(split, step, micro)

    def _problem(self, split, step, number):
        rng = np.random.default_rng([PROBLEMS, self.seed, SPLITS.index(split), step, number])
        tokens = self.tokens[split]
        starts = range(0, len(tokens) - self.block_size, self.stride)
        start = starts[rng.integers(len(starts))]
        window = np.array(tokens[start : start + self.block_size + 1], dtype=np.int64)  # (T + 1,)
        if window.max() >= self.tokenizer.vocab_size:
            raise ValueError(f"{self.folder}/{split}.bin has the token id {window.max()}; prepare it again")
        if self.mode == LANGUAGE_MODEL:
            input = window[:-1]                                                      # (T,)
            target = window[1:]                                                      # (T,)
            mask = np.ones(self.block_size, dtype=bool)
        else:
            target = window[:-1]                                                     # (T,)
            newline = self.tokenizer.newline_token_id
            mask = draw_mask(rng, target, self.masks, self.mask_low, self.mask_high, newline)
            input = np.where(mask, self.tokenizer.mask_token_id, target)
        return {"input": input, "target": target, "mask": mask, "number": np.int64(number)}

    def size(self):
        """The number of tokens and how they are masked, in words."""
        masked = ""
        if self.masks:
            masked = f", {self.mask_low:.0%} to {self.mask_high:.0%} masked ({', '.join(self.masks)})"
        return (f"{len(self.tokens['train'])} training and {len(self.tokens['val'])} validation tokens, windows of "
                f"{self.block_size}{masked}")

    def train_text(self):
        """The whole training text, decoded."""
        return self.tokenizer.decode(self.tokens["train"].tolist())
