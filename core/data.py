"""Prepared datasets in their folders, and running text as problems: windows of it, with masks to fill in.

A problem depends on (seed, split, step, its number) alone, so there is no state to checkpoint.
"""

import json
import os
from collections.abc import Callable

import numpy as np
import torch

from core.errors import Mistake, calling, definition
from core.files import on_hub, read_object, replacing
from core.model import LANGUAGE_MODEL
from core.settings.setting import shown
from core.tokenizer import AGAIN, Tokenizer, from_description, same_vocabulary

SPLITS = ("train", "val")
PROMPTS = "prompts.jsonl"
FILES = (".jsonl", ".json", ".csv", ".parquet")  # a dataset with such an ending is a file of records
FIELDS = {"prompt": ("prompt", "question", "instruction", "problem"),
          "answer": ("answer", "solution", "response", "output")}  # their names in other data sets; the first one wins
OF_CONSUMER = {"text", "tokens", "where", "split"}  # fields of a record that a PromptConsumer adds, or needs alone
PROBLEMS = 0  # the first number of the seeds of problems, so that sampling draws other noise (core/distributions.py)
MASKS = {}  # {name: function(rng, tokens, count, newline) -> (T,) bool}


# Folders of prepared datasets: token files or prompts, with meta.json

def dataset_folder(dataset: str) -> str:
    """A name under data/, or a folder of your own."""
    return dataset if os.path.isdir(dataset) else os.path.join("data", dataset)


def is_file_of_records(dataset: str) -> bool:
    """Tells whether a dataset is a file of records, or one of the hub, which need no preparation."""
    return on_hub(dataset) or dataset.endswith(FILES)


def has_prompts(dataset: str) -> bool:
    """Tells whether a dataset consists of prompts, not of running text. Raises Mistake for other files."""
    if is_file_of_records(dataset):
        return True
    if os.path.isfile(dataset):
        raise Mistake(f"dataset={dataset} is a file, but not of prompts; write those as {', '.join(FILES)}, unpacked. "
                      "Make running text a folder with data/char_diffusion/prepare.py "
                      f"--input={dataset} --out=data/mine")
    return os.path.exists(os.path.join(dataset_folder(dataset), PROMPTS))


def dtype_of_ids(tokenizer: Tokenizer) -> np.dtype:
    """An id takes 16 bits or, of a vocabulary above 65,536, 32."""
    return np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")


def write_dataset(folder: str, tokens: dict, tokenizer: Tokenizer, **facts) -> None:
    """Writes train.bin, val.bin and meta.json.
    tokens: {"train": ids, "val": ids}; facts: counts worth keeping, printed and written to meta.json"""
    files = {}
    for split in SPLITS:
        facts[f"{split}_tokens"] = len(tokens[split])
        files[f"{split}.bin"] = np.array(tokens[split], dtype=dtype_of_ids(tokenizer)).tobytes()
    write_folder(folder, files, tokenizer, facts)


def write_folder(folder: str, files: dict, tokenizer: Tokenizer, facts: dict) -> None:
    """Writes the files {name: bytes} of a dataset and, last, meta.json; each whole or not at all. Prints the facts."""
    if not folder:
        raise Mistake("out is empty; name a folder with --out=FOLDER")
    meta = json.dumps({"tokenizer": tokenizer.description(), **facts}, indent=1).encode()
    for name, content in {**files, "meta.json": meta}.items():
        with replacing(os.path.join(folder, name)) as new, open(new, "wb") as f:
            f.write(content)
    print(f"{folder}: " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items()))


def file_of(folder: str, name: str) -> str:
    """The path of a file of a prepared dataset, which must exist."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise Mistake(f"dataset not prepared: {path} is missing; correct the path, or run its prepare.py "
                      "(for your own data: data/char_diffusion/prepare.py or data/custom/prepare.py)")
    return path


def load_meta(folder: str, tokenizer: Tokenizer | None = None) -> tuple:
    """(meta.json of a prepared dataset, its tokenizer). tokenizer: one that is used in place of the dataset's own"""
    path = file_of(folder, "meta.json")
    meta = read_object(path, path, AGAIN)
    if not isinstance(meta.get("tokenizer"), dict):
        raise Mistake(f"{path} has no tokenizer: {AGAIN}")
    return meta, tokenizer or from_description(meta["tokenizer"], path)


