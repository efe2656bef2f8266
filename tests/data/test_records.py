"""Records of prompts: every way to write them is read."""

import json
from collections import Counter

import numpy as np
import pytest

from core.errors import Mistake
from core.prompts import PromptConsumer
from core.records import LISTS, load_records, read_hub, read_records
from tests.tiny import CAUSAL, jsonl, without_place

ROWS = [{"question": f"{i}+{i}?", "answer": 2 * i, "level": None if i % 2 else "easy"} for i in range(40)]


def test_prompt_and_answer_go_by_many_names(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "response": 2}, {"instruction": "Go", "output": "went"},
                 {"problem": "x", "solution": "y", "hint": [1]}, {"prompt": "p", "question": "q", "answer": "a"})
    assert without_place(read_records(path)) == [
        {"prompt": "1+1?", "answer": 2}, {"prompt": "Go", "answer": "went"},
        {"prompt": "x", "answer": "y", "hint": [1]}, {"prompt": "p", "question": "q", "answer": "a"}]
    assert read_records(path)[2]["where"] == f"{path}, line 3"


def turn(role, content):
    return {"role": role, "content": content}


CHAT = [turn("user", "1+1?"), turn("assistant", "2")]
PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?", "image_url": None}]


@pytest.mark.parametrize(("record", "expected", "notes"), [
    ({"messages": CHAT}, {"prompt": CHAT[:1], "answer": "2"}, ["messages answer"]),
    ({"messages": CHAT, "ground_truth": "2"}, {"prompt": CHAT[:1], "answer": "2", "ground_truth": "2"}, ["messages"]),
    ({"messages": CHAT, "answer": "3"}, {"prompt": CHAT[:1], "answer": "3", "completion": "2"}, ["completion"]),
    ({"messages": CHAT[:1], "solution": "2"}, {"prompt": CHAT[:1], "answer": "2"}, []),
    ({"messages": CHAT + CHAT[:1]}, {"prompt": CHAT + CHAT[:1]}, []),
    ({"prompt": CHAT}, {"prompt": CHAT}, []),
    ({"prompt": [turn("user", PARTS)]}, {"prompt": CHAT[:1]}, []),
    ({"messages": [turn("user", PARTS), turn("assistant", [{"type": "text", "text": "2"}])]},
     {"prompt": CHAT[:1], "answer": "2"}, ["answer"]),
    ({"instruction": "Add.", "input": "1 and 1", "output": "2"},
     {"prompt": "Add.\n\n1 and 1", "input": "1 and 1", "answer": "2"}, ["instruction input"]),
    ({"instruction": "Add 1 and 1.", "input": "", "output": "2"},
     {"prompt": "Add 1 and 1.", "input": "", "answer": "2"}, []),
    ({"question": "?", "input": "1"}, {"prompt": "?", "input": "1"}, ["input"]),
    ({"prompt": "?", "system": "Be brief."}, {"prompt": "?", "system": "Be brief."}, ["system"]),
    ({"prompt": "?", "tools": []}, {"prompt": "?", "tools": []}, []),
    ({"prompt": "?", "answer": float("nan")}, {"prompt": "?"}, []),
    ({"prompt": CHAT[:1], "completion": CHAT[1:]}, {"prompt": CHAT[:1], "completion": "2"}, []),
    ({"prompt": "?", "text": "? !", "completions": ["!"]}, {"prompt": "?"}, ["text", "completions"])], ids=str)
def test_forms_of_other_trainers_are_read_and_what_is_joined_or_ignored_is_noted(tmp_path, record, expected, notes):
    found = Counter()
    assert without_place(read_records(jsonl(tmp_path / "a.jsonl", record, record), found)) == [expected] * 2
    assert len(found) == len(notes) and set(found.values()) <= {2}
    for sentence, words in zip(sorted(found), sorted(notes), strict=True):
        assert all(word in sentence for word in words.split())


TEXTS = ["Name a prime:", "Explain how binary search works:"]


