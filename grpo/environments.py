"""Environments: classes that answer what a model writes, so that a completion has several turns.

from grpo.environments import environment

@environment
class Guess:
    def __init__(self, seed): ...      # only if it draws: all completions of a group get the same seed
    def reset(self, record): ...       # gets the record, whose prompt the policy reads
    def step(self, text): ...          # -> (answer, reward): the answer None ends the episode
    def close(self): ...               # optional
    metrics = ("name",)                # optional: attributes that are (sum, count) at the end, logged as means

An answer is encoded once. Its tokens are read through the cache of its completion, one by one, like those that the
policy writes.
"""

import copy
import inspect
import itertools
import math
import sys

import numpy as np
import torch

from core.data_folder import OF_CONSUMER
from core.prompts import PromptFormat
from core.records import are_messages
from core.settings.user_code import UserCodeError, naming_line_of, one_line, time_limit
from grpo.reward_functions.registry import load_reward_file
from grpo.rollout import REWARD, TURNS, join

ENVIRONMENTS = {}  # {name: class}
SEEDS = 3          # the first number of the seeds of environments, so that they differ from other noise
WARNED = set()     # lines of environments whose errors were printed in this process


def environment(cls):
    """Registers a class under its name."""
    cls.metrics = tuple(getattr(cls, "metrics", ()))
    ENVIRONMENTS[cls.__name__] = cls
    return cls


def find_environment(name, path):
    """The class of this name; the reward_file at `path`, if there is one, has run."""
    load_reward_file(path)
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment={name!r} is no @environment class of reward_file={path}; known: "
                         f"{', '.join(ENVIRONMENTS) or 'none'}")
    return ENVIRONMENTS[name]


def check_begins(config, data):
    """Raises ValueError if an environment cannot begin with the first record of `data`, a PromptConsumer."""
    episode, record = Episode(config), data.records["train"][0]
    episode.begin(0, record)
    if episode.error is not None:
        raise ValueError(f"environment={config.environment!r} does not begin with {record['where']}: {episode.error}")
    episode.close()


class Episode:
    """The environment of one completion, and its turns. A method that raises or takes too long returns None and sets
    `error`, a UserCodeError. Raises ValueError for a method that returns something else than it should.

    turns: the columns in which turns begin; rewards: those of the turns that ended
    """

    def __init__(self, config):
        """config: environment, reward_file, reward_timeout"""
        self.config = config
        self.make = find_environment(config.environment, config.reward_file)
        self.one = self.error = None
        self.turns, self.rewards = [0], []

    def begin(self, seed, record):
        """Makes the environment and hands it the record."""
        own = copy.deepcopy({key: x for key, x in record.items() if key not in OF_CONSUMER})

        def make_and_reset():
            seeds = [seed] if inspect.signature(self.make).parameters else []
            self.one = self.make(*seeds)
            return self.one.reset(own)

        self.attempt(make_and_reset, lambda result: result is None,
                     "reset must return None, because the prompt is the record's")

    def step(self, text):
        """Returns the answer to the text of a turn; None ends the episode."""
        if self.error is None:
            result = self.attempt(lambda: self.one.step(text), is_answer_and_reward,
                                  "step must return (a text, messages or None, a finite number)")
        if self.error is not None:
            return None
        answer, reward = result
        self.rewards.append(float(reward))
        return answer if len(self.rewards) < self.config.max_turns else None

    def measure(self):
        """Returns {"environment/name": (sum, count)} of what it measured."""
        return self.attempt(lambda: {f"environment/{name}": tuple(map(float, getattr(self.one, name)))
                                     for name in self.make.metrics})

    def close(self):
        self.attempt(getattr(self.one, "close", int))

    def attempt(self, call, is_right=lambda result: True, wanted=""):
        """Returns the result of a call."""
        try:
            with naming_line_of(self.make), time_limit(self.config.reward_timeout):
                result = call()
        except UserCodeError as error:
            self.error = error
            return None
        if not is_right(result):
            raise ValueError(f"environment={self.config.environment!r}: its {wanted}, not "
                             f"{one_line(result, write=repr)}")
        return result


