"""Prompts: templates, splits, and batches of problems and of training examples."""

import os

import numpy as np
import pytest

from core.config import CHOICES
from core.files.records import RAW, has_prompts, read_records, side, write_prompts
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.prompts import TEMPLATES, PromptConsumer, as_columns, render
from core.tokenizer import CharTokenizer, load_meta, named_tokenizer
from tests.families import tokenizer_of
from tests.tiny import jsonl, without_place

RECORDS = [{"prompt": f"{i}+{i * i}=", "completion": str(i + i * i), "split": "train" if i % 5 else "val"}
           for i in range(60)]


def prepared(folder, records=RECORDS, tokenizer=None):
    write_prompts(str(folder), records, tokenizer or named_tokenizer("char"))
    return str(folder)


def test_a_template_ends_where_the_answer_begins():
    assert render("3+4=") == "3+4=" and render("3+4=", response_prefix=" ") == "3+4= "
    assert render("Hi", "chat", system_prompt="Be kind.") == "System: Be kind.\n\nUser: Hi\n\nAssistant: "
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert render(turns) == "a\n\nb\n\nc"
    assert render(turns, "chat", response_prefix="Well") == "User: a\n\nAssistant: b\n\nUser: c\n\nAssistant: Well"
    assert all(tag in render("x", "math") for tag in ("<start_working_out>", "<end_working_out>", "</SOLUTION>"))
    for name in ("math", "code"):
        assert render("x", name).startswith("System: ") and render("x", name).endswith("User: x\n\nAssistant: ")
    assert all(render(turns, name) for name in TEMPLATES) and len(turns) == 3


def test_a_prompt_has_one_split_unless_its_record_gives_another(tmp_path):
    sides = [side(f"prompt {i}") for i in range(3000)]
    assert 0.07 < sides.count("val") / 3000 < 0.13
    turns = [{"role": "user", "content": str(i)} for i in range(100)]
    assert [side([turn]) for turn in turns] == [side([dict(reversed(turn.items()))]) for turn in turns]
    records = [{"prompt": f"prompt {i}"} for i in range(300)]
    first, again = (PromptConsumer(prepared(tmp_path / name, rows), 1)
                    for name, rows in (("a", records), ("b", [*records[::-1], *({"prompt": f"q{i}"} for i in "xyz")])))
    for split in ("train", "val"):
        mine, its = ({r["prompt"] for r in data.records[split]} for data in (first, again))
        assert its - {"qx", "qy", "qz"} <= {f"prompt {i}" for i in range(300) if sides[i] == split} and mine & its
    flipped = [{**r, "split": "val" if side(r["prompt"]) == "train" else "train"} for r in records]
    data = PromptConsumer(prepared(tmp_path / "c", flipped), 1)
    assert all(side(r["prompt"]) != split for split in ("train", "val") for r in data.records[split])
    assert load_meta(tmp_path / "c")[0]["val_records"] == sum(r["split"] == "val" for r in flipped)


def test_a_prompt_that_occurs_twice_is_kept_once(tmp_path):
    folder = prepared(tmp_path / "d", [*RECORDS, *RECORDS[:7]])
    assert load_meta(folder)[0]["records"] == len(RECORDS) == len(read_records(os.path.join(folder, "prompts.jsonl")))
    assert has_prompts(folder) and not has_prompts(str(tmp_path)) and not list((tmp_path / "d").glob("*.tmp"))


def of_lengths(folder, **lengths):
    records = [{"prompt": split[0] * n, "split": split} for split, of_split in lengths.items() for n in of_split]
    return prepared(folder, records)


def test_no_prompt_is_left_out_but_training_prompts_above_max_prompt_length(tmp_path):
    folder = of_lengths(tmp_path / "d", train=range(10, 110), val=range(5, 45))
    data = PromptConsumer(folder, 1)
    assert data.dropped == 0 and data.longest == 109 and "left out" not in data.size()
    assert [len(r["prompt"]) for r in data.records["train"]] == list(range(10, 110))
    data = PromptConsumer(folder, 1, max_prompt_length=50)
    assert [len(r["prompt"]) for r in data.records["train"]] == list(range(10, 51)) and data.longest == 50
    assert [len(r["prompt"]) for r in data.records["val"]] == list(range(5, 45))
    assert data.dropped == 59 and "59 longer than max_prompt_length=50 left out" in data.size()
    folder = of_lengths(tmp_path / "e", train=range(10, 20), val=[3])
    with pytest.raises(ValueError, match="all training prompts are longer than max_prompt_length=5; raise it"):
        PromptConsumer(folder, 1, max_prompt_length=5)


