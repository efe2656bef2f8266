"""Errors of the user's own code: their line, their error, nothing of ours."""

import asyncio
import json
import os
import re

import pytest

from core.settings.user_code import ROOT, UserCodeError, guarded, naming_line_of

HERE = os.path.join("tests", "core", "settings", "test_user_code.py")


def divides(a, b=0):
    return a / b


def checks_json(text):
    return json.loads(text)


def ends_its_task():
    raise asyncio.CancelledError


def has_no_file(text):
    raise SyntaxError("odd", (None, 3, 1, text))


class Callable:
    def __call__(self):
        raise SystemExit("no\nkey")


@pytest.mark.parametrize(("function", "arguments", "message"), [
    (divides, (1,), "return a / b: ZeroDivisionError: division by zero"),
    (checks_json, ("[1",), "return json.loads.text.: JSONDecodeError: Expecting ',' delimiter: .*"),
    (ends_its_task, (), "raise asyncio.CancelledError: CancelledError"), (has_no_file, ("x",), ".*: SyntaxError: odd.*"),
    (Callable(), (), 'raise SystemExit."no.nkey".: SystemExit: no key')])
def test_an_exception_has_the_innermost_line_of_the_user_and_what_it_was(monkeypatch, function, arguments, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserCodeError, match=f"^{HERE}, line [0-9]+: {message}$") as found, naming_line_of(function):
        function(*arguments)
    assert found.value.__cause__ is not None and re.fullmatch(f"{HERE}, line [0-9]+", found.value.line)


def test_the_error_of_a_library_is_one_line_and_one_of_this_project_stays_as_it_is():
    with pytest.raises(ValueError, match=r"^x is damaged \(Expecting value: line 1 column 1 .char 0.\); copy it$"):
        with guarded("x is damaged", "copy it"):
            json.loads("")
    with pytest.raises(ValueError, match="^a=1 is wrong$"), guarded("x is damaged", "copy it"):
        raise ValueError("a=1 is wrong")
