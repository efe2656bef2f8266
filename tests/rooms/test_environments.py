"""The calls of environments, and the shipped game."""

import time
from functools import cache
from types import SimpleNamespace

import pytest

from core.errors import Mistake
from grpo.environments import Episode, environment, find_environment
from tests.tiny import ROOT


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


@pytest.mark.parametrize(("number", "guesses", "reward"), [
    (8, [8], 1.0), (5, [8, 4, 6, 5], 1.0), (5, range(1, 6), 0.75), (14, range(1, 15), 0.0), (9, [5, 4], 0.0)])
def test_the_reward_falls_with_more_guesses_than_the_best_player_needs(number, guesses, reward):
    game = new_game(1, 15)
    game.number = number
    assert [game.step(f" {x}") for x in guesses][-1] == (None, reward)


@environment
class Waiting:
    """Needs no seed, waits for ever in its first step, and raises at its end."""

    def reset(self, record):
        pass

    def step(self, text):
        time.sleep(1000)

    def close(self):
        raise RuntimeError("no end")


def test_an_environment_that_waits_or_raises_fails_with_the_line_of_its_file():
    one = Episode(SimpleNamespace(environment="Waiting", reward_file=None, reward_timeout=0.05, max_turns=9))
    assert one.begin(0, {}) is one.step("a") is None
    assert isinstance(one.error, Mistake) and "OutOfTime" in str(one.error)
    one.close()
    assert "test_environments.py, line" in str(one.error) and "no end" in str(one.error)
