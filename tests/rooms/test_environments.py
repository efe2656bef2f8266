"""The calls of environments, and the shipped game."""

import math
import time
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.errors import Mistake, definition
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


class Slow:
    def __float__(self):
        time.sleep(1000)


class Failing:
    def __iter__(self):
        raise KeyError("no pair")


class Vague:
    def __repr__(self):
        raise RuntimeError


@environment
class Returns:
    """Its step returns what `made` makes."""
    metrics = ("found",)

    def reset(self, record):
        self.made = record["made"]

    def step(self, text):
        return self.made()


def step_of(made):
    one = Episode(SimpleNamespace(environment="Returns", reward_file=None, reward_timeout=0.2, max_turns=9))
    one.begin(0, {"made": made})
    return one, one.step("a")


@pytest.mark.parametrize("made", [
    lambda: ("b", 0.5), lambda: ["b", 0.5], lambda: (x for x in ("b", 0.5)), lambda: ("b", np.float32(0.5)),
    lambda: ("b", torch.tensor(0.5))])
def test_a_pair_of_any_kind_is_an_answer_and_a_reward(made):
    one, answer = step_of(made)
    assert answer == "b" and one.rewards == [0.5] and one.error is None


@pytest.mark.parametrize("made", [
    lambda: None, lambda: ("b", "c"), lambda: ("b", 10**400), lambda: ("b", math.nan), lambda: (1, 1.0),
    lambda: ("b", 1.0, 2.0), lambda: (Vague(), 1.0), lambda: ([{"role": "user"}], 1.0)])
def test_what_is_no_answer_and_reward_ends_the_run(made):
    with pytest.raises(Mistake, match="environment='Returns': its step must return"):
        step_of(made)


@pytest.mark.parametrize(("made", "told"), [
    (lambda: ("b", Slow()), "OutOfTime"), (Failing, "KeyError: 'no pair'"), (lambda: 1 / 0, "ZeroDivisionError"),
    (lambda: iter([1]).throw(1), "AttributeError")])
def test_what_fails_while_it_is_read_fails_the_completion_alone(made, told):
    one, answer = step_of(made)
    assert answer is None and "test_environments.py, line" in str(one.error) and told in str(one.error)
    assert one.rewards == []


def test_an_environment_without_its_methods_or_metrics_fails_with_where_it_is_defined():
    one, _ = step_of(lambda: ("b", 0.5))
    assert one.measure() == {} and "'Returns' object has no attribute 'found'" in str(one.error)
    assert str(one.error).startswith(definition(Returns.reset))
