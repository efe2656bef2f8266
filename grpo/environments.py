"""Environments: classes that answer a model, so that a completion has several turns.

from grpo.environments import environment

@environment
class Guess:
    def __init__(self, seed): ...      # only for random draws: all completions of a group get the same seed
    def reset(self, record): ...       # gets the record with the prompt
    def step(self, text): ...          # -> (answer, reward): the answer None ends the episode
    def close(self): ...               # optional
    metrics = ("name",)                # optional: attributes with (sum, count), set from reset on, logged as means

An answer is encoded once. Its tokens go through the cache of the completion one by one, like the policy's own tokens.
"""

import contextlib
import copy
import difflib
import inspect
import math
import sys

import numpy as np
import torch

from core.data import NOT_FOR_REWARDS
from core.device import keep_torch_defaults
from core.errors import Mistake, definition, one_line, others, time_limit
from core.prompts import PromptFormat, as_messages, plain, prefill
from core.records import are_messages
from core.settings.setting import shown
from grpo.reward_functions.registry import ENVIRONMENTS, load_reward_file
from grpo.rollout import REWARD, TURNS, join

SEEDS = 3  # first entry of the environments' seed sequences, so that they differ from other noise
METHODS = {"reset": ("record",), "step": ("text",), "close": ()}  # {method: its arguments}
# A call of a function of these kinds does not run its body
NOT_AT_ONCE = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
TURNS_OF_EACH = "environment/turns"  # metrics of every environment
FAILED = "environment/failed"
WARNED = {}  # {key: line} of the warnings of this process


def environment(cls):
    """Registers an environment class under its name."""
    names = getattr(cls, "metrics", ())
    cls.metrics = (names,) if isinstance(names, str) else tuple(names)
    ENVIRONMENTS[cls.__name__] = cls
    return cls


def find_environment(name, path):
    """Returns the environment class of this name. Runs the reward_file at `path` first, unless the path is None."""
    load_reward_file(path)
    if name not in ENVIRONMENTS:
        raise Mistake(f"environment={name!r} is no @environment class of reward_file={path}; known: "
                      f"{', '.join(ENVIRONMENTS) or 'none'}")
    return ENVIRONMENTS[name]


# Checks at the start of a run

def check_begins(config, data):
    """Raises Mistake if the environment lacks a method or a metric, or fails on the first record of `data`, a
    PromptConsumer."""
    record = data.records["train"][0]
    episode = Episode(config)
    check_metrics(episode)
    episode.construct(0)
    if episode.error is None:
        check_method(episode, "reset")
        episode.reset(record)
    if episode.error is not None:
        raise Mistake(f"{record['where']}: {episode.error}")
    check_method(episode, "step")
    check_method(episode, "close")
    episode.measure()
    unset_metric = episode.error
    if unset_metric is not None:  # the environment may set it only in its first step
        episode.errors.clear()
        with contextlib.suppress(Mistake):  # an empty text may be no valid turn
            episode.step("")
        episode.measure()
    works = episode.error is None
    episode.close()
    if not works:
        raise unset_metric


def check_metrics(episode):
    """Raises Mistake for a metric name that is not a string, or that a metric of every environment has."""
    about = f"{definition(episode.cls)}: {episode.setting}"
    for name in episode.cls.metrics:
        if not isinstance(name, str):
            raise Mistake(f"{about} has {shown(name)} among its metrics; write names of attributes, ('name',)")
        if metric_of(name) in (TURNS_OF_EACH, FAILED):
            raise Mistake(f"{about} has a metric {name}, which every environment has; give it another name")


def check_method(episode, name):
    """Raises Mistake for a method that is missing, does not take the arguments of METHODS, or is a coroutine or a
    generator. `close` is optional."""
    place = definition(episode.cls)
    with others(f"{episode.setting} failed", "correct it", place):
        method = getattr(episode.instance, name, None)  # it may be a property
    if inspect.ismethod(method):
        place = definition(method)
    about = f"{place}: {episode.setting}"
    arguments = METHODS[name]
    remedy = f"write def {name}({', '.join(('self', *arguments))})"
    if method is None:
        if name == "close":
            return
        raise Mistake(f"{about} has no method {name}; {remedy}{misspelled(name, episode.cls)}")
    if not callable(method):
        raise Mistake(f"{about}: its {name} is {shown(method)}, no method; {remedy}")
    if any(is_kind(method) for is_kind in NOT_AT_ONCE):
        raise Mistake(f"{about}: its {name} is a coroutine or a generator; {remedy} without async and yield")
    try:
        signature = inspect.signature(method, follow_wrapped=False)  # a wrapper may add arguments
    except (ValueError, TypeError):  # a function in C may have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise Mistake(f"{about}: its {name} cannot be called ({error}); {remedy}") from None


def misspelled(name, cls):
    """Returns ", or rename METHOD" for a method that looks like a misspelled `name`, else ""."""
    methods = {own.lower(): own for own in dir(cls)}
    near = difflib.get_close_matches(name, methods, 1)
    if not near:
        return ""
    return f", or rename {methods[near[0]]}"