def test_a_validation_prompt_that_is_too_long_is_an_error_with_its_line(tmp_path):
    folder = of_lengths(tmp_path / "d", train=range(10, 30), val=[9, 34, 8, 31])
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 22: a validation prompt of 34 tokens is longer than "
                       "max_prompt_length=30; set max_prompt_length=34.*or remove the 2 validation records"):
        PromptConsumer(folder, 1, max_prompt_length=30)
    assert len(PromptConsumer(folder, 1, max_prompt_length=34).records["val"]) == 4


def test_a_split_without_a_record_is_named_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match='none of its 5 prompts is in the split val; .*"split": "val" in some'):
        PromptConsumer(of_lengths(tmp_path / "d", train=range(1, 6)), 1)


@pytest.mark.parametrize(("world", "micros"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_problems_do_not_depend_on_how_a_step_is_cut(tmp_path, world, micros):
    folder = prepared(tmp_path / "d")
    whole = PromptConsumer(folder, 8)
    ranks = [PromptConsumer(folder, 8 // world // micros, rank=r, world=world) for r in range(world)]
    for draw in ("problems", "batch"):
        expected = getattr(whole, draw)("train", 3)
        parts = [getattr(data, draw)("train", 3, micro) for micro in range(micros) for data in ranks]
        assert [n for part in parts for n in part["number"]] == list(range(8)) == list(expected["number"])
        texts = [whole.tokenizer.decode(row, "") for part in parts for row in part["input"]]
        assert texts == [whole.tokenizer.decode(row, "") for row in expected["input"]]


def test_no_problem_occurs_twice_in_a_step(tmp_path):
    data = PromptConsumer(prepared(tmp_path / "d"), 12)
    step = [r["prompt"] for micro in range(3) for r in data.problems("train", 0, micro)["record"]]
    assert len(set(step)) == len(step) == 36
    other = [r["prompt"] for micro in range(3) for r in data.problems("train", 1, micro)["record"]]
    assert step != other
    assert [r["prompt"] for r in data.problems("train", 0)["record"]] == step[:12], "pure in the step"
    assert not {r["prompt"] for r in data.problems("val", 0)["record"]} & set(step)


def test_prompts_are_padded_on_the_left(tmp_path):
    data = PromptConsumer(prepared(tmp_path / "d"), 16, template="chat", system_prompt="Add.", response_prefix="= ")
    batch = data.problems("val", 0)
    assert batch["input"].shape == (16, data.longest) and len(set(batch["padding"])) > 1
    for row, padding, record in zip(batch["input"], batch["padding"], batch["record"], strict=True):
        assert (row[:padding] == data.tokenizer.pad_token_id).all()
        assert data.tokenizer.decode(row[padding:]) == render(record["prompt"], "chat", "Add.", "= ")
        assert record["text"] + "= " == render(record["prompt"], "chat", "Add.", "= "), "rewards see it once"


def test_a_training_example_is_its_completion_and_the_stop_token(tmp_path):
    data = PromptConsumer(prepared(tmp_path / "d"), 16)
    t, batch = data.tokenizer, data.batch("train", 5)
    records = data.problems("train", 5)["record"]
    for input, target, mask, record in zip(*(batch[k] for k in ("input", "target", "mask")), records, strict=True):
        prompt, completion = t.encode(record["prompt"]), [*t.encode(record["completion"]), t.stop_token_id]
        whole = prompt + completion
        assert input[: len(whole)].tolist() == (whole + [t.pad_token_id] * len(input))[: len(input)][: len(whole)]
        assert target[mask].tolist() == completion
        assert mask.nonzero()[0].tolist() == list(range(len(prompt) - 1, len(whole) - 1)) and not target[~mask].any()
    width = batch["input"].shape[1] - 1
    cut = PromptConsumer(data.folder, 16, block_size=width)
    assert np.array_equal(cut.batch("train", 5)["input"], batch["input"][:, :width])
    assert "training examples are cut" in cut.size()
    with pytest.raises(ValueError, match="leave no room for a completion in block_size=6"):
        PromptConsumer(data.folder, 16, block_size=6)


def test_a_text_that_is_not_there_is_called_a_file():
    with pytest.raises(FileNotFoundError, match="dataset=my.txt is no file here, nor data/my.txt a folder; correct the"):
        load_meta("data/my.txt")


def test_a_missing_field_is_named_with_its_file_and_line(tmp_path):
    data = PromptConsumer(prepared(tmp_path / "d"), 4)
    data.require("completion", "training")
    with pytest.raises(ValueError, match="prompts.jsonl, line 2: no answer, which the reward needs.*solution"):
        data.require("answer", "the reward")
    prepared(tmp_path / "fill", tokenizer=CharTokenizer())
    with pytest.raises(ValueError, match="meta.json has no stop_token_id.*data/custom"):
        PromptConsumer(str(tmp_path / "fill"), 4)
    prepared(tmp_path / "none", [*RECORDS, {"prompt": "\u4e2d"}])
    with pytest.raises(ValueError, match="line 61: no usable characters"):
        PromptConsumer(str(tmp_path / "none"), 4)


def test_columns_are_the_fields_of_all_records_with_none_where_one_is_missing(tmp_path):
    rows = [{"prompt": f"{i}?", "answer": str(i), "split": "train" if i else "val"} for i in range(4)]
    rows[2]["level"] = 7
    data = PromptConsumer(prepared(tmp_path / "d", rows), 1, template="chat", response_prefix="!")
    prompts, columns = as_columns(data.records["train"])
    assert prompts == ["User: 1?\n\nAssistant: ", "User: 2?\n\nAssistant: ", "User: 3?\n\nAssistant: "]
    assert columns == {"prompt": ["1?", "2?", "3?"], "answer": ["1", "2", "3"], "level": [None, 7, None]}
    assert as_columns([]) == ([], {})


def test_an_answer_that_is_a_number_is_also_given_as_it_was(tmp_path):
    rows = [{"prompt": f"{i}?", "answer": x, "split": s} for i, (x, s) in enumerate(
        [(5, "train"), (0.5, "train"), ("five", "train"), (1, "val")])]
    columns = as_columns(PromptConsumer(jsonl(tmp_path / "a.jsonl", *rows), 1, tokenizer=named_tokenizer("char"))
                         .records["train"])[1]
    assert columns["answer"] == ["5", "0.5", "five"] and columns[RAW] == [5, 0.5, "five"]


def test_arguments_of_a_chat_template_that_is_not_used_are_refused(tmp_path):
    with pytest.raises(ValueError, match="chat_template_kwargs=.*which template='chat' does not use; set template="):
        PromptConsumer(prepared(tmp_path / "d"), 1, template="chat", chat_template_kwargs={"enable_thinking": False})


def test_a_file_as_it_is_gives_the_problems_of_the_prepared_folder(tmp_path):
    rows = [{"question": f"{i}+{i}=", "output": str(2 * i), "completion": str(2 * i)} for i in range(80)]
    path = jsonl(tmp_path / "mine.jsonl", *rows, *rows[:5])
    t = named_tokenizer("char")
    folder = prepared(tmp_path / "d", without_place(read_records(path)), t)
    data, expected = PromptConsumer(path, 6, tokenizer=t), PromptConsumer(folder, 6)
    assert not os.path.exists(tmp_path / "meta.json") and data.folder == path
    assert data.repeated == 5 and "5 repeated ones left out" in data.size() and "repeated" not in expected.size()
    for split in ("train", "val"):
        for draw in ("problems", "batch"):
            a, b = getattr(data, draw)(split, 3), getattr(expected, draw)(split, 3)
            assert all(np.array_equal(a[key], b[key]) for key in ("input", "number"))
        assert [r["answer"] for r in data.records[split]] == [r["answer"] for r in expected.records[split]]
    with pytest.raises(ValueError, match="dataset=.*mine.jsonl has prompts but no tokenizer.*data/custom/prepare.py"):
        PromptConsumer(path, 6)
    with pytest.raises(ValueError, match="mine.jsonl has prompts, which a causal model completes, but this model fills in text"):
        PromptConsumer(path, 6, tokenizer=CharTokenizer())
    with pytest.raises(FileNotFoundError, match="dataset=gone.jsonl does not exist"):
        PromptConsumer("gone.jsonl", 6, tokenizer=t)


def huggingface_tokenizer(path, kind):
    pytest.importorskip("transformers")
    tokenizer_of(kind).save_pretrained(str(path))
    return load_huggingface_tokenizer(str(path))


def test_a_prepared_folder_of_prompts_serves_every_tokenizer(tmp_path):
    folder = prepared(tmp_path / "d")
    for kind in ("bytes", "start"):
        t = huggingface_tokenizer(tmp_path / kind, kind)
        data = PromptConsumer(folder, 8, response_prefix="=", tokenizer=t)
        assert data.tokenizer is t
        batch = data.problems("train", 2)
        for row, padding, record in zip(batch["input"], batch["padding"], batch["record"], strict=True):
            assert row[padding:].tolist() == t.backend(record["prompt"] + "=")["input_ids"]
            assert (row[:padding] == t.pad_token_id).all()
        batch = data.batch("train", 2)
        records = data.problems("train", 2)["record"]
        for target, mask, record in zip(batch["target"], batch["mask"], records, strict=True):
            assert target[mask].tolist() == t.encode(record["completion"]) + [t.stop_token_id]
    with pytest.raises(FileNotFoundError, match="dataset not prepared"):
        PromptConsumer(str(tmp_path / "gone"), 8, tokenizer=t)


def test_the_template_of_the_model_makes_one_start_token_and_ends_where_the_answer_begins(tmp_path):
    t = huggingface_tokenizer(tmp_path / "chat", "chat")
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"},
             {"role": "user", "content": "3+3?"}]
    rows = [{"prompt": "1+1?", "split": "train"}, {"prompt": turns, "split": "val"}]
    data = PromptConsumer(jsonl(tmp_path / "a.jsonl", *rows), 1, template="model", system_prompt="Add.", tokenizer=t,
                          response_prefix="It is", chat_template_kwargs={"enable_thinking": False})
    first, last = data.records["train"][0], data.records["val"][0]
    system, end = "<|im_start|>system\nAdd.<|im_end|>\n", "<|im_start|>assistant\n<think></think>"
    assert first["text"] == f"{system}<|im_start|>user\n1+1?<|im_end|>\n{end}"
    assert last["text"] == system + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turns) + end
    for record in (first, last):
        assert record["tokens"] == t.backend.encode(record["text"] + "It is", add_special_tokens=False)
    started = huggingface_tokenizer(tmp_path / "start", "start")
    started.backend.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    data = PromptConsumer(jsonl(tmp_path / "a.jsonl", *rows), 1, template="model", tokenizer=started)
    assert data.records["train"][0]["tokens"] == started.backend("1+1?")["input_ids"], "one start token, not two"
    with pytest.raises(ValueError, match="template='model' is the chat template of a Hugging Face model, which this"):
        PromptConsumer(prepared(tmp_path / "d"), 1, template="model")
    assert set(CHOICES["template"]) == {*TEMPLATES, "model"}


def test_the_start_of_a_run_shows_how_a_prompt_ends_and_what_ends_a_completion(tmp_path):
    data = PromptConsumer(prepared(tmp_path / "d"), 4, template="chat", response_prefix="=")
    prompt = data.records["train"][0]["prompt"]
    assert data.describe_prompts() == [f"the first prompt ends in 'User: {prompt}\\n\\nAssistant: ='",
                                       "a completion ends with token 96 'STOP'"]
    t = huggingface_tokenizer(tmp_path / "chat", "chat")
    t.stop_token_ids, t.stop_token_names = (0, 2), ("<|endoftext|>", "<|im_end|>")
    data = PromptConsumer(prepared(tmp_path / "e", [{"prompt": "x" * 200, "split": "train"},
                                                      {"prompt": "y", "split": "val"}]), 1, template="model", tokenizer=t)
    tail, ends = data.describe_prompts()
    assert tail == f"the first prompt ends in {data.records['train'][0]['text'][-80:]!r}" and "assistant" in tail
    assert ends == "a completion ends with token 0 '<|endoftext|>' or 2 '<|im_end|>'"
    data = PromptConsumer(data.folder, 1, template="plain", tokenizer=t)
    assert data.describe_prompts()[2:] == ["the tokenizer has a chat template, which template='plain' does not use"]
    bare = huggingface_tokenizer(tmp_path / "bytes", "bytes")
    assert len(PromptConsumer(data.folder, 1, template="plain", tokenizer=bare).describe_prompts()) == 2
