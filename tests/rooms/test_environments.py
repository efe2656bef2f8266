"""The calls of environments, and the shipped game."""

import random
import time
from functools import cache
from types import SimpleNamespace

import pytest

from core.settings.user_code import UserCodeError
from grpo.environments import Episode, environment, find_environment
from tests.tiny import ROOT


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_class_without_a_method_is_refused(method):
    whole = {"reset": lambda self, record: None, "step": lambda self, text: None}
    with pytest.raises(ValueError, match=f"Half.*{method}"):
        environment(type("Half", (), whole | {method: None}))


def new_game(low, high, seed=0):
    game = find_environment("Guess", f"{ROOT}/data/guess/environment.py")(seed)
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
    for number, guesses, last in ((14, range(1, 15), 0.0), (5, range(1, 6), 0.75), (9, [5, 4], 0.0)):  # a poor player's
        game = new_game(1, 15)
        game.number = number
        assert [game.step(f" {x}") for x in guesses][-1] == (None, last)


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
    assert isinstance(one.error, UserCodeError) and "OutOfTime" in str(one.error)
    one.close()
    assert "test_environments.py, line" in str(one.error) and "no end" in str(one.error)


@pytest.mark.parametrize(("method", "results"), [
    ("reset", [5, "a prompt"]), ("step", [None, ("a", "b"), ("a", float("nan")), ([{"role": "user"}], 1.0)])])
def test_what_is_something_else_than_it_should_be_is_named(monkeypatch, method, results):
    monkeypatch.setattr(Waiting, "step", lambda self, text: (None, 1.0))
    for result in results:
        monkeypatch.setattr(Waiting, method, lambda *_, x=result: x)
        one = episode()
        with pytest.raises(ValueError, match=f"environment='Waiting': its {method} must"):
            one.begin(0, {})
            one.step("x")
