"""Environments by name, their calls, the settings that go with them, and the shipped game."""

import pathlib
import random
import re
import time
from functools import cache
from types import SimpleNamespace

import pytest

from core.settings.user_code import UserCodeError
from grpo import environments
from grpo.environments import ENVIRONMENTS, Episode, environment, find_environment
from tests.tiny import ROOT, jsonl, prompt_config, run_here

GAME = {"environment": "Guess", "reward_file": f"{ROOT}/data/guess/environment.py",
        "reward_functions": ("environment",)}


@pytest.mark.parametrize(("spoiled", "words"), [
    ({"step": lambda self: None}, "needs step.self, text."), ({"reset": None}, "needs reset.self, record."),
    ({"metrics": ("turns",)}, "metrics=.* must be a tuple of names")])
def test_a_class_without_a_method_or_with_metrics_of_another_kind_is_refused(spoiled, words):
    whole = {"reset": lambda self, record: None, "step": lambda self, text: None}
    with pytest.raises(ValueError, match=f"^environment Half: .*{words}"):
        environment(type("Half", (), whole | spoiled))
    assert "Half" not in ENVIRONMENTS


@pytest.mark.parametrize(("settings", "words"), [
    ({"environment": None, "reward_functions": ("length_penalty",), "max_turns": 3}, "max_turns=3 is a setting of environment"),
    ({"environment": None}, "environment=None"), ({"reward_functions": ("length_penalty",)}, "environment"),
    ({"overlong_buffer": 2}, "overlong_buffer=2")])
def test_settings_that_do_not_go_together_are_refused(settings, words):
    prompt_config(**GAME)
    with pytest.raises(ValueError, match=words):
        prompt_config(**GAME | settings)


def test_an_environment_that_cannot_begin_ends_the_start_with_the_line_of_its_file(tmp_path):
    (tmp_path / "broken.py").write_text("from grpo.environments import environment\n@environment\nclass Broken:\n"
        "    def reset(self, record): record['gone']\n    def step(self, text): return None, 1.0\n")
    done = run_here("grpo/train_grpo.py", "config/grpo_guess.py", "--environment=Broken", f"--reward_file={tmp_path}/broken.py",
                    f"--out_dir={tmp_path}/out", "--dry_run",
                    f"--dataset={jsonl(tmp_path / 'p.jsonl', *({'prompt': f'{n}-9:'} for n in range(40)))}")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert "environment='Broken' does not begin with " in done.stderr
    assert "broken.py, line 4: def reset(self, record): record['gone']: KeyError: 'gone'" in done.stderr


def test_the_examples_of_the_page_run(monkeypatch):
    monkeypatch.setattr(environments, "ENVIRONMENTS", {})
    page = pathlib.Path(ROOT, "docs", "environments.md").read_text()
    found = {}
    for example in re.findall("```python\n(.*?)```", page, re.DOTALL):
        exec(example, found)
    game = found["Guess"](3)
    game.reset({})
    assert [game.step(text) for text in ("x", "0", "64", str(game.number))] == [(None, 0), ("+", 0), ("-", 0), (None, 1)]
    program = found["Mend"]()
    program.reset({"tests": "assert twice(2) == 4"})
    assert program.step("def twice(x): return x") == ("The tests: failed. Try again.", 0.0)
    assert program.step("def twice(x): return 2 * x") == (None, 1.0)
    tools = found["Tools"]()
    assert tools.reset({"prompt": "6*7=", "answer": "42"}) == "6*7="
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    assert tools.step(call) == ([{"role": "tool", "content": "42"}], 1.0)
    assert tools.step("<tool_call>no json</tool_call>")[0][0]["content"].startswith("error")


def new_game(low, high, seed=0):
    game = find_environment("Guess", GAME["reward_file"])(seed)
    game.reset({"prompt": f"{low}-{high}:"})
    return game


@cache
def worst(count):
    """The guesses that the best player needs at worst for one of `count` numbers, by trying all guesses."""
    if count == 0:
        return 0
    return 1 + min(max(worst(left), worst(count - 1 - left)) for left in range(count))


def test_optimal_guesses_are_those_of_a_search_over_all_games():
    for count in range(1, 64):
        game = new_game(10, 9 + count)
        assert game.allowed == worst(count)
        for guess in range(10, 10 + count):
            rest = max(worst(guess - 10), worst(9 + count - guess))
            assert game.is_optimal(guess) == (1 + rest == worst(count)), (count, guess)


def test_a_player_who_halves_always_wins_and_the_reward_falls_with_more_guesses():
    rng = random.Random(1)
    for seed in range(200):
        low = rng.randint(1, 60)
        game = new_game(low, low + rng.randint(7, 39), seed)
        answer = "+"
        while answer is not None:
            answer, reward = game.step(str((game.low + game.high) // 2))
        assert reward == 1.0 and game.optimal == (game.guesses, game.guesses)
    for number, guesses, last in ((14, range(1, 15), 0.0), (5, range(1, 6), 0.75)):  # those of a poor player
        game = new_game(1, 15)
        game.number = number
        assert [game.step(f" {x}") for x in guesses] == [("+", 0.0)] * (number - 1) + [(None, last)]
    for guesses in (["0"], ["16"], ["x"], ["5", "4"]):  # the answer to the last guess was known, or it is no number
        game = new_game(1, 15)
        game.number = 9
        assert [game.step(guess) for guess in guesses][-1] == (None, 0.0)


def test_the_number_depends_on_the_seed_alone():
    numbers = [new_game(1, 63, seed).number for seed in (*range(40), *range(40))]
    assert numbers[:40] == numbers[40:] and len(set(numbers)) > 15


@environment
class Waiting:
    """Needs no seed, waits for ever in its first step, and raises at its end."""

    def reset(self, record):
        pass

    def step(self, text):
        time.sleep(1000)

    def close(self):
        raise RuntimeError("no end")


def episode(seconds=0.5):
    return Episode(SimpleNamespace(environment="Waiting", reward_file=None, reward_timeout=seconds, max_turns=9))


def test_an_environment_that_waits_or_raises_fails_with_the_line_of_its_file():
    one = episode(seconds=0.05)
    assert one.begin(0, {}) is one.step("a") is None
    assert isinstance(one.error, UserCodeError) and "OutOfTime: it was not done after 0.05 seconds" in str(one.error)
    one.close()
    assert "test_environments.py, line" in str(one.error) and "no end" in str(one.error)


@pytest.mark.parametrize("method, attribute, results", [
    ("reset", "reset", [5, [{"role": "user"}]]), ("step", "step", [None, ("a", "b"), ("a", float("nan"))]),
    ("metrics", "count", [3, ("a", 1)])])
def test_what_is_something_else_than_it_should_be_is_named(monkeypatch, method, attribute, results):
    monkeypatch.setattr(Waiting, "metrics", ("count",))
    monkeypatch.setattr(Waiting, "step", lambda self, text: (None, 1.0))
    for result in results:
        value = result if attribute == "count" else lambda *_, x=result: x
        monkeypatch.setattr(Waiting, attribute, value, raising=False)
        one = episode()
        with pytest.raises(ValueError, match=f"^environment='Waiting': its {method} must "):
            one.begin(0, {})
            one.step("x")
            one.measure()
