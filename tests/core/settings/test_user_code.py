"""Errors of the user's own code: their line, their error, nothing of ours."""

import functools
import json
import math
import os
import pickle

import pytest

from core.settings.user_code import ROOT, UserCodeError, definition, run_user_code, shortest

HERE = os.path.join("tests", "core", "settings", "test_user_code.py")


def divides(a, b=0):
    return a / b


def checks_json(text):
    return json.loads(text)


class Callable:
    def __call__(self):
        raise SystemExit("no\nkey")


def raises_nothing_to_read():
    raise LookupError


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_value_comes_back_as_it_is():
    assert run_user_code(divides, 6, b=3) == 2


@pytest.mark.parametrize(("function", "arguments", "message"), [
    (divides, (1,), "return a / b: ZeroDivisionError: division by zero"),
    (checks_json, ("[1",), "return json.loads.text.: JSONDecodeError: Expecting ',' delimiter: .*"),
    (Callable(), (), 'raise SystemExit."no.nkey".: SystemExit: no key'),
    (raises_nothing_to_read, (), "raise LookupError: LookupError")])
def test_an_exception_has_the_innermost_line_of_the_user_and_what_it_was(function, arguments, message):
    with pytest.raises(UserCodeError, match=f"^{HERE}, line [0-9]+: {message}$") as found:
        run_user_code(function, *arguments)
    assert found.value.__cause__ is not None and "\n" not in str(found.value)


def test_an_error_in_the_call_itself_names_the_definition():
    line = divides.__code__.co_firstlineno
    assert definition(functools.wraps(divides)(lambda: divides(1))) == f"{HERE}, line {line}"
    with pytest.raises(UserCodeError, match=f"^{HERE}, line {line}: TypeError: divides.. got an unexpected keyword"):
        run_user_code(divides, wrong=1)


def test_an_exception_without_a_part_of_the_user_stays_as_it_is():
    with pytest.raises(AttributeError):
        run_user_code(shortest, 1)
    assert definition(definition) is None


def test_an_exception_of_a_librarys_function_names_the_function():
    with pytest.raises(UserCodeError, match="json/__init__.py, line [0-9]+: JSONDecodeError: Expecting"):
        run_user_code(json.loads, "[1")
    with pytest.raises(UserCodeError, match="^fsum: TypeError"):
        run_user_code(math.fsum, 1)


def test_the_error_survives_the_way_out_of_a_worker_process():
    error = pickle.loads(pickle.dumps(UserCodeError("f.py, line 1: x", "KeyError: 'a'")))
    assert str(error) == "f.py, line 1: x: KeyError: 'a'" and error.line == "f.py, line 1: x"
