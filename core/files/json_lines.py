"""Files with a record on each line, which a run writes as it goes: an object of JSON with the `step` it belongs to."""

import json
import os

from core.files.whole_files import replacing


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
                yield record_of(line, f"{path}, line {number}")


def record_of(line, where):
    """One record. Raises ValueError if the line, which `where` names, is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f"{where} is damaged; delete the line")
    return record


def keep_records(path, step):
    """Drops the records of steps after `step`; at step 0, where a run begins, all of them."""
    with replacing(path) as new, open(new, "w") as f:
        for record in each_record(path):
            if 0 < step >= record["step"]:
                f.write(json.dumps(record) + "\n")
