"""Records of prompts: every way to write them is read, and a mistake is named with its place."""

import json
import sys

import pytest

from core.files.records import (
    check_record,
    has_prompts,
    load_records,
    read_hub,
    read_records,
    unique_prompts,
    write_prompts,
)
from core.tokenizer import named_tokenizer
from tests.tiny import jsonl, without_place

ROWS = [{"question": f"{i}+{i}?", "answer": 2 * i, "level": None if i % 2 else "easy"} for i in range(40)]
TURNS = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"},
         {"role": "assistant", "content": "2"}]


def test_prompt_and_answer_go_by_many_names(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "response": 2}, {"instruction": "Go", "output": "went"},
                 {"problem": "x", "solution": "y", "hint": [1]}, {"prompt": "p", "question": "q", "answer": "a"})
    assert without_place(read_records(path)) == [
        {"prompt": "1+1?", "answer": 2}, {"prompt": "Go", "answer": "went"},
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
    ('{"prompt": "a"}\n{"prompt": "b"', "line 2 is not JSON .*column 15.; correct it$"),
    ("\n \n", "has no records"),
    ('{"prompts": []}', "has no records"),
    ('[{"prompt": "a"}, 3]', "record 2: .*object.*int"),
    ('{"prompt": "a"}\n{"prompt": ""}', "line 2: prompt must be"),
    ('{"prompts": 4}', "a list of records"),
    ('{"prompt": "a"}\n{"prompt": "b", "split": "test"}', "line 2: split='test' must be train or val"),
    (b'{"prompt": "a"}\n{"prompt": "\xff"}', "not UTF-8"),
    ('{"prompt": "a", "x": ' + "9" * 5000 + "}", "line 1 is not JSON .Exceeds the limit"),
    ('{"prompt": "a"}\n{"prompt": "b", "x": ["\\ud800"]}', "line 2: a text has half of a surrogate pair"),
    ('{"prompt": "a"}\n{"prompt": "b", "where": 1}', "line 2: the field where is reserved; give it another name")])
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"bad.jsonl.*{message}"):
        read_records(str(tmp_path / "bad.jsonl"))


def test_a_split_without_records_is_named_with_the_remedy(tmp_path, capsys):
    records = [{"prompt": "a", "split": "train"}, {"prompt": "b", "split": "val"}]
    for count in (1, 2):
        write_prompts(str(tmp_path), records[:count], named_tokenizer("char"))
        remedy = 'no val records: give more, or mark one with "split": "val"' in capsys.readouterr().out
        assert remedy == (count == 1)


@pytest.mark.parametrize(("messages", "fault"), [
    ([TURNS[0], {"role": "user", "content": [{"type": "text", "text": "a"}]}], "content of message 2 is missing or no text"),
    ([{"content": "a"}], "role of message 1 is missing or no text"), ([], "it is no list, or empty"), (3, "it is no list")])
def test_what_is_wrong_with_messages_is_named(messages, fault):
    for field in ("prompt", "messages"):
        with pytest.raises(ValueError, match=f"^a, line 3: prompt must be .* messages; {fault}"):
            check_record({field: messages}, "a, line 3")


def test_a_conversation_is_its_prompt_and_the_assistant_s_last_turn():
    record = check_record({"messages": TURNS, "level": 1}, "a, line 1")
    assert record == {"prompt": TURNS[:2], "completion": "2", "answer": "2", "level": 1, "where": "a, line 1"}
    assert check_record({"messages": TURNS, "solution": "two"}, "a")["answer"] == "two", "the record's own comes first"
    assert check_record({"messages": TURNS[:2]}, "a")["prompt"] == TURNS[:2], "without an answer there is no completion"
    assert check_record({"messages": TURNS, "prompt": "mine"}, "a")["messages"] == TURNS, "a prompt comes first"
    assert check_record({"prompt": "a", "completion": TURNS[2:]}, "a")["completion"] == "2"
    with pytest.raises(ValueError, match="^a, line 3: prompt must be"):
        check_record({"messages": TURNS[2:]}, "a, line 3")


def test_the_records_whose_last_turn_is_their_answer_are_counted(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", {"messages": TURNS}, {"messages": TURNS, "answer": "2"}, {"messages": TURNS[:2]},
                 {"prompt": "a"}, {"messages": TURNS})
    assert [record.get("answer") for record in read_records(str(path))] == ["2", "2", None, None, "2"]
    assert " 2 records " in capsys.readouterr().out
    read_records(str(jsonl(tmp_path / "b.jsonl", {"prompt": "a", "answer": "b"})))
    assert not capsys.readouterr().out