def open_tokens(folder: str, split: str, tokenizer: Tokenizer, block_size: int) -> np.memmap:
    """The token ids of a split, as an array that stays on disk. Raises Mistake, naming the file,
    unless it has more than a window of block_size."""
    path = file_of(folder, f"{split}.bin")
    dtype = dtype_of_ids(tokenizer)
    count = os.path.getsize(path) // dtype.itemsize
    if count <= block_size + 1:
        raise Mistake(f"{path} has {count} tokens, fewer than one window of block_size={block_size} + 1")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def check_meta(folder: str, meta: dict, tokenizer: Tokenizer, masks: dict | None) -> None:
    """Raises Mistake unless windows of the dataset can be cut and masked with this tokenizer.
    masks: {key of MASKS: weight}, or None where nothing is masked"""
    if not same_vocabulary(meta["tokenizer"], tokenizer):
        raise Mistake(f"dataset={folder} was prepared with another vocabulary "
                      f"({meta['tokenizer'].get('vocab_size')} tokens) than the model's ({tokenizer.vocab_size}); "
                      "prepare it for this one: data/char_diffusion/prepare.py --tokenizer=MODEL")
    stride = meta.get("stride", 1)
    if type(stride) is not int or stride < 1:
        raise Mistake(f"{os.path.join(folder, 'meta.json')}: stride={shown(stride)} must be a whole number, 1 or more: "
                      f"{AGAIN}")
    if masks and tokenizer.mask_token_id is None:
        raise Mistake(f"dataset={folder}: its tokenizer has no mask token, which filling in needs")
    if masks and "line" in masks and tokenizer.newline_token_id < 0:
        raise Mistake(f"masks={masks} has lines, but the tokenizer has no end of a line; leave 'line' out")


# Masks, and windows of running text

def mask(fn: Callable) -> Callable:
    """Adds a kind of mask under the function's name. A user's file adds one in this way too."""
    MASKS[fn.__name__] = fn
    return fn


@mask
def random(rng: np.random.Generator, tokens: np.ndarray, count: int, newline: int) -> np.ndarray:
    """Masks `count` single positions, drawn uniformly."""
    return in_lines(rng, tokens, count, newline=-1)


@mask
def in_lines(rng: np.random.Generator, tokens: np.ndarray, count: int, newline: int) -> np.ndarray:
    """Masks `count` single positions but no newline; all others, if there are fewer."""
    mask = np.zeros(len(tokens), dtype=bool)
    inside = np.flatnonzero(tokens != newline)
    chosen = rng.choice(inside, size=min(count, len(inside)), replace=False)
    mask[chosen] = True
    return mask


@mask
def span(rng: np.random.Generator, tokens: np.ndarray, count: int, newline: int, mean_span: int = 5) -> np.ndarray:
    """Masks runs of positions with geometrically distributed lengths, until `count` positions are masked."""
    mask = np.zeros(len(tokens), dtype=bool)
    while mask.sum() < count:
        length = min(rng.geometric(1 / mean_span), count - mask.sum())
        start = rng.integers(len(tokens) - length + 1)
        mask[start : start + length] = True
    return mask


@mask
def line(rng: np.random.Generator, tokens: np.ndarray, count: int, newline: int) -> np.ndarray:
    """Masks whole lines but not their newlines, in random order, until `count` positions are masked."""
    mask = np.zeros(len(tokens), dtype=bool)
    ends = tokens == newline                                                         # (T,)
    line = ends.cumsum() - ends                                                      # (T,) number of each token's line
    for i in rng.permutation(line[-1] + 1):
        inside = np.flatnonzero((line == i) & ~ends)
        mask[inside[: count - mask.sum()]] = True
        if mask.sum() >= count:
            break
    return mask


def check_masks(masks: dict | None) -> dict:
    """masks, {key of MASKS: weight}, with its default. Raises Mistake for a key or weight that cannot be."""
    masks = {"random": 1.0, "span": 1.0} if masks is None else masks
    are_weights = all(isinstance(weight, (int, float)) and 0 < weight < 1e100 for weight in masks.values())
    if not masks or not masks.keys() <= MASKS.keys() or not are_weights:
        raise Mistake(f"masks={masks} must have weights above 0 of {', '.join(MASKS)}, or of your @mask functions")
    return masks


