"""Running text: a folder of token files, and windows of it as problems. A problem depends on (seed, split, step, its
number) alone, so there is no state to checkpoint."""

import json
import os

import numpy as np
import torch

from core.files import read_object, replacing
from core.masking import check_masks, draw_mask
from core.model import LANGUAGE_MODEL
from core.settings.setting import shown
from core.tokenizer import AGAIN, from_description, same_vocabulary

SPLITS = ("train", "val")
PROBLEMS = 0  # the first number of the seeds of problems, so that sampling draws other noise (core/distributions.py)


def dataset_folder(dataset):
    """A name under data/, or a folder of your own."""
    return dataset if os.path.isdir(dataset) else os.path.join("data", dataset)


def dtype_of_ids(tokenizer):
    """An id takes 16 bits or, of a vocabulary above 65,536, 32."""
    return np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")


def write_dataset(folder, tokens, tokenizer, **facts):
    """Writes train.bin, val.bin and meta.json.

    tokens: {"train": ids, "val": ids}; facts: counts worth keeping, printed and written to meta.json
    """
    files = {}
    for split in SPLITS:
        facts[f"{split}_tokens"] = len(tokens[split])
        files[f"{split}.bin"] = np.array(tokens[split], dtype=dtype_of_ids(tokenizer)).tobytes()
    write_folder(folder, files, tokenizer, facts)


def write_folder(folder, files, tokenizer, facts):
    """Writes the files {name: bytes} of a dataset and, last, meta.json with its tokenizer and facts, which are printed.
    Each file appears whole or not at all."""
    if not folder:
        raise ValueError("out is empty; name a folder with --out=FOLDER")
    meta = json.dumps({"tokenizer": tokenizer.description(), **facts}, indent=1).encode()
    for name, content in {**files, "meta.json": meta}.items():
        with replacing(os.path.join(folder, name)) as new, open(new, "wb") as f:
            f.write(content)
    print(f"{folder}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))


def load_meta(folder, tokenizer=None):
    """(meta.json of a prepared dataset, its tokenizer). tokenizer: one that is used in place of the dataset's own"""
    path = os.path.join(folder, "meta.json")
    if not os.path.exists(path):
        raise FileNotFoundError(f"dataset not prepared: {path} is missing; correct the path, or run its prepare.py "
                                "(for your own data: data/char_diffusion/prepare.py or data/custom/prepare.py)")
    meta = read_object(path, path, AGAIN)
    if not isinstance(meta.get("tokenizer"), dict):
        raise ValueError(f"{path} has no tokenizer: {AGAIN}")
    return meta, tokenizer or from_description(meta["tokenizer"], path)


def open_tokens(folder, split, tokenizer, block_size):
    """The token ids of a split, as an array that stays on disk. Raises FileNotFoundError or ValueError, naming the
    file, unless it has more than a window of block_size."""
    path = os.path.join(folder, f"{split}.bin")
    if not os.path.exists(path):
        raise FileNotFoundError(f"dataset not prepared: {path} is missing; run its prepare.py again")
    dtype = dtype_of_ids(tokenizer)
    count = os.path.getsize(path) // dtype.itemsize
    if count <= block_size + 1:
        raise ValueError(f"{path} has {count} tokens, fewer than one window of block_size={block_size} + 1")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def check_meta(folder, meta, tokenizer, masks):
    """Raises ValueError unless windows of the dataset can be cut and masked with this tokenizer.

    masks: {key of MASKS: weight}, or None where nothing is masked
    """
    if not same_vocabulary(meta["tokenizer"], tokenizer):
        raise ValueError(f"dataset={folder} was prepared with another vocabulary "
                         f"({meta['tokenizer'].get('vocab_size')} tokens) than the model's ({tokenizer.vocab_size}); "
                         "prepare it for this one: data/char_diffusion/prepare.py --tokenizer=MODEL")
    if masks and tokenizer.mask_token_id is None:
        raise ValueError(f"dataset={folder}: its tokenizer has no mask token, which filling in needs")
    if masks and "line" in masks and tokenizer.newline_token_id < 0:
        raise ValueError(f"masks={masks} has lines, but the tokenizer has no end of a line; leave 'line' out")
    stride = meta.get("stride", 1)
    if type(stride) is not int or stride < 1:
        raise ValueError(f"{folder}/meta.json: stride={shown(stride)} cannot be; prepare the dataset again")


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
        self.mode, self.block_size = mode, block_size
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world = rank, world
        self.masks = None if mode == LANGUAGE_MODEL else check_masks(masks)
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
        words = (f"{len(self.tokens['train'])} training and {len(self.tokens['val'])} validation tokens, windows of "
                 f"{self.block_size}")
        if self.masks:
            words += f", {self.mask_low:.0%} to {self.mask_high:.0%} masked ({', '.join(self.masks)})"
        return words

    def train_text(self):
        """The whole training text, decoded."""
        return self.tokenizer.decode(self.tokens["train"].tolist())


def unpack_batch(batch, device):
    """A batch of numpy arrays as tensors.

    Returns input, target (B, T) int64 on `device`, and mask (B, T) bool, which stays on the CPU: indices are built from
    it there, without waiting for the device.
    """
    if not batch["mask"].any(axis=1).all():
        raise ValueError("a batch without masks: every text needs at least one masked position to fill in")
    input, target, mask = (torch.from_numpy(batch[key]) for key in ("input", "target", "mask"))
    return input.to(device, non_blocking=True), target.to(device, non_blocking=True), mask
