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
    mask: torch.Tensor         # (N, M) 1.0 where a token was sampled, 0.0 after the end
    logp: torch.Tensor         # (N, M) log-probability under the distribution drawn from
    kept: KeptTokens | None    # the tokens that could be drawn, for the K sampled tokens in order; None: all
    truncated: torch.Tensor    # (N,) bool, on the CPU: ran out of room before its end


@torch.no_grad()
def generate(model, prompt, padding, uniform, stop, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, budget=None):
    """Samples G completions of every prompt: each prompt is read once, all rows are decoded together, and rows that
    have ended leave the batch. Returns a Generation.

    prompt: (P, T) tokens, padded on the left; padding: (P,) number of padded columns, or None for none
    uniform: (P, G, L) noise in [0, 1) of each completion's tokens, at most L of them; top_k=1 takes the likeliest
    stop: (tokens so far (n, t), f) -> (n, t - f) bool, whether a row ends at each of the columns from f on; as Stop
    budget: a KeptBudget, which raises ValueError for too many kept tokens, or None
    """
    device, (P, G, L) = prompt.device, uniform.shape
    noise = noise_on(device, uniform).flatten(0, 1)                                  # (N, L)
    target = torch.zeros(P * G, L, dtype=torch.long, device=device)
    logp = torch.zeros(P * G, L, device=device)
    length = torch.full((P * G,), L + 1, device=device)                              # L + 1: it has not ended
    past = model.new_cache()
    last = torch.full((P, 1), prompt.shape[1] - 1, device=device)
    h = model.states(prompt, last, past, padding)[:, 0]                              # (P, C), later (n, C)
    number = torch.arange(P * G, device=device)                                      # (n,) completions in the batch
    past = past.expand(number // G, L)
    if padding is not None:
        padding = padding[number // G]                                               # (n,)
    collector, token = KeptCollector(budget), None
    with prepacked(model.layers):
        for t in range(L):
            if t > 0:
                h = model.states(token[:, None], None, past, padding)[:, 0]
            u = noise[number.to(noise.device), t].view(len(h), -1)                   # (P, G), later (n, 1)
            token, token_logp, kept = draw_tokens(model, h, u, temperature, top_p, top_k, min_p)
            token = token.flatten()                                                  # (n,)
            target[number, t] = token
            logp[number, t] = token_logp.flatten()
            live = length[number] > t                                                # (n,)
            if kept is not None:
                state = torch.arange(len(h)).repeat_interleave(u.shape[1])           # (n,) that each row was drawn from
                collector.add((number[live] * L + t).cpu(), kept[state[live.cpu()]])
            ends = stop(target[number, : t + 1], t)[:, 0]                            # (n,)
            length[number[ends & live]] = t + 1
            live = live & ~ends
            left = int(live.sum())
            if left == 0:
                break
            if left <= LEAVE_SHARE * len(live):
                keep = torch.arange(left, device=device)  # rows that stay in their place cost nothing ...
                keep[~live[:left]] = live[left:].nonzero().squeeze(1) + left         # ... the others fill the gaps
                past.keep(keep)
                number, token = number[keep], token[keep]
                if padding is not None:
                    padding = padding[keep]
    M = int(length.clamp(max=L).max())
    mask = torch.arange(M, device=device) < length[:, None]                          # (N, M)
    return Generation(target[:, :M] * mask, mask.float(), logp[:, :M] * mask, collector.joined(), (length > L).cpu())


class Stop:
    """Ends a row at a stop token, or where its text has just come to contain one of the stop sequences.

    prefix: the beginning of every answer (response_prefix), which is part of the completion's text
    """

    def __init__(self, tokenizer, sequences=(), prefix=""):
        self.tokenizer, self.prefix = tokenizer, prefix
        self.sequences = tuple(sequences)
        for s in self.sequences:
            alone = tokenizer.decode(tokenizer.encode(s))
            in_text = tokenizer.decode(tokenizer.encode("a" + s))
            if alone != s and in_text != "a" + s:
                raise ValueError(f"stop_sequences: {s!r} is a text that the tokenizer cannot write, so it would never "
                                 "end a completion")
        # Tokens that can hold a sequence, and one before them: a tokenizer may leave out a space that begins a text
        self.window = max((len(s.encode()) + 1 for s in self.sequences), default=0)

    def __call__(self, tokens, first):
        """Marks the columns at which rows end. tokens: (n, t) so far, of which those from column `first` on are new.

        Returns (n, t - first) bool; the first end of a row counts, and what is marked after it means nothing.
        """
        ended = torch.isin(tokens[:, first:], tokens.new_tensor(self.tokenizer.stop_token_ids))  # (n, t - first)
        if self.sequences:
            begin = max(0, first + 1 - self.window)
            for i, ids in enumerate(tokens[:, begin:].tolist()):
                for j in range(first - begin, len(ids)):
                    tail = self.tokenizer.decode(ids[max(0, j + 1 - self.window) : j + 1])
                    if any(s in tail for s in self.sequences):
                        ended[i, j + begin - first] = True
        return ended

    def text(self, ids):
        """A completion as its reader sees it: without stop tokens, cut before the first stop sequence."""
        text = self.tokenizer.decode(ids)
        ends = [text.find(s) for s in self.sequences if s in text]
        return self.prefix + text[: min(ends, default=None)]
