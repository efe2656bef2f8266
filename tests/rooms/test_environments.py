"""The calls of environments, and the shipped game."""

import math
import time
from functools import cache, partial, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.errors import Mistake, definition
from core.generation import Stop
from grpo import environments
from grpo.environments import Episode, Episodes, check_begins, environment, find_environment
from grpo.reward_functions.registry import REWARDS, Reward, reward
from tests.tiny import CAUSAL, ROOT, prompt_config
from tests.trainers import prompt_trainer, records, run


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
    assert one.begin(0, {"prompt": "a"}) is one.step("a") is None
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
    one.begin(0, {"prompt": "a", "made": made})
    return one, one.step("a")


@pytest.mark.parametrize("made", [
    lambda: ("b", 0.5), lambda: ["b", 0.5], lambda: (x for x in ("b", 0.5)), lambda: ("b", np.float32(0.5)),
    lambda: ("b", torch.tensor(0.5))])
def test_a_pair_of_any_kind_is_an_answer_and_a_reward(made):
    one, answer = step_of(made)
    assert answer == "b" and one.reward == 0.5 and one.transcript == [["a", "b", 0.5]] and one.error is None


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
    assert one.reward == 0 and one.transcript == [["a", None, None]]


def test_an_environment_without_its_methods_or_metrics_fails_with_where_it_is_defined():
    one, _ = step_of(lambda: ("b", 0.5))
    assert one.measure() == {} and "'Returns' object has no attribute 'found'" in str(one.error)
    assert str(one.error).startswith(definition(Returns.reset))


@environment
class Base:
    def reset(self, record):
        self.guesses = 0

    def step(self, text):
        self.guesses += 1
        return None, 1.0


class Late(Base):
    metrics = ("wins",)

    def step(self, text):
        self.wins = 1, 2
        return None  # of an empty text


class Share(Base):
    metrics = ("share",)

    @property
    def share(self):
        return 1 / self.guesses, 1


class Inner(Base):
    def __init__(self):
        self.inner = Base()

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Given(Base):
    """Its methods are no functions of the class, and take more than they need."""
    reset = Base().reset
    close = None

    def __init__(self):
        self.step = partial(Base.step, self)


class Wrapped(Base):
    def with_another_argument(function):
        @wraps(function)
        def called(self, text):
            return function(self, text, "another")
        return called

    @with_another_argument
    def step(self, text, more):
        return None, 1.0


class Static:
    @staticmethod
    def reset(record, more=0):
        pass

    @classmethod
    def step(cls, *texts):
        return None, 1.0

    def close(self, *, slowly=False):
        pass


class OneName(Base):
    metrics = ("guessed")
    guessed = np.float32(1), torch.tensor(2)


def began(cls, monkeypatch):
    """Checks that the environment of a class can begin."""
    monkeypatch.setattr(environments, "ENVIRONMENTS", {})
    environment(cls)
    c = SimpleNamespace(environment=cls.__name__, reward_file=None, reward_timeout=0.2, max_turns=9)
    check_begins(c, SimpleNamespace(records={"train": [{"prompt": "a", "where": "data.jsonl, line 1"}]}))


@pytest.mark.parametrize("cls", [Base, Late, Share, Inner, Given, Wrapped, Static, OneName])
def test_an_environment_that_works_begins(cls, monkeypatch):
    began(cls, monkeypatch)


def test_metrics_may_be_one_name(monkeypatch):
    monkeypatch.setattr(environments, "ENVIRONMENTS", {})
    environment(OneName)
    one = Episode(SimpleNamespace(environment="OneName", reward_file=None, reward_timeout=0.2))
    one.begin(0, {"prompt": "a"})
    assert one.measure() == {"environment/guessed": (1.0, 2.0)}


@environment
class Breaks:
    """Fails at its end, in two ways of one kind; its metrics have all characters."""
    metrics = ("lost", "found\x1b[2J\u202e")
    close = 3

    def __init__(self):
        vars(self)[self.metrics[1]] = 3, 4

    def reset(self, record):
        self.lost = 1

    def step(self, text):
        return None, 1.0


@pytest.fixture
def ended(monkeypatch, capsys):
    """(environment, completions, do they end their turn) -> ({metric: (sum, count)}, what is said) of episodes."""
    monkeypatch.setattr(environments, "WARNED", {})

    def made(name, count=2, ends=True):
        c = prompt_config(environment=name, reward_functions=("environment",), group_size=count)
        episodes = Episodes({"record": [{"prompt": "a"}], "number": [0]}, 0, c, Stop(CAUSAL, ()))
        for n in range(count if ends else 0):
            assert episodes.answer_turn(n, [CAUSAL.stop_token_id])
        return episodes.close(), capsys.readouterr().err
    return made


def test_what_fails_at_the_end_of_an_episode_is_counted_and_said_once(ended):
    metrics, said = ended("Breaks")
    assert metrics["environment/failed"] == (2, 2) and metrics["environment/lost"] == (0.0, 0.0)
    first, second = said.splitlines()
    assert "test_environments.py, line" in first and "'lost'" in first and "'int' object is not callable" in second
    assert ended("Breaks")[1] == ""


def test_a_metric_of_any_name_is_measured_under_a_printable_key(ended):
    metrics, said = ended("Breaks")
    (key,) = metrics.keys() - {"environment/failed", "environment/turns", "environment/lost"}
    assert key.isprintable() and key.startswith("environment/found") and metrics[key] == (6.0, 8.0)
    assert all(line.isprintable() for line in said.splitlines())


def hostile(completions, log_metric):
    log_metric("$a^$\x1b[2J", 1.0)
    return [0.0 for _ in completions]


@pytest.mark.slow
def test_no_name_of_a_users_reaches_terminal_or_picture_raw(prompts, tmp_path, capsys, recwarn, monkeypatch):
    monkeypatch.setitem(REWARDS, "mine?[2J", Reward(hostile))  # what is registered in its place goes with the test
    hostile.__name__ = "mine\x1b[2J"
    reward(hostile)
    run(prompt_trainer(prompts, tmp_path, environment="Breaks", reward_functions=("environment", "mine?[2J"),
                       max_iters=3, stop_sequences=tuple("0123456789")))
    found = capsys.readouterr()
    assert found.out.count("environment/found") == found.out.count("reward/mine") == found.out.count("$a^$") == 3
    assert all(line.isprintable() for line in (found.out + found.err).split("\n"))
    assert all(key.isprintable() for record in records(tmp_path) for key in record)
    assert (tmp_path / "curves.png").exists() and not recwarn.list


def test_a_first_turn_begins_with_the_beginning_that_the_prompt_gives_it(monkeypatch):
    @environment
    class Hears:
        heard = []

        def reset(self, record):
            pass

        def step(self, text):
            self.heard.append(text)
            return "?", 0.0

    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So "}]
    c = prompt_config(environment="Hears", reward_functions=("environment",), group_size=2, max_new_tokens=20)
    problems = {"record": [{"prompt": chat, "where": "a"}], "number": np.zeros(1)}
    episodes = Episodes(problems, 0, c, Stop(CAUSAL, ("\n",)))
    first, second = CAUSAL.encode("one\n"), CAUSAL.encode("two\n")
    episodes.answer_turn(0, first)
    episodes.answer_turn(0, first + CAUSAL.encode("?") + second)
    assert Hears.heard == ["So one", "two"]
