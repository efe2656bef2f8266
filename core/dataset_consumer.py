"""Data without state: a problem depends on (seed, split, step, its number) alone; there is nothing to checkpoint."""

import json
import os

import numpy as np
import torch

from core.masking import draw_mask
from core.model import LANGUAGE_MODEL
from core.settings.ranges import shown
from core.tokenizer import load_meta, read_meta, same_vocabulary

SPLITS = ("train", "val")
DTYPES = ("uint16", "uint32")  # of the ids in a file
PROBLEMS = 0  # the first number of this file's seeds, so that sampling draws other numbers (core/fill_in.py)


def write_dataset(folder, tokens, tokenizer, **facts):
    """Writes train.bin, val.bin and, last, meta.json; each appears whole or not at all.

    tokens: {"train": ids, "val": ids}; facts: counts worth keeping, printed and written to meta.json.
    An id takes 16 bits or, of a vocabulary above 65,536, 32, which meta.json then has as its dtype.
    """
    os.makedirs(folder, exist_ok=True)
    facts |= {f"{split}_tokens": len(tokens[split]) for split in SPLITS}
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    if dtype != np.uint16:
        facts["dtype"] = np.dtype(dtype).name
    meta = json.dumps({"tokenizer": tokenizer.description(), **facts}, indent=1).encode()
    files = {f"{split}.bin": np.array(tokens[split], dtype=dtype).tobytes() for split in SPLITS}
    for name, content in (files | {"meta.json": meta}).items():
        path = os.path.join(folder, name)
        with open(path + ".tmp", "wb") as f:
            f.write(content)
        os.replace(path + ".tmp", path)
    print(f"{folder}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))


def dataset_folder(dataset):
    """A name under data/, or a folder of your own."""
    return dataset if os.path.isdir(dataset) else os.path.join("data", dataset)


def unpack_batch(batch, device):
    """A batch of numpy arrays as tensors.

    Returns input, target (B, T) int64 on `device`, and mask (B, T) bool, which stays on the CPU: indices are built from
    it there, without waiting for the device. Raises ValueError if a text has nothing masked.
    """
    if not batch["mask"].any(axis=1).all():
        raise ValueError("a batch without masks: every text needs at least one masked position to fill in "
                         "(mask_low and mask_high set how many)")
    move = lambda x: torch.from_numpy(x).to(device, non_blocking=True)
    return move(batch["input"]), move(batch["target"]), torch.from_numpy(batch["mask"])


class DatasetConsumer:
    """Windows of a token file as training problems.

    batch(split, step) is {"input", "target", "mask"}, each (batch_size, block_size), and "number", (batch_size,).
    MASKED_FILL replaces target's tokens by MASK in input where mask is True; LANGUAGE_MODEL shifts by one.
    Problem i of a step is drawn from (seed, step, its number in the step), so the same problems are drawn however a
    step is cut into ranks and micro-batches. The files stay on disk; windows of them are read as they are needed.
    A window starts at a multiple of meta.json's "stride", if it has one: texts of one length, such as the boards of a
    game, are then read whole.
    tokenizer: the one that is used, whose vocabulary must be that of the files; None: the one that wrote them
    """

    def __init__(self, dataset, mode, block_size, batch_size, seed=1337, rank=0, world=1, masks=None, mask_low=0.2,
                 mask_high=0.5, tokenizer=None):
        self.folder = dataset_folder(dataset)
        if tokenizer is None:
            self.meta, self.tokenizer = load_meta(self.folder)
        else:
            self.meta, self.tokenizer = read_meta(self.folder), tokenizer
            self._check_vocabulary()
        self.mode, self.block_size, self.batch_size = mode, block_size, batch_size
        self.seed, self.rank, self.world = seed, rank, world
        self.masks, self.mask_low, self.mask_high = masks or {"random": 1.0}, mask_low, mask_high
        if mode != LANGUAGE_MODEL:
            self._check_masks()
        self.stride = self.meta.get("stride", 1)
        if type(self.stride) is not int or self.stride < 1:
            raise ValueError(f"{self.folder}/meta.json: stride={shown(self.stride)} must be a whole number above 0; "
                             "prepare the dataset again")
        self.tokens = {split: self._open(split) for split in SPLITS}

    def _check_vocabulary(self):
        path, written = os.path.join(self.folder, "meta.json"), self.meta.get("tokenizer", {})
        if not same_vocabulary(written, self.tokenizer, path):
            raise ValueError(f"dataset={self.folder} was prepared with another vocabulary ({written.get('vocab_size')} "
                             f"tokens) than the model's ({self.tokenizer.vocab_size}); use a model of that vocabulary, "
                             "or prepare the text for this one: data/char_diffusion/prepare.py --tokenizer=MODEL")

    def _check_masks(self):
        if self.tokenizer.mask_token_id is None:
            raise ValueError(f"dataset={self.folder}: its tokenizer has no mask token, which filling in needs; prepare "
                             "it with the tokenizer of a masked language model, such as BERT's")
        if "line" in self.masks and self.tokenizer.newline_token_id < 0:
            raise ValueError("mask_line is above 0, but the tokenizer has no token for the end of a line; set "
                             "mask_line=0.0")

    def _open(self, split):
        path = os.path.join(self.folder, f"{split}.bin")
        if not os.path.exists(path):
            raise FileNotFoundError(f"dataset not prepared: {path} is missing; run the prepare.py that made "
                                    f"{self.folder}/meta.json again")
        name = self.meta.get("dtype", "uint16")
        if name not in DTYPES:
            raise ValueError(f"{self.folder}/meta.json: dtype={shown(name)} is not one of {', '.join(DTYPES)}; prepare "
                             "the dataset again")
        dtype = np.dtype(name)
        count = os.path.getsize(path) // dtype.itemsize
        if count <= self.block_size + 1:
            raise ValueError(f"{path} has {count} tokens, fewer than one window of "
                             f"block_size={self.block_size} + 1; use a longer text or a smaller block_size")
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))

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
        start = int(rng.integers(-(-(len(tokens) - self.block_size) // self.stride))) * self.stride
        window = np.array(tokens[start : start + self.block_size + 1], dtype=np.int64)  # (T + 1,)
        if window.max() >= self.tokenizer.vocab_size:
            raise ValueError(f"{self.folder}/{split}.bin has the token id {window.max()}, but its vocabulary has "
                             f"{self.tokenizer.vocab_size} tokens; prepare the dataset again")
        if self.mode == LANGUAGE_MODEL:
            return {"input": window[:-1], "target": window[1:], "mask": np.ones(self.block_size, dtype=bool),
                    "number": np.int64(number)}
        target = window[:-1]                                                         # (T,)
        mask = draw_mask(rng, target, self.masks, self.mask_low, self.mask_high, self.tokenizer.newline_token_id)
        return {"input": np.where(mask, self.tokenizer.mask_token_id, target), "target": target, "mask": mask,
                "number": np.int64(number)}

    def size(self):
        """How many tokens there are and how they are masked, in words."""
        masked = f", {self.mask_low:.0%} to {self.mask_high:.0%} masked ({', '.join(self.masks)})"
        return (f"{len(self.tokens['train'])} training and {len(self.tokens['val'])} validation tokens, windows of "
                f"{self.block_size}{masked if self.mode != LANGUAGE_MODEL else ''}")

    def train_text(self):
        """The whole training text, decoded."""
        return self.tokenizer.decode(self.tokens["train"].tolist())