def metric_of(name):
    """The key under which a metric of an environment is logged, in printable letters."""
    return f"environment/{one_line(name)}"


def warn(key, line):
    """Writes a line to stderr, unless this process has written one with this key."""
    if key not in WARNED:
        WARNED[key] = one_line(line, 2000)
        sys.stderr.write(WARNED[key] + "\n")


# One completion

class Attempt(others):
    """A context in which the user's class runs. An exception in the class becomes an error of the episode: the episode
    fails, and the run continues. A Mistake of ours, about a method's return value, ends the run."""

    def __init__(self, episode, part="", remedy="correct it"):
        """part: names the part of the environment in the error"""
        super().__init__(f"{part}{episode.setting} failed", remedy, definition(episode.cls))
        self.episode = episode

    def __exit__(self, kind, error, trace):
        try:
            super().__exit__(kind, error, trace)
        except Mistake as mistake:
            self.episode.errors.append(mistake)
            return True


class Episode:
    """The environment of one completion, and its turns. Raises Mistake for an invalid return value of a method.

    cls: the user's class; instance: its object
    begun: the beginning of the first turn that the prompt prefills
    turns: the columns in which turns begin; reward: the sum of their rewards
    transcript: for each turn a list of the text that `step` got, and of the answer and the reward that it returned.
        Both are None where it failed, and where tokens ran out before the turn ended
    pieces: the texts of turns, as sampled, and of answers so far
    errors: a Mistake for each call that raised or took too long
    """

    def __init__(self, config):
        """config: has environment, reward_file, reward_timeout, max_turns"""
        self.config = config
        self.setting = f"environment={config.environment!r}"
        self.cls = find_environment(config.environment, config.reward_file)
        self.instance = None
        self.turns = [0]
        self.transcript = []
        self.pieces = []
        self.errors = []
        self.reward = 0.0

    @property
    def error(self):
        """The last error, or None."""
        return self.errors[-1] if self.errors else None

    def deadline(self):
        """A context that limits the time of a call of the user's class."""
        return time_limit(self.config.reward_timeout)

    def begin(self, seed, record):
        """Makes the environment and hands it the record, whose prompt may begin the first turn."""
        self.begun = prefill(record["prompt"])
        self.construct(seed)
        if self.error is None:
            self.reset(record)

    def construct(self, seed):
        """Makes the environment, with the seed if it takes one."""
        with Attempt(self), keep_torch_defaults(), self.deadline():
            if inspect.signature(self.cls).parameters:
                self.instance = self.cls(seed)
            else:
                self.instance = self.cls()

    def reset(self, record):
        """Hands the environment a copy of the record."""
        fields = {key: value for key, value in record.items() if key not in NOT_FOR_REWARDS}
        fields = copy.deepcopy(fields)
        with Attempt(self), keep_torch_defaults(), self.deadline():
            result = self.instance.reset(fields)
            if result is not None:
                self.refuse(self.instance.reset, "reset must return None, because the prompt is the record's", result)

    def step(self, text):
        """Returns the answer to the text of a turn. None ends the episode."""
        turn = [text, None, None]
        self.transcript.append(turn)
        if self.error is not None:
            return None
        with Attempt(self), keep_torch_defaults(), self.deadline():
            result = self.instance.step(text)
            found = answer_and_reward(result)
            if found is None:
                self.refuse(self.instance.step, "step must return (a text, messages or None, a finite number)", result)
            answer, reward = found
            turn[1:] = copy.deepcopy(answer), reward  # the environment may change its messages later
            self.reward += reward
            if len(self.transcript) < self.config.max_turns:
                return answer
        return None  # the step failed, or was the last

    def measure(self):
        """Returns {"environment/name": (sum, count)} of the metrics of the environment."""
        metrics = {}
        for name in self.cls.metrics:
            part = f"the metric {shown(name)} of "
            remedy = f"set self.{one_line(name)} in reset, to (sum, count)"
            with Attempt(self, part, remedy), keep_torch_defaults(), self.deadline():
                total, count = getattr(self.instance, name)
                if not math.isfinite(total) or not math.isfinite(count):
                    raise ValueError("not finite")
                metrics[metric_of(name)] = float(total), float(count)
        return metrics

    def close(self):
        """Ends the environment."""
        with Attempt(self), keep_torch_defaults(), self.deadline():
            close = getattr(self.instance, "close", None)
            if close is not None:
                close()

    def refuse(self, method, wanted, result):
        """Raises Mistake about the value that a method returned."""
        raise Mistake(f"{definition(method)}: {self.setting}: its {wanted}, not {shown(result)}")


def readable(text):
    """A text with question marks for halves of surrogate pairs, which are no text."""
    return text.encode(errors="replace").decode()


def answer_and_reward(result):
    """Parses the return value of `step` into (answer, reward as a float); None if it has another form."""
    try:
        answer, reward = result
        is_finite = math.isfinite(reward)
        reward = float(reward)
    except (TypeError, ValueError, OverflowError):
        return None
    is_answer = answer is None or isinstance(answer, str) or are_messages(answer)
    if is_answer and is_finite:
        return answer, reward
    return None


