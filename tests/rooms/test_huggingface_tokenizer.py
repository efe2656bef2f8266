"""Tokenizers in Hugging Face format: the ids of transformers, and every declared end."""

import json

import pytest

transformers = pytest.importorskip("transformers")

from core.errors import Mistake
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.tokenizer import CharTokenizer, from_description, same_vocabulary
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
    ("padded", ([], [])), ("chat", ([], [])), ("start", (["<s>"], [])), ("words", (["[CLS]"], ["[SEP]"])),
    ("angle", (["<s>"], ["</s>"]))])
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


TURNS = "{% for m in messages %}<turn> {{ m['content'] }} <over> {% endfor %}"


@pytest.mark.parametrize(("names", "template", "shown"), [
    ({"additional_special_tokens": ["<think>", "<turn>"]}, TURNS, ["<think>"]),
    ({"additional_special_tokens": ["<think>", "<turn>"]}, None, ["<think>", "<turn>"]),
    ({"additional_special_tokens": ["<think>"], "pad_token": "<turn>"}, None, ["<think>"]),
    ({"additional_special_tokens": ["<think>"]}, "{{ raise_exception('no') }}", []),
    ({"pad_token": "<turn>"}, TURNS, [])], ids=str)
def test_special_tokens_that_were_added_stay_in_the_text_unless_they_mark_turns(tmp_path, names, template, shown):
    words = {"?": 0, "a": 1, "<think>": 2, "<turn>": 3, "<over>": 4, "</s>": 5}
    path = word_tokenizer(tmp_path, words, eos_token="</s>", chat_template=template, **names)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    t = load_huggingface_tokenizer(path)
    assert sorted(t.shown_tokens) == shown
    special = [words[name] for name in ("<think>", "<turn>") if words[name] in t.special_ids]
    for i in special:
        name = t.backend.convert_ids_to_tokens(i)
        assert (name in t.decode([1, i, 1, 5])) == (name in shown)
    assert t.decode([1, 1, 5]) == "a a"


def test_a_token_that_was_added_behind_the_vocabulary_stays_in_the_text(tmp_path):
    backend = tokenizer_of("chat")
    backend.add_tokens(["<think>"], special_tokens=True)
    backend.save_pretrained(str(tmp_path))
    t = load_huggingface_tokenizer(str(tmp_path))
    assert t.shown_tokens == ("<think>",) and t.decode(t.encode("<|im_start|>a<think>b<|im_end|>")) == "a<think>b"


def test_what_has_no_text_is_never_written(tmp_path):
    words = {"?": 0, "a": 1, "b": 2, "<mask>": 3, "</s>": 8}
    names = {"mask_token": "<mask>", "eos_token": "</s>"}
    path = word_tokenizer(tmp_path / "a", words, **names)
    assert load_huggingface_tokenizer(path).banned_token_ids == (0, 3, 4, 5, 6, 7, 8), "a masked language model"
    (tmp_path / "a" / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"]}')
    t = load_huggingface_tokenizer(path)
    assert t.banned_token_ids == (4, 5, 6, 7) and t.stop_token_id == 8 and t.base_vocab_size == 9


def test_a_vocabulary_is_known_by_its_words_and_another_in_its_folder_is_refused(tmp_path):
    a = loaded(tmp_path / "a", "words")
    b = loaded(tmp_path / "b", "words", generation_config={"eos_token_id": 3})
    other = loaded(tmp_path / "c", "angle")
    description = json.loads(json.dumps(a.description()))
    assert same_vocabulary(description, b) and not same_vocabulary(description, other)
    assert not same_vocabulary(CharTokenizer().description(), a)
    again = from_description(description, "meta.json")
    assert again.description() == a.description() and again.encode(TEXTS[0]) == a.encode(TEXTS[0])
    tokenizer_of("angle").save_pretrained(a.path)
    with pytest.raises(Mistake, match="^meta.json"):
        from_description(description, "meta.json")
