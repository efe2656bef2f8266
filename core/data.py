"""Prepared dataset folders, and windows of running text as problems, with masks to fill in.

A problem depends only on (seed, split, step, its number in the step), so there is no state to checkpoint.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from core.errors import Mistake, calling, definition
from core.files import on_hub, read_object, replacing
from core.logger import fitted
from core.settings.setting import shown
from core.tokenizer import AGAIN, Tokenizer, from_description, same_vocabulary

if TYPE_CHECKING:
    import torch  # only for hints: the scripts that prepare data start faster without it

SPLITS = ("train", "val")
PROMPTS = "prompts.jsonl"
FILES = (".jsonl", ".json", ".csv", ".parquet")  # a dataset with one of these endings is a file of records
# {our name of a field: its names in data sets}. If a record has several of them, the first one counts
FIELDS = {"prompt": ("prompt", "question", "instruction", "problem"),
          "answer": ("answer", "solution", "response", "output")}
NOT_FOR_REWARDS = {"text", "tokens", "where", "split"}  # fields of a record that are not for rewards
MEAN_SPAN = 5  # tokens
PROBLEMS = 0  # the first number of the seeds of problems, so that sampling draws other noise (core/distributions.py)
MASKS = {}  # {name: function(rng, tokens, count, newline) -> (T,) bool}


# Folders of prepared datasets: token files or prompts, with meta.json

def dataset_folder(dataset: str) -> str:
    """Returns the folder of a dataset: the folder of this path, or else of this name under data/."""
    return dataset if os.path.isdir(dataset) else os.path.join("data", dataset)


def is_file_of_records(dataset: str) -> bool:
    """True for a dataset that needs no preparation: a file of records, or a dataset on the hub."""
    return on_hub(dataset) or dataset.endswith(FILES)


def has_prompts(dataset: str) -> bool:
    """True for a dataset of prompts, False for running text. Raises Mistake for a file that is neither."""
    if is_file_of_records(dataset):
        return True
    if os.path.isfile(dataset):
        raise Mistake(f"dataset={dataset} is a file, but not of prompts; write those as {', '.join(FILES)}, unpacked. "
                      "Make running text a folder with data/char_diffusion/prepare.py "
                      f"--input={dataset} --out=data/mine")
    path = os.path.join(dataset_folder(dataset), PROMPTS)
    return os.path.exists(path)


def dtype_of_ids(tokenizer: Tokenizer) -> np.dtype:
    """Returns uint16, or uint32 for a vocabulary of more than 65,536 tokens."""
    if tokenizer.vocab_size <= 2**16:
        return np.dtype("uint16")
    return np.dtype("uint32")


def write_dataset(folder: str, tokens: dict, tokenizer: Tokenizer, **facts) -> None:
    """Writes train.bin, val.bin and meta.json.
    tokens: {"train": ids, "val": ids}; facts: counts worth keeping, printed and written to meta.json"""
    files = {}
    for split in SPLITS:
        ids = np.array(tokens[split], dtype=dtype_of_ids(tokenizer))
        facts[f"{split}_tokens"] = len(ids)
        files[f"{split}.bin"] = ids.tobytes()
    write_folder(folder, files, tokenizer, facts)


def write_folder(folder: str, files: dict, tokenizer: Tokenizer, facts: dict) -> None:
    """Writes the files {name: bytes} of a dataset and prints the facts. Each file is written atomically, meta.json
    last, so that a folder with a meta.json is complete."""
    if not folder:
        raise Mistake("out is empty; name a folder with --out=FOLDER")
    meta = {"tokenizer": tokenizer.description(), **facts}
    meta_json = json.dumps(meta, indent=1)
    files = {**files, "meta.json": meta_json.encode()}
    for name, content in files.items():
        path = os.path.join(folder, name)
        with replacing(path) as new, open(new, "wb") as f:
            f.write(content)
    words = [f"{key.replace('_', ' ')} {value}" for key, value in facts.items()]
    print(fitted(f"{folder}: {', '.join(words)}"))


def prepared_file(folder: str, name: str) -> str:
    """Returns the path of a file of a prepared dataset. Raises Mistake if it does not exist."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        raise Mistake(f"dataset not prepared: {path} is missing; correct the path, run its prepare.py (for your own "
                      "data: data/char_diffusion/prepare.py or data/custom/prepare.py), or name a folder of files of "
                      "records as hf:FOLDER")
    return path


