"""Malformed settings and prompts: reading one may succeed, or raise a Mistake of one line.

Inputs are valid ones with parts replaced, cut or flipped, and texts that have broken parsers before. Of any other
exception a script would print the traceback.
"""

import copy
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from core.config import load_config
from core.errors import Mistake
from core.prompts import PromptConsumer, PromptFormat
from core.sample import SampleConfig
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from tests.tiny import CAUSAL, all_settings

FIELDS = [(cls, key) for cls in (GRPOConfig, PretrainConfig, SampleConfig) for key in sorted(all_settings(cls))]
SPECIAL = (-1, 0, 2**31, 10**30, 1e-320, float("nan"), float("inf"), "", "4", "..", "None", "a" * 5000, "'", "\n",
           "hf:", "\u202e", None, True, [], {}, [[]])
VALUES = st.one_of(st.sampled_from(SPECIAL), st.integers(), st.floats(), st.text(max_size=20),
                   st.lists(st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=3),
                   st.dictionaries(st.text(max_size=5), st.integers(), max_size=2))
TEXTS = st.one_of(VALUES.map(repr), VALUES.map(str), st.just("(" * 5000))
JUNK = st.one_of(st.sampled_from((b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000,
                                  b"\xff\xfe", b"\xef\xbb\xbf{}", b'"\\ud800"', b"\0" * 9, b"NaN", b"[1, 2")),
                 st.binary(max_size=50))
RECORDS = [{"prompt": "1+1=", "answer": 2, "completion": "2", "split": "train"},
           {"question": [{"role": "user", "content": "a"}], "completion": "4", "split": "val"}]
LINES = "\n".join(map(json.dumps, RECORDS)).encode()
many = hypothesis.settings(max_examples=100, database=None, deadline=None, derandomize=True,
                           suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False)


def places(value):
    """(container, key) of every part of a JSON value, the whole aside."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@st.composite
def changed(draw):
    """A file of records with one to three parts replaced or left out."""
    value = copy.deepcopy(RECORDS)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(value) or [({"": 0}, "")]))
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(VALUES))
        else:
            del container[key]
    return json.dumps(value).encode()


@st.composite
def damaged(draw):
    """Lines with one to four bytes overwritten, or cut, or with others put in."""
    out = bytearray(LINES)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(out)))
        out[place : draw(st.integers(place, len(out)))] = draw(st.binary(max_size=8))
    return bytes(out)


def check(read, *arguments):
    """Reads an input, which may raise a Mistake and nothing else."""
    try:
        read(*arguments)
    except Mistake as mistake:
        assert str(mistake) and "\n" not in str(mistake), repr(mistake)


@pytest.mark.slow
@many
@hypothesis.given(st.sampled_from(FIELDS), TEXTS)
def test_malformed_settings_end_in_a_mistake(field, text):
    cls, key = field
    check(load_config, cls, [f"--{key}={text}"])


@pytest.mark.slow
@many
@hypothesis.given(st.one_of(JUNK, changed(), damaged()))
def test_malformed_records_end_in_a_mistake(tmp_path, content):
    def read():
        data = PromptConsumer(str(tmp_path / "a.jsonl"), 2, tokenizer=CAUSAL, format=PromptFormat("chat"))
        data.require_completions()
        data.batch("train", 0)

    (tmp_path / "a.jsonl").write_bytes(content)
    check(read)
