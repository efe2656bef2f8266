"""Fill-in sampling: a masked-fill model writes the hidden tokens of a text, all at once or in several passes."""

import torch

from core.distributions import LOGITS_AT_ONCE, KeptCollector, KeptTokens, sample_tokens
from core.masking import masked_positions


def predict_and_sample_tokens(model, input, position, uniform, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Fills the masked positions of every input G times in one forward per input, few enough inputs at a time that the
    logits stay below LOGITS_AT_ONCE numbers.

    input: (P, T); position: (P, M) from masked_positions; uniform: (P, G, T) noise by place in the text
    temperature: a number, or (P, 1, 1)
    Returns target (P, G, M) ids, their logp (P, G, M) under the distribution drawn from, and the KeptTokens of the
    P * M places, or None for all
    """
    noise = uniform.to("cpu" if input.device.type == "mps" else input.device)        # MPS has no float64
    noise = noise.gather(2, position.to(noise.device)[:, None].expand(-1, uniform.shape[1], -1))  # (P, G, M)
    size = max(1, LOGITS_AT_ONCE // max(1, position.shape[1] * model.vocabulary))
    cut, parts = lambda x: x.split(size) if torch.is_tensor(x) else [x] * -(-len(input) // size), []
    for texts, places, u, t in zip(cut(input), cut(position), cut(noise), cut(temperature), strict=True):
        parts.append(sample_tokens(model(texts, places), u, t, top_p, top_k, min_p))
    target, logp, kept = zip(*parts, strict=True)
    return torch.cat(target), torch.cat(logp), None if kept[0] is None else KeptTokens.join(kept)


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
                   min_p=0.0, budget=None):
    """Fills hidden tokens in several passes; each pass reads the tokens drawn in those before it.

    input: (P, T); position, chosen: (P, M); uniform, order: (P, G, T) noise by place, for tokens and for their order
    budget: a KeptBudget, which raises ValueError for too many kept tokens, or None
    Returns target (N, M), their logp (N, M) and turn (N, M), the texts read (N, passes, T), and the KeptTokens of the
    N * M places, or None for all; passes=1 draws what predict_and_sample_tokens draws
    """
    P, G, T = uniform.shape
    order = order.to("cpu" if input.device.type == "mps" else input.device)
    rows = torch.arange(P, device=input.device).repeat_interleave(G)                 # (N,)
    text, where, hidden = input[rows], position[rows], chosen[rows]                  # (N, T), (N, M), (N, M)
    by_place = where.to(order.device)  # noise may have to stay on the CPU: MPS has no float64
    turn = draw_turns(order.flatten(0, 1).gather(1, by_place), hidden.to(order.device), passes).to(input.device)
    target, logp, read, collector = torch.zeros_like(where), torch.zeros_like(hidden), [], KeptCollector(budget)
    settings = temperature, top_p, top_k, min_p
    for i in range(passes):
        read.append(text)
        if i == 0:  # the completions of a problem share the first text
            token, token_logp, kept = predict_and_sample_tokens(model, input, position, uniform, *settings)
        else:
            token, token_logp, kept = predict_and_sample_tokens(model, text, where, uniform.flatten(0, 1)[:, None],
                                                                *settings)
        # Padding gets tokens of the first pass: one that could not be drawn would have log-probability -inf
        now = turn == i if i else turn <= 0                                          # (N, M)
        target = torch.where(now, token.flatten(0, 1), target)
        logp = torch.where(now, token_logp.flatten(0, 1), logp)
        if kept is not None:
            n, m = now.cpu().nonzero(as_tuple=True)                                  # (k,) each
            M = now.shape[1]
            collector.add(n * M + m, kept[(n if i else n // G) * M + m])
        text = fill_in(text, where, (turn == i).float(), target[:, None])[:, 0]
    return target, logp, turn, torch.stack(read, 1), collector.joined()


@torch.no_grad()
def fill_once(model, input, mask, uniform, temperature=1.0, top_p=1.0):
    """The completed texts alone: input, mask (P, T), uniform (P, G, T) -> (P, G, T)."""
    position, chosen = masked_positions(mask, input.device)
    target, _, _ = predict_and_sample_tokens(model, input, position, uniform, temperature, top_p)
    return fill_in(input, position, chosen, target)
