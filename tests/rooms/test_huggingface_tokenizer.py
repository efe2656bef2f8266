"""Tokenizers in Hugging Face format: the ids of transformers, and every declared end."""

import json

import pytest

transformers = pytest.importorskip("transformers")

from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.tokenizer import CharTokenizer
from core.tokenizer_kinds import from_description, same_vocabulary
from tests.families import tokenizer_of

TEXTS = ("the quick brown fox", "7+8=15\n", " caf\u00e9 \u4e2d", "</a> {1}")
ENDS = "</s>"


def loaded(path, kind, **files):
    """Our tokenizer from a folder of this kind; files: as in tokenizer_folder."""
    return load_huggingface_tokenizer(tokenizer_folder(path, kind, **files))


def tokenizer_folder(path, kind, **files):
    """Writes a tokenizer to a folder, and more files with these contents. Returns the folder as a string."""
    tokenizer_of(kind).save_pretrained(str(path))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


def word_tokenizer(path, words, **names):
    """A tokenizer of whole words with these ids, {word: id}."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", **names).save_pretrained(str(path))
    return str(path)


@pytest.mark.parametrize("kind, around", [
    ("bytes", ([], [])), ("padded", ([], [])), ("chat", ([], [])), ("start", (["<s>"], [])),
    ("words", (["[CLS]"], ["[SEP]"])), ("angle", (["<s>"], ["</s>"])), ("square", (["[CLS]"], ["[SEP]"]))])
def test_ids_and_texts_are_those_of_transformers(tmp_path, kind, around):
    own, t = tokenizer_of(kind), loaded(tmp_path, kind)
    for text in TEXTS:
        assert t.encode(text) == own.encode(text, add_special_tokens=False)
        assert [*t.encode_prompt(text), *t.end_ids] == own(text)["input_ids"]
        assert t.decode(own(text)["input_ids"]) == own.decode(t.encode(text), skip_special_tokens=True)
        assert kind == "words" or t.decode(t.encode(text)) == text
    assert t.base_vocab_size == t.vocab_size == len(own) and 0 <= t.pad_token_id < len(own)
    assert t.decode(sorted(t.special_ids - {t.mask_token_id})) == ""
    assert tuple(own.convert_ids_to_tokens(list(ids)) for ids in (t.start_ids, t.end_ids)) == around
    newline = t.encode("\n")
    assert t.newline_token_id == (newline[0] if kind != "words" else -1), "BERT's has none"
    assert t.banned_token_ids == (() if t.mask_token_id is None else tuple(sorted(own.all_special_ids)))
    t.save(str(tmp_path / "saved"))
    saved = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert [saved(text)["input_ids"] for text in TEXTS] == [own(text)["input_ids"] for text in TEXTS]
    assert saved.chat_template == own.chat_template


@pytest.mark.parametrize("config, generation, more", [
    ({}, {}, []), ({"eos_token_id": 7}, {}, [7]), ({}, {"eos_token_id": [9, 7]}, [9, 7]),
    ({"eos_token_id": [5, 6]}, {"eos_token_id": 6}, [5, 6]), ({"eos_token_id": None}, {"eos_token_id": 8}, [8]),
    ({"text_config": {"eos_token_id": 4}}, {}, [4])], ids=str)
def test_every_declared_end_id_ends_a_completion_the_tokenizer_s_own_first(tmp_path, config, generation, more):
    t = loaded(tmp_path, "start", config=config, generation_config=generation)
    own = t.backend.convert_tokens_to_ids(ENDS)
    assert t.stop_token_ids == (own, *more) and t.stop_token_id == own
    assert t.stop_token_names[0] == ENDS and len(t.stop_token_names) == len(t.stop_token_ids)
    assert t.decode([*t.encode("the fox"), *t.stop_token_ids]) == "the fox"


def test_what_has_no_text_is_never_written(tmp_path):
    words = {"?": 0, "a": 1, "b": 2, "<mask>": 3, "</s>": 8}
    names = {"mask_token": "<mask>", "eos_token": "</s>"}
    path = word_tokenizer(tmp_path / "a", words, **names)
    assert load_huggingface_tokenizer(path).banned_token_ids == (0, 3, 4, 5, 6, 7, 8), "a masked language model"
    (tmp_path / "a" / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"]}')
    t = load_huggingface_tokenizer(path)
    assert t.banned_token_ids == (4, 5, 6, 7) and t.stop_token_id == 8 and t.base_vocab_size == 9


def test_a_masked_token_is_shown_and_word_pieces_stay_readable(tmp_path):
    t = loaded(tmp_path / "words", "words")
    ids = t.encode("the quick brown fox the lazy dog")
    assert t.decode(ids) == "the quick brown fox the lazy dog"
    pieces = t.backend.convert_ids_to_tokens(ids)
    ids[pieces.index("the")] = t.mask_token_id
    start, end = list(t.start_ids), list(t.end_ids)
    assert t.decode([*start, *ids, *end]) == "_ quick brown fox the lazy dog"


def test_a_vocabulary_is_known_by_its_words_and_another_in_its_folder_is_refused(tmp_path):
    paths = [tokenizer_folder(tmp_path / "a", "words"),
             tokenizer_folder(tmp_path / "b", "words", generation_config={"eos_token_id": 3})]
    a, b = map(load_huggingface_tokenizer, paths)
    other = loaded(tmp_path / "c", "square")
    description = json.loads(json.dumps(a.description()))
    assert a.description() != b.description() and same_vocabulary(description, b)
    assert not same_vocabulary(description, other) and not same_vocabulary(CharTokenizer().description(), a)
    again = from_description(description, "meta.json")
    assert again.description() == a.description() and again.encode(TEXTS[0]) == a.encode(TEXTS[0])
    tokenizer_of("square").save_pretrained(paths[0])
    with pytest.raises(ValueError, match="^meta.json"):
        from_description(description, "meta.json")
    words = {"?": 0, "a": 1, "b": 2}
    c, d = (load_huggingface_tokenizer(word_tokenizer(tmp_path / name, words, **names))
            for name, names in (("d", {}), ("e", {"mask_token": "b"})))
    assert not same_vocabulary(c.description(), d), "the same words, but one of them is the mask"


def test_a_chat_is_rendered_by_the_model_s_template(tmp_path):
    t = loaded(tmp_path / "chat", "chat")
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    text = t.render_chat(turns)
    assert text == "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert t.render_chat(turns, enable_thinking=False) == text + "<think></think>"
    start = t.backend.convert_tokens_to_ids("<|im_start|>")
    assert t.encode(text).count(start) == 3, "a special token in a template's text is that token"
    t.backend.chat_template = "{{ raise_exception('roles must alternate') }}"
    for refusing in (t, loaded(tmp_path / "plain", "bytes")):
        with pytest.raises(ValueError, match="template"):
            refusing.render_chat(turns)


def test_an_adapter_without_a_tokenizer_has_that_of_its_base_and_always_its_end_ids(tmp_path):
    base = tokenizer_folder(tmp_path / "base", "start", generation_config={"eos_token_id": [7]})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    expected = load_huggingface_tokenizer(base)
    for files in (False, True):
        if files:
            tokenizer_folder(tmp_path / "adapter", "start")
        t = load_huggingface_tokenizer(str(tmp_path / "adapter"))
        assert same_vocabulary(t.description(), expected) and t.stop_token_ids == expected.stop_token_ids
        assert 7 in t.stop_token_ids
