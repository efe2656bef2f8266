"""JSON of others, and files with a record on each line."""

import pytest

from core.files.json_lines import each_record, keep_records, object_from_json, read_records


@pytest.mark.parametrize("text", ["[1, 2", "", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, b"\xff\xff", "[]", "null"])
def test_what_is_no_object_of_json_is_one_line(text):
    with pytest.raises(ValueError, match="^the file [^\n]*; copy it again$"):
        object_from_json(text, "the file", "copy it again")
    assert object_from_json(b'{"a": [1]}', "x", "") == {"a": [1]}


def test_records_are_read_one_at_a_time_and_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\nno JSON\n{"step": 4}')
    found = each_record(str(path))
    assert next(found) == {"step": 1} and next(found) == {"step": 2}
    for read in (next, lambda found: keep_records(str(path), 2)):
        with pytest.raises(ValueError, match="metrics.jsonl, line 4 is not JSON"):
            read(found)
    assert path.read_text().count("\n") == 4, "nothing is dropped"
    assert read_records(str(tmp_path / "none.jsonl")) == []


def test_records_of_later_steps_and_a_line_that_was_cut_short_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2}\n{"step": 3}\n{"step": 2, "lo')
    keep_records(str(path), 2)
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2}\n'
    keep_records(str(path), 0)
    assert path.read_text() == ""
