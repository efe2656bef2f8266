"""Causal sampling: a language model completes prompts token by token, each prompt read once through a cache."""

from dataclasses import dataclass

import torch

from core.distributions import draw_tokens, noise_on
from core.performance.kept_tokens import KeptCollector, KeptTokens
from core.performance.prepacked import prepacked

LEAVE_SHARE = 0.9  # finished rows leave the batch once at most this share has not ended


@dataclass
class Generation:
    """N = P * G sampled completions; M is the length of the longest."""
    target: torch.Tensor       # (N, M) tokens, the stop token included
    mask: torch.Tensor         # (N, M) 1.0 where a token was sampled, 0.0 after the end, and where it was given
    logp: torch.Tensor         # (N, M) log-probability under the distribution drawn from
    kept: KeptTokens | None    # the tokens that could be drawn, for the K sampled tokens in order; None: all
    truncated: torch.Tensor    # (N,) bool: ran out of room before its end


@torch.no_grad()
def generate(model, prompt, padding, uniform, stop, turns=None, **sampling):
    """Samples G completions of every prompt: each prompt is read once, all rows are decoded together, and rows that
    have ended leave the batch.

    prompt: (P, T) tokens, padded on the left; padding: (P,) number of padded columns, or None for none
    uniform: (P, G, L) noise in [0, 1) of each completion's tokens, at most L of them
    stop: a Stop, or a function with its arguments: it tells where rows end
    turns: what answers a completion where `stop` ends it, as grpo.policies.turns.Episodes, or None: it is then over
    sampling: temperature, top_p, top_k, min_p; top_k=1 takes the likeliest
    """
    device = prompt.device
    P, G, L = uniform.shape
    noise = noise_on(device, uniform).flatten(0, 1)                                  # (N, L)
    target = torch.zeros(P * G, L, dtype=torch.long, device=device)
    logp = torch.zeros(P * G, L, device=device)
    length = torch.full((P * G,), L + 1, device=device)                              # L + 1: it has not ended
    number = torch.arange(P * G, device=device)                                      # (n,) completions in the batch
    past = model.new_cache()
    h = model.states(prompt, past=past, padding=padding)[:, -1]                      # (P, C)
    h = h[number // G]                                                               # (n, C)
    past = past.expand(number // G, L)
    if padding is not None:
        padding = padding[number // G]                                               # (n,)
    collector = KeptCollector()
    with prepacked(model.layers):
        for t in range(L):
            if t > 0:
                token = target[number, t - 1, None]                                  # (n, 1)
                h = model.states(token, None, past, padding)[:, 0]
            u = noise[number.to(noise.device), t, None]                              # (n, 1)
            token, token_logp, kept = draw_tokens(model, h, u, **sampling)           # (n, 1) each
            live = chosen = length[number] > t                                       # (n,)
            if turns is not None:
                given = turns.given[number.cpu(), t].to(device)                      # (n,)
                chosen = live & (given < 0)
                token = torch.where(given < 0, token[:, 0], given)[:, None]
            target[number, t] = token[:, 0]
            logp[number, t] = token_logp[:, 0]
            if kept is not None:
                place = number[chosen] * L + t
                collector.add(place.cpu(), kept[chosen.cpu()])
            begin = None if turns is None else [turns.begin[n][-1] for n in number.tolist()]
            ends = stop(target[number, : t + 1], t, begin)[:, 0]                     # (n,)
            if turns is not None:
                over = turns(target, dict.fromkeys(number[ends & chosen].tolist(), t))
                ends = torch.isin(number, number.new_tensor(over))
            length[number[ends & live]] = t + 1
            live &= ~ends
            left = int(live.sum())
            if left == 0:
                break
            if left <= LEAVE_SHARE * len(live):
                keep = torch.arange(left, device=device)  # rows that stay in their place cost nothing ...
                keep[~live[:left]] = live[left:].nonzero().squeeze(1) + left         # ... the others fill the gaps
                past.keep(keep)
                number = number[keep]
                if padding is not None:
                    padding = padding[keep]
    M = int(length.clamp(max=L).max())
    mask = torch.arange(M, device=device) < length[:, None]                          # (N, M)
    target = target[:, :M] * mask
    if turns is not None:
        mask &= turns.given[:, :M].to(device) < 0
    logp = logp[:, :M] * mask
    return Generation(target, mask.float(), logp, collector.joined(), truncated=length > L)


class Stop:
    """Ends a row at a stop token, or where its text has just come to contain one of the stop sequences.

    prefix: the beginning of every answer (response_prefix), which is part of the completion's text
    """

    def __init__(self, tokenizer, sequences=(), prefix=""):
        self.tokenizer = tokenizer
        self.sequences = sequences
        self.prefix = prefix
        for s in sequences:
            alone = tokenizer.decode(tokenizer.encode(s))
            in_text = tokenizer.decode(tokenizer.encode("a" + s))
            if alone != s and in_text != "a" + s:
                raise ValueError(f"stop_sequences: the tokenizer cannot write {s!r}")
        # Tokens that can hold a sequence, and one before them: a tokenizer may leave out a space that begins a text
        self.window = max((len(s.encode()) + 1 for s in sequences), default=0)

    def __call__(self, tokens, first, turn=None):
        """Marks the columns at which rows end: (n, t - first) bool, of which the first one of a row counts.

        tokens: (n, t) so far, of which those from column `first` on are new
        turn: n columns in which the turns of rows begin, None: 0; no stop sequence reaches back behind them
        """
        new = tokens[:, first:]                                                      # (n, t - first)
        ended = torch.isin(new, new.new_tensor(self.tokenizer.stop_token_ids))
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

    def text(self, ids):
        """A completion as its reader sees it: without stop tokens, cut before the first stop sequence."""
        text = self.tokenizer.decode(ids)
        ends = [text.find(s) for s in self.sequences if s in text]
        return self.prefix + text[: min(ends, default=None)]
