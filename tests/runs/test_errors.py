"""What code of others raises is a mistake with the user's line; what ours raises is a bug, which passes as it is."""

import json
import subprocess
import sys
import time

import pytest
import torch

from core.config import run_config_file
from core.errors import ROOT, Mistake, calling, definition, described, others, time_limit
from core.settings.setting import is_inside


@pytest.fixture
def gone(tmp_path, monkeypatch):
    """The working directory was removed."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()


def test_a_folder_that_is_gone_hides_no_error(gone):
    with pytest.raises(Mistake, match="test_errors.py, line .*ZeroDivisionError"):
        with others("it failed", "remedy", definition(waits)):
            raising(ZeroDivisionError())()


class NoException(BaseException):
    """As those of extensions in Rust."""


class Unprintable(Exception):
    """An exception whose text raises."""

    def __str__(self):
        raise SystemExit


def raising(exception):
    def fails():
        raise exception
    return fails


def waits():
    with time_limit(0.02):
        time.sleep(100)


def asks_ours():
    return is_inside(1, "no interval")


def takes_one(a):
    return a


HERE = r"^tests/runs/test_errors.py, line \d+: "
USERS = {
    "an error": (raising(ZeroDivisionError("by zero")), "ZeroDivisionError: by zero"),
    "an error of ours that he caused": (asks_ours, "ValueError"),
    "a library's that he caused": (lambda: json.loads("{"), "JSONDecodeError"),
    "an exit": (raising(SystemExit(3)), "SystemExit: 3"),
    "no Exception": (raising(NoException("at all")), "NoException: at all"),
    "a text that raises": (raising(Unprintable()), "Unprintable"),
    "no memory": (raising(MemoryError()), "MemoryError"),
    "no end": (waits, "OutOfTime"),
    "no such argument": (takes_one, "TypeError")}


@pytest.mark.parametrize("case", USERS)
def test_an_exception_of_the_users_code_is_a_mistake_with_his_line(case, monkeypatch):
    monkeypatch.chdir(ROOT)
    function, told = USERS[case]
    with pytest.raises(Mistake, match=f"{HERE}.*it failed .*{told}.*; remedy$") as found:
        with others("it failed", "remedy", definition(function)):
            function()
    assert str(found.value).isprintable()


@pytest.mark.parametrize("text", ["a = 1\nb = a +\n", "a = 1\nb = a / 0\n"])
def test_a_config_names_its_line(tmp_path, text):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(Mistake, match="c.py, line 2: b = a"):
        run_config_file(str(tmp_path / "c.py"))


def test_without_a_line_of_the_users_a_library_is_named_by_what_it_did():
    with pytest.raises(Mistake, match=r"^a\.json is not JSON \(JSONDecodeError: .*\); copy it again$"):
        with others("a.json is not JSON", "copy it again"):
            json.loads("{")


def test_a_mistake_of_ours_under_the_users_line_is_told_with_it():
    def reads():
        run_config_file("gone.py")

    with pytest.raises(Mistake, match="test_errors.py, line .*it failed .gone.py does not exist; correct the path.; r"):
        with others("it failed", "remedy"):
            reads()


def test_a_function_of_ours_is_called_without_a_guard():
    with pytest.raises(ValueError) as found:
        with calling(is_inside, "it failed"):
            json.loads("{")
    assert type(found.value) is json.JSONDecodeError
    with pytest.raises(Mistake, match="^tests|/test_errors.py, line .*it failed"):
        with calling(takes_one, "it failed"):
            json.loads("{")


@pytest.mark.parametrize("exception", [
    Mistake("a remedy"), KeyboardInterrupt(), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_mistakes_interrupts_and_too_little_memory_pass_as_they_are(exception):
    with pytest.raises(type(exception)) as found:
        with others("it failed", "remedy"):
            raise exception
    assert found.value is exception


def test_a_comprehension_of_the_block_is_the_block():
    with pytest.raises(Mistake, match="KeyError: 'b'"):
        with others("it failed", "remedy"):
            [x["b"] for x in ({"a": 1},)]
    with pytest.raises(ValueError) as found:
        with others("it failed", "remedy"):
            sorted([is_inside(x, "no interval") for x in (1, 2)])
    assert type(found.value) is ValueError


def test_a_bug_of_ours_passes_as_it_is_unless_the_block_is_a_trial():
    with pytest.raises(ValueError) as found:
        with others("it failed", "remedy"):
            is_inside(1, "no interval")
    assert type(found.value) is ValueError
    with pytest.raises(Mistake, match="it failed"):
        with others("it failed", "remedy", ours_too=True):
            is_inside(1, "no interval")


def test_an_exception_in_words_is_one_printable_line():
    assert described(type("a\nb", (Exception,), {})("c")) == "a b: c"
    assert described(ValueError("a\n\x1b b" + "c" * 1000)).startswith("ValueError: a ? b")
    assert described(ValueError()) == "ValueError" and described(Mistake("correct it")) == "correct it"
    assert len(described(ValueError("c" * 10_000_000))) < 400


def test_a_file_beside_a_script_or_in_the_root_hides_no_library_once_the_script_runs(tmp_path):
    (tmp_path / "script.py").write_text(f"""import sys
sys.path.insert(0, {ROOT!r})
from core.errors import run_script

def main(argv):
    print(sys.path[-1], sys.path.count({ROOT!r}), {str(tmp_path)!r} in sys.path)

run_script(main)
""")
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True)
    assert done.stdout.split() == [ROOT, "1", "False"], done.stderr
