"""Code and files of others that do the worst: each ends in one line that a terminal shows as it is."""

import importlib.util

import pytest

from core.config import load_config
from grpo.grpo_config import GRPOConfig
from grpo.reward_functions.registry import REWARDS, load_reward_file, run_reward
from grpo.reward_functions.trl import register_functions


def one_line(function, *arguments):
    """The ValueError that a call ends in, which is one printable line."""
    with pytest.raises(ValueError) as found:
        function(*arguments)
    text = str(found.value)
    assert text.isprintable() and len(text) < 2000, text
    return text


@pytest.fixture
def table(monkeypatch):
    """The table of rewards, which is as before after the test."""
    monkeypatch.setattr("grpo.reward_functions.registry.REWARDS", REWARDS)
    before = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(before)


LIES = """
class Odd:
    def __len__(self): raise KeyError("x")
    def __iter__(self): raise KeyError("x")
    def __repr__(self): raise KeyError("x")
    def __float__(self): raise KeyError("x")
class Own(BaseException):
    def __str__(self): raise KeyError("x")
import asyncio, torch
"""
REWARD_BODIES = {
    "GeneratorExit": "raise GeneratorExit", "BaseException": "raise BaseException('x')", "exits": "raise SystemExit",
    "cancelled": "raise asyncio.CancelledError", "error without a text": "raise Own",
    "10 MB": "raise ValueError('x' * 10_000_000)",
    "control characters": "raise ValueError(chr(27) + '[2J' + chr(0) + chr(0x202e) + chr(10))",
    "meta tensor": "return torch.zeros(2, device='meta')", "sparse tensor": "return torch.zeros(2).to_sparse()",
    "length raises": "return Odd()", "float raises": "return [Odd(), Odd()]", "complex": "return [1j, 2]",
    "too many": "return [1.0] * 1000", "large int": "return [10**5000] * 2", "nested": "return [[Odd()]] * 2"}


@pytest.mark.parametrize("prefix", ["def", "async def"])
@pytest.mark.parametrize("kind", REWARD_BODIES)
def test_a_reward_ends_in_one_line(kind, prefix, table, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"{LIES}\n{prefix} hostile(completions):\n    {REWARD_BODIES[kind]}\n")
    register_functions(["hostile"], load_reward_file(str(path)), str(path))
    text = one_line(run_reward, "hostile", {"completions": ["a", "b"]}, {}, 2)
    assert "hostile" in text and "mine.py" in text


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_an_async_reward_that_would_end_the_loop_is_one_line(kind, table, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"async def hostile(completions):\n    raise {kind}\n")
    register_functions(["hostile"], load_reward_file(str(path)), str(path))
    for _ in range(2):  # the loop lives on
        assert kind in one_line(run_reward, "hostile", {"completions": ["a", "b"]}, {}, 2)


def test_a_library_s_reward_without_its_package_names_the_function(table, tmp_path):
    pytest.importorskip("trl")
    if importlib.util.find_spec("math_verify"):
        pytest.skip("its package is here")
    path = tmp_path / "mine.py"
    path.write_text("from trl.rewards import accuracy_reward\n")
    register_functions(["accuracy_reward"], load_reward_file(str(path)), str(path))
    fields = {"completions": [[{"role": "assistant", "content": "4"}]], "solution": ["4"]}
    assert "math_verify" in one_line(run_reward, "accuracy_reward", fields, {}, 1)


def test_a_range_that_is_no_number_is_one_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from grpo.rewards import reward\n@reward('a', 1)\ndef hostile(completions): pass\n")
    assert "smallest and the largest value" in one_line(load_reward_file, str(path))


@pytest.mark.parametrize("text", ["class X:\n    def __repr__(self): raise KeyError\nseed = X()",
                                  "raise BaseException(chr(27) * 9)", "seed = 10**5000", "raise GeneratorExit",
                                  "x = []\nfor _ in range(5000): x = [x]\nseed = x"])
def test_a_config_ends_in_one_line(text, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(text)
    one_line(load_config, GRPOConfig, [str(path)])
