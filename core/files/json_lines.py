"""JSON that is read with one line for whatever is wrong with it; files with a record on each line."""

import json
import os

from core.files.whole_files import replacing
from core.settings.user_code import guarded


def object_from_json(text, where, remedy):
    """The object {...} of a JSON text. Raises ValueError for another text.

    where: names the text; remedy: what to do, the end of the error
    """
    with guarded(f"{where} is not JSON", remedy):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object {{...}}, not {type(value).__name__}; {remedy}")
    return value


def read_object(path, where, remedy):
    """The object {...} of a JSON file. where, remedy: as in object_from_json"""
    with open(path, "rb") as f:
        return object_from_json(f.read(), where, remedy)


def read_records(path):
    """The records of a file as a list; none if there is no file."""
    return list(each_record(path))


def each_record(path):
    """Yields the records one at a time, because the file of a long run may be larger than the memory. A last line that
    a crash cut short is left out. Raises ValueError for a line that is no record."""
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            if line.endswith("\n") and line != "\n":
                yield object_from_json(line, f"{path}, line {number}", "delete the line")


def keep_records(path, step):
    """Drops the records of steps after `step`; at step 0, where a run begins, all of them."""
    with replacing(path) as new, open(new, "w") as f:
        for record in each_record(path):
            if 0 < step >= record["step"]:
                f.write(json.dumps(record) + "\n")
