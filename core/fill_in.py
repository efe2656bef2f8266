"""Fill-in sampling: a masked-fill model writes the hidden tokens of a text, all at once or in several passes."""

import torch

from core.distributions import kept_tokens, restrict, sample_from, sampling_logp, token_logp, truncates
from core.masking import masked_positions


def predict_and_sample_tokens(model, input, position, uniform, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Fills the masked positions of every input G times in one forward per input.

    input: (P, T); position: (P, M) from masked_positions; uniform: (P, G, T) noise by place in the text
    Returns target (P, G, M) ids, their logp (P, G, M) under the distribution drawn from, and kept (P, M, V), the tokens
    that could be drawn, or None for all
    """
    full = sampling_logp(model(input, position), temperature)                        # (P, M, V)
    kept = kept_tokens(full, top_p, top_k, min_p) if truncates(top_p, top_k, min_p) else None
    drawn, G = restrict(full, kept), uniform.shape[1]
    noise = uniform.to("cpu" if input.device.type == "mps" else input.device)        # MPS has no float64
    noise = noise.gather(2, position.to(noise.device)[:, None].expand(-1, G, -1))    # (P, G, M)
    target = sample_from(drawn, noise)                                               # (P, G, M)
    return target, token_logp(drawn[:, None].expand(-1, G, -1, -1), target), kept


def fill_in(input, position, chosen, target):
    """Puts sampled tokens into their texts.

    input: (P, T); position, chosen: (P, M); target: (P, G, M)
    Returns (P, G, T)
    """
    G = target.shape[1]
    text = input[:, None].expand(-1, G, -1)                                          # (P, G, T)
    where = position[:, None].expand(-1, G, -1)                                      # (P, G, M)
    token = torch.where(chosen[:, None] > 0, target, text.gather(2, where))          # padding rewrites what is there
    return text.scatter(2, where, token)


def draw_turns(order, chosen, passes):
    """The pass in which each hidden token is filled: in random order, about as many in each pass.

    order: (N, M) noise; chosen: (N, M) 1.0 where a token is hidden
    Returns (N, M) in 0 .. passes - 1, and -1 where nothing is hidden
    """
    shuffled = order.masked_fill(chosen == 0, 2.0).argsort(1).argsort(1)             # (N, M) place in the order
    return (shuffled * passes // chosen.sum(1, keepdim=True).long().clamp(min=1)).masked_fill(chosen == 0, -1)


@torch.no_grad()
def fill_in_passes(model, input, position, chosen, uniform, order, passes, temperature=1.0, top_p=1.0, top_k=0,
                   min_p=0.0):
    """Fills hidden tokens in several passes; each pass reads the tokens drawn in those before it.

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
    for i in range(passes):
        read.append(text)
        full = sampling_logp(model(input, position)[rows] if i == 0 else model(text, where), temperature)  # (N, M, V)
        allowed = kept_tokens(full, top_p, top_k, min_p) if truncates(top_p, top_k, min_p) else None
        drawn = restrict(full, allowed)
        noise = uniform.flatten(0, 1).gather(1, by_place)[:, None]                   # (N, 1, M)
        token, now = sample_from(drawn, noise)[:, 0], turn == i                      # (N, M)
        # Padding gets tokens of the first pass: one that could not be drawn would have log-probability -inf
        now = now if i else torch.ones_like(now)
        target = torch.where(now, token, target)
        logp = torch.where(now, token_logp(drawn, token), logp)
        if allowed is not None:
            kept = allowed if kept is None else torch.where(now[..., None], allowed, kept)
        text = fill_in(text, where, (turn == i).float(), target[:, None])[:, 0]
    return target, logp, turn, torch.stack(read, 1), kept


@torch.no_grad()
def fill_once(model, input, mask, uniform, temperature=1.0, top_p=1.0):
    """The completed texts alone: input, mask (P, T), uniform (P, G, T) -> (P, G, T)."""
    position, chosen = masked_positions(mask, input.device)
    target, _, _ = predict_and_sample_tokens(model, input, position, uniform, temperature, top_p)
    return fill_in(input, position, chosen, target)
