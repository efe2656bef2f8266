"""Files on the disk, JSON of others, files with a record on each line."""

import os
import stat

import pytest

from core.files import CannotWrite, each_record, keep_records, object_from_json, replacing
from tests.tiny import read_records


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_has_the_mode_that_open_gives(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, real=real: (done.append(name), real(*arguments))[1])
    (tmp_path / "plain").write_text("")
    with replacing(tmp_path / "new" / "a") as new:
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o600))
    assert done == ["fsync", "replace"]
    assert stat.S_IMODE((tmp_path / "new" / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error, ends", [
    (KeyboardInterrupt(), KeyboardInterrupt), (ValueError("x"), ValueError),
    (OSError(28, "No space left on device"), CannotWrite)], ids=repr)
def test_a_block_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path, error, ends):
    (tmp_path / "a").write_text("before")
    with pytest.raises(ends), replacing(str(tmp_path / "a")) as new:
        (tmp_path / new).write_text("half")
        raise error
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "before"


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
