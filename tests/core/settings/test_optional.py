"""Packages that only a part of the project needs."""

import sys

import pytest

from core.settings.optional import require


def test_a_missing_package_is_one_line_with_the_remedy():
    assert require("json", "a setting") is sys.modules["json"]
    with pytest.raises(ValueError, match="^load_in_4bit=True needs the package no_such_package: pip install x$"):
        require("no_such_package.part", "load_in_4bit=True", "x")
