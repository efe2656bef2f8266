"""An environment of the user's while it is played: its calls have a limit of time; what they may return."""

import copy
import json
import math

from core.prompts import OF_CONSUMER
from core.records import are_messages
from core.settings.user_code import UserCodeError, naming_line_of, one_line, time_limit
from grpo.environments import find_environment


def check_begins(config, data):
    """Raises ValueError if an environment cannot begin an episode with the first record of `data`, a PromptConsumer:
    then none would be played, and the run would learn nothing."""
    one, record = Played(config), data.records["train"][0]
    one.begin(0, record)
    if one.error is not None:
        raise ValueError(f"environment={one.name!r} does not begin with {record['where']}: {one.error}")
    one.close()


class Played:
    """The environment of one completion. A method that raises or takes too long gives None and sets `error`, a
    UserCodeError. Raises ValueError for one that returns something else than it should."""

    def __init__(self, config):
        """config: environment, environment_file, reward_timeout"""
        self.name, self.seconds = config.environment, config.reward_timeout
        self.make = find_environment(config.environment, config.environment_file)
        self.one = self.error = None

    def begin(self, seed, record):
        """Makes it. Returns what its reset returns: a prompt, or None."""
        own = copy.deepcopy({key: x for key, x in record.items() if key not in OF_CONSUMER})

        def make_and_reset():
            self.one = self.make(seed)
            return self.one.reset(own)

        return self.attempt(make_and_reset, text_or_messages, "reset must return None, a text or messages")

    def step(self, text):
        """Returns the answer and the reward of a turn."""
        return self.attempt(lambda: self.one.step(text), answer_and_reward,
                            "step must return (a text, messages or None, a finite number)")

    def measure(self):
        """Returns {name: (sum, count)}, of what it measured."""
        return self.attempt(lambda: {name: getattr(self.one, name) for name in self.make.metrics}, pairs_of_numbers,
                            "metrics must be pairs (sum, count) of finite numbers")

    def close(self):
        self.attempt(lambda: getattr(self.one, "close", int)())

    def attempt(self, call, convert=None, wanted=""):
        """Returns what a call gives, converted to Python's own types."""
        try:
            with naming_line_of(self.make), time_limit(self.seconds):
                result = call()
        except UserCodeError as error:
            self.error = error
            return None
        try:
            return convert(result) if convert else None
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"environment={self.name!r}: its {wanted}, not {one_line(result, write=repr)}") from None


def text_or_messages(x):
    """A text, messages or None, without classes of the user's."""
    x = json.loads(json.dumps(x))
    if x is None or isinstance(x, str) or are_messages(x):
        return x
    raise ValueError


def answer_and_reward(result):
    """The answer and the reward of a step."""
    answer, reward = result
    return text_or_messages(answer), finite_number(reward)


def pairs_of_numbers(measured):
    """{name: (sum, count)}"""
    pairs = {}
    for name, pair in measured.items():
        total, count = map(finite_number, pair)
        pairs[name] = total, count
    return pairs


def finite_number(x):
    """A finite number."""
    if math.isfinite(x):
        return float(x)
    raise ValueError
