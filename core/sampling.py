"""Sampling: tokens and the log-probabilities of the distribution that they were drawn from."""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch.nn import functional as F

from core.batch import masked_positions
from core.losses import kept_tokens, restrict, sampling_logp, token_logp
from core.model import Cache

CHECK_EVERY = 8  # tokens between two looks, on a GPU, at which rows have finished: each look waits for the device

SAMPLING = 1  # keeps this noise apart from the stream that draws problems (core/dataset_consumer.py)


def draw_uniforms(seed, step, numbers, shape):
    """Uniform noise in [0, 1), float64, (len(numbers), *shape), on the CPU.

    Row i depends on (seed, step, numbers[i]) alone: a problem's samples are the same on every device, in whatever
    batch, micro-batch or rank it is drawn.
    """
    rows = [np.random.default_rng([SAMPLING, seed, step, int(number)]).random(shape) for number in numbers]
    return torch.from_numpy(np.stack(rows))


def sample_from(logp, uniform):
    """Inverse-CDF sampling. logp: (P, M, V) log-probabilities; uniform: (P, G, M) in [0, 1). Returns ids (P, G, M)."""
    cdf = logp.to(uniform.device).double().exp().cumsum(-1)                          # (P, M, V)
    u = uniform.transpose(1, 2).contiguous() * cdf[..., -1:]                         # (P, M, G)
    ids = torch.searchsorted(cdf, u, right=True)                                     # (P, M, G) skips probability 0
    last = (logp > -torch.inf).int().cumsum(-1).argmax(-1, keepdim=True)             # (P, M, 1) last possible token
    return torch.minimum(ids.to(logp.device), last).transpose(1, 2)


