"""Code of others that does the worst: each ends in one line that a terminal shows as it is."""

import pytest

from grpo.reward_functions.registry import Call, register_functions, run_reward


def one_line(function, *arguments):
    """The ValueError that a call ends in, which is one printable line."""
    with pytest.raises(ValueError) as found:
        function(*arguments)
    text = str(found.value)
    assert text.isprintable() and len(text) < 2000, text
    return text


REWARD_BODIES = {
    "exits": "raise SystemExit", "10 MB": "raise ValueError('x' * 10_000_000)",
    "control characters": "raise ValueError(chr(27) + '[2J' + chr(0) + chr(0x202e) + chr(10))",
    "no list": "return 5", "complex": "return [1j, 2]"}


def error_of(tmp_path, text, name="hostile", **fields):
    """The line that a reward of a user's file ends in."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    register_functions([name], str(path))
    return one_line(run_reward, Call(name, {"completions": ["a", "b"]} | fields, {}, 2))


@pytest.mark.parametrize("kind", REWARD_BODIES)
def test_a_reward_ends_in_one_line(kind, tmp_path):
    for prefix in ("def", "async def"):
        text = error_of(tmp_path, f"{prefix} hostile(completions):\n    {REWARD_BODIES[kind]}\n")
        assert "mine.py" in text
