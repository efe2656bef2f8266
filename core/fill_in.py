"""Fill-in sampling: a masked-fill model writes the hidden tokens of a text, all at once or in several passes."""

import torch

from core.distributions import LOGITS_AT_ONCE, KeptCollector, KeptTokens, sample_tokens
from core.masking import masked_positions, places_of_mask


def predict_and_sample_tokens(model, input, position, uniform, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
                              places=None):
    """Samples G tokens at the masked positions of every input, in one forward per input. Logits are made only for the
    places where a token is drawn, and for few enough at a time that they stay below LOGITS_AT_ONCE numbers.

    input: (P, T); position: (P, M) from masked_positions; uniform: (P, G, T) noise by place in the text
    temperature: a number, or (P, 1, 1)
    places: (P, M) bool on the CPU, where a token is drawn; elsewhere it and its log-probability are 0. None: everywhere
    Returns target (P, G, M) ids, their logp (P, G, M) under the distribution drawn from, and the KeptTokens of the K
    places where a token is drawn, or None for all
    """
    (P, M), G, device = position.shape, uniform.shape[1], input.device
    where = torch.arange(P * M) if places is None else places.flatten().nonzero().squeeze(1)
    where = where.to(device)                                                         # (K,)
    each_place = lambda x: x.transpose(1, 2).flatten(0, 1)[where.to(x.device)]       # (P, ..., M) -> (K, ...)
    noise = uniform.to("cpu" if device.type == "mps" else device)                    # MPS has no float64
    noise = each_place(noise.gather(2, position.to(noise.device)[:, None].expand(-1, G, -1)))  # (K, G)
    if torch.is_tensor(temperature):
        temperature = each_place(temperature.expand(P, 1, M))                        # (K, 1)
    h = model.states(input, position).flatten(0, 1)                                  # (P M, C)
    h = h if len(where) == len(h) else h[where]                                      # (K, C)
    size, parts = max(1, LOGITS_AT_ONCE // model.vocabulary), []
    cut = lambda x: x.split(size) if torch.is_tensor(x) else [x] * max(1, -(-len(h) // size))
    for part, u, t in zip(cut(h), cut(noise), cut(temperature), strict=True):
        parts.append(sample_tokens(model.project(part)[None], u.T[None], t, top_p, top_k, min_p))
    target, logp, kept = zip(*parts, strict=True)
    whole = lambda x: x.new_zeros(P * M, G).index_copy(0, where, x[0].T).view(P, M, G).transpose(1, 2)  # (P, G, M)
    target, logp = whole(torch.cat(target, 2)), whole(torch.cat(logp, 2))
    return target, logp, None if kept[0] is None else KeptTokens.join(kept)


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

    order: (N, M) noise; chosen: (N, M) 1.0 or True where a token is hidden
    Returns (N, M) in 0 .. passes - 1, and -1 where nothing is hidden
    """
    shuffled = order.masked_fill(chosen == 0, 2.0).argsort(1).argsort(1)             # (N, M) place in the order
    return (shuffled * passes // chosen.sum(1, keepdim=True).long().clamp(min=1)).masked_fill(chosen == 0, -1)


@torch.no_grad()
def fill_in_passes(model, input, position, places, uniform, order, passes, temperature=1.0, top_p=1.0, top_k=0,
                   min_p=0.0, budget=None):
    """Fills hidden tokens in several passes; each pass reads the tokens drawn in those before it.

    input: (P, T); position, places: (P, M), places bool on the CPU: where a token is hidden
    uniform, order: (P, G, T) noise by place in the text, for tokens and for their order
    budget: a KeptBudget, which raises ValueError for too many kept tokens, or None
    Returns target (N, M), their logp (N, M) and turn (N, M), the texts read (N, passes, T), and the KeptTokens of the
    hidden tokens in order, or None for all; passes=1 draws what predict_and_sample_tokens draws. Target and logp are 0
    on padding
    """
    P, G, T = uniform.shape
    text, where, hidden = (x.repeat_interleave(G, 0) for x in (input, position, places))  # (N, T), (N, M), (N, M)
    by_place = order.cpu().flatten(0, 1).gather(1, where.cpu())                      # (N, M)
    turn = draw_turns(by_place, hidden, passes)                                      # (N, M)
    target, logp = torch.zeros_like(where), torch.zeros(where.shape, device=input.device)  # (N, M) each
    read, collector = [], KeptCollector(budget)
    for i in range(passes):
        read.append(text)
        now = turn == i                                                              # (N, M)
        if not now.any():  # no text has as many hidden tokens as there are passes
            continue
        if i == 0:  # the completions of a problem share the first text
            drawn, batch = now.view(P, G, -1).any(1), (input, position, uniform)     # (P, M)
        else:
            drawn, batch = now, (text, where, uniform.flatten(0, 1)[:, None])        # (N, M)
        token, token_logp, kept = predict_and_sample_tokens(model, *batch, temperature, top_p, top_k, min_p, drawn)
        if kept is not None:
            n, m = now.nonzero(as_tuple=True)                                        # (k,) each
            number = drawn.flatten().cumsum(0).view(drawn.shape) - 1                 # (P or N, M) of each place in kept
            collector.add(n * now.shape[1] + m, kept[number[n if i else n // G, m]])
        now = now.to(input.device)
        target = torch.where(now, token.flatten(0, 1), target)
        logp = torch.where(now, token_logp.flatten(0, 1), logp)
        text = fill_in(text, where, now.float(), target[:, None])[:, 0]
    return target, logp, turn.to(input.device), torch.stack(read, 1), collector.joined()


@torch.no_grad()
def fill_once(model, input, mask, uniform, temperature=1.0, top_p=1.0):
    """The completed texts alone: input, mask (P, T), uniform (P, G, T) -> (P, G, T)."""
    position, chosen = masked_positions(mask, input.device)
    target, _, _ = predict_and_sample_tokens(model, input, position, uniform, temperature, top_p,
                                             places=places_of_mask(mask))
    return fill_in(input, position, chosen, target)