def is_answer_and_reward(result):
    """True for what `step` may return."""
    try:
        answer, reward = result
        return math.isfinite(reward) and (answer is None or isinstance(answer, str) or are_messages(answer))
    except (TypeError, ValueError):
        return False


class Episodes:
    """The episodes of N = P * G completions, an Episode each. Those of a problem have the same seed and record.
    given: (N, L) tokens of answers, by column; -1 where the policy writes"""

    def __init__(self, problems, iteration, config, stop):
        """problems: a batch of PromptConsumer; stop: a core.generation.Stop, which ends a turn
        config: environment, reward_file, reward_timeout, max_turns, group_size, seed, max_new_tokens, and what
        PromptFormat has
        """
        self.stop, self.config = stop, config
        self.form = PromptFormat.of(config)
        self.episodes = []
        for record, number in zip(problems["record"], problems["number"], strict=True):
            sequence = np.random.SeedSequence([SEEDS, config.seed, iteration, int(number)])
            for _ in range(config.group_size):
                self.episodes.append(Episode(config))
                self.episodes[-1].begin(int(sequence.generate_state(1)[0]), record)
        self.given = torch.full((len(self.episodes), config.max_new_tokens), -1)

    def over(self, target, number, t, drawn):
        """Answers the completions whose turn ends at column t. Returns (n,) bool: the episode of the row is over.
        target: (N, L) tokens so far; number: (n,) completions; drawn: (n,) bool: the policy wrote the token"""
        begin = [self.episodes[n].turns[-1] for n in number.tolist()]
        ends = self.stop(target[number, : t + 1], t, begin)[:, 0] & drawn            # (n,)
        over = [n for n in number[ends].tolist() if self.ends(n, target[n, : t + 1].tolist())]
        return torch.isin(number, number.new_tensor(over))

    def ends(self, n, written):
        """Answers completion n, whose tokens so far, a list, end a turn. Returns whether the episode is over."""
        turns = self.episodes[n].turns
        ids = written[turns[-1] :]
        answer = self.episodes[n].step(self.stop.text(ids))
        if answer is None:
            return True
        given = torch.tensor(self.stop.tokenizer.encode(self.between(answer, ids[-1])), dtype=torch.long)
        room = self.given[n, len(written) :]
        room[: len(given)] = given[: len(room)]
        turns.append(len(written) + len(given))
        return False

    def between(self, answer, last):
        """The text behind a turn whose last token is `last`: the answer, and what the template puts around it."""
        tokenizer = self.stop.tokenizer
        if isinstance(answer, str):
            if self.form.template == "plain":
                return answer
            answer = [{"role": "user", "content": answer}]
        text = self.form.behind(answer, tokenizer)
        if last in tokenizer.stop_token_ids:  # the model wrote the end token itself
            end = tokenizer.stop_token_ids.index(last)
            text = text.removeprefix(tokenizer.stop_token_names[end])
        return text

    def columns(self):
        """{column of Texts: N values}. The reward is None where the environment failed; those of the turns are then
        0, as is that of a last turn without an end."""
        columns = {REWARD: [], TURNS: []}
        for episode in self.episodes:
            failed = episode.error is not None
            rewards = () if failed else episode.rewards
            columns[REWARD].append(None if failed else sum(rewards))
            columns[TURNS].append(list(itertools.zip_longest(episode.turns, rewards, fillvalue=0.0)))
        return columns

    def close(self):
        """Ends the environments. Returns {name: (sum, count)} of what they measured. The error of one that failed is
        printed once for each line of the user's file."""
        parts = []
        for episode in self.episodes:
            measured = None if episode.error is not None else episode.measure()
            episode.close()
            begun = sum(t < self.given.shape[1] for t in episode.turns)
            error = episode.error
            own = {"environment/turns": (begun, 1), "environment/failed": (error is not None, 1)}
            parts.append((measured or {}) | own)
            if error is not None and error.line not in WARNED:
                WARNED.add(error.line)
                sys.stderr.write(f"environment: {error}; it is counted as environment/failed\n")
        nothing = {f"environment/{name}": (0.0, 0.0) for name in self.episodes[0].make.metrics}
        return join([nothing, *parts])
