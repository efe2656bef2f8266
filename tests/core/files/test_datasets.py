"""Datasets of running text: what was written is read, and what is wrong with the files is named."""

import json
import os

import pytest

from core.dataset_consumer import DatasetConsumer
from core.files.datasets import write_dataset
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.tokenizer import CharTokenizer
from tests.tiny import TEXT, TOKENIZER, write_text_dataset


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


def changed(folder, **facts):
    """Writes other facts into meta.json."""
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


BROKEN = {
    "nothing": (lambda d: (d / "meta.json").unlink(), "dataset not prepared: .*meta.json is missing; .*prepare.py"),
    "no val": (lambda d: (d / "val.bin").unlink(), "dataset not prepared: .*val.bin is missing; .*prepare.py"),
    "empty val": (lambda d: (d / "val.bin").write_bytes(b""), "val.bin has 0 tokens, fewer than one window"),
    "stride": (lambda d: changed(d, stride=1.5), "meta.json: .*stride=.* cannot be")}


@pytest.mark.parametrize("fault", BROKEN)
def test_damaged_files_are_named_with_a_remedy(tmp_path, fault):
    write_text_dataset(tmp_path, TEXT)
    damage, message = BROKEN[fault]
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        opened(tmp_path)
    assert "\n" not in str(error.value)


class Limited(CharTokenizer):
    """Characters, without a mask token or without newlines. Their description is that of CharTokenizer."""

    def __init__(self, **changes):
        super().__init__()
        self.__dict__ |= changes

    def description(self):
        return TOKENIZER.description()


@pytest.mark.parametrize(("tokenizer", "masks", "message"), [
    (CharTokenizer(stop=True), {"span": 1.0}, "was prepared with another vocabulary"),
    (Limited(mask_token_id=None), {"span": 1.0}, "its tokenizer has no mask token, which filling in needs"),
    (Limited(newline_token_id=-1), {"span": 1.0, "line": 0.5}, "mask_line is above 0")])
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, tokenizer, masks, message):
    write_text_dataset(tmp_path, TEXT)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, masks=masks, tokenizer=tokenizer)
    opened(tmp_path, masks={"span": 1.0}, tokenizer=Limited(newline_token_id=-1))
    opened(tmp_path, mode=LANGUAGE_MODEL, masks={"line": 1.0}, tokenizer=Limited(mask_token_id=None))
