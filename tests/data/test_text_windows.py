"""Running text: what was written is read, and a problem depends on its number alone, however a step is cut."""

import os

import numpy as np
import pytest

from core.data import MASKS, DatasetConsumer, draw_mask, unpack_batch
from core.data_folder import write_dataset
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.tokenizer import CharTokenizer
from tests.tiny import TEXT, TOKENIZER, config, consumer


def opened(folder, block_size=16, mode=MASKED_FILL, **settings):
    return DatasetConsumer(str(folder), mode, block_size, 4, **settings)


@pytest.mark.parametrize(("vocabulary", "bits"), [(2**16, 16), (2**16 + 1, 32), (151936, 32)])
def test_every_id_of_a_large_vocabulary_is_read_as_it_was_written(tmp_path, vocabulary, bits):
    t = CharTokenizer()
    t.vocab_size = t.base_vocab_size = vocabulary
    ids = list(range(vocabulary - 40, vocabulary))
    write_dataset(str(tmp_path), {"train": ids, "val": ids[::-1]}, t)
    assert os.path.getsize(tmp_path / "train.bin") == 40 * bits // 8 and not list(tmp_path.glob("*.tmp"))
    data = opened(tmp_path, mode=LANGUAGE_MODEL, tokenizer=t)
    assert data.tokens["train"].tolist() == ids and data.tokens["val"].tolist() == ids[::-1]
    assert set(data.batch("train", 0)["input"].flatten()) <= set(ids)


def equal(a, b):
    return all(np.array_equal(a[key], b[key]) for key in a)


def test_batches_are_pure_and_dealt_alike_to_any_layout(dataset):
    whole, half = consumer(dataset, config(batch_size=8)), config(batch_size=4)
    first = whole.batch("train", 3)
    assert equal(first, consumer(dataset, config(batch_size=8)).batch("train", 3))
    assert equal(first, whole.problems("train", 3)) and not equal(first, whole.batch("train", 4))
    ranks = [consumer(dataset, half, rank=r, world=2).batch("train", 3) for r in range(2)]
    micros = [consumer(dataset, half).batch("train", 3, micro) for micro in range(2)]
    for parts in (ranks, micros):
        assert equal(first, {key: np.concatenate([part[key] for part in parts]) for key in first})


def test_input_masks_the_target_and_nothing_else(dataset):
    batch = consumer(dataset, config()).batch("val", 0)
    input, target, mask = unpack_batch(batch, "cpu")
    assert (input[mask] == TOKENIZER.mask_token_id).all() and (input[~mask] == target[~mask]).all()
    assert all(TOKENIZER.decode(row) in TEXT[len(TEXT) * 4 // 5 :] for row in target.tolist())
    batch["mask"][1] = False
    with pytest.raises(ValueError, match="without masks"):
        unpack_batch(batch, "cpu")


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_hides_the_share_that_was_asked_for(name):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 96, size=64)
    tokens[::9] = 0
    shares = [draw_mask(rng, tokens, {name: 1.0}, 0.25, 0.25, newline=0).mean() for _ in range(200)]
    assert set(shares) == {0.25}


def test_span_masks_are_runs_and_line_masks_spare_newlines():
    rng = np.random.default_rng(0)
    tokens = np.ones(128, dtype=np.int64)
    tokens[31::32] = 0
    masks = {name: [MASKS[name](rng, tokens, 40, 0).astype(int) for _ in range(100)] for name in ("span", "random")}
    runs = {name: (np.diff(found, prepend=0) == 1).sum() for name, found in masks.items()}
    assert runs["span"] < 0.6 * runs["random"]
    for _ in range(50):
        assert not MASKS["line"](rng, tokens, 40, 0)[tokens == 0].any()
    only_newlines = np.zeros(16, dtype=np.int64)
    assert draw_mask(rng, only_newlines, {"line": 1.0}, 0.3, 0.3, newline=0).any(), "never a problem without a mask"
