"""Windows of a token file: pure, the same for every layout, and clear about what is wrong with the files."""

import json
import os

import numpy as np
import pytest
import torch

from core.dataset_consumer import SPLITS, DatasetConsumer, unpack_batch, write_dataset
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.tokenizer import BPETokenizer, CharTokenizer
from tests.tiny import TEXT, TOKENIZER, config, consumer, write_ranks, write_text_dataset


def test_batches_are_pure_and_dealt_alike_to_any_layout(dataset):
    c = config(batch_size=8)
    whole = consumer(dataset, c)
    first, again = whole.batch("train", 3), consumer(dataset, c).batch("train", 3)
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert not np.array_equal(first["target"], whole.batch("train", 4)["target"])
    half = config(batch_size=4)
    ranks = [consumer(dataset, half, rank=r, world=2).batch("train", 3) for r in range(2)]
    micros = [consumer(dataset, half).batch("train", 3, micro) for micro in range(2)]
    for parts in (ranks, micros):
        assert all(np.array_equal(np.concatenate([p[k] for p in parts]), first[k]) for k in first)
    assert all(np.array_equal(whole.problems("train", 3)[k], first[k]) for k in first)


def test_input_masks_the_target_and_nothing_else(dataset):
    data = consumer(dataset, config())
    input, target, mask = unpack_batch(data.batch("val", 0), "cpu")
    assert (input[mask] == data.tokenizer.mask_token_id).all() and (input[~mask] == target[~mask]).all()
    text = "".join(TEXT[len(TEXT) * 4 // 5:])
    assert all(data.tokenizer.decode(row) in text for row in target.tolist())
    assert input.dtype == target.dtype == torch.int64 and mask.dtype == torch.bool


def test_language_model_batches_are_shifted_by_one(dataset):
    batch = DatasetConsumer(dataset, LANGUAGE_MODEL, 16, 4).batch("train", 0)
    assert np.array_equal(batch["input"][:, 1:], batch["target"][:, :-1]) and batch["mask"].all()


def test_token_files_stay_on_disk_and_windows_are_copies(dataset):
    data = DatasetConsumer(dataset, LANGUAGE_MODEL, 16, 4)
    for split in SPLITS:
        assert isinstance(data.tokens[split], np.memmap) and not data.tokens[split].flags.writeable
        assert np.array_equal(data.tokens[split], np.fromfile(os.path.join(dataset, f"{split}.bin"), dtype=np.uint16))
    batch = data.batch("train", 0)
    assert all(type(x) is np.ndarray and x.flags.writeable for x in batch.values())
    assert batch["input"].dtype == batch["target"].dtype == np.int64


def test_the_training_text_is_the_text_that_was_written(dataset):
    assert consumer(dataset, config()).train_text() == TEXT[: len(TEXT) * 4 // 5]


def test_bad_data_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset not prepared.*prepare.py"):
        DatasetConsumer(str(tmp_path / "nothing"), MASKED_FILL, 16, 4)
    write_text_dataset(tmp_path / "d", "too short")
    with pytest.raises(ValueError, match="smaller block_size"):
        DatasetConsumer(str(tmp_path / "d"), MASKED_FILL, 16, 4)
    (tmp_path / "d" / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match="val.bin is missing"):
        DatasetConsumer(str(tmp_path / "d"), MASKED_FILL, 2, 4)
    meta = json.loads((tmp_path / "d" / "meta.json").read_text())
    del meta["tokenizer"]["mask_token_id"]
    (tmp_path / "d" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="meta.json has no mask_token_id"):
        DatasetConsumer(str(tmp_path / "d"), MASKED_FILL, 2, 4)


def test_an_empty_token_file_is_named_and_half_a_token_at_its_end_is_left_out(tmp_path):
    tokens = list(range(40))
    write_dataset(str(tmp_path / "d"), {"train": tokens, "val": tokens}, TOKENIZER)
    with open(tmp_path / "d" / "train.bin", "ab") as f:
        f.write(b"\1")
    assert DatasetConsumer(str(tmp_path / "d"), MASKED_FILL, 16, 4).tokens["train"].tolist() == tokens
    (tmp_path / "d" / "val.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="val.bin has 0 tokens, fewer than one window of block_size=16"):
        DatasetConsumer(str(tmp_path / "d"), MASKED_FILL, 16, 4)


def test_a_batch_without_masks_is_refused(dataset):
    batch = consumer(dataset, config()).batch("train", 0)
    batch["mask"][1] = False
    with pytest.raises(ValueError, match="without masks"):
        unpack_batch(batch, "cpu")


@pytest.mark.parametrize(("vocabulary", "bits"), [(2**16, 16), (2**16 + 1, 32), (151936, 32)])
def test_every_id_of_a_large_vocabulary_is_read_as_it_was_written(tmp_path, vocabulary, bits):
    t = CharTokenizer()
    t.vocab_size = t.base_vocab_size = vocabulary
    ids = list(range(vocabulary - 40, vocabulary))
    write_dataset(str(tmp_path), {"train": ids, "val": ids[::-1]}, t)
    assert json.loads((tmp_path / "meta.json").read_text()).get("dtype", "uint16") == f"uint{bits}"
    assert os.path.getsize(tmp_path / "train.bin") == 40 * bits // 8
    data = DatasetConsumer(str(tmp_path), LANGUAGE_MODEL, 16, 4, tokenizer=t)
    assert data.tokens["train"].tolist() == ids and data.tokens["val"].tolist() == ids[::-1]
    assert set(data.batch("train", 0)["input"].flatten()) <= set(ids)


def test_a_given_tokenizer_is_used_and_must_have_the_vocabulary_of_the_files(tmp_path):
    write_text_dataset(tmp_path, TEXT)
    own = CharTokenizer()
    data = DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 4, tokenizer=own)
    assert data.tokenizer is own
    expected = DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 4).batch("val", 2)
    assert all(np.array_equal(x, expected[key]) for key, x in data.batch("val", 2).items())
    with pytest.raises(ValueError, match="dataset=.* was prepared with another vocabulary .99 tokens. than the model's "
                                         ".100.; .*--tokenizer=MODEL"):
        DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 4, tokenizer=CharTokenizer(stop=True))


def test_masks_that_the_tokenizer_cannot_make_are_refused(tmp_path):
    t = BPETokenizer(write_ranks(tmp_path / "ranks", b"th"))
    write_dataset(str(tmp_path), {"train": t.encode(TEXT), "val": t.encode(TEXT)}, t)
    DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 4, masks={"line": 1.0}, tokenizer=t)
    t.newline_token_id = -1
    DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 4, masks={"span": 1.0}, tokenizer=t)
    with pytest.raises(ValueError, match="mask_line is above 0, but the tokenizer has no token for the end of a line"):
        DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 4, masks={"span": 1.0, "line": 0.5}, tokenizer=t)
    t.description = lambda written=t.description(): written
    t.mask_token_id = None
    DatasetConsumer(str(tmp_path), LANGUAGE_MODEL, 16, 4, masks={"line": 1.0}, tokenizer=t)
    with pytest.raises(ValueError, match="its tokenizer has no mask token, which filling in needs"):
        DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 4, tokenizer=t)


@pytest.mark.parametrize("dtype", ["object", "float64", "uint8", 3, None, ["uint16"]])
def test_ids_of_another_type_are_refused(tmp_path, dtype):
    write_text_dataset(tmp_path, TEXT)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"dtype": dtype}))
    with pytest.raises(ValueError, match=r"meta.json: dtype=.* is not one of uint16, uint32; prepare the dataset again"):
        DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 2)


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    write_text_dataset(tmp_path, TEXT)
    (tmp_path / "train.bin").write_bytes(np.full(100, TOKENIZER.vocab_size, dtype=np.uint16).tobytes())
    data = DatasetConsumer(str(tmp_path), MASKED_FILL, 16, 2)
    with pytest.raises(ValueError, match="train.bin has the token id 99, but its vocabulary has 99 tokens; prepare"):
        data.batch("train", 0)
    data.batch("val", 0)
