"""Corpus, vocabulary, masks and batches."""

import importlib.util
import json
import os

import numpy as np
import pytest

from core.batch import unpack_batch
from core.dataset_consumer import DatasetConsumer
from core.masking import MASKS, draw_mask
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.tokenizer import CharTokenizer, fold_to_ascii, from_description, load_meta
from tests.tiny import ROOT, TEXT, config, consumer, run_script, write_text_dataset

PREPARE = os.path.join("data", "char_diffusion", "prepare.py")
spec = importlib.util.spec_from_file_location("prepare", os.path.join(ROOT, PREPARE))
prepare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare)


def test_tokenizer_round_trip_and_folding():
    t = CharTokenizer()
    assert t.decode(t.encode(text := "Hello, World!\n~ 42")) == text
    assert (t.base_vocab_size, t.vocab_size) == (96, 99)
    assert len({t.mask_token_id, t.pad_token_id, t.cls_token_id} | set(range(96))) == 99
    assert fold_to_ascii("caf\u00e9 \u201cna\u00efve\u201d \u4e2d") == ("cafe \"naive\" ", 4, 1)
    assert t.decode([t.mask_token_id, *t.encode("a")]) == "_a"
    assert from_description(json.loads(json.dumps(t.description())), "here").description() == t.description()


def test_prose_keeps_prose():
    text = ("Short.\n\n" + "This is a paragraph of plain words that goes on for\n    more than one line of text.\n\n"
            + "x = {1: 2, 3: 4} " * 9)
    assert list(prepare.prose(text)) == [
        "This is a paragraph of plain words that goes on for more than one line of text.\n"]


def test_docstrings_are_found_wherever_they_stand():
    source = '"""module"""\nclass A:\n  """klass"""\n  async def f(self):\n    """method"""\nx = """not one"""'
    assert sorted(prepare.docstrings(source)) == ["klass", "method", "module"]
    assert prepare.docstrings("print 'python 2'") == []


def test_a_paragraph_has_one_side_however_it_is_wrapped():
    paragraphs = [f"Paragraph {i} about something or other" for i in range(3000)]
    sides = [prepare.is_validation(p) for p in paragraphs]
    assert 0.07 < np.mean(sides) < 0.13
    assert sides == [prepare.is_validation("  " + p.upper().replace(" ", "\n") + "\n") for p in paragraphs]


def test_prepare_splits_your_text_without_leaking(tmp_path):
    paragraphs = [f"Verse {i * 7919 % 1000},\nsaid voice {i}.\n" for i in range(400)]
    (tmp_path / "my.txt").write_text("\n".join(paragraphs + paragraphs[:50]))
    done = run_script(PREPARE, f"--input={tmp_path}/my.txt", f"--out={tmp_path}/mine")
    assert done.returncode == 0 and "paragraphs kept 400" in done.stdout, done.stderr
    meta, tokenizer = load_meta(tmp_path / "mine")
    text = {s: tokenizer.decode(np.fromfile(tmp_path / "mine" / f"{s}.bin", dtype=np.uint16)) for s in ("train", "val")}
    assert meta["train_tokens"] == len(text["train"]) and meta["val_tokens"] == len(text["val"]) > 0
    for p in paragraphs:
        assert (p in text["train"]) != (p in text["val"])
    first = (tmp_path / "mine" / "train.bin").read_bytes()
    assert run_script(PREPARE, f"--input={tmp_path}/my.txt", f"--out={tmp_path}/mine").returncode == 0
    assert (tmp_path / "mine" / "train.bin").read_bytes() == first
    assert not list((tmp_path / "mine").glob("*.tmp"))


def test_prepare_says_what_is_wrong(tmp_path):
    (tmp_path / "empty.txt").write_text("\u4e2d\u6587\n\u4e2d\n")
    for arguments, code, message in ((["--input=nowhere.txt"], 1, "nowhere.txt does not exist"),
                                     ([f"--input={tmp_path}/empty.txt"], 1, "no usable characters"),
                                     (["--source=wikipedia"], 2, "python, shakespeare"),
                                     (["--colour=red"], 2, "--input=FILE")):
        done = run_script(PREPARE, *arguments, f"--out={tmp_path}/x")
        assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr
        assert len(done.stderr.strip().split("\n")) == 1 and not (tmp_path / "x").exists()


def test_a_failed_download_names_the_way_out(monkeypatch):
    import urllib.error

    def refuse(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(prepare.urllib.request, "urlopen", refuse)
    with pytest.raises(ValueError, match="--input=FILE"):
        prepare.read_source({"source": "shakespeare"})


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
    runs = lambda mask: (np.diff(np.concatenate(([0], mask.astype(int)))) == 1).sum()
    spans = [runs(MASKS["span"](rng, tokens, 40, 0)) for _ in range(100)]
    singles = [runs(MASKS["random"](rng, tokens, 40, 0)) for _ in range(100)]
    assert np.mean(spans) < 0.6 * np.mean(singles)
    for _ in range(50):
        assert not MASKS["line"](rng, tokens, 40, 0)[tokens == 0].any()
    only_newlines = np.zeros(16, dtype=np.int64)
    assert draw_mask(rng, only_newlines, {"line": 1.0}, 0.3, 0.3, newline=0).any(), "never a problem without a mask"


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


def test_input_hides_the_target_and_nothing_else(dataset):
    data = consumer(dataset, config())
    input, target, mask = unpack_batch(data.batch("val", 0), "cpu")
    assert (input[mask] == data.tokenizer.mask_token_id).all() and (input[~mask] == target[~mask]).all()
    text = "".join(TEXT[len(TEXT) * 4 // 5:])
    assert all(data.tokenizer.decode(row) in text for row in target.tolist())


def test_language_model_batches_are_shifted_by_one(dataset):
    batch = DatasetConsumer(dataset, LANGUAGE_MODEL, 16, 4).batch("train", 0)
    assert np.array_equal(batch["input"][:, 1:], batch["target"][:, :-1])


def test_bad_data_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset not prepared.*prepare.py"):
        DatasetConsumer(str(tmp_path / "nothing"), MASKED_FILL, 16, 4)
    write_text_dataset(tmp_path / "d", "too short")
    with pytest.raises(ValueError, match="smaller block_size"):
        DatasetConsumer(str(tmp_path / "d"), MASKED_FILL, 16, 4)
    meta = json.loads((tmp_path / "d" / "meta.json").read_text())
    del meta["tokenizer"]["mask_token_id"]
    (tmp_path / "d" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="meta.json has no mask_token_id"):
        DatasetConsumer(str(tmp_path / "d"), MASKED_FILL, 2, 4)


def test_a_batch_without_masks_is_refused(dataset):
    batch = consumer(dataset, config()).batch("train", 0)
    batch["mask"][1] = False
    with pytest.raises(ValueError, match="without masks"):
        unpack_batch(batch, "cpu")
