"""Files with a record on each line."""

import pytest

from core.files.json_lines import each_record, keep_records, read_records


def test_records_are_read_one_at_a_time(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\n{"step": 2}\nno JSON\n{"step": 4}')
    found = each_record(str(tmp_path / "metrics.jsonl"))
    assert next(found) == {"step": 1} and next(found) == {"step": 2}
    with pytest.raises(ValueError):
        next(found)
    assert read_records(str(tmp_path / "none.jsonl")) == []


def test_records_of_later_steps_and_a_line_that_was_cut_short_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2}\n{"step": 3}\n{"step": 2, "lo')
    keep_records(str(path), 2)
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2}\n'
    keep_records(str(path), 0)
    assert path.read_text() == ""


@pytest.mark.parametrize("line", ["{", "null", '{"loss": 1.0}', "[" * 100_000, "\udcff"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line.encode(errors="surrogateescape") + b'\n{"step": 2}\n')
    for read in (read_records, lambda path: keep_records(path, 2)):
        with pytest.raises(ValueError, match="metrics.jsonl, line 2 is damaged; delete the line") as error:
            read(str(path))
        assert "\n" not in str(error.value)
    assert path.read_bytes().count(b"\n") == 3, "nothing is dropped"
