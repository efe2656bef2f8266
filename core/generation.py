"""Causal sampling: a language model completes prompts token by token, each prompt read once through a cache."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.distributions import LOGITS_AT_ONCE, KeptCollector, KeptTokens, sample_tokens

LEAVE_SHARE = 0.75  # finished rows leave the batch once at most this share is still being written


@dataclass
class Generation:
    """What `generate` wrote for N = P * G rows; M is the length of the longest."""
    target: torch.Tensor       # (N, M) tokens, the stop token included
    mask: torch.Tensor         # (N, M) 1.0 where a token was written, 0.0 after the end
    logp: torch.Tensor         # (N, M) log-probability under the distribution drawn from
    kept: KeptTokens | None    # the tokens that could be drawn, for the K written tokens in order; None: all
    truncated: torch.Tensor    # (N,) bool, on the CPU: ran out of room before its end


@torch.no_grad()
def generate(model, prompt, padding, uniform, stop, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, check_every=None,
             budget=None):
    """Writes G completions of every prompt: each prompt is read once, all rows are decoded together, and rows that
    have finished leave the batch.

    prompt: (P, T) tokens, padded on the left; padding: (P,) number of padded columns, or None for none
    uniform: (P, G, L) noise in [0, 1) of each completion's tokens, at most L of them; temperature=0 takes the likeliest
    stop: (rows of tokens (n, t)) -> (n,) bool, whether a row has just ended
    check_every: tokens between two looks, each of which waits for the device, at which rows have finished; the default
    is 1 on a CPU and 8 elsewhere, and what is written does not depend on it; truncation waits at every token
    budget: a KeptBudget, which raises ValueError for too many kept tokens, or None
    """
    device, (P, G, L) = prompt.device, uniform.shape
    check_every = check_every or (1 if device.type == "cpu" else 8)
    noise = uniform.flatten(0, 1).to("cpu" if device.type == "mps" else device)      # MPS has no float64
    past = model.new_cache()
    last = torch.full((P, 1), prompt.shape[1] - 1, device=device)
    h = model.states(prompt, last, past, padding)                                    # (P, 1, C)
    past = past.repeat(G, room=L)
    padding = None if padding is None else padding.repeat_interleave(G, 0)
    rows, collector, zeros = torch.arange(P * G, device=device), KeptCollector(budget), torch.zeros(P * G, L).to(device)
    out = Generation(zeros.long(), zeros.clone(), zeros.clone(), None, None)
    live, open_rows = torch.ones_like(rows, dtype=torch.bool), torch.ones_like(rows, dtype=torch.bool)
    for t in range(L):
        u = noise[rows.to(noise.device), t].view(len(h), -1, 1)                      # (P, G, 1), then (n, 1, 1)
        token, logp, kept = next_tokens(model, h, u, temperature, top_p, top_k, min_p)  # (n,), (n,)
        out.target[rows, t], out.mask[rows, t] = torch.where(live, token, 0), live.float()
        out.logp[rows, t] = logp * live
        if kept is not None:
            alive = live.nonzero().squeeze(1)                                        # (k,)
            collector.add((rows[alive] * L + t).cpu(), kept[alive.cpu() // (len(rows) // len(kept))])
        live = live & ~stop(out.target[rows, : t + 1])
        open_rows[rows] = live
        if t + 1 == L:
            break
        if (t + 1) % check_every == 0:
            if (left := int(live.sum())) == 0:
                break
            if left <= LEAVE_SHARE * len(live):  # moving the others together costs a copy of the cache
                keep = live.nonzero().squeeze(1)
                past.keep(keep)
                rows, token, live = rows[keep], token[keep], live[keep]
                padding = None if padding is None else padding[keep]
        h = model.states(token[:, None], None, past, padding)                        # (n, 1, C)
    M = max(1, int(out.mask.sum(1).max()))
    return Generation(out.target[:, :M], out.mask[:, :M], out.logp[:, :M], collector.joined(), open_rows.cpu())


def next_tokens(model, h, uniform, *settings):
    """Draws g tokens from each of n states, with the logits of few enough at a time.

    h: (n, 1, C); uniform: (n, g, 1); settings: those of sample_tokens
    Returns ids (n * g,), their log-probability (n * g,), and the KeptTokens of the n states, or None for all
    """
    size = max(1, LOGITS_AT_ONCE // model.vocabulary)
    parts = [sample_tokens(model.project(x), u, *settings)
             for x, u in zip(h.split(size), uniform.split(size), strict=True)]
    target, logp, kept = zip(*parts, strict=True)
    return torch.cat(target).flatten(), torch.cat(logp).flatten(), None if kept[0] is None else KeptTokens.join(kept)


def join_generations(parts):
    """Generations of different prompts as one."""
    M = max(part.target.shape[1] for part in parts)
    wide = lambda name: torch.cat([F.pad(x := getattr(part, name), (0, M - x.shape[1])) for part in parts])
    kept = None if parts[0].kept is None else KeptTokens.join([part.kept for part in parts])
    return Generation(wide("target"), wide("mask"), wide("logp"), kept, torch.cat([part.truncated for part in parts]))


class Stop:
    """Ends a row at a stop token, or where its text has just come to contain one of the stop sequences.

    prefix: the beginning of every answer (response_prefix), which is part of the completion's text
    """

    def __init__(self, tokenizer, sequences=(), prefix=""):
        self.tokenizer, self.sequences, self.prefix = tokenizer, tuple(sequences), prefix
        for s in self.sequences:
            written = [tokenizer.decode(tokenizer.encode(text)) for text in (s, "a" + s)]  # alone, and in mid-text
            if written[0] != s and written[1] != "a" + s:
                raise ValueError(f"stop_sequences: {s!r} is a text that the tokenizer cannot write, so it would never "
                                 "end a completion")
        # Tokens that can hold a sequence, and one before them: a tokenizer may leave out a space that begins a text
        self.window = max((len(s.encode()) + 1 for s in self.sequences), default=0)

    def __call__(self, written):
        """written: (n, t) tokens so far. Returns (n,) bool."""
        ended = torch.zeros_like(written[:, -1], dtype=torch.bool)                   # (n,)
        for stop in self.tokenizer.stop_token_ids:
            ended = ended | (written[:, -1] == stop)
        if self.sequences:
            tails = (self.tokenizer.decode(ids) for ids in written[:, -self.window :].tolist())
            found = [any(s in tail for s in self.sequences) for tail in tails]
            ended = ended | torch.tensor(found, device=written.device)
        return ended

    def text(self, ids):
        """A completion as its reader sees it: without stop tokens, cut before the first stop sequence."""
        text = self.tokenizer.decode(ids)
        ends = [i for s in self.sequences if (i := text.find(s)) >= 0]
        return self.prefix + (text[: min(ends)] if ends else text)
