"""Prompts: records, templates, splits, and batches of problems and of training examples."""

import json
import os

import numpy as np
import pytest

from core.prompts import TEMPLATES, PromptConsumer, as_columns, has_prompts, read_records, render, side, write_prompts
from core.tokenizer import CharTokenizer, load_meta, named_tokenizer
from tests.tiny import jsonl, without_place

RECORDS = [{"prompt": f"{i}+{i * i}=", "completion": str(i + i * i), "split": "train" if i % 5 else "val"}
           for i in range(60)]


def prepared(folder, records=RECORDS, tokenizer=None):
    write_prompts(str(folder), records, tokenizer or named_tokenizer("char"))
    return str(folder)


def test_prompt_and_answer_go_by_many_names(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "response": 2}, {"instruction": "Go", "output": "went"},
                 {"problem": "x", "solution": "y", "hint": [1]}, {"prompt": "p", "question": "q", "answer": "a"})
    assert without_place(read_records(path)) == [
        {"prompt": "1+1?", "answer": "2"}, {"prompt": "Go", "answer": "went"},
        {"prompt": "x", "answer": "y", "hint": [1]}, {"prompt": "p", "question": "q", "answer": "a"}]
    assert read_records(path)[2]["where"] == f"{path}, line 3"


def test_every_way_to_write_a_list_of_records_is_read(tmp_path):
    records = [{"prompt": [{"role": "user", "content": "h\u00e9"}]}, {"prompt": "two\u2028lines", "answer": "b"}]
    rows = [json.dumps(record, ensure_ascii=False) for record in records]
    for text in (json.dumps({"prompts": records}, indent=1), json.dumps(records), "\n".join(rows), "\n\n".join(rows),
                 "\r\n".join(rows) + "\r\n", "\ufeff" + "\n".join(rows)):
        (tmp_path / "a").write_bytes(text.encode())
        assert without_place(read_records(str(tmp_path / "a"))) == records
    assert without_place(read_records(jsonl(tmp_path / "one", records[1]))) == records[1:]


@pytest.mark.parametrize(("text", "message"), [
    ('{"prompt": "a"}\n\n{"answer": "b"}', r"line 3: no prompt; .*question, instruction"),
    ('{"prompt": "a"}\n{"prompt": "b"', "line 2: not JSON"), ("", "has no records"), ("\n \n", "has no records"),
    ('{"prompts": []}', "has no records"), ('[{"prompt": "a"}, 3]', "record 2: .*object.*int"),
    ('{"prompt": "a"}\n{"prompt": ""}', "line 2: prompt must be"), ('[{"prompt": []}]', "record 1: prompt must be"),
    ('[{"prompt": [{"role": "user"}]}]', "prompt must be"), ("42", "list of records"), ('{"prompts": 4}', "list of"),
    ('{"prompt": "a"}\n{"prompt": "b", "split": "test"}', "line 2: split='test' must be train or val"),
    (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2: not UTF-8")])
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"bad.jsonl.*{message}"):
        read_records(str(tmp_path / "bad.jsonl"))


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


def test_a_split_without_records_is_named_with_the_remedy(tmp_path, capsys):
    write_prompts(str(tmp_path), [{"prompt": "a", "split": "train"}], named_tokenizer("char"))
    assert 'no val records: give more, or mark one with "split": "val"' in capsys.readouterr().out
    write_prompts(str(tmp_path), [{"prompt": "a", "split": "train"}, {"prompt": "b", "split": "val"}],
                  named_tokenizer("char"))
    assert "give more" not in capsys.readouterr().out


def test_long_prompts_are_dropped_and_counted(tmp_path):
    lengths = np.arange(10, 110)
    records = [{"prompt": "x" * int(n), "split": "val" if n % 4 == 0 else "train"} for n in lengths]
    folder = prepared(tmp_path / "d", records)
    for limit in (512, 50):
        data = PromptConsumer(folder, 1, max_prompt_length=limit)
        longest = min(np.sort(lengths)[90], limit)  # 90 in 100 are shorter than this one
        assert data.longest == longest and data.dropped == (lengths > longest).sum()
        assert sum(map(len, data.records.values())) + data.dropped == 100
        assert f"{data.dropped} longer ones dropped" in data.size()
    with pytest.raises(ValueError, match="no train prompts of at most 5 tokens"):
        PromptConsumer(folder, 1, max_prompt_length=5)


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


def test_a_missing_field_is_named_with_its_file_and_line(tmp_path):
    data = PromptConsumer(prepared(tmp_path / "d"), 4)
    data.require("completion", "training")
    with pytest.raises(ValueError, match="prompts.jsonl, line 2: no answer, which the reward needs.*solution"):
        data.require("answer", "the reward")
    prepared(tmp_path / "fill", tokenizer=CharTokenizer())
    with pytest.raises(ValueError, match="meta.json has no stop_token_id.*data/custom"):
        PromptConsumer(str(tmp_path / "fill"), 4)
    prepared(tmp_path / "none", [*RECORDS, {"prompt": "\u4e2d"}])
    with pytest.raises(ValueError, match="record 61 has no usable characters"):
        PromptConsumer(str(tmp_path / "none"), 4)


def test_a_reserved_field_is_refused(tmp_path):
    for name in ("prompts", "completions", "text", "tokens", "where"):
        with pytest.raises(ValueError, match=f"line 2: the field {name} is reserved; give it another name"):
            read_records(jsonl(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", name: 1}))


def test_columns_are_the_fields_of_all_records_with_none_where_one_is_missing(tmp_path):
    rows = [{"prompt": f"{i}?", "answer": str(i), "split": "train" if i else "val"} for i in range(4)]
    rows[2]["level"] = 7
    data = PromptConsumer(prepared(tmp_path / "d", rows), 1, template="chat", response_prefix="!")
    prompts, columns = as_columns(data.records["train"])
    assert prompts == ["User: 1?\n\nAssistant: ", "User: 2?\n\nAssistant: ", "User: 3?\n\nAssistant: "]
    assert columns == {"answer": ["1", "2", "3"], "level": [None, 7, None]}
    assert as_columns([]) == ([], {})
