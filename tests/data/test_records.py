"""Records of prompts: every way to write them is read."""

import json

import pytest

from core.records import load_records, read_hub, read_records
from tests.tiny import jsonl, without_place

ROWS = [{"question": f"{i}+{i}?", "answer": 2 * i, "level": None if i % 2 else "easy"} for i in range(40)]


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


def write_parquet(path, rows):
    """Writes a Parquet file. Returns its path as a string."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_a_parquet_file_holds_the_same_records_as_its_lines(tmp_path):
    records = load_records(write_parquet(tmp_path / "a.parquet", ROWS))
    lines = jsonl(tmp_path / "a.jsonl", *({k: x for k, x in row.items() if x is not None} for row in ROWS))
    assert without_place(records) == without_place(load_records(lines))


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
    one = read_hub(hub_folder(tmp_path / "c", monkeypatch, train=marked))
    assert len(one) == 40 and not any(r["split"] for r in one), "a hash of the prompt decides later"
