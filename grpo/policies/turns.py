"""The environments of completions while they are sampled.

An answer is encoded once, and its tokens are read through the cache of its completion, one by one, as those that the
policy writes.
"""

import itertools
import sys

import numpy as np
import torch

from core.prompts import PromptFormat, as_problems
from grpo.rollout import REWARD, TURNS
from grpo.policies.environment_calls import Played

SEEDS = 3                 # begins the seeds of environments, and keeps them apart from other noise
CHARACTERS = 100          # most characters of a token, on average
WARNED = set()            # lines of environments whose errors were printed in this process


class Episodes:
    """One environment for each of N = P * G completions. Those of a problem have the same seed and record.

    problems: those given, with the prompts that `reset` returned in the place of the records' own
    given: (N, L) tokens that are not sampled but given, by column; -1: the policy writes
    begin: N lists of the columns in which turns begin; reward: N lists of the rewards of turns
    """

    def __init__(self, problems, iteration, config, stop, longest):
        """problems: a batch of PromptConsumer; stop: a core.generation.Stop, which ends a turn
        config: environment, environment_file, reward_timeout, max_turns, group_size, seed, max_new_tokens, and what
        PromptFormat has; longest: tokens that fit into the model
        """
        self.stop, self.config = stop, config
        self.form = PromptFormat.of(config)
        self.longest = longest
        G = config.group_size
        N = len(problems["record"]) * G
        self.given = torch.full((N, config.max_new_tokens), -1)
        self.begin = [[0] for _ in range(N)]
        self.reward = [[] for _ in range(N)]
        self.played = [Played(config) for _ in range(N)]
        records = []
        for p, (record, number) in enumerate(zip(problems["record"], problems["number"], strict=True)):
            sequence = np.random.SeedSequence([SEEDS, config.seed, iteration, int(number)])
            seed = int(sequence.generate_state(1)[0])
            records.append(self.opened(record, seed, self.played[p * G : (p + 1) * G]))
        self.problems = problems
        if any(new is not old for new, old in zip(records, problems["record"], strict=True)):
            T = max(len(record["tokens"]) for record in records)
            self.problems = as_problems(records, problems["number"], T, stop.tokenizer)

    def opened(self, record, seed, group):
        """The record, with the prompt of its environments if they give one. Raises ValueError if those of a group are
        not the same, or too long."""
        start = f"environment={self.config.environment!r}: its reset gave"
        prompts = [one.begin(seed, record) for one in group]
        found = [prompt for one, prompt in zip(group, prompts, strict=True) if one.error is None]
        if any(prompt != found[0] for prompt in found):
            raise ValueError(f"{start} the completions of a group different prompts; draw what is random from "
                             "random.Random(seed)")
        if not found or found[0] is None:
            return record
        text, tokens = self.form.encode(found[0], self.stop.tokenizer)
        most = min(self.config.max_prompt_length, self.longest - self.given.shape[1])
        if not 0 < len(tokens) <= most:
            raise ValueError(f"{start} a prompt of {len(tokens)} tokens; max_prompt_length, and max_new_tokens in what "
                             f"the model reads, leave room for 1 to {most}")
        return {**record, "prompt": found[0], "text": text, "tokens": tokens}

    def __call__(self, target, ends):
        """Answers completions. Returns those whose episode is over, a list.

        target: (N, L) tokens so far; ends: {completion: column of the last token of its turn}
        """
        over = []
        for n, t in ends.items():
            ids = target[n, self.begin[n][-1] : t + 1].tolist()
            one, result = self.played[n], None
            if one.error is None:
                result = one.step(self.stop.text(ids))
            if result is None or not self.goes_on(n, ids[-1], t, *result):
                over.append(n)
        return over

    def goes_on(self, n, last, t, answer, reward):
        """Takes what the environment of one completion returned for its turn, whose last token is `last`. Returns
        whether it has another turn."""
        self.reward[n].append(reward)
        if answer is None or len(self.reward[n]) == self.config.max_turns:
            return False
        room = self.given.shape[1] - t - 1
        text = self.between(answer, last)[: CHARACTERS * room]
        ids = torch.tensor(self.stop.tokenizer.encode(text), dtype=torch.long)
        self.given[n, t + 1 : t + 1 + len(ids)] = ids[:room]
        self.begin[n].append(t + 1 + len(ids))
        return True

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
        for one, begin, reward in zip(self.played, self.begin, self.reward, strict=True):
            failed = one.error is not None
            columns[REWARD].append(None if failed else sum(reward))
            if failed:
                reward = ()
            columns[TURNS].append(list(itertools.zip_longest(begin, reward, fillvalue=0.0)))
        return columns

    def close(self):
        """Ends the environments. Returns {name: (sum, count)} of what they measured. The error of one that failed is
        printed once for each line of the user's file."""
        N = len(self.begin)
        sums = {name: (0.0, 0.0) for name in self.played[0].make.metrics}
        for one in self.played:
            measured = one.measure() if one.error is None else None
            for name, (total, count) in (measured or {}).items():
                sums[name] = sums[name][0] + total, sums[name][1] + count
            one.close()
        errors = [one.error for one in self.played if one.error is not None]
        for error in errors:
            if error.line not in WARNED:
                WARNED.add(error.line)
                sys.stderr.write(f"environment: {error}; it is counted as environment/failed\n")
        begun = sum(t < self.given.shape[1] for begin in self.begin for t in begin)
        sums |= {"turns": (begun, N), "failed": (len(errors), N)}
        return {f"environment/{name}": x for name, x in sums.items()}
