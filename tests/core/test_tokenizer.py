"""Characters and byte pairs: round trips, and descriptions that are enough to rebuild a tokenizer."""

import base64
import hashlib
import json
import os

import pytest
import requests
import tiktoken

from core.models import load_model, load_tokenizer, save_model
from core.tokenizer import (BPETokenizer, CharTokenizer, by_character, fold_to_ascii, from_description, load_meta,
                            named_tokenizer, same_vocabulary)
from tests.tiny import TOKENIZER, model, write_ranks

TAGS = ["<end_working_out>", "<SOLUTION>", "</SOLUTION>"]


def through_json(description):
    return json.loads(json.dumps(description))


def older_form(path):
    """The description of a file of ranks as earlier versions wrote it."""
    t = BPETokenizer(str(path))
    return {"kind": "bpe", "encoding": str(path), "sha256": hashlib.sha256(open(path, "rb").read()).hexdigest(),
            "stop_token_id": t.stop_token_id, "base_vocab_size": t.base_vocab_size, "vocab_size": t.vocab_size,
            "mask_token_id": t.mask_token_id, "pad_token_id": t.pad_token_id, "cls_token_id": t.cls_token_id}


def test_tokenizer_round_trip_and_folding():
    t = CharTokenizer()
    assert t.decode(t.encode(text := "Hello, World!\n~ 42")) == text
    assert (t.base_vocab_size, t.vocab_size) == (96, 99)
    assert len({t.mask_token_id, t.pad_token_id, t.cls_token_id} | set(range(96))) == 99
    assert fold_to_ascii("caf\u00e9 \u201cna\u00efve\u201d \u4e2d") == ("cafe \"naive\" ", 4, 1)
    assert t.decode([t.mask_token_id, *t.encode("a")]) == "_a"
    assert from_description(through_json(t.description()), "here").description() == t.description()


def test_a_tag_is_one_token_and_the_stop_token_is_no_text():
    t = named_tokenizer("char", TAGS)
    text = "<working> 1 < 2<end_working_out><SOLUTION>3</SOLUTION>\n"
    ids = t.encode(text)
    assert t.decode(ids) == text and len(ids) == len(text) - sum(map(len, TAGS)) + 3
    assert t.stop_token_id not in ids and t.decode([*ids, t.stop_token_id]) == text
    assert t.stop_token_id < t.base_vocab_size <= t.mask_token_id
    for other in (t, CharTokenizer(tags=["<a>"]), CharTokenizer(stop=True), CharTokenizer()):
        again = from_description(through_json(other.description()), "here")
        assert again.description() == other.description() and again.encode(text + "<a>") == other.encode(text + "<a>")


def test_byte_pairs_survive_the_round_trip_and_the_description(tmp_path):
    t = BPETokenizer(write_ranks(tmp_path / "ranks", b"th", b"the", b" the"))
    text = "the the caf\u00e9 \u4e2d <|endoftext|>\n"
    assert t.decode(t.encode(text)) == text and t.encode("the the") == [257, 258]
    assert t.stop_token_id == 259 and t.base_vocab_size == 260 and t.vocab_size == 263
    assert t.stop_token_id not in t.encode(text) and t.decode([257, t.stop_token_id, t.pad_token_id]) == "the_"
    description = through_json(t.description())
    os.remove(tmp_path / "ranks")
    again = from_description(description, "here")
    assert again.encode(text) == t.encode(text) and again.description() == t.description()
    with pytest.raises(FileNotFoundError, match="neither char, gpt2"):
        named_tokenizer(str(tmp_path / "gpt3"))


@pytest.mark.parametrize(("content", "message"), [
    ("AA== x\n", "line 1: not a base64 token"), ("AA== 0\nAQ== 1 2\n", "line 2: not a base64 token"),
    ("AA== 0\n", "all 256 single bytes")])
def test_a_mistake_in_a_file_of_ranks_is_named(tmp_path, content, message):
    (tmp_path / "ranks").write_text(content)
    with pytest.raises(ValueError, match=message):
        named_tokenizer(str(tmp_path / "ranks"))


