"""Packages that only a part of the project needs."""

import sys

import pytest

from core.settings.optional import REQUIREMENTS, require
from tests.tiny import ROOT


def test_a_package_that_is_there_is_given():
    assert require("json", "a setting") is sys.modules["json"]
    assert require("os.path", "a setting") is sys.modules["os.path"]


def test_a_missing_package_is_one_line_with_the_remedy():
    with pytest.raises(ValueError) as caught:
        require("no_such_package.part", "template='model'")
    assert str(caught.value) == ("template='model' needs the package no_such_package: "
                                 "pip install -r requirements-hf.txt")


def test_a_package_beside_the_requirements_has_a_remedy_of_its_own():
    with pytest.raises(ValueError, match="^load_in_4bit=True needs the package no_such_package: pip install another$"):
        require("no_such_package", "load_in_4bit=True", "another")


def test_a_package_that_lacks_a_package_of_its_own_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        require("half_installed", "a setting")


def test_every_package_of_the_requirements_is_pinned():
    lines = open(f"{ROOT}/{REQUIREMENTS}").read().split()
    assert {"transformers", "peft", "datasets", "tokenizers"} <= {line.partition("==")[0] for line in lines}
    assert all(line.count("==") == 1 for line in lines)