@pytest.mark.parametrize("text", [
    json.dumps(TEXTS), "\n".join(map(json.dumps, TEXTS)), json.dumps([TEXTS[0], {"prompt": TEXTS[1]}]),
    *(json.dumps({name: TEXTS}, indent=1) for name in LISTS)])
def test_prompts_alone_are_records_in_every_list(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert without_place(read_records(str(tmp_path / "a.json"))) == [{"prompt": prompt} for prompt in TEXTS]


@pytest.mark.parametrize(("text", "prompts"), [
    ('{"Train": ["a", "b"], "validation": ["c"]}', [("a", "train"), ("b", "train"), ("c", "val")]),
    ('{"train": ["a"], "val": [[{"role": "user", "content": "b"}]]}', [("a", "train"), ([turn("user", "b")], "val")]),
    ('"a"', [("a", None)]), ('{"prompts": ["a", "a"], "answers": ["b", "c"]}', [("a", None), ("a", None)])])
def test_prompts_alone_have_the_split_of_their_list(tmp_path, text, prompts):
    (tmp_path / "a.json").write_text(text)
    notes = Counter()
    found = read_records(str(tmp_path / "a.json"), notes)
    assert [(record["prompt"], record.get("split")) for record in found] == prompts
    assert len(notes) == ("answers" in text)


@pytest.mark.parametrize(("text", "splits"), [
    ('{"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]}', ["train", "val"]),
    ('{"Train": [{"prompt": "a"}], "dev": [], "test": [{"prompt": "b"}]}', ["train", "val"]),
    ('{"version": 1, "data": [{"prompt": "a"}, {"prompt": "b"}]}', [None, None]),
    ('{"prompt": "a", "data": [{"b": 1}]}', [None]),
    ('{"data": [{"prompt": "a"}], "more": [{"prompt": "b"}]}', [None]),
    ('{"prompt": "a", "split": "training"}\n{"prompt": "b", "split": "Validation"}', ["train", "val"]),
    ('{"prompt": "a", "split": "test"}\n{"prompt": "b", "split": "valid"}', ["val"]),
    ('{"prompt": "a", "split": null}\n{"prompt": "b", "split": ""}', [None, None])])
def test_names_of_splits_and_of_lists_are_those_that_exporters_write(tmp_path, text, splits):
    (tmp_path / "a.json").write_text(text)
    notes = Counter()
    assert [record.get("split") or None for record in read_records(str(tmp_path / "a.json"), notes)] == splits
    assert notes.total() == (len(splits) < text.count('"prompt"'))


@pytest.mark.parametrize(("text", "rows"), [
    ("prompt,answer\n1+1?,2\n", [{"prompt": "1+1?", "answer": "2"}]),
    ('\ufeffquestion,answer,level\r\n"a, ""b""\nc",,007\r\n\r\n', [{"prompt": 'a, "b"\nc', "level": "007"}]),
    (",prompt,split\n0,a,train\n1,b,test\n", [{"prompt": "a", "split": "train"}, {"prompt": "b", "split": "val"}]),
    ("prompt , answer,,\na,b,,\n,,,\n", [{"prompt": "a", "answer": "b"}]),
    ("prompt,text,answer\na,b,3.0", [{"prompt": "a", "answer": "3.0"}])], ids=repr)
def test_a_csv_file_has_commas_and_a_header_and_its_values_are_texts(tmp_path, text, rows):
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert without_place(load_records(str(tmp_path / "a.csv"), Counter())) == rows


@pytest.mark.parametrize("fault", ["c,2,3", 'c,"2" d', ",2"])
def test_errors_of_a_csv_file_name_the_line_in_which_a_record_begins(tmp_path, fault):
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"a\nb",1\n{fault}\n')
    with pytest.raises(Mistake, match="a.csv, line 4"):
        load_records(str(tmp_path / "a.csv"), Counter())


@pytest.mark.parametrize("records", [
    ROWS, ["a", {"messages": CHAT}, {"prompt": "b", "answer": float("nan"), "split": "test", "text": "c"}]], ids=len)
def test_a_list_from_python_gives_the_records_and_notes_of_its_file_and_stays_as_it_is(tmp_path, records):
    (tmp_path / "a.json").write_text(json.dumps(records))
    before, found, expected = repr(records), Counter(), Counter()
    from_list, from_file = load_records(records, found), load_records(str(tmp_path / "a.json"), expected)
    assert without_place(from_list) == without_place(from_file) and found == expected and repr(records) == before
    one, other = (PromptConsumer(x, 4, tokenizer=CAUSAL) for x in (records, str(tmp_path / "a.json")))
    for step in range(3):
        assert without_place(one.problems("train", step)["record"]) == without_place(
            other.problems("train", step)["record"])


@pytest.mark.parametrize(("records", "words"), [
    ([{"prompt": "a"}, {"answer": "b"}], "dataset, record 2"), ([{"prompt": "a", "split": "x"}], "dataset, record 1"),
    ([], "dataset"), ([{"prompt": "a", "split": "train"}] * 2, "split val"), ({"prompt": ["a", "b"]}, "dict")])
def test_a_list_from_python_is_refused_as_a_file_is_by_the_number_of_the_record(records, words):
    with pytest.raises(Mistake, match=words):
        PromptConsumer(records, 4, tokenizer=CAUSAL)


def test_arrays_in_the_fields_of_a_list_from_python_stay():
    board = np.arange(4)
    record, = load_records([{"prompt": "a", "board": board, "level": np.float64("nan")}], Counter())
    assert record["board"] is board and "level" not in record


def test_every_way_to_write_a_list_of_records_is_read(tmp_path):
    records = [{"prompt": [{"role": "user", "content": "h\u00e9"}]}, {"prompt": "two\u2028lines", "answer": "b"}]
    rows = [json.dumps(record, ensure_ascii=False) for record in records]
    for text in (json.dumps({"prompts": records}, indent=1), json.dumps(records), "\n".join(rows), "\n\n".join(rows),
                 "\r\n".join(rows) + "\r\n", "\ufeff" + "\n".join(rows)):
        (tmp_path / "a").write_bytes(text.encode())
        assert without_place(read_records(str(tmp_path / "a"))) == records
    assert without_place(read_records(jsonl(tmp_path / "one", records[1]))) == records[1:]


def write_parquet(path, rows):
    """Writes a Parquet file. Returns its path as a string."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_a_parquet_file_holds_the_same_records_as_its_lines(tmp_path):
    records = load_records(write_parquet(tmp_path / "a.parquet", ROWS), Counter())
    lines = jsonl(tmp_path / "a.jsonl", *({k: x for k, x in row.items() if x is not None} for row in ROWS))
    assert without_place(records) == without_place(load_records(lines, Counter()))


def hub_folder(folder, monkeypatch, **splits):
    """Writes a folder that the package datasets loads, {split: rows}, and keeps its cache there. Returns hf:FOLDER."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        write_parquet(folder / "data" / f"{split}.parquet", rows)
    return f"hf:{folder / 'data'}"


def test_the_splits_of_a_data_set_of_the_hub_are_ours(tmp_path, monkeypatch):
    marked = [row | {"split": "elsewhere"} for row in ROWS]
    both = read_hub(hub_folder(tmp_path / "a", monkeypatch, train=marked[:30], test=marked[30:]), Counter())
    assert [r["split"] for r in both] == ["train"] * 30 + ["val"] * 10
    assert [(r["prompt"], r["answer"]) for r in both] == [(row["question"], row["answer"]) for row in ROWS]
    assert both[31]["where"].endswith("data, test, record 2")
    one = read_hub(hub_folder(tmp_path / "c", monkeypatch, train=marked), Counter())
    assert len(one) == 40 and not any(r["split"] for r in one), "a hash of the prompt decides later"
