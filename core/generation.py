"""Causal sampling: a language model completes prompts token by token, each prompt read once through a cache."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.distributions import LOGITS_AT_ONCE, KeptCollector, KeptTokens, sample_tokens
from core.performance.prepacked import prepacked

LEAVE_SHARE = 0.9  # finished rows leave the batch once at most this share is still being written


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
    stop: (tokens so far (n, t), f) -> (n, t - f) bool, whether a row ends at each of the columns from f on; as Stop
    check_every: tokens between two looks, each of which waits for the device, at which rows have ended; the default
    is 1 on a CPU and 8 elsewhere, and what is written does not depend on it; truncation waits at every token
    budget: a KeptBudget, which raises ValueError for too many kept tokens, or None
    """
    device, (P, G, L) = prompt.device, uniform.shape
    check_every = check_every or (1 if device.type == "cpu" else 8)
    noise = uniform.flatten(0, 1).to("cpu" if device.type == "mps" else device)      # MPS has no float64
    rows, collector, unchecked = torch.arange(P * G, device=device), KeptCollector(budget), []
    target, logp = torch.zeros_like(rows)[:, None].repeat(1, L), torch.zeros(P * G, L, device=device)
    length, ended = torch.full_like(rows, L + 1), torch.full_like(rows, L + 1)       # (N,), (n,) L + 1: not yet
    last, past = torch.full((P, 1), prompt.shape[1] - 1, device=device), model.new_cache()
    h = model.states(prompt, last, past, padding)                                    # (P, 1, C)
    past, first = past.expand(rows // G, room=L), 0
    padding = None if padding is None else padding[rows // G]                        # (n,)
    with prepacked(model.layers):
        for t in range(L):
            u = noise[rows.to(noise.device), t].view(len(h), -1, 1)                  # (P, G, 1), then (n, 1, 1)
            token, drawn, kept = next_tokens(model, h, u, temperature, top_p, top_k, min_p)  # (n,), (n,)
            target[rows, t], logp[rows, t] = token, drawn.float()
            unchecked.append((t, kept))
            if (t + 1) % check_every == 0 or t + 1 == L:
                ends = stop(target[rows, : t + 1], first)                            # (n, t + 1 - first)
                column = torch.arange(first, t + 1, device=device)
                ended = ended.minimum(torch.where(ends, column + 1, L + 1).amin(1))
                length[rows] = ended
                collect(collector, unchecked, rows, ended, L)
                first, unchecked, live = t + 1, [], ended > L
                if t + 1 == L or (left := int(live.sum())) == 0:
                    break
                if left <= LEAVE_SHARE * len(live):
                    keep = gathered(live, left)
                    past.keep(keep)
                    rows, token, ended = rows[keep], token[keep], ended[keep]
                    padding = None if padding is None else padding[keep]
            h = model.states(token[:, None], None, past, padding)                    # (n, 1, C)
    M = int(length.clamp(max=L).max())
    mask = torch.arange(M, device=device) < length[:, None]                          # (N, M)
    return Generation(target[:, :M] * mask, mask.float(), logp[:, :M] * mask, collector.joined(), (length > L).cpu())


def gathered(live, left):
    """The indices (left,) of the rows that live (n,) marks: those among the first `left` stay where they are, and the
    others take the places between."""
    keep = torch.arange(left, device=live.device)
    keep[~live[:left]] = live[left:].nonzero().squeeze(1) + left
    return keep


def collect(collector, unchecked, rows, ended, L):
    """Adds the kept tokens of columns to a collector, without those that were drawn after a row's end.

    unchecked: [(column, its KeptTokens or None)]; ended: (n,) length of each row, or more if it has not ended
    """
    for t, kept in unchecked:
        if kept is not None:
            alive = (ended > t).nonzero().squeeze(1)                                 # (k,)
            collector.add((rows[alive] * L + t).cpu(), kept[alive.cpu() // (len(rows) // len(kept))])


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
        self.able, self.known = None, set()  # (V,) False: this token never completes a sequence; the tokens looked at

    def __call__(self, written, first):
        """Where rows end. written: (n, t) tokens so far, of which those from column `first` on are new.

        Returns (n, t - first) bool; the first end of a row counts, and what is marked after it means nothing.
        """
        new = written[:, first:]
        ended = torch.zeros_like(new, dtype=torch.bool)                              # (n, t - first)
        for stop in self.tokenizer.stop_token_ids:
            ended |= new == stop
        if self.sequences:
            self._find_sequences(written, first, ended)
        return ended

    def _find_sequences(self, written, first, ended):
        """Marks in `ended` where a sequence is complete. Rows whose new tokens complete none are not decoded."""
        if self.able is None:
            self.able = torch.ones(self.tokenizer.vocab_size, dtype=torch.bool, device=written.device)
        able = self.able[written[:, first:]]                                         # (n, t - first)
        rows = able.any(1).nonzero().squeeze(1)                                      # (r,)
        for i, ids, columns in zip(rows.tolist(), written[rows].tolist(), able[rows].tolist(), strict=True):
            for j in (j for j, can in enumerate(columns) if can):
                end = first + j + 1
                tail = self.tokenizer.decode(ids[max(0, end - self.window) : end])
                ended[i, j] |= any(s in tail for s in self.sequences)
                self._learn(ids[end - 1])

    def _learn(self, token):
        """Notes of a token that it never completes a sequence, where that is certain: its text is known, and it lacks
        the last character of each of them. Spaces may be left out, and a part of a character has no text."""
        if token not in self.known:
            self.known.add(token)
            text = self.tokenizer.decode([token])
            unclear = not text or "\ufffd" in text
            self.able[token] = unclear or any(s[-1] == " " or s[-1] in text for s in self.sequences)

    def text(self, ids):
        """A completion as its reader sees it: without stop tokens, cut before the first stop sequence."""
        text = self.tokenizer.decode(ids)
        ends = [i for s in self.sequences if (i := text.find(s)) >= 0]
        return self.prefix + (text[: min(ends)] if ends else text)