def draw_mask(rng: np.random.Generator, tokens: np.ndarray, weights: dict, low: float, high: float,
              newline: int) -> np.ndarray:
    """Draws a mask: its share of the window from [low, high], and the kind of mask in proportion to `weights`.

    tokens: (T,) ids; weights: {key of MASKS: weight}; newline: the id that ends a line
    Returns (T,) bool, True where masked, with at least one True
    """
    p = np.array(list(weights.values()))
    name = rng.choice(list(weights), p=p / p.sum())
    share = rng.uniform(low, high)
    count = max(1, round(share * len(tokens)))
    with calling(MASKS[name], f"masks: {name} failed"):
        mask = np.asarray(MASKS[name](rng, tokens, count, newline))
    if mask.dtype != bool or mask.shape != tokens.shape:
        raise Mistake(f"{definition(MASKS[name])}: masks: {name} returned an array of {mask.dtype} of shape "
                      f"{mask.shape}; return one of bool of shape {tokens.shape}")
    if not mask.any():  # newlines alone: no line to mask
        return random(rng, tokens, count, newline)
    return mask


class DatasetConsumer:
    """Windows of a token file as training problems.

    batch(split, step) is {"input", "target", "mask"}, each (batch_size, block_size), and "number", (batch_size,).
    MASKED_FILL replaces target's tokens by MASK in input where mask is True; LANGUAGE_MODEL shifts by one.
    Problem i of a step is drawn from (seed, step, its number in the step), however a step is cut into ranks and
    micro-batches. A window starts at a multiple of meta.json's "stride", if it has one: texts of one length, such as
    the boards of a game, are then read whole.
    tokenizer: the one that is used, whose vocabulary must be that of the files; None: the one that wrote them
    """

    has_prompts = False

    def __init__(self, dataset: str, mode: str, block_size: int, batch_size: int, seed: int = 1337, rank: int = 0,
                 world: int = 1, masks: dict | None = None, mask_low: float = 0.2, mask_high: float = 0.5,
                 tokenizer: Tokenizer | None = None):
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

    def batch(self, split: str, step: int, micro: int = 0) -> dict:
        """Micro-batch `micro` of `step` as numpy arrays; this rank's share of it."""
        first = (micro * self.world + self.rank) * self.batch_size
        problems = [self._problem(split, step, first + i) for i in range(self.batch_size)]
        return {key: np.stack([p[key] for p in problems]) for key in problems[0]}

    problems = batch  # for reinforcement learning the same as for supervised training

    def _problem(self, split, step, number):
        rng = np.random.default_rng([PROBLEMS, self.seed, SPLITS.index(split), step, number])
        tokens = self.tokens[split]
        starts = range(0, len(tokens) - self.block_size, self.stride)
        start = starts[rng.integers(len(starts))]
        window = np.array(tokens[start : start + self.block_size + 1], dtype=np.int64)  # (T + 1,)
        if window.max() >= self.tokenizer.vocab_size:
            raise Mistake(f"{self.folder}/{split}.bin has the token id {window.max()}; prepare it again")
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

    def size(self) -> str:
        """The number of tokens and how they are masked, in words."""
        words = (f"{len(self.tokens['train'])} training and {len(self.tokens['val'])} validation tokens, windows of "
                 f"{self.block_size}")
        if self.masks:
            words += f", {self.mask_low:.0%} to {self.mask_high:.0%} masked ({', '.join(self.masks)})"
        return words

    def train_text(self) -> str:
        """The whole training text, decoded."""
        return self.tokenizer.decode(self.tokens["train"].tolist())


def unpack_batch(batch: dict, device: torch.device | str) -> tuple:
    """A batch of numpy arrays as tensors.

    Returns input, target (B, T) int64 on `device`, and mask (B, T) bool, which stays on the CPU: indices are built from
    it there, without waiting for the device.
    """
    if not batch["mask"].any(axis=1).all():
        raise Mistake("a batch without masks: every text needs at least one masked position to fill in")
    input, target, mask = (torch.from_numpy(batch[key]) for key in ("input", "target", "mask"))
    return input.to(device, non_blocking=True), target.to(device, non_blocking=True), mask


def masked_positions(mask: torch.Tensor, device: torch.device | str) -> tuple:
    """The positions of the masked tokens of each row. M is the largest number of them in a row.

    mask: (B, T) bool on the CPU
    Returns position (B, M) int64 on `device`, the masked positions in order and then padding, and hidden (B, M) bool on
    the CPU, False on padding
    """
    hidden, order = mask.int().sort(dim=1, descending=True, stable=True)             # (B, T) each, masked ones first
    M = int(mask.sum(1).max())
    position = order[:, :M].to(device, non_blocking=True)
    return position, hidden[:, :M].bool()
