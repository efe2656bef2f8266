"""Packages that only a part of the project needs."""

import sys

import pytest

from core.settings.optional import require


def test_a_missing_package_is_one_line_with_the_remedy():
    assert require("json", "a setting") is sys.modules["json"]
    with pytest.raises(ValueError, match="^load_in_4bit=True needs the package no_such_package: pip install x$"):
        require("no_such_package.part", "load_in_4bit=True", "x")


def test_a_package_that_lacks_a_package_of_its_own_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        require("half_installed", "a setting")
