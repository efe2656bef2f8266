"""Characters and byte pairs: round trips, and descriptions that are enough to rebuild a tokenizer."""

import json


from core.tokenizer import CharTokenizer, fold_to_ascii, from_description, named_tokenizer
from tests.tiny import small_bpe

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
