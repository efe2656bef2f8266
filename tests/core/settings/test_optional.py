"""Packages that only a part of the project needs."""

import sys

import pytest

from core.settings.optional import require


def test_a_package_that_is_there_is_given():
    assert require("json", "a setting") is sys.modules["json"]
    assert require("os.path", "a setting") is sys.modules["os.path"]


def test_a_missing_package_is_one_line_with_the_remedy():
    for why, install, command in (("template='model'", (), "-r requirements-hf.txt"), ("load_in_4bit=True", ("x",), "x")):
        with pytest.raises(ValueError, match=f"^{why} needs the package no_such_package: pip install {command}$"):
            require("no_such_package.part", why, *install)


def test_a_package_that_lacks_a_package_of_its_own_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        require("half_installed", "a setting")
