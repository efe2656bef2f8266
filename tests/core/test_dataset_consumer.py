"""Windows of a token file: pure, and the same for every layout."""

import numpy as np
import pytest

from core.dataset_consumer import DatasetConsumer, unpack_batch
from core.model import LANGUAGE_MODEL, MASKED_FILL
from tests.tiny import TEXT, TOKENIZER, config, consumer, write_text_dataset


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
    assert [str(x.dtype) for x in (input, target, mask)] == ["torch.int64", "torch.int64", "torch.bool"]
    batch["mask"][1] = False
    with pytest.raises(ValueError, match="without masks"):
        unpack_batch(batch, "cpu")


def test_language_model_batches_are_shifted_by_one(dataset):
    batch = DatasetConsumer(dataset, LANGUAGE_MODEL, 16, 4).batch("train", 0)
    assert np.array_equal(batch["input"][:, 1:], batch["target"][:, :-1]) and batch["mask"].all()


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    write_text_dataset(tmp_path, TEXT)
    (tmp_path / "train.bin").write_bytes(np.full(100, TOKENIZER.vocab_size, dtype=np.uint16).tobytes())
    data = DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 2)
    with pytest.raises(ValueError, match="train.bin has the token id 99"):
        data.batch("train", 0)
    data.batch("val", 0)
