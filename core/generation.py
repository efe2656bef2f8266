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

DROP_SHARE = 0.9  # finished rows leave the batch once at most this share has not ended


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, padding: Tensor | None, uniform: Tensor, stop: Callable[..., Tensor],
             turns: Any = None, **sampling) -> "Generation":
    """Samples G completions of every prompt. Each prompt is read once, and all completions are decoded together.

    prompt: (P, T) tokens, padded on the left; padding: (P,) number of padded columns, or None for none
    uniform: (P, G, L) noise in [0, 1) of each completion's tokens, at most L of them
    stop: a Stop, or a function with its arguments: it tells where rows end
    turns: a grpo.environments.Episodes, which answers completions that end, so that they go on; or None
    sampling: temperature, top_p, top_k, min_p; top_k=1 takes the likeliest
    """
    rows = Rows(uniform, padding, stop, turns, prompt.device)
    past = new_cache(model)
    h = model.states(prompt, past=past, padding=padding)[rows.problem, -1]           # (N, C)
    past = past.expand(rows.problem, rows.longest)
    with prepacked(model.layers):
        for t in range(rows.longest):
            if t > 0:
                h = model.states(rows.token, None, past, rows.padding)[:, 0]         # (n, C)
            token, logp, kept = draw_tokens(model, h, rows.noise[:, t, None], **sampling)  # (n, 1) each
            rows.step(t, token, logp, kept)
            if rows.left == 0:
                break
            rows.drop_finished(past)
    return rows.generation(t + 1)


@dataclass
class Generation:
    """N = P * G sampled completions; M is the length of the longest."""
    target: Tensor             # (N, M) tokens, the stop token included
    mask: Tensor               # (N, M) 1.0 where a token was sampled, 0.0 after the end, and where it was given
    logp: Tensor               # (N, M) log-probability under the distribution drawn from
    kept: KeptTokens | None    # the tokens that could be drawn, for the K sampled tokens in order; None: all
    truncated: Tensor          # (N,) bool: ran out of room before its end


class Rows:
    """The N = P * G completions of `generate` while they are written; n of them are in the batch.

    number: (n,) the completion of each row; problem: (N,) the prompt of each completion
    token: (n, 1) the tokens to read next; live: (n,) bool: the row has not ended; left: the number of such rows
    """

    def __init__(self, uniform: Tensor, padding: Tensor | None, stop: Callable[..., Tensor], turns: Any,
                 device: torch.device):
        P, G, self.longest = uniform.shape
        self.stop, self.turns = stop, turns
        self.target = torch.zeros(P * G, self.longest, dtype=torch.long, device=device)
        self.logp = torch.zeros(P * G, self.longest, device=device)
        self.drawn = torch.zeros(P * G, self.longest, dtype=torch.bool, device=device)
        self.truncated = torch.ones(P * G, dtype=torch.bool, device=device)
        self.collector = KeptCollector()
        self.number = torch.arange(P * G, device=device)
        self.problem = self.number // G
        self.padding = None if padding is None else padding[self.problem]
        self.noise = noise_on(device, uniform).flatten(0, 1)
        self.live = torch.ones_like(self.truncated)

    def step(self, t: int, token: Tensor, logp: Tensor, kept: KeptTokens | None) -> None:
        """Writes column t, and ends rows. token, logp: (n, 1); kept: the KeptTokens of the rows, or None"""
        drawn = self.live                                                            # (n,)
        if self.turns is not None:
            given = self.turns.given[self.number.cpu(), t, None].to(token.device)    # (n, 1)
            token = torch.where(given < 0, token, given)
            drawn = drawn & (given < 0)[:, 0]
        self.token = token
        self.target[self.number, t] = token[:, 0] * self.live
        self.logp[self.number, t] = logp[:, 0] * drawn
        self.drawn[self.number, t] = drawn
        if kept is not None:
            place = self.number[drawn] * self.longest + t
            self.collector.add(place.cpu(), kept[drawn.cpu()])
        if self.turns is None:
            ended = self.stop(self.target[self.number, : t + 1], t)[:, 0] & drawn    # (n,)
        else:
            ended = self.turns.over(self.target, self.number, t, drawn)              # (n,)
        self.truncated[self.number[ended]] = False
        self.live = self.live & ~ended
        self.left = int(self.live.sum())

    def drop_finished(self, past: Any) -> None:
        """Takes rows that have ended out of the batch and its cache `past`, ours or a HuggingFaceCache, once there are
        enough of them."""
        if self.left > DROP_SHARE * len(self.live):
            return
        keep = self.live.nonzero().squeeze(1)
        past.keep(keep)
        self.number = self.number[keep]
        self.token = self.token[keep]
        self.live = self.live[keep]
        self.noise = self.noise[keep.to(self.noise.device)]
        if self.padding is not None:
            self.padding = self.padding[keep]

    def generation(self, M: int) -> Generation:
        """The Generation, whose longest completion has M tokens."""
        return Generation(
            self.target[:, :M], self.drawn[:, :M].float(), self.logp[:, :M],
            kept=self.collector.joined(),
            truncated=self.truncated)


class Stop:
    """Ends a row at a stop token, or where its text has just come to contain one of the stop sequences.
    prefix: the beginning of every answer (response_prefix), which is part of the completion's text"""

    def __init__(self, tokenizer: Tokenizer, sequences: Sequence[str] = (), prefix: str = ""):
        self.tokenizer = tokenizer
        self.ids = tuple(tokenizer.stop_token_ids)
        self.sequences = sequences
        self.prefix = prefix
        for s in sequences:
            alone = tokenizer.decode(tokenizer.encode(s))
            in_text = tokenizer.decode(tokenizer.encode("a" + s))
            if alone != s and in_text != "a" + s:
                raise Mistake(f"stop_sequences: the tokenizer cannot write {s!r}")
        # Tokens that can hold a sequence, and one before them: a tokenizer may leave out a space that begins a text
        self.window = max((len(s.encode()) + 1 for s in sequences), default=0)

    def __call__(self, tokens: Tensor, first: int, turn: Sequence[int] | None = None) -> Tensor:
        """Marks the columns at which rows end: (n, t - first) bool, of which the first one of a row counts.

        tokens: (n, t) so far, of which those from column `first` on are new
        turn: n columns in which the turns of rows begin, None: 0; no stop sequence reaches back behind them
        """
        new = tokens[:, first:]                                                      # (n, t - first)
        ended = torch.isin(new, ids_on(new.device, *self.ids))
        if self.sequences:
            begin = max(0, first + 1 - self.window)
            for row, ids in enumerate(tokens[:, begin:].tolist()):
                earliest = 0 if turn is None else max(0, turn[row] - begin)
                for column in range(new.shape[1]):
                    end = first - begin + column + 1
                    last = ids[max(earliest, end - self.window) : end]
                    tail, before = self.tokenizer.decode(last), self.tokenizer.decode(last[:-1])
                    known = len(before.rstrip("\ufffd"))  # characters; the last one may have been a part of one
                    if any(s in tail[max(0, known - len(s) + 1) :] for s in self.sequences):  # not of an earlier turn
                        ended[row, column] = True
        return ended

    def text(self, ids: Sequence[int]) -> str:
        """A completion as its reader sees it: without stop tokens, cut before the first stop sequence."""
        text = self.tokenizer.decode(ids)
        ends = [text.find(s) for s in self.sequences if s in text]
        return self.prefix + text[: min(ends, default=None)]