def load_meta(folder: str, tokenizer: Tokenizer | None = None) -> tuple:
    """Loads (meta.json of a prepared dataset, a tokenizer): the given tokenizer or, if None, the dataset's."""
    path = prepared_file(folder, "meta.json")
    meta = read_object(path, path, AGAIN)
    if not isinstance(meta.get("tokenizer"), dict):
        raise Mistake(f"{path} has no tokenizer: {AGAIN}")
    return meta, tokenizer or from_description(meta["tokenizer"], path)


# Masks

def mask(fn: Callable) -> Callable:
    """Registers a kind of mask under the function's name. A user's file registers its masks the same way."""
    MASKS[fn.__name__] = fn
    return fn


@mask
def random(rng: Generator, tokens: ndarray, count: int, newline: int) -> ndarray:
    """Masks `count` single positions, drawn uniformly."""
    return in_lines(rng, tokens, count, newline=-1)


@mask
def in_lines(rng: Generator, tokens: ndarray, count: int, newline: int) -> ndarray:
    """Masks `count` single positions, never a newline; all positions if there are fewer."""
    mask = np.zeros(len(tokens), dtype=bool)
    inside = np.flatnonzero(tokens != newline)
    count = min(count, len(inside))
    mask[rng.choice(inside, size=count, replace=False)] = True
    return mask


@mask
def span(rng: Generator, tokens: ndarray, count: int, newline: int) -> ndarray:
    """Masks runs of positions with geometrically distributed lengths, until `count` positions are masked."""
    mask = np.zeros(len(tokens), dtype=bool)
    while mask.sum() < count:
        room = count - mask.sum()
        length = min(rng.geometric(1 / MEAN_SPAN), room)
        start = rng.integers(len(tokens) - length + 1)
        mask[start : start + length] = True
    return mask


@mask
def line(rng: Generator, tokens: ndarray, count: int, newline: int) -> ndarray:
    """Masks whole lines but not their newlines, in random order, until `count` positions are masked."""
    mask = np.zeros(len(tokens), dtype=bool)
    ends = tokens == newline                                                         # (T,)
    number = ends.cumsum() - ends                                                    # (T,) of each token's line
    lines = number[-1] + 1
    for i in rng.permutation(lines):
        inside = np.flatnonzero((number == i) & ~ends)
        room = count - mask.sum()
        mask[inside[:room]] = True
        if mask.sum() >= count:
            break
    return mask


def is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e100


def check_masks(masks: dict | None) -> dict:
    """Returns the masks {key of MASKS: weight}, or the default for None. Raises Mistake for an unknown key or a weight
    that is not above 0."""
    if masks is None:
        masks = {"random": 1.0, "span": 1.0}
    are_known = masks.keys() <= MASKS.keys()
    are_weights = all(map(is_weight, masks.values()))
    if not masks or not are_known or not are_weights:
        raise Mistake(f"masks={masks} must have weights above 0 of {', '.join(MASKS)}, or of your @mask functions")
    return masks