# All completions of an iteration

class Episodes:
    """The episodes of N = P * G completions, an Episode each. The G episodes of a problem share its seed and record.
    given: (N, L) tokens of answers, by column; -1 where the policy writes"""

    def __init__(self, problems, iteration, settings, stop):
        """problems: a batch of PromptConsumer; settings: SamplingSettings; stop: a core.generation.Stop, which ends a
        turn"""
        self.stop = stop
        self.form = PromptFormat.of(settings)
        self.episodes = []
        for record, number in zip(problems["record"], problems["number"], strict=True):
            sequence = np.random.SeedSequence([SEEDS, settings.seed, iteration, int(number)])
            seed = int(sequence.generate_state(1)[0])
            for _ in range(settings.group_size):
                episode = Episode(settings)
                episode.begin(seed, record)
                self.episodes.append(episode)
        self.given = torch.full((len(self.episodes), settings.max_new_tokens), -1)

    def over(self, target, number, t, drawn):
        """Answers the completions that end a turn at column t. Returns (n,) bool, True where the episode is over.
        target: (N, L) tokens so far; number: (n,) completions; drawn: (n,) bool, True where the policy wrote the token
        """
        begin = [self.episodes[n].turns[-1] for n in number.tolist()]
        written = target[number, : t + 1]
        ends = self.stop(written, t, begin)[:, 0] & drawn                            # (n,)
        over = []
        for n in number[ends].tolist():
            ids = target[n, : t + 1].tolist()
            if self.answer_turn(n, ids):
                over.append(n)
        return torch.isin(number, number.new_tensor(over))

    def answer_turn(self, n, written):
        """Answers completion n at the end of a turn. Returns True if the episode is over.
        written: the list of its tokens so far"""
        episode = self.episodes[n]
        ids = written[episode.turns[-1] :]
        text = self.turn_text(episode, ids)
        answer = episode.step(text)
        if answer is None:
            return True
        tokenizer = self.stop.tokenizer
        episode.pieces += [tokenizer.decode(ids), plain(as_messages(answer))]
        framed = self.framed_answer(answer, ids[-1])
        given = torch.tensor(tokenizer.encode(readable(framed)), dtype=torch.long)
        room = self.given[n, len(written) :]  # a view of the row
        room[: len(given)] = given[: len(room)]
        episode.turns.append(len(written) + len(given))
        return False

    def turn_text(self, episode, ids):
        """The text of the current turn of an episode, as `step` gets it. ids: its tokens"""
        text = self.stop.text(ids)
        if episode.turns == [0]:
            text = episode.begun + text
        return text

    def framed_answer(self, answer, last):
        """The text of an answer in the frame of the template. last: the last token of the previous turn"""
        tokenizer = self.stop.tokenizer
        if isinstance(answer, str):
            if self.form.template == "plain":
                return answer
            answer = [{"role": "user", "content": answer}]
        text = self.form.after_turn(answer, tokenizer)
        if last in tokenizer.stop_token_ids:  # the model wrote the end token itself
            end = tokenizer.stop_token_ids.index(last)
            text = text.removeprefix(tokenizer.stop_token_names[end])
        return text

    def add_to(self, texts):
        """Adds rewards and turns to the Texts of the completions. The reward is None where the environment failed. The
        frame of a template names roles: its texts become those of turns and answers, without the frame."""
        rewards = []
        turns = []
        for n, episode in enumerate(self.episodes):
            rewards.append(episode.reward if episode.error is None else None)
            last = texts.completion_ids[n][episode.turns[-1] :]  # empty if an answer took the last token
            if last and len(episode.transcript) < len(episode.turns):  # tokens ran out
                text = self.turn_text(episode, last)
                episode.transcript.append([text, None, None])
            turns.append(episode.transcript)
            if self.form.template != "plain":
                pieces = episode.pieces[:-1]
                if last:
                    pieces = [*episode.pieces, self.stop.tokenizer.decode(last)]
                texts.completions[n] = episode.begun + readable("\n".join(pieces))
        texts.columns |= {REWARD: rewards, TURNS: turns}

    def close(self):
        """Ends the environments. Returns {name: (sum, count)} of their metrics. Prints each error once per line of the
        user's file, part of the environment and type."""
        keys = map(metric_of, self.episodes[0].cls.metrics)
        nothing = dict.fromkeys(keys, (0.0, 0.0))
        measured = [nothing]  # has every metric, even if every episode failed
        for episode in self.episodes:
            if episode.error is None:
                measured.append(episode.measure())
            episode.close()
            begins = [t for t in episode.turns if t < self.given.shape[1]]  # the last turn may begin past the end
            failed = episode.error is not None
            measured.append({TURNS_OF_EACH: (len(begins), 1), FAILED: (failed, 1)})
            for error in episode.errors:
                place, _, _ = str(error).partition(" failed (")  # the rest may differ in each episode
                key = place, type(error.__cause__).__name__
                warn(key, f"{error}; it is counted as {FAILED}")
        return join(measured)
