"""JSON that others wrote: whatever is wrong with it is one ValueError."""

import json


def from_json(text, where, remedy):
    """The value of a JSON text. Raises ValueError for what is not JSON, and for numbers and depths that Python refuses.

    where: names the text; remedy: what to do, the end of the error
    """
    try:
        return json.loads(text)
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, or an int of thousands of digits
        one_line = getattr(error, "lineno", None) == 1
        reason = f"{error.msg}, column {error.colno}" if one_line else str(error).split(";")[0]
    raise ValueError(f"{where} is not JSON ({reason}); {remedy}")


def object_from_json(text, where, remedy):
    """The value of a JSON text that must be an object {...}; arguments as in from_json."""
    value = from_json(text, where, remedy)
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object {{...}}, not {type(value).__name__}; {remedy}")
    return value


def read_object(path, where, remedy):
    """The object {...} of a JSON file. where, remedy: as in from_json"""
    with open(path, "rb") as f:
        return object_from_json(f.read(), where, remedy)


def fault_of_json(value):
    """Why a value of lists and objects cannot be copied, compared and printed, in words; nothing if it can."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except RecursionError:
        return "nested too deeply"
    except UnicodeEncodeError:
        return "a text has half of a surrogate pair, which is no character"
    return ""
