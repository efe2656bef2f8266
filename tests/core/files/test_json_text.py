"""JSON of others: every fault is one line."""

import pytest

from core.files.json_text import fault_of_json, from_json, object_from_json


@pytest.mark.parametrize(("text", "reason"), [
    ("[1, 2", "Expecting ',' delimiter, column 6"), ('{\n"a" 1}', "Expecting ':' delimiter: line 2 column 5 .char 6."),
    ("", "Expecting value, column 1"), ("[" * 100_000, "nested too deeply"), ('{"a":' * 100_000, "nested too deeply"),
    ("9" * 5000, "Exceeds the limit .4300 digits. for integer string conversion: value has 5000 digits"),
    (b"\xff\xff", "'utf-8' codec can't decode byte 0xff in position 0: .*")])
def test_what_is_not_json_is_one_line(text, reason):
    with pytest.raises(ValueError, match=f"^the file is not JSON .{reason}.; copy it again$"):
        from_json(text, "the file", "copy it again")


def test_what_must_be_an_object_is_refused_if_it_is_another_value():
    with pytest.raises(ValueError, match="^x must be an object {...}, not list; copy it again$"):
        object_from_json("[]", "x", "copy it again")
    assert object_from_json(b'{"a": [1]}', "x", "") == {"a": [1]}


def test_values_that_cannot_be_copied_or_printed_have_a_fault():
    assert fault_of_json({"a": [1, "\u00e9\U0001f600", None], "b": {"c": ("x",)}}) == ""
    for value in ("\ud800", {"a": ["x", "\udfff"]}, {"\ud800": 1}):
        assert "surrogate" in fault_of_json(value)