def draw_mask(
        rng: Generator,
        tokens: ndarray,
        weights: dict,
        low: float,
        high: float,
        newline: int) -> ndarray:
    """Draws a mask: its share of the window from [low, high], and the kind of mask in proportion to `weights`.

    tokens: (T,) ids; weights: {key of MASKS: weight}; newline: the id that ends a line
    Returns (T,) bool, True where masked, with at least one True
    """
    names = list(weights)
    p = np.array(list(weights.values()))
    name = rng.choice(names, p=p / p.sum())
    share = rng.uniform(low, high)
    count = max(1, round(share * len(tokens)))
    draw = MASKS[name]
    with calling(draw, f"masks: {name} failed"):
        mask = np.asarray(draw(rng, tokens, count, newline))
    if mask.dtype != bool or mask.shape != tokens.shape:
        raise Mistake(f"{definition(draw)}: masks: {name} returned an array of {mask.dtype} of shape {mask.shape}; "
                      f"return one of bool of shape {tokens.shape}")
    if not mask.any():  # for example, every token is a newline
        return random(rng, tokens, count, newline)
    return mask


# Windows of running text

def rng_of(seed: int, split: str, step: int, *number: int) -> Generator:
    """Returns the random generator of a step, or of the problem with this number in it. It depends on nothing else, so
    that a step draws the same problems for any number of ranks and micro-batches, and after a resume."""
    return np.random.default_rng([PROBLEMS, seed, SPLITS.index(split), step, *number])


def numbers_of_rank(data: Any, split: str, micro: int) -> ndarray:
    """Returns the numbers, within a step, of this rank's problems in a micro-batch. In validation all ranks have those
    of rank 0, because an evaluation shares out whole batches. data: a consumer"""
    rank = data.rank if split == "train" else 0
    first = (micro * data.world + rank) * data.batch_size
    return np.arange(first, first + data.batch_size)


