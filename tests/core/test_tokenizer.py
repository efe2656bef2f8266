"""Characters and byte pairs: round trips, and descriptions that are enough to rebuild a tokenizer."""

import json

import pytest
import requests
import tiktoken

from core.tokenizer import CharTokenizer, by_character, fold_to_ascii, from_description, load_meta, named_tokenizer
from tests.tiny import TOKENIZER, small_bpe

TAGS = ["<end_working_out>", "<SOLUTION>", "</SOLUTION>"]


def rebuilt(tokenizer):
    """The tokenizer that its description gives after a file of JSON, whose description must be the same."""
    again = from_description(json.loads(json.dumps(tokenizer.description())), "here")
    assert again.description() == tokenizer.description()
    return again


def test_tokenizer_round_trip_and_folding():
    t = CharTokenizer()
    text = "Hello, World!\n~ 42"
    assert t.decode(t.encode(text)) == text
    assert (t.base_vocab_size, t.vocab_size) == (96, 99)
    assert len({t.mask_token_id, t.pad_token_id, t.cls_token_id} | set(range(96))) == 99
    assert fold_to_ascii("caf\u00e9 \u201cna\u00efve\u201d \u4e2d") == ("cafe \"naive\" ", 4, 1)
    assert t.decode([t.mask_token_id, *t.encode("a")]) == "_a"


def test_a_tag_is_one_token_and_the_stop_token_is_no_text():
    t = named_tokenizer("char", TAGS)
    text = "<working> 1 < 2<end_working_out><SOLUTION>3</SOLUTION>\n"
    ids = t.encode(text)
    assert t.decode(ids) == text and len(ids) == len(text) - sum(map(len, TAGS)) + 3
    assert t.stop_token_id not in ids and t.decode([*ids, t.stop_token_id]) == text
    assert t.stop_token_id < t.base_vocab_size <= t.mask_token_id
    for other in (t, CharTokenizer(tags=["<a>"]), CharTokenizer(stop=True), CharTokenizer()):
        assert rebuilt(other).encode(text + "<a>") == other.encode(text + "<a>")


def test_byte_pairs_survive_the_round_trip_and_may_have_unused_ids(monkeypatch):
    t = small_bpe(monkeypatch, "cl100k_base", b"th", b"the", b" the", special=("<|endoftext|>", "<|fim|>"))
    text = "the the caf\u00e9 \u4e2d <|endoftext|>\n"
    assert t.decode(t.encode(text)) == text and t.encode("the the") == [257, 258]
    assert (t.stop_token_id, t.base_vocab_size, t.vocab_size) == (259, 263, 266)
    assert t.stop_token_id not in t.encode(text)
    assert t.decode([257, *range(259, 266), 97]) == "the" + "_" * 6 + "a"
    assert rebuilt(t).encode(text) == t.encode(text)


def test_byte_pairs_need_a_network_once(monkeypatch):
    def refuse(name):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(ValueError, match="gpt2 could not be downloaded.*TIKTOKEN_CACHE_DIR"):
        named_tokenizer("gpt2")
    with pytest.raises(FileNotFoundError, match="tokenizer gpt3: neither char, gpt2, cl100k_base nor a folder"):
        named_tokenizer("gpt3")


def test_what_a_causal_run_asks_of_a_tokenizer(monkeypatch):
    names = {named_tokenizer("char"): ("STOP",), small_bpe(monkeypatch): ("<|endoftext|>",), CharTokenizer(): ()}
    for t, expected in names.items():
        assert t.stop_token_names == expected and len(t.stop_token_ids) == len(expected)
        assert t.stop_token_ids in ((), (t.stop_token_id,)) and t.banned_token_ids == ()
        assert t.encode_prompt("the 7") == t.encode("the 7"), "no token begins a prompt"


def test_characters_are_marked_by_the_token_that_they_belong_to():
    assert by_character(TOKENIZER, TOKENIZER.encode("a_b"), [False, True, False]) == [False, True, False]

    class Words:
        """A word for each id; the third joins the second without a space, and the last is left out."""

        def decode(self, ids):
            return " ".join(["one", "two", "three", ""][i] for i in ids).replace("two three", "twothree").strip()

    assert by_character(Words(), [0, 1, 2, 3], [False, False, True, True]) == [0] * 7 + [1] * 5
    assert by_character(Words(), [2, 0], [True, False]) == [1] * 5 + [0] * 4


@pytest.mark.parametrize(("text", "message"), [
    ("[]", "must be an object {...}, not list"),
    ("{}", "has no tokenizer"),
    ('{"tokenizer": []}', "has no tokenizer"),
    ("[" * 100_000, "is not JSON .nested too deeply."),
    ('{"a": ' + "9" * 5000 + "}", "is not JSON .Exceeds the limit"),
    (b"\xff\xff", "is not JSON .'utf-")])
def test_a_hostile_meta_json_is_one_line(tmp_path, text, message):
    (tmp_path / "meta.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"^{tmp_path}/meta.json {message}.*prepare the dataset again") as error:
        load_meta(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("change", "message"), [
    ({"kind": []}, r"kind=\[\].* is not known .known: char, bpe of gpt2 or cl100k_base, huggingface"),
    ({"kind": "bpe"}, "kind='bpe', encoding=None is not known"),
    ({"kind": "bpe", "encoding": ["gpt2"]}, r"encoding=\['gpt2'\] is not known"),
    ({"kind": "huggingface", "name": 1}, "has no name"),
    ({"characters": 4}, "has no characters"),
    ({"characters": ""}, "has no character"),
    ({"characters": "aa"}, "one of them twice"),
    ({"tags": [3]}, "tags that are no texts"),
    ({"tags": [""]}, "an empty tag"),
    ({"vocab_size": "99"}, "vocab_size='99' of its tokenizer does not agree"),
    ({"stop_token_id": 3}, "has no tags"),
    ({"extra": 1}, "extra=1 of its tokenizer does not agree")])
def test_a_hostile_description_is_one_line(change, message):
    with pytest.raises(ValueError, match=f"^here.*{message}.*prepare it again"):
        from_description(TOKENIZER.description() | change, "here")
