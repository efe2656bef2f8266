"""Causal sampling: a language model completes prompts token by token, each prompt read once through a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.cache import new_cache
from core.device import ids_on
from core.distributions import KeptCollector, KeptTokens, draw_tokens, noise_on
from core.errors import Mistake
from core.performance.prepacked import prepacked
from core.tokenizer import Tokenizer

DROP_SHARE = 0.9  # finished rows leave the batch once at most this share of the rows is still being written


@torch.no_grad()
def generate(
        model: nn.Module,
        prompt: Tensor,          # (P, T) tokens, padded on the left
        padding: Tensor | None,  # (P,) number of padded columns; None: none in any row
        uniform: Tensor,         # (P, G, L) noise in [0, 1) for the tokens of each completion, at most L
        stop: Callable,          # a Stop, or a function with its arguments: marks where rows end
        turns: Any = None,       # a grpo.environments.Episodes, which answers completions instead of ending them
        **sampling) -> "Generation":
    """Samples G completions of every prompt. Each prompt is read once, and all completions are decoded together.
    sampling: temperature, top_p, top_k, min_p; top_k=1 takes the most likely token"""
    rows = Rows(uniform, padding, stop, turns, prompt.device)
    past = new_cache(model)
    h = model.states(prompt, past=past, padding=padding)                             # (P, T, C)
    h = h[:, -1]                                                                     # (P, C)
    h = h[rows.problem]                                                              # (N, C)
    past = past.expand(rows.problem, rows.longest)
    with prepacked(model.layers):
        for t in range(rows.longest):
            if t > 0:
                h = model.states(rows.token, past=past, padding=rows.padding)        # (n, 1, C)
                h = h[:, 0]                                                          # (n, C)
            noise = rows.noise[:, t, None]                                           # (n, 1)
            token, logp, kept = draw_tokens(model, h, noise, **sampling)             # (n, 1) each
            rows.write(t, token[:, 0], logp[:, 0], kept)
            if rows.remaining == 0:
                break
            rows.drop_finished(past)
    longest = t + 1
    return rows.generation(longest)


@dataclass
class Generation:
    """N = P * G sampled completions; M is the length of the longest. With top_k=1 the sampled tokens are those kept."""
    target: Tensor             # (N, M) tokens, the stop token included
    mask: Tensor               # (N, M) 1.0 where a token was sampled; 0.0 after the end, and in answers to a turn
    logp: Tensor               # (N, M) log-probability under the distribution drawn from
    kept: KeptTokens | None    # the tokens that could be drawn, for each sampled token in order; None: all, or top_k=1
    truncated: Tensor          # (N,) bool: ran out of room before its end


class Rows:
    """The N = P * G completions of `generate` while they are written; n rows are in the batch.

    number: (n,) the completion of each row; token: (n, 1) the tokens to read next
    problem: (N,) the prompt of each completion; live: (N,) bool, True until it ends; remaining: number of live ones
    """

    def __init__(
            self,
            uniform: Tensor,
            padding: Tensor | None,
            stop: Callable,
            turns: Any,
            device: torch.device):
        P, G, L = uniform.shape
        N = P * G
        self.longest = L
        self.stop = stop
        self.turns = turns
        self.target = torch.zeros(N, L, dtype=torch.long, device=device)
        self.drawn = torch.zeros_like(self.target, dtype=torch.bool)
        self.logp = torch.zeros_like(self.target, dtype=torch.float32)
        self.live = torch.ones(N, dtype=torch.bool, device=device)
        self.collector = KeptCollector()
        self.number = torch.arange(N, device=device)
        self.problem = self.number // G
        noise = noise_on(device, uniform)                                            # (P, G, L)
        self.noise = noise.flatten(0, 1)                                             # (N, L)
        if padding is not None:
            padding = padding[self.problem]                                          # (N,)
        self.padding = padding

    def write(
            self,
            t: int,
            token: Tensor,                      # (n,)
            logp: Tensor,                       # (n,)
            kept: KeptTokens | None) -> None:   # of the rows; None: all tokens
        """Writes column t, and marks the rows that end there."""
        number = self.number
        live = self.live[number]                                                     # (n,)
        drawn = live                                                                 # (n,)
        if self.turns is not None:
            given = self.turns.given[number.cpu(), t]                                # (n,) of answers; -1: draw
            given = given.to(token.device)
            is_own = given < 0
            token = torch.where(is_own, token, given)
            drawn = drawn & is_own
        self.token = token[:, None]
        self.target[number, t] = token * live
        self.logp[number, t] = logp * drawn
        self.drawn[number, t] = drawn
        if kept is not None:
            place = number[drawn] * self.longest + t                                 # in (N, L), flattened
            kept = kept[drawn.cpu()]
            self.collector.add(place.cpu(), kept)
        if self.turns is None:
            tokens = self.target[number, : t + 1]                                    # (n, t + 1)
            ended = self.stop(tokens, t)                                             # (n, 1)
            ended = ended[:, 0] & drawn                                              # (n,)
        else:
            ended = self.turns.over(self.target, number, t, drawn)                   # (n,)
        self.live[number[ended]] = False
        self.remaining = int(self.live.sum())

    def drop_finished(self, past: Any) -> None:
        """Removes finished rows from the batch and from its cache `past` (a Cache or HuggingFaceCache), once there are
        enough finished rows."""
        rows = len(self.number)
        if self.remaining > DROP_SHARE * rows:
            return
        live = self.live[self.number]                                                # (n,)
        keep = live.nonzero().squeeze(1)                                             # indices of rows
        past.keep(keep)
        self.number = self.number[keep]
        self.token = self.token[keep]
        self.noise = self.noise[keep.to(self.noise.device)]
        if self.padding is not None:
            self.padding = self.padding[keep]

    def generation(self, M: int) -> Generation:
        """Returns the Generation. M: length of the longest completion"""
        drawn = self.drawn[:, :M]
        return Generation(
            target=self.target[:, :M],
            mask=drawn.float(),
            logp=self.logp[:, :M],
            kept=self.collector.joined(),
            truncated=self.live)


class Stop:
    """Ends a row at a stop token, or at the token that completes a stop sequence.
    prefix: the beginning of every answer (response_prefix), which is part of the completion's text"""

    def __init__(
            self,
            tokenizer: Tokenizer,
            sequences: Sequence[str] = (),
            prefix: str = ""):
        self.tokenizer = tokenizer
        self.ids = tuple(tokenizer.stop_token_ids)
        self.sequences = sequences
        self.prefix = prefix
        # Only the last `window` tokens of a text are decoded: as many as the longest sequence can have (a token has at
        # least one byte), and one before, because a tokenizer may drop a leading space
        self.window = 0
        for s in sequences:
            most_tokens = len(s.encode())
            self.window = max(self.window, most_tokens + 1)
            alone = tokenizer.decode(tokenizer.encode(s))
            in_text = tokenizer.decode(tokenizer.encode("a" + s))
            if alone != s and in_text != "a" + s:
                raise Mistake(f"stop_sequences: the tokenizer cannot write {s!r}")

    def __call__(
            self,
            tokens: Tensor,                                # (n, t) so far
            first: int,                                    # the columns from this one on are new
            turn: Sequence[int] | None = None) -> Tensor:  # n columns in which the rows' current turns begin; None: 0
        """Marks the columns at which rows end: (n, t - first) bool. Only the first mark of a row counts. A stop
        sequence lies within one turn."""
        new = tokens[:, first:]                                                      # (n, t - first)
        stop_ids = ids_on(new.device, *self.ids)
        ended = torch.isin(new, stop_ids)
        if not self.sequences:
            return ended
        begin = max(0, first + 1 - self.window)
        recent = tokens[:, begin:].tolist()
        for row, ids in enumerate(recent):
            earliest = 0
            if turn is not None:
                earliest = max(0, turn[row] - begin)
            for end in range(first - begin + 1, len(ids) + 1):
                start = max(earliest, end - self.window)
                if self.completes_sequence(ids[start:end]):
                    column = begin + end - 1
                    ended[row, column - first] = True
        return ended

    def completes_sequence(self, ids: Sequence[int]) -> bool:
        """True if the last token completes a stop sequence. A sequence completed before it belongs to an earlier turn,
        or to text from a template."""
        text = self.tokenizer.decode(ids)
        before = self.tokenizer.decode(ids[:-1])
        before = before.rstrip("\ufffd")  # the bytes so far of an unfinished character
        for s in self.sequences:
            first = max(0, len(before) - len(s) + 1)  # a sequence that begins earlier ends within `before`
            if s in text[first:]:
                return True
        return False

    def text(self, ids: Sequence[int]) -> str:
        """Decodes a completion as its reader sees it: without stop tokens, cut before the first stop sequence."""
        text = self.tokenizer.decode(ids)
        end = len(text)
        for s in self.sequences:
            if s in text:
                end = min(end, text.index(s))
        return self.prefix + text[:end]
