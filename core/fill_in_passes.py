"""Fill-in sampling in several passes: each pass reads the tokens that were drawn in the passes before it."""

import torch

from core.distributions import in_parts, token_logp
from core.fill_in import fill_in, predict_and_sample_tokens
from core.performance.kept_tokens import KeptCollector


def draw_passes(order, hidden, passes, block_length=None):
    """The pass in which each hidden token is drawn: block after block, and in each block by rising `order`, about as
    many in each of its passes.

    order: (N, M) noise; hidden: (N, M) bool, False on padding; block_length: places of a block, None: one block
    Returns (N, M) in 0 .. number of blocks * passes - 1, and -1 on padding
    """
    turns = []
    length = block_length or order.shape[1]
    for block, there in zip(order.split(length, 1), hidden.split(length, 1), strict=True):
        rank = block.masked_fill(~there, 2.0).argsort(1).argsort(1)                  # (N, m) rank in the order
        count = there.sum(1, keepdim=True).clamp(min=1)                              # (N, 1)
        turn = len(turns) * passes + rank * passes // count                          # (N, m)
        turns.append(turn.masked_fill(~there, -1))
    return torch.cat(turns, 1)


@torch.no_grad()
def fill_in_passes(model, input, position, hidden, uniform, order, passes, budget=None, padding=None,
                   block_length=None, by_confidence=False, end_ids=(), **sampling):
    """Fills in hidden tokens in several passes; passes=1 draws what predict_and_sample_tokens draws.

    input: (P, T); position, hidden: (P, M) from masked_positions
    uniform, order: (P, G, T) noise by column of the text, for tokens and for their order, on the CPU
    budget: a KeptBudget, which raises ValueError for too many kept tokens, or None
    padding: (P,) number of leading columns of a text without a token, or None
    block_length: hidden tokens of a block, which has `passes` of its own; None: one block
    by_confidence: each pass draws all hidden tokens of its block and keeps the likeliest, as LLaDA does
    (arXiv 2502.09992): which ones depends on the policy
    end_ids: tokens with which a row ends, once all before it are there; what is hidden behind is not drawn any more
    Returns target (N, M), their logp (N, M) and the pass (N, M) that drew each, the texts read (N, all passes, T), and
    the KeptTokens of the drawn tokens in order, or None for all. Where nothing is drawn target and logp are 0, and the
    pass is -1
    """
    G = uniform.shape[1]
    device = input.device
    text = input.repeat_interleave(G, 0)                                             # (N, T)
    column = position.repeat_interleave(G, 0)                                        # (N, M)
    order = order.flatten(0, 1).gather(1, column.cpu())                              # (N, M)
    plan = draw_passes(order, hidden.repeat_interleave(G, 0), passes, block_length)  # (N, M)
    noise = uniform.flatten(0, 1)[:, None]                                           # (N, 1, T)
    each_padding = None if padding is None else padding.repeat_interleave(G)         # (N,)
    blocks = 1 if block_length is None else -(-position.shape[1] // block_length)
    turn = torch.full_like(plan, -1)
    ended = torch.zeros(len(plan), dtype=torch.bool)                                 # (N,)
    target = torch.zeros_like(column)
    logp = torch.zeros(column.shape, device=device)
    collector = KeptCollector(budget)
    read = []
    for i in range(blocks * passes):
        read.append(text)
        now = (plan == i) & ~ended[:, None]                                          # (N, M)
        if not now.any():  # no text has as many hidden tokens as there are passes, or all have ended
            continue
        drawn = now
        if by_confidence:
            drawn = (plan // passes == i // passes) & (turn < 0) & ~ended[:, None]
        if i == 0:  # the completions of a problem share its text
            some = drawn.unflatten(0, (-1, G)).any(1)                                # (P, M) in any completion
            token, drawn_logp, kept = predict_and_sample_tokens(
                model, input, position, uniform, some, padding=padding, **sampling)
            token, drawn_logp = token.flatten(0, 1), drawn_logp.flatten(0, 1)        # (N, M) each
            number = (some.flatten().cumsum(0).view_as(some) - 1).repeat_interleave(G, 0)  # (N, M) index in `kept`
        else:
            rows = drawn.any(1).nonzero().squeeze(1)                                 # (n,)
            here = rows.to(device)
            own = None if padding is None else each_padding[here]
            new, new_logp, kept = predict_and_sample_tokens(
                model, text[here], column[here], noise[rows], drawn[rows], padding=own, **sampling)
            token, drawn_logp = torch.zeros_like(target), torch.zeros_like(logp)
            token[here], drawn_logp[here] = new[:, 0], new_logp[:, 0]
            number = drawn.flatten().cumsum(0).view_as(drawn) - 1                    # (N, M)
        if by_confidence:
            likeliness = untruncated_logp(model, text, column, token, each_padding).cpu()
            rank = likeliness.masked_fill(~drawn, -torch.inf).argsort(1, descending=True).argsort(1)  # (N, M)
            now = drawn & (rank < now.sum(1, keepdim=True))
        if kept is not None:
            collector.add(now.flatten().nonzero().squeeze(1), kept[number[now]])
        turn[now] = i
        now = now.to(device)
        target = torch.where(now, token, target)
        logp = torch.where(now, drawn_logp, logp)
        text = fill_in(text, column, now, target[:, None])[:, 0]
        if end_ids:
            end = torch.isin(target, torch.tensor(end_ids, device=device)).cpu() & (turn >= 0)   # (N, M)
            whole = (turn >= 0).int().cumprod(1).bool()                              # (N, M) all up to here are there
            ended = (end & whole).any(1)
    read = torch.stack(read, 1)
    return target, logp, turn.to(device), read, collector.joined()


def untruncated_logp(model, text, column, token, padding):
    """Log-probability at temperature 1, and without truncation, of tokens (N, M) at their columns (N, M) of texts
    (N, T), which are read again: (N, M)."""
    h = model.states(text, column, padding=padding)                                  # (N, M, C)

    def logp(h, token):
        return (token_logp(model.project(h).log_softmax(-1), token),)

    found, = in_parts(logp, model.vocabulary, h.flatten(0, 1), token.flatten())
    return found.view(token.shape)
