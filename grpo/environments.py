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
from core.device import keep_torch_defaults
from core.errors import Mistake, definition, others, time_limit
from core.prompts import PromptFormat
from core.records import are_messages
from core.settings.setting import shown
from grpo.reward_functions.registry import ENVIRONMENTS, load_reward_file
from grpo.rollout import REWARD, TURNS, join

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
        raise Mistake(f"environment={name!r} is no @environment class of reward_file={path}; known: "
                      f"{', '.join(ENVIRONMENTS) or 'none'}")
    return ENVIRONMENTS[name]


def check_begins(config, data):
    """Raises Mistake if an environment cannot begin with the first record of `data`, a PromptConsumer."""
    episode, record = Episode(config), data.records["train"][0]
    episode.begin(0, record)
    if episode.error is not None:
        raise Mistake(f"{record['where']}: {episode.error}")
    episode.close()


class Attempt:
    """The user's class is called in the block, within a time_limit. What it raises, or that it takes longer, ends the
    block and becomes the `error` of the episode. A Mistake, about what a method returned, ends the run."""

    def __init__(self, episode):
        config = episode.config
        self.episode = episode
        self.defaults = keep_torch_defaults()
        self.others = others(f"environment={config.environment!r} failed", "correct it", definition(episode.make))

    def __enter__(self):
        self.defaults.__enter__()
        self.others.__enter__()

    def __exit__(self, kind, error, trace):
        self.defaults.__exit__(None, None, None)
        try:
            self.others.__exit__(kind, error, trace)
        except Mistake as mistake:
            self.episode.error = mistake
            return True


class Episode:
    """The environment of one completion, and its turns. `error` is the Mistake of a method that raised or took too
    long. Raises Mistake for a method that returns something else than it should.

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
        with Attempt(self), time_limit(self.config.reward_timeout):
            takes_a_seed = inspect.signature(self.make).parameters
            self.one = self.make(seed) if takes_a_seed else self.make()
            result = self.one.reset(own)
            if result is not None:
                self.refuse("reset must return None, because the prompt is the record's", result)

    def step(self, text):
        """Returns the answer to the text of a turn; None ends the episode."""
        if self.error is not None:
            return None
        with Attempt(self), time_limit(self.config.reward_timeout):
            result = self.one.step(text)
            found = answer_and_reward(result)
            if found is None:
                self.refuse("step must return (a text, messages or None, a finite number)", result)
            answer, reward = found
            self.rewards.append(reward)
            return answer if len(self.rewards) < self.config.max_turns else None

    def measure(self):
        """Returns {"environment/name": (sum, count)} of what it measured."""
        metrics = {}
        with Attempt(self), time_limit(self.config.reward_timeout):
            for name in self.make.metrics:
                total, count = getattr(self.one, name)
                metrics[f"environment/{name}"] = float(total), float(count)
            return metrics
        return {}

    def close(self):
        with Attempt(self), time_limit(self.config.reward_timeout):
            if hasattr(self.one, "close"):
                self.one.close()

    def refuse(self, wanted, result):
        raise Mistake(f"environment={self.config.environment!r}: its {wanted}, not {shown(result)}")


def answer_and_reward(result):
    """(answer, reward) of what `step` returned, the reward as a float; None if it is something else."""
    try:
        answer, reward = result
        is_finite = math.isfinite(reward)
        reward = float(reward)
    except (TypeError, ValueError, OverflowError):
        return None
    is_answer = answer is None or isinstance(answer, str) or are_messages(answer)
    return (answer, reward) if is_answer and is_finite else None


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
        text = self.between(answer, ids[-1]).encode(errors="replace").decode()  # half a surrogate pair is no text
        given = torch.tensor(self.stop.tokenizer.encode(text), dtype=torch.long)
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
            measured = {} if episode.error is not None else episode.measure()
            episode.close()
            begun = sum(t < self.given.shape[1] for t in episode.turns)
            error = episode.error
            own = {"environment/turns": (begun, 1), "environment/failed": (error is not None, 1)}
            parts.append(measured | own)
            place = str(error).partition(": ")[0]
            if error is not None and place not in WARNED:
                WARNED.add(place)
                sys.stderr.write(f"{error}; it is counted as environment/failed\n")
        nothing = {f"environment/{name}": (0.0, 0.0) for name in self.episodes[0].make.metrics}
        return join([nothing, *parts])
