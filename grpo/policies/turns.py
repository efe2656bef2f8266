"""The environments of completions while they are sampled.

An answer is encoded once, and its tokens are read through the cache of its completion, one by one, as those that the
policy writes.
"""

import copy
import math
import sys

import numpy as np
import torch

from core.prompts import OF_CONSUMER, PromptFormat
from core.settings.user_code import UserCodeError, one_line, run_user_code, time_limit
from grpo.environments import find_environment

SEEDS = 3          # begins the seeds of environments, and keeps them apart from other noise
WARNED = set()     # lines of environments whose errors were printed in this process


class Episodes:
    """One environment for each of N = P * G completions. Those of a problem have the same seed and record.

    given: (N, L) tokens that are not sampled but given, by column; -1: the policy writes
    reward: N sums of the rewards of all turns; None where the environment failed
    """

    def __init__(self, problems, iteration, config, stop):
        """problems: a batch of PromptConsumer; stop: a core.generation.Stop, which ends a turn
        config: environment, environment_file, max_turns, reward_timeout, group_size, seed, max_new_tokens, template,
        system_prompt, chat_template_kwargs
        """
        self.stop = stop
        form = PromptFormat(config.template, config.system_prompt, chat_template_kwargs=config.chat_template_kwargs)
        self.front, self.back = form.around(stop.tokenizer)
        self.most, self.seconds = config.max_turns, config.reward_timeout
        make = find_environment(config.environment, config.environment_file)
        self.names = make.metrics
        G = config.group_size
        records = [record for record in problems["record"] for _ in range(G)]
        numbers = np.repeat(problems["number"], G)
        N = len(records)
        self.given = torch.full((N, config.max_new_tokens), -1)
        self.begin = [0] * N    # the column in which the turn begins
        self.turns = [0] * N
        self.reward = [0.0] * N
        self.failed = 0
        self.environments = [None] * N
        for n, (record, number) in enumerate(zip(records, numbers, strict=True)):
            seed = np.random.SeedSequence([SEEDS, config.seed, iteration, int(number)])
            self.environments[n] = self.run(n, make, int(seed.generate_state(1)[0]))
            if self.environments[n] is not None:
                fields = {key: copy.deepcopy(x) for key, x in record.items() if key not in OF_CONSUMER}
                self.run(n, self.environments[n].reset, fields)

    def run(self, n, function, *arguments):
        """Returns what a function of the environment of completion n returns; None if it raises, or takes more than
        reward_timeout of the processor's time, which ends the episode."""
        try:
            with time_limit(self.seconds):
                return run_user_code(function, *arguments)
        except UserCodeError as error:
            self.reward[n] = None
            self.failed += 1
            if error.line not in WARNED:
                WARNED.add(error.line)
                sys.stderr.write(f"environment: {error}; the completion is skipped\n")

    def __call__(self, target, t, numbers):
        """Answers the completions whose turn ended in column t. Returns those whose episode is over, a list.

        target: (N, L) tokens so far; numbers: of these completions
        """
        return [n for n in numbers if not self.goes_on(n, target[n, self.begin[n] : t + 1].tolist(), t)]

    def goes_on(self, n, ids, t):
        """Answers one completion, whose turn has these ids. Returns whether it has another turn."""
        if self.reward[n] is not None:
            result = self.run(n, self.environments[n].step, self.stop.text(ids))
        if self.reward[n] is None:  # it failed, now or at its start
            return False
        answer, reward = checked(result)
        self.reward[n] += reward
        self.turns[n] += 1
        if answer is None or self.turns[n] == self.most:
            return False
        ids = torch.tensor(self.encode(answer, ids[-1]), dtype=torch.long)
        room = self.given.shape[1] - t - 1
        self.given[n, t + 1 : t + 1 + len(ids)] = ids[:room]
        self.begin[n] = t + 1 + len(ids)
        return True

    def encode(self, answer, last):
        """The tokens behind a turn whose last token is `last`: the answer, and what the template puts around it."""
        tokenizer, front = self.stop.tokenizer, self.front
        if last in tokenizer.stop_token_ids:  # the model wrote the end token itself
            front = front.removeprefix(tokenizer.stop_token_names[tokenizer.stop_token_ids.index(last)])
        return tokenizer.encode(front + answer + self.back)

    def close(self):
        """Ends the environments. Returns {name: (sum, count)} of what they measured."""
        sums = {name: (0.0, 0.0) for name in self.names}
        for n, one in enumerate(self.environments):
            for name in self.names:
                sums[name] = add(sums[name], getattr(one, name, (0, 0)), name)
            reward = self.reward[n]
            if hasattr(one, "close"):
                self.run(n, one.close)
            self.reward[n] = reward
        N = len(self.turns)
        sums |= {"turns": (sum(self.turns), N), "failed": (self.failed, N)}
        return {f"environment/{name}": x for name, x in sums.items()}


def add(sums, measured, name):
    """The sums of two pairs. Raises ValueError unless what an environment measured is a pair of finite numbers."""
    try:
        total, count = (float(x) for x in measured)
        if math.isfinite(total + count):
            return sums[0] + total, sums[1] + count
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name!r} in the metrics of an environment must be (sum, count), two finite numbers, not "
                     f"{one_line(measured, write=repr)}")


def checked(result):
    """The answer and the reward of a step. Raises ValueError unless they are a text or None, and a finite number."""
    try:
        answer, reward = result
        if (answer is None or isinstance(answer, str)) and math.isfinite(reward):
            return answer, float(reward)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError("the step of an environment must return (a text or None, a finite number), not "
                     f"{one_line(result, write=repr)}")
