"""Running text: what was written is read, and a problem depends on its number alone, however a step is cut."""

import json
import os
import shutil

import numpy as np
import pytest

from core.data import MASKS, DatasetConsumer, draw_mask, unpack_batch, write_dataset
from core.errors import Mistake
from core.model import LANGUAGE_MODEL
from core.tokenizer import CharTokenizer
from tests.tiny import TEXT, TOKENIZER, config, consumer


@pytest.mark.parametrize(("vocabulary", "bits"), [(2**16, 16), (2**16 + 1, 32), (151936, 32)])
def test_every_id_of_a_large_vocabulary_is_read_as_it_was_written(tmp_path, vocabulary, bits):
    t = CharTokenizer()
    t.vocab_size = t.base_vocab_size = vocabulary
    ids = list(range(vocabulary - 40, vocabulary))
    write_dataset(str(tmp_path), {"train": ids, "val": ids[::-1]}, t)
    assert os.path.getsize(tmp_path / "train.bin") == 40 * bits // 8 and not list(tmp_path.glob("*.tmp"))
    data = DatasetConsumer(str(tmp_path), LANGUAGE_MODEL, 16, 4, tokenizer=t)
    assert data.tokens["train"].tolist() == ids and data.tokens["val"].tolist() == ids[::-1]
    assert set(data.batch("train", 0)["input"].flatten()) <= set(ids)


@pytest.mark.parametrize("stride", [0, -1, "x", 1.5, True, None])
def test_windows_that_cannot_begin_anywhere_are_refused(dataset, tmp_path, stride):
    folder = shutil.copytree(dataset, tmp_path / "strided")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"stride": stride}))
    with pytest.raises(Mistake, match="meta.json: stride="):
        DatasetConsumer(str(folder), LANGUAGE_MODEL, 16, 4)


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


def test_a_mask_hides_its_share_and_spans_are_runs_and_lines_spare_newlines():
    rng = np.random.default_rng(0)
    tokens = np.ones(128, dtype=np.int64)
    tokens[31::32] = 0
    masks = {name: np.array([draw_mask(rng, tokens, {name: 1.0}, 0.25, 0.25, newline=0) for _ in range(100)])
             for name in MASKS}
    assert all((found.sum(1) == 32).all() for found in masks.values())
    runs = {name: (np.diff(found.astype(int), prepend=0) == 1).sum() for name, found in masks.items()}
    assert runs["span"] < 0.6 * runs["random"] and not masks["line"][:, tokens == 0].any()
    only_newlines = np.zeros(16, dtype=np.int64)
    assert draw_mask(rng, only_newlines, {"line": 1.0}, 0.3, 0.3, newline=0).any(), "never a problem without a mask"
