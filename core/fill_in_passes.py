"""Fill-in sampling in several passes: each pass reads the tokens that were drawn in the passes before it."""

import torch

from core.fill_in import fill_in, predict_and_sample_tokens
from core.performance.kept_tokens import KeptCollector


def draw_passes(order, hidden, passes):
    """The pass in which each hidden token is drawn: in random order, about as many in each pass.

    order: (N, M) noise; hidden: (N, M) bool, False on padding
    Returns (N, M) in 0 .. passes - 1, and -1 on padding
    """
    rank = order.masked_fill(~hidden, 2.0).argsort(1).argsort(1)                     # (N, M) rank in the random order
    count = hidden.sum(1, keepdim=True).clamp(min=1)                                 # (N, 1)
    turn = rank * passes // count                                                    # (N, M)
    return turn.masked_fill(~hidden, -1)


@torch.no_grad()
def fill_in_passes(model, input, position, hidden, uniform, order,
                   passes, budget=None, **sampling):
    """Fills in hidden tokens in several passes; passes=1 draws what predict_and_sample_tokens draws.

    input: (P, T); position, hidden: (P, M) from masked_positions
    uniform, order: (P, G, T) noise by column of the text, for tokens and for their order, on the CPU
    budget: a KeptBudget, which raises ValueError for too many kept tokens, or None
    Returns target (N, M), their logp (N, M) and the pass (N, M) that drew each, the texts read (N, passes, T), and the
    KeptTokens of the hidden tokens in order, or None for all. Target and logp are 0 on padding
    """
    G = uniform.shape[1]
    text = input.repeat_interleave(G, 0)                                             # (N, T)
    column = position.repeat_interleave(G, 0)                                        # (N, M)
    order = order.flatten(0, 1).gather(1, column.cpu())                              # (N, M)
    turn = draw_passes(order, hidden.repeat_interleave(G, 0), passes)                # (N, M)
    target = torch.zeros_like(column)
    logp = torch.zeros(column.shape, device=input.device)
    collector = KeptCollector(budget)
    read = []
    for i in range(passes):
        read.append(text)
        now = turn == i                                                              # (N, M)
        if not now.any():  # no text has as many hidden tokens as there are passes
            continue
        if i == 0:  # the completions of a problem share its text
            drawn = now.unflatten(0, (-1, G)).any(1)                                 # (P, M) in any completion
            token, token_logp, kept = predict_and_sample_tokens(model, input, position, uniform, drawn, **sampling)
            if kept is not None:
                number = drawn.flatten().cumsum(0).view_as(drawn) - 1                # (P, M) index in `kept`
                kept = kept[number.repeat_interleave(G, 0)[now]]
        else:
            noise = uniform.flatten(0, 1)[:, None]                                   # (N, 1, T)
            token, token_logp, kept = predict_and_sample_tokens(model, text, column, noise, now, **sampling)
        if kept is not None:
            collector.add(now.flatten().nonzero().squeeze(1), kept)
        now = now.to(input.device)
        target = torch.where(now, token.flatten(0, 1), target)
        logp = torch.where(now, token_logp.flatten(0, 1), logp)
        text = fill_in(text, column, now, target[:, None])[:, 0]
    read = torch.stack(read, 1)
    return target, logp, turn.to(input.device), read, collector.joined()
