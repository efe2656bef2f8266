"""Malformed inputs: settings and prompts. Reading one may succeed, or raise the documented error: a
ValueError, UsageError, UserCodeError or FileNotFoundError of one line.

python tests/malformed.py --inputs=10000
python tests/malformed.py --inputs=2000 --kinds=records

Inputs are valid ones with parts replaced, cut or flipped, and texts that have broken parsers before. The valid one must
be accepted; a documented error must come from this project's code, or a script would print a traceback. Prints what the
inputs of each kind ended in, and ends with the first failing one, made smaller.
"""

import collections
import copy
import json
import os
import pathlib
import sys
import tempfile
import traceback

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import hypothesis
from hypothesis import strategies as st

from core.config import UsageError, load_config
from core.prompts import PromptConsumer, PromptFormat
from core.sample import SampleConfig
from core.settings.script import run_script
from core.settings.setting import Settings
from core.settings.user_code import ROOT, UserCodeError
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from tests.tiny import CAUSAL, all_settings

DOCUMENTED = (ValueError, UsageError, UserCodeError, FileNotFoundError)
CONFIGS = (GRPOConfig, PretrainConfig, SampleConfig)
SPECIAL = (-1, 0, 2**31, 10**30, 1e-320, float("nan"), float("inf"), "", "4", "..", "None", "a" * 5000, "'", "\n",
           "hf:", "\u202e", None, True, [], {}, [[]])
VALUES = st.one_of(st.sampled_from(SPECIAL),
                   st.integers(), st.floats(), st.text(max_size=20),
                   st.lists(st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=3),
                   st.dictionaries(st.text(max_size=5), st.integers(), max_size=2))
JUNK = st.one_of(st.sampled_from((b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000,
                                  b"\xff\xfe", b"\xef\xbb\xbf{}", b'"\\ud800"', b"\0" * 9, b"NaN", b"[1, 2")),
                 st.binary(max_size=50))


class Failed(AssertionError):
    """An input ended in something else than its documented error."""


def places(value):
    """(container, key) of every part of a JSON value, the whole aside."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@st.composite
def changed(draw, valid):
    """A JSON value with one to three parts replaced or left out."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        if not (found := places(value)):
            return copy.deepcopy(draw(VALUES))
        container, key = draw(st.sampled_from(found))
        if draw(st.booleans()):
            container[key] = copy.deepcopy(draw(VALUES))
        else:
            del container[key]
    return value


@st.composite
def damaged(draw, valid):
    """Bytes with one to four of them overwritten, or cut, or with others put in."""
    out = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(out) - 1)))
        if draw(st.booleans()) and out:
            out[place] = draw(st.integers(0, 255))
        else:
            out[place : draw(st.integers(place, len(out)))] = draw(st.binary(max_size=8))
    return bytes(out)


# Every kind of input: (a valid one, a strategy that damages it, the function that reads it)


def settings(folder):
    """Arguments of the command line."""
    fields = [(cls, key) for cls in CONFIGS for key in sorted(all_settings(cls))]
    text = st.one_of(VALUES.map(repr), VALUES.map(str), st.just("(" * 5000), st.text(max_size=20))
    argument = st.tuples(st.sampled_from(fields), text)
    return ((GRPOConfig, "seed"), "3"), argument, lambda a: load_config(a[0][0], [f"--{a[0][1]}={a[1]}"])


def records(folder):
    """Files of prompts."""
    valid = [{"prompt": "1+1=", "answer": 2, "completion": "2", "split": "train"},
             {"question": [{"role": "user", "content": "a"}], "completion": "4", "split": "val"}]
    lines = "\n".join(map(json.dumps, valid)).encode()
    whole = changed(valid).map(lambda value: json.dumps(value).encode())

    def read(content):
        path = pathlib.Path(folder, "prompts.jsonl")
        path.write_bytes(content)
        data = PromptConsumer(str(path), 2, tokenizer=CAUSAL, format=PromptFormat("chat"))
        data.problems("train", 0)
        data.require_completions()
        data.batch("train", 0)
    return lines, st.one_of(JUNK, whole, damaged(lines)), read


KINDS = {"settings": settings, "records": records}


def ending(read, value):
    """The end of reading an input: "accepted", or the name of the documented error. Raises Failed for another."""
    try:
        read(value)
    except Exception as error:  # whatever it is, it is reported
        if type(error) not in DOCUMENTED or "\n" in str(error) or not str(error):
            raise Failed(f"{type(error).__name__}: {error!s:.300}") from error
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        if not file.startswith(f"{ROOT}{os.sep}"):
            raise Failed(f"{type(error).__name__} of {file}: {error!s:.300}") from error
        return type(error).__name__
    return "accepted"


def check(kind, folder, inputs, seed=None):
    """Reads so many inputs of a kind. Returns {ending: count}. Raises Failed if the valid one is refused, and for the
    smallest that ends in another error than the documented one.

    seed: of the inputs; None: always the same ones
    """
    valid, strategy, read = KINDS[kind](folder)
    ends = collections.Counter()
    try:
        read(valid)
    except DOCUMENTED as error:
        raise Failed(f"the valid input is refused: {error}") from error

    def test(value):
        ends[ending(read, value)] += 1

    test = hypothesis.settings(max_examples=inputs, database=None, deadline=None, derandomize=seed is None,
                               suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False)(
        hypothesis.given(strategy)(test))
    (test if seed is None else hypothesis.seed(seed)(test))()
    return ends


class Malformed(Settings):
    """The settings of this script."""
    inputs: int = 10_000
    kinds: str = ",".join(KINDS)
    seed: int = 0


def main(argv):
    """Reads so many inputs of all kinds together, and prints what those of each kind ended in."""
    options, _ = load_config(Malformed, argv)
    names = options.kinds.split(",")
    for kind in names:
        with tempfile.TemporaryDirectory() as folder:
            ends = check(kind, folder, -(-options.inputs // len(names)), options.seed)
        print(f"{kind:<12}" + ", ".join(f"{count} {name}" for name, count in ends.most_common()), flush=True)


if __name__ == "__main__":
    run_script(main)
