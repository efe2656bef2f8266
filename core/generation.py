"""Causal sampling: a language model completes prompts token by token, each prompt read once through a cache."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.distributions import kept_tokens, restrict, sample_from, sampling_logp, token_logp, truncates

LEAVE_SHARE = 0.75  # finished rows leave the batch once at most this share is still being written


@dataclass
class Generation:
    """What `generate` wrote for N = P * G rows; M is the length of the longest."""
    target: torch.Tensor       # (N, M) tokens, the stop token included
    mask: torch.Tensor         # (N, M) 1.0 where a token was written, 0.0 after the end
    logp: torch.Tensor         # (N, M) log-probability under the distribution drawn from
    kept: torch.Tensor | None  # (K, V) the tokens that could be drawn, for the K written tokens in order; None: all
    truncated: torch.Tensor    # (N,) bool, on the CPU: ran out of room before its end


@torch.no_grad()
def generate(model, prompt, padding, uniform, stop, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, check_every=None):
    """Writes G completions of every prompt: each prompt is read once, all rows are decoded together, and rows that
    have finished leave the batch.

    prompt: (P, T) tokens, padded on the left; padding: (P,) number of padded columns, or None for none
    uniform: (P, G, L) noise in [0, 1) of each completion's tokens, at most L of them; temperature=0 takes the likeliest
    stop: (rows of tokens (n, t)) -> (n,) bool, whether a row has just ended
    check_every: tokens between two looks, each of which waits for the device, at which rows have finished; the default
    is 1 on a CPU and 8 elsewhere, and what is written does not depend on it
    """
    device, (P, G, L) = prompt.device, uniform.shape
    check_every = check_every or (1 if device.type == "cpu" else 8)
    noise = uniform.flatten(0, 1).to("cpu" if device.type == "mps" else device)      # MPS has no float64
    past = model.new_cache()
    last = torch.full((P, 1), prompt.shape[1] - 1, device=device)
    logits = model.project(model.states(prompt, last, past, padding)).repeat_interleave(G, 0)  # (N, 1, V)
    past = past.repeat(G, room=L)
    padding = None if padding is None else padding.repeat_interleave(G, 0)
    rows, kept_parts, zeros = torch.arange(P * G, device=device), [], torch.zeros(P * G, L, device=device)
    out = Generation(zeros.long(), zeros.clone(), zeros.clone(), None, None)
    live, open_rows = torch.ones_like(rows, dtype=torch.bool), torch.ones_like(rows, dtype=torch.bool)
    for t in range(L):
        full = sampling_logp(logits, temperature or 1.0)                             # (n, 1, V)
        kept = kept_tokens(full, top_p, top_k, min_p) if truncates(top_p, top_k, min_p) else None
        drawn = restrict(full, kept)
        u = noise[rows.to(noise.device), None, t : t + 1]                            # (n, 1, 1)
        token = drawn.argmax(-1) if temperature == 0 else sample_from(drawn, u)[:, 0]
        out.target[rows, t], out.mask[rows, t] = torch.where(live, token[:, 0], 0), live.float()
        out.logp[rows, t] = token_logp(drawn, token)[:, 0] * live
        if kept is not None:
            kept_parts.append((rows * L + t, live, kept[:, 0]))
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
        logits = model.project(model.states(token, None, past, padding))             # (n, 1, V)
    M = max(1, int(out.mask.sum(1).max()))
    return Generation(out.target[:, :M], out.mask[:, :M], out.logp[:, :M], in_order(kept_parts), open_rows.cpu())


def in_order(kept_parts):
    """The kept tokens (K, V) of all written tokens, row by row.

    kept_parts: for each t, (place of each row's token, whether it was written, tokens kept), or empty
    """
    if not kept_parts:
        return None
    place, written, kept = map(torch.cat, zip(*kept_parts, strict=True))
    where = written.nonzero().squeeze(1)
    return kept[where[place[where].argsort()]]


def join_generations(parts):
    """Generations of different prompts as one."""
    M = max(part.target.shape[1] for part in parts)
    wide = lambda name: torch.cat([F.pad(x := getattr(part, name), (0, M - x.shape[1])) for part in parts])
    kept = None if parts[0].kept is None else torch.cat([part.kept for part in parts])
    return Generation(wide("target"), wide("mask"), wide("logp"), kept, torch.cat([part.truncated for part in parts]))


class Stop:
    """Ends a row at the stop token, or where its text has just come to contain one of the stop sequences.

    prefix: the beginning of every answer (response_prefix), which is part of the completion's text
    """

    def __init__(self, tokenizer, sequences=(), prefix=""):
        self.tokenizer, self.sequences, self.prefix = tokenizer, tuple(sequences), prefix
        for s in self.sequences:
            if tokenizer.decode(tokenizer.encode(s)) != s:
                raise ValueError(f"stop_sequences: {s!r} is a text that the tokenizer cannot write, so it would never "
                                 "end a completion")
        self.window = max((len(s.encode()) for s in self.sequences), default=0)      # tokens that can hold a sequence

    def __call__(self, written):
        """written: (n, t) tokens so far. Returns (n,) bool."""
        stop = self.tokenizer.stop_token_id
        ended = written[:, -1] == (-1 if stop is None else stop)
        if self.sequences:
            tails = (self.tokenizer.decode(ids) for ids in written[:, -self.window :].tolist())
            found = [any(s in tail for s in self.sequences) for tail in tails]
            ended = ended | torch.tensor(found, device=written.device)
        return ended

    def text(self, ids):
        """A completion as its reader sees it: without the stop token, cut before the first stop sequence."""
        text = self.tokenizer.decode(ids)
        ends = [i for s in self.sequences if (i := text.find(s)) >= 0]
        return self.prefix + (text[: min(ends)] if ends else text)