def predict_and_sample_tokens(model, input, position, uniform, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Fills the masked positions of every input G times in one forward per input.

    input: (P, T); position: (P, M) from masked_positions; uniform: (P, G, T) noise by place in the text
    Returns target (P, G, M) ids and logp (P, G, M), their log-probabilities under the distribution drawn from.
    """
    logp = sampling_logp(model(input, position), temperature, top_p, top_k, min_p)   # (P, M, V)
    G = uniform.shape[1]
    noise = uniform.to("cpu" if input.device.type == "mps" else input.device)        # MPS has no float64
    noise = noise.gather(2, position.to(noise.device)[:, None].expand(-1, G, -1))    # (P, G, M)
    target = sample_from(logp, noise)                                                # (P, G, M)
    return target, token_logp(logp[:, None].expand(-1, G, -1, -1), target)


def fill_in(input, position, chosen, target):
    """Puts sampled tokens into their texts.

    input: (P, T); position, chosen: (P, M); target: (P, G, M)
    Returns (P, G, T)
    """
    G = target.shape[1]
    text = input[:, None].expand(-1, G, -1)                                          # (P, G, T)
    where = position[:, None].expand(-1, G, -1)                                      # (P, G, M)
    kept = torch.where(chosen[:, None] > 0, target, text.gather(2, where))           # padding rewrites what was there
    return text.scatter(2, where, kept)


def draw_turns(order, chosen, passes):
    """In which of `passes` passes each hidden place is filled: in random order, about as many in each.

    order: (N, M) noise; chosen: (N, M) 1.0 where a place is hidden
    Returns (N, M) in 0 .. passes - 1; what is not chosen has no turn, -1
    """
    shuffled = order.masked_fill(chosen == 0, 2.0).argsort(1).argsort(1)             # (N, M) place in the order
    return (shuffled * passes // chosen.sum(1, keepdim=True).long().clamp(min=1)).masked_fill(chosen == 0, -1)


@torch.no_grad()
def fill_in_passes(model, input, position, chosen, uniform, order, passes, temperature=1.0, top_p=1.0, top_k=0,
                   min_p=0.0):
    """Fills hidden places in several passes: what a pass has drawn, the next ones read.

    input: (P, T); position, chosen: (P, M); uniform, order: (P, G, T) noise by place, for tokens and for their order
    Returns target (N, M), their logp (N, M) and turn (N, M), the texts read (N, passes, T), and kept (N, M, V), the
    tokens that could be drawn, or None for all; passes=1 draws what predict_and_sample_tokens draws
    """
    P, G, T = uniform.shape
    uniform, order = (x.to("cpu" if input.device.type == "mps" else input.device) for x in (uniform, order))
    rows = torch.arange(P, device=input.device).repeat_interleave(G)                 # (N,)
    text, where, hidden = input[rows], position[rows], chosen[rows]                  # (N, T), (N, M), (N, M)
    by_place = where.to(order.device)  # noise may have to stay on the CPU: MPS has no float64
    turn = draw_turns(order.flatten(0, 1).gather(1, by_place), hidden.to(order.device), passes).to(input.device)
    target, logp, kept, read = torch.zeros_like(where), torch.zeros_like(hidden), None, []
    truncates = top_p < 1 or top_k > 0 or min_p > 0
    for i in range(passes):
        read.append(text)
        full = sampling_logp(model(input, position)[rows] if i == 0 else model(text, where), temperature)  # (N, M, V)
        allowed = kept_tokens(full, top_p, top_k, min_p) if truncates else None
        drawn = restrict(full, allowed)
        noise = uniform.flatten(0, 1).gather(1, by_place)[:, None]                   # (N, 1, M)
        token, now = sample_from(drawn, noise)[:, 0], turn == i                      # (N, M)
        # What the first pass drew stands on padding too: a token that could be drawn has a logarithm
        now, said = now if i else torch.ones_like(now), token_logp(drawn, token)
        target, logp = torch.where(now, token, target), torch.where(now, said, logp)
        if truncates:
            kept = allowed if kept is None else torch.where(now[..., None], allowed, kept)
        text = fill_in(text, where, (turn == i).float(), target[:, None])[:, 0]
    return target, logp, turn, torch.stack(read, 1), kept


@torch.no_grad()
def fill_once(model, input, mask, uniform, temperature=1.0, top_p=1.0):
    """The completed texts alone: input, mask (P, T), uniform (P, G, T) -> (P, G, T)."""
    position, chosen = masked_positions(mask, input.device)
    target, _ = predict_and_sample_tokens(model, input, position, uniform, temperature, top_p)
    return fill_in(input, position, chosen, target)


@dataclass
class Generation:
    """What `generate` wrote for N = P * G rows; M is the length of the longest."""
    target: torch.Tensor       # (N, M) tokens, the stop token included
    mask: torch.Tensor         # (N, M) 1.0 where a token was written, 0.0 after the end
    logp: torch.Tensor         # (N, M) log-probability under the distribution drawn from
    kept: torch.Tensor | None  # (N, M, V) the tokens that could be drawn, None if all
    truncated: torch.Tensor    # (N,) bool, on the CPU: ran out of room before its end


@torch.no_grad()
def generate(model, prompt, padding, uniform, stop, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Writes G completions of every prompt: each prompt is read once, all rows are decoded together, and rows that
    have finished leave the batch.

    prompt: (P, T) tokens, padded on the left; padding: (P,) how much of it, or None
    uniform: (P, G, L) noise in [0, 1) of each completion's tokens, at most L of them; temperature=0 takes the likeliest
    stop: (rows of tokens (n, t)) -> (n,) bool, whether a row has just ended
    """
    P, G, L = uniform.shape
    noise = uniform.flatten(0, 1).to("cpu" if prompt.device.type == "mps" else prompt.device)  # MPS has no float64
    past, truncates = Cache(), top_p < 1 or top_k > 0 or min_p > 0
    last = torch.full((P, 1), prompt.shape[1] - 1, device=prompt.device)
    logits = model(prompt, last, past, padding).repeat_interleave(G, 0)              # (N, 1, V)
    past = past.repeat(G, room=L)
    padding = None if padding is None else padding.repeat_interleave(G, 0)
    rows, V = torch.arange(P * G, device=prompt.device), logits.shape[-1]
    out = Generation(torch.zeros(P * G, L, dtype=torch.long, device=prompt.device),
                     torch.zeros(P * G, L, device=prompt.device), torch.zeros(P * G, L, device=prompt.device),
                     torch.ones(P * G, L, V, dtype=torch.bool, device=prompt.device) if truncates else None, None)
    live, open_rows = torch.ones_like(rows, dtype=torch.bool), torch.ones_like(rows, dtype=torch.bool)
    for t in range(L):
        full = sampling_logp(logits, temperature or 1.0)                             # (n, 1, V)
        kept = kept_tokens(full, top_p, top_k, min_p) if truncates else None
        drawn = restrict(full, kept)
        u = noise[rows.to(noise.device), None, t : t + 1]                            # (n, 1, 1)
        token = drawn.argmax(-1) if temperature == 0 else sample_from(drawn, u)[:, 0]
        out.target[rows, t], out.mask[rows, t] = torch.where(live, token[:, 0], 0), live.float()
        out.logp[rows, t] = token_logp(drawn, token)[:, 0] * live
        if truncates:
            out.kept[rows, t] = kept[:, 0]
        live = live & ~stop(out.target[rows, : t + 1])
        open_rows[rows] = live
        if t + 1 < L and (prompt.device.type == "cpu" or t % CHECK_EVERY == 0):
            left = int(live.sum())
            if left == 0:
                break
            if left <= 0.75 * len(live):  # moving the rest together costs a copy of the cache
                keep = live.nonzero().squeeze(1)
                past.keep(keep)
                rows, token, live = rows[keep], token[keep], live[keep]
                padding = None if padding is None else padding[keep]
        if t + 1 < L:
            logits = model(token, None, past, padding)                               # (n, 1, V)
    M = max(1, int(out.mask.sum(1).max()))
    cut = {name: None if (x := getattr(out, name)) is None else x[:, :M] for name in ("target", "mask", "logp", "kept")}
    return Generation(**cut, truncated=open_rows.cpu())


def join_generations(parts):
    """Generations of some prompts each as one."""
    M = max(part.target.shape[1] for part in parts)

    def joined(name):
        x = [getattr(part, name) for part in parts]
        if x[0] is None or x[0].dim() == 1:
            return None if x[0] is None else torch.cat(x)
        # On padding every token may be drawn: a distribution that keeps none has no logarithm
        room = [(0, M - y.shape[1]) if y.dim() == 2 else (0, 0, 0, M - y.shape[1]) for y in x]
        return torch.cat([F.pad(y, size, value=y.dtype == torch.bool) for y, size in zip(x, room, strict=True)])

    return Generation(**{field.name: joined(field.name) for field in fields(Generation)})


class Stop:
    """Ends a row at the stop token, or where its text has just come to contain one of the stop sequences.

    prefix: what every answer begins with (response_prefix), which its reader sees too
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
