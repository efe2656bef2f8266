"""Atomic file writes, checked JSON reads, and the names of a run's files."""

import contextlib
import json
import os

import safetensors

from core.errors import Mistake, one_line, others

STATE = "state.pt"
BEFORE = "state-before.pt"
BEST = "best"  # the folder of the best model and its state
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
CONSOLE = "console.log"
CONFIG = "config.json"
REPORT = "report.html"
CURVES = "curves.png"
VLLM_WEIGHTS = "vllm-weights"
RUN_FILES = (STATE, BEFORE, METRICS, SAMPLES, CONSOLE, CONFIG, REPORT, CURVES)
HUB = "hf:"  # prefix of a name on the Hugging Face hub, hf:owner/name
UMASK = os.umask(0)  # the only way to read it is to set another one
os.umask(UMASK)


def on_hub(path):
    """True for a name of the Hugging Face hub, hf:owner/name."""
    return path.startswith(HUB)


def lies_in(path, folder):
    """True if `path`, which may be None, lies directly in the folder of a run or in its best/."""
    if path is None:
        return False
    parent = os.path.dirname(os.path.realpath(path))
    folder = os.path.realpath(folder)
    return parent in (folder, os.path.join(folder, BEST))


class CannotWrite(Mistake):
    """A file could not be written."""


@contextlib.contextmanager
def writing(path):
    """Raises CannotWrite, with the reason in one line, if the block cannot write to `path`."""
    try:
        yield
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        if isinstance(error.__context__, OSError):  # torch.save raises its own error when it closes the file
            error = error.__context__
        if isinstance(error, RuntimeError):
            raise
        if isinstance(error, OSError) and error.errno is None:  # not about a file
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise CannotWrite(f"{path} could not be written ({reason})") from None


@contextlib.contextmanager
def replacing(path):
    """Yields the name of a new file beside `path`, which replaces `path` after the block. If the block fails, `path` is
    unchanged. Raises CannotWrite."""
    new = f"{path}.tmp"
    with writing(path):
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            yield new
            put_in_place(new, path)
        finally:
            if os.path.exists(new):
                os.remove(new)


def put_in_place(new, path):
    """Replaces `path` by the file `new`, once it is flushed to disk, with the mode that open() gives."""
    with contextlib.suppress(PermissionError):  # some file systems have no modes
        os.chmod(new, 0o666 & ~UMASK)  # safetensors makes files that only their owner may read
    with open(new, "r+b") as f:
        os.fsync(f.fileno())
    os.replace(new, path)


def write_json(path, value):
    """Writes plain values to a JSON file atomically."""
    with replacing(path) as new, open(new, "w") as f:
        json.dump(value, f, indent=1)


def value_from_json(text, where, remedy):
    """Parses a JSON text. Raises Mistake if it is not JSON.
    where: names the text; remedy: what to do, the end of the error"""
    with others(f"{where} is not JSON", remedy):
        return json.loads(text)


def object_from_json(text, where, remedy):
    """Parses a JSON text that must be an object {...}. Raises Mistake if it is not. where, remedy: as in
    value_from_json"""
    value = value_from_json(text, where, remedy)
    if not isinstance(value, dict):
        raise Mistake(f"{where} must be an object {{...}}, not {type(value).__name__}; {remedy}")
    return value


def read_object(path, where, remedy):
    """Reads the object {...} in a JSON file. where, remedy: as in value_from_json"""
    with open(path, "rb") as f:
        return object_from_json(f.read(), where, remedy)


def each_record(path, say=None):
    """Yields the records of a file, one on each line; none if there is no file. The file may be larger than memory.

    say: takes a message if a crash cut the last line short, which is then left out
    Raises Mistake for a line that is not the record of a step.
    """
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8", errors="replace") as f:
        for number, line in enumerate(f, 1):
            if line == "\n":
                continue
            where = f"{path}, line {number}"
            remedy = "delete the line"
            if not line.endswith("\n"):
                if say is not None:
                    say(f"{where} was cut short, and is left out")
                return
            record = object_from_json(line, where, remedy)
            step = record.get("step")
            if type(step) is not int or not 0 <= step < 1e15:
                raise Mistake(f"{where} has no whole number as its step; {remedy}")
            yield record


def each_metrics(path):
    """Yields the records of a metrics.jsonl as each_record does. Raises Mistake for a value that is not a number."""
    for record in each_record(path):
        for name, value in record.items():
            if value is not None and type(value) not in (int, float):
                raise Mistake(f"{path}, step {record['step']}: {one_line(name, 100)} is no number; delete the line")
        yield record


def starts_of(config, path):
    """Returns the records of a run's starts. config: the content of its config.json at `path`. Raises Mistake if they
    do not have the form that core/run.py records."""
    starts = config.get("starts", [])
    if not isinstance(starts, list) or not all(map(is_start, starts)):
        raise Mistake(f"{path}: starts must be a list of what was written there; delete the file")
    return starts


def is_start(start):
    """True for an object of the form that core/run.py records."""
    if not isinstance(start, dict):
        return False
    match {"end": {}, "settings": {}} | start:
        case {"end": dict(end), "settings": dict(settings)}:
            is_complete = not end or end.keys() >= {"ended", "step", "time", "why"}
            return is_complete and all(isinstance(about, dict) for about in settings.values())
    return False


def keep_records(path, step, say=None):
    """Drops the records of steps after `step`; at step 0, where a run begins, all records. say: as in each_record"""
    with replacing(path) as new, open(new, "w") as f:
        for record in each_record(path, say):
            if step > 0 and record["step"] <= step:
                f.write(json.dumps(record) + "\n")