def test_a_vocabulary_is_known_by_its_ranks_not_by_the_path_of_their_file(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    path = write_ranks(tmp_path / "folder" / "ranks", b"th", b"the")
    lines = open(path).read().splitlines()
    (tmp_path / "copy").write_text("\n\n".join(reversed(lines)))  # other bytes, equal ranks
    monkeypatch.chdir(tmp_path)
    spellings = [path, "folder/ranks", "./folder/../folder/ranks", "copy"]
    first, *others = (named_tokenizer(spelling).description() for spelling in spellings)
    assert all(other == first for other in others)
    assert named_tokenizer(write_ranks(tmp_path / "other", b"th", b"tha")).description() != first


def test_a_checkpoint_is_enough_to_use_a_model_of_byte_pairs(tmp_path):
    t = named_tokenizer(write_ranks(tmp_path / "ranks", b"th", b"the"))
    path = str(tmp_path / "m.safetensors")
    save_model(path, model(tokenizer=t), t)
    os.remove(tmp_path / "ranks")
    assert load_tokenizer(path).encode("the") == [257] == t.encode("the")
    load_model(path, tokenizer=t)
    other = named_tokenizer(write_ranks(tmp_path / "ranks", b"th", b"tha"))
    with pytest.raises(ValueError, match="has another vocabulary"):
        load_model(path, tokenizer=other)


def test_a_description_of_the_older_form_is_read_from_its_file(tmp_path):
    path = tmp_path / "ranks"
    t, old = named_tokenizer(write_ranks(path, b"th", b"the")), older_form(path)
    assert from_description(old, "here").description() == t.description() != old
    assert same_vocabulary(old, t, "here") and same_vocabulary(t.description(), t, "here")
    assert not same_vocabulary(old, named_tokenizer(write_ranks(tmp_path / "b", b"th", b"tha")), "here")
    write_ranks(path, b"th", b"tha")
    with pytest.raises(ValueError, match="here: .*ranks, which has changed since; put the file with sha256 .*again"):
        from_description(old, "here")
    os.remove(path)
    with pytest.raises(FileNotFoundError, match="here: .*ranks, which does not exist; put it there again"):
        from_description(old, "here")


@pytest.mark.parametrize(("change", "message"), [
    ({"ranks": "AA== AQ=="}, "ranks of its tokenizer are damaged"), ({"ranks": "?"}, "its tokenizer are damaged"),
    ({"vocab_size": 7}, "do not agree"), ({"stop_token_id": 3}, "do not agree"), ({"extra": 1}, "do not agree"),
    ({"kind": "words"}, "known: char, bpe, huggingface")])
def test_a_damaged_description_is_named(tmp_path, change, message):
    description = named_tokenizer(write_ranks(tmp_path / "ranks", b"th")).description()
    with pytest.raises(ValueError, match=f"^here: .*{message}"):
        from_description(description | change, "here")
    doubled = description["ranks"].replace(base64.b64encode(b"th").decode(), base64.b64encode(b"t").decode())
    with pytest.raises(ValueError, match="here: the ranks of its tokenizer are damaged"):
        from_description(description | {"ranks": doubled}, "here")


def test_named_byte_pairs_need_a_network_once_and_may_have_holes(monkeypatch):
    def refuse(name):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(ValueError, match="gpt2 could not be downloaded.*TIKTOKEN_CACHE_DIR"):
        named_tokenizer("gpt2")
    ranks = {bytes([b]): b for b in range(256)}
    with_holes = tiktoken.Encoding("holes", pat_str=r"\S+|\s+", mergeable_ranks=ranks,
                                   special_tokens={"<|endoftext|>": 257, "<|fim|>": 260})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: with_holes)
    t = named_tokenizer("cl100k_base")
    assert t.decode([97, *range(256, t.vocab_size), 98]) == "a" + "_" * (t.vocab_size - 257) + "b"
    assert t.description()["encoding"] == "cl100k_base" and "ranks" not in t.description()
    assert from_description(through_json(t.description()), "here").description() == t.description()


def test_what_a_causal_run_asks_of_a_tokenizer(tmp_path):
    byte_pairs = named_tokenizer(write_ranks(tmp_path / "ranks", b"th"))
    for t, names in ((named_tokenizer("char"), ("STOP",)), (byte_pairs, ("<|endoftext|>",)), (CharTokenizer(), ())):
        assert t.stop_token_names == names and t.banned_token_ids == ()
        assert t.stop_token_ids == (() if t.stop_token_id is None else (t.stop_token_id,)) and len(names) == len(
            t.stop_token_ids)
        assert t.encode_prompt("the 7") == t.encode("the 7"), "no token begins a prompt"


def test_characters_are_marked_by_the_token_that_they_belong_to():
    ids = TOKENIZER.encode("a_b")
    assert by_character(TOKENIZER, ids, [False, True, False]) == [False, True, False]

    class Words:
        """A word for each id; the third joins the second without a space, and the last is left out."""

        def decode(self, ids):
            return " ".join(["one", "two", "three", ""][i] for i in ids).replace("two three", "twothree").strip()

    assert by_character(Words(), [0, 1, 2, 3], [False, False, True, True]) == [0] * 7 + [1] * 5
    assert by_character(Words(), [2, 0], [True, False]) == [1] * 5 + [0] * 4


@pytest.mark.parametrize(("text", "message"), [
    ("[]", "must be an object {...}, not list"), ("null", "must be an object"), ("{}", "has no tokenizer"),
    ("[" * 100_000, "is not JSON .nested too deeply."), ('{"tokenizer": []}', "has no tokenizer"),
    ('{"a": ' + "9" * 5000 + "}", "is not JSON .Exceeds the limit"), (b"\xff\xff", "is not JSON .'utf-")])
def test_a_hostile_meta_json_is_one_line(tmp_path, text, message):
    (tmp_path / "meta.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"^{tmp_path}/meta.json {message}.*prepare the dataset again") as error:
        load_meta(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("change", "message"), [
    ({"kind": []}, r"kind=\[\] of its tokenizer is of the wrong type"), ({"vocab_size": "99"}, "vocab_size='99' of"),
    ({"characters": 4}, "characters=4 of its"), ({"characters": ""}, "has no character, or one of them twice"),
    ({"characters": "aa"}, "has no character, or one of them twice"), ({"tags": [3]}, "tags that are no texts"),
    ({"tags": [""]}, "tags that are no texts"), ({"kind": "bpe", "encoding": 5}, "encoding=5 of its"),
    ({"kind": "bpe", "ranks": [1]}, r"ranks=\[1\] of its"), ({"kind": "huggingface", "name": 1}, "name=1 of its")])
def test_a_hostile_description_is_one_line(change, message):
    with pytest.raises(ValueError, match=f"^here: .*{message}"):
        from_description(TOKENIZER.description() | change, "here")