@dataclass(eq=False)
class DatasetConsumer:
    """Windows of a token file as training problems.

    batch(split, step) is {"input", "target", "mask"}, each (batch_size, block_size), and "number", (batch_size,).
    MASKED_FILL replaces target's tokens by MASK in input where mask is True; LANGUAGE_MODEL shifts by one.
    Problem i of a step is drawn from (seed, step, its number in the step), for any number of ranks and micro-batches. A
    window starts at a multiple of meta.json's "stride", if it has one, so that texts of equal length, such as game
    boards, are read whole.
    """

    dataset: str
    mode: str                            # LANGUAGE_MODEL or MASKED_FILL
    block_size: int
    batch_size: int
    seed: int = 1337
    rank: int = 0
    world: int = 1
    masks: dict | None = None            # {key of MASKS: weight}
    mask_low: float = 0.2                # the smallest and the largest share of a window that is masked
    mask_high: float = 0.5
    tokenizer: Tokenizer | None = None   # with the vocabulary of the files; None: from meta.json

    has_prompts = False

    def __post_init__(self):
        from core.model import LANGUAGE_MODEL  # which loads torch
        self.folder = dataset_folder(self.dataset)
        self.meta, self.tokenizer = load_meta(self.folder, self.tokenizer)
        self.masks = None if self.mode == LANGUAGE_MODEL else check_masks(self.masks)
        self._check()
        self.tokens = {split: self._open(split) for split in SPLITS}

    def _check(self):
        """Raises Mistake unless windows of the dataset can be cut and masked with the tokenizer."""
        dataset = f"dataset={self.folder}"
        tokenizer = self.tokenizer
        described = self.meta["tokenizer"]
        if not same_vocabulary(described, tokenizer):
            raise Mistake(f"{dataset} was prepared with another vocabulary ({described.get('vocab_size')} tokens) than "
                          f"the model's ({tokenizer.vocab_size}); prepare it for this one: "
                          "data/char_diffusion/prepare.py --tokenizer=MODEL")
        stride = self.meta.get("stride", 1)
        if type(stride) is not int or stride < 1:
            path = os.path.join(self.folder, "meta.json")
            raise Mistake(f"{path}: stride={shown(stride)} must be a whole number, 1 or more: {AGAIN}")
        if self.masks is None:
            return
        if tokenizer.mask_token_id is None:
            raise Mistake(f"{dataset}: its tokenizer has no mask token, which filling in needs")
        if "line" in self.masks and tokenizer.newline_token_id < 0:
            raise Mistake(f"masks={self.masks} has lines, but the tokenizer has no end of a line; leave 'line' out")

    def _open(self, split):
        """Memory-maps the token ids of a split. Raises Mistake, naming the file, for a split without room for two
        windows."""
        path = prepared_file(self.folder, f"{split}.bin")
        dtype = dtype_of_ids(self.tokenizer)
        count = os.path.getsize(path) // dtype.itemsize
        if count <= self.block_size + 1:
            raise Mistake(f"{path} has {count} tokens, fewer than one window of block_size={self.block_size} + 1")
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))

    def batch(self, split: str, step: int, micro: int = 0) -> dict:
        """Returns this rank's share of micro-batch `micro` of `step`, as numpy arrays."""
        numbers = numbers_of_rank(self, split, micro)
        problems = [self._problem(split, step, int(number)) for number in numbers]
        input, target, mask = map(np.stack, zip(*problems, strict=True))             # (B, T) each
        return {"input": input, "target": target, "mask": mask, "number": numbers}

    problems = batch  # the same for reinforcement learning as for supervised training

    def _problem(self, split, step, number):
        """Draws a problem: (input, target, mask), (T,) each."""
        rng = rng_of(self.seed, split, step, number)
        tokens = self.tokens[split]
        stride = self.meta.get("stride", 1)
        starts = range(0, len(tokens) - self.block_size, stride)
        start = starts[rng.integers(len(starts))]
        end = start + self.block_size + 1
        window = np.array(tokens[start:end], dtype=np.int64)                         # (T + 1,)
        largest = window.max()
        if largest >= self.tokenizer.vocab_size:
            raise Mistake(f"{self.folder}/{split}.bin has the token id {largest}; prepare it again")
        if self.masks is None:
            mask = np.ones(self.block_size, dtype=bool)
            return window[:-1], window[1:], mask
        target = window[:-1]
        newline = self.tokenizer.newline_token_id
        mask = draw_mask(rng, target, self.masks, self.mask_low, self.mask_high, newline)
        input = np.where(mask, self.tokenizer.mask_token_id, target)
        return input, target, mask

    def size(self) -> str:
        """Describes the number of tokens and the masks."""
        train = len(self.tokens["train"])
        val = len(self.tokens["val"])
        words = f"{train} training and {val} validation tokens, windows of {self.block_size}"
        if self.masks:
            words += f", {self.mask_low:.0%} to {self.mask_high:.0%} masked ({', '.join(self.masks)})"
        return words

    def train_text(self) -> str:
        """Decodes the whole training text."""
        return self.tokenizer.decode(self.tokens["train"].tolist())


def unpack_batch(batch: dict, device: "torch.device | str") -> tuple:
    """Converts a batch of numpy arrays to tensors.

    Returns input, target (B, T) int64 on `device`, and mask (B, T) bool, which stays on the CPU: indices are built from
    it there, without waiting for the device.
    """
    import torch
    if not batch["mask"].any(axis=1).all():
        raise Mistake("a batch without masks: every text needs at least one masked position to fill in")
    input = torch.from_numpy(batch["input"])
    target = torch.from_numpy(batch["target"])
    mask = torch.from_numpy(batch["mask"])
    return input.to(device, non_blocking=True), target.to(device, non_blocking=True), mask


def masked_positions(mask: "torch.Tensor", device: "torch.device | str") -> tuple:
    """Finds the masked positions of each row. M is the largest number of masked tokens in a row.

    mask: (B, T) bool on the CPU
    Returns position (B, M) int64 on `device`, the masked positions in order and then padding, and hidden (B, M) bool on
    the CPU, False on padding
    """
    # A stable sort keeps the order of the masked positions, which come first
    hidden, order = mask.int().sort(dim=1, descending=True, stable=True)             # (B, T) each
    M = int(mask.sum(1).max())
    position = order[:, :M]
    return position.to(device, non_blocking=True), hidden[:, :M].bool()