def test_of_a_repeated_prompt_the_last_record_is_kept():
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}, {"prompt": TURNS, "n": 3}, {"prompt": "a", "n": 4},
            {"prompt": list(TURNS), "n": 5}]
    assert [r["n"] for r in unique_prompts(rows)] == [4, 2, 5]


def test_a_dataset_is_a_file_by_its_ending(tmp_path):
    assert all(map(has_prompts, ("a.jsonl", "b/a.json", "a.parquet", "hf:owner/name")))
    assert not has_prompts("arithmetic.old") and not has_prompts(str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="dataset=.*a.txt is a file, but not of prompts .*.jsonl.*--input=.*a.txt --out=data/mine"):
        has_prompts(str(tmp_path / "a.txt"))
    with pytest.raises(FileNotFoundError, match="dataset=gone.parquet does not exist"):
        load_records("gone.parquet")


def write_parquet(path, rows):
    """Writes a Parquet file. Returns its path as a string."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    table = pyarrow.Table.from_pylist(rows) if rows else pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    parquet.write_table(table, path)
    return str(path)


def test_a_parquet_file_holds_the_same_records_as_its_lines(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    lines = jsonl(tmp_path / "a.jsonl", *({k: x for k, x in row.items() if x is not None} for row in ROWS))
    records = load_records(path)
    assert without_place(records) == without_place(load_records(lines))
    assert records[2]["where"] == f"{path}, row 3"


@pytest.mark.parametrize("rows, message", [
    ([{"prompt": "a"}, {"prompt": None}], ", row 2: no prompt; it needs one of .*messages"), ([], " has no records"),
    (None, " is not a parquet file .*")])
def test_what_is_wrong_with_a_parquet_file_is_one_line(tmp_path, rows, message):
    path = write_parquet(tmp_path / "a.parquet", rows)
    if rows is None:
        (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(ValueError, match=f"^{path}{message}[^\n]*$"):
        load_records(path)


def test_a_column_with_a_reserved_name_is_left_out_of_a_table(tmp_path, capsys):
    rows = [{"prompt": "a", "text": "x", "tokens": 3, "level": 1}, {"prompt": "b", "text": None, "tokens": 4, "level": 2}]
    path = write_parquet(tmp_path / "a.parquet", rows)
    assert without_place(load_records(path)) == [{"prompt": "a", "level": 1}, {"prompt": "b", "level": 2}]
    assert capsys.readouterr().out == f"{path}: left out the columns text, tokens, whose names are reserved\n"


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
    both = read_hub(hub_folder(tmp_path / "a", monkeypatch, train=marked[:30], test=marked[30:]))
    assert [r["split"] for r in both] == ["train"] * 30 + ["val"] * 10
    assert [(r["prompt"], r["answer"]) for r in both] == [(row["question"], row["answer"]) for row in ROWS]
    assert both[31]["where"].endswith("data, test, row 2")
    three = read_hub(hub_folder(tmp_path / "b", monkeypatch, train=ROWS[:5], validation=ROWS[5:8], test=ROWS[8:]))
    assert [r["split"] for r in three] == ["train"] * 5 + ["val"] * 3
    one = read_hub(hub_folder(tmp_path / "c", monkeypatch, train=marked))
    assert len(one) == 40 and not any(r["split"] for r in one), "a hash of the prompt decides later"
    with pytest.raises(ValueError, match="could not be loaded .*BuilderConfig 'subset' not found"):
        read_hub(f"hf:{tmp_path}/c/data:subset")


def test_a_data_set_of_the_hub_that_cannot_be_read_is_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def refuse(name, subset):
        assert (name, subset) == ("owner/name", "main")
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match="^dataset=hf:owner/name:main could not be loaded .*Couldn't reach[^\n]*check "
                                         "the name and the network, or download it elsewhere[^\n]*$"):
        load_records("hf:owner/name:main")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: {"first": None, "second": None})
    with pytest.raises(ValueError, match="has the splits first, second but none named train"):
        load_records("hf:owner/name")


@pytest.mark.parametrize("package, dataset", [("pyarrow.parquet", "{}/a.parquet"), ("datasets", "hf:owner/name")])
def test_a_package_that_is_not_here_is_named_with_the_command(package, dataset, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    dataset = dataset.format(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"^dataset={dataset} needs the package {package.split('.')[0]}: pip install "
                                         "-r requirements-hf.txt$"):
        load_records(dataset)
