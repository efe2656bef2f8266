"""Fill-in sampling in several passes: each pass reads the tokens that were drawn in the passes before it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from core.device import ids_on
from core.distributions import KeptCollector
from core.fill_in import depends_on_policy, draw_hidden, fill_in, order_of


def rank(order: Tensor, places: Tensor) -> Tensor:
    """The rank (N, M) of each of these places by rising order, in 0 .. number of places - 1; other places come after
    them. order: (N, M) numbers; places: (N, M) bool"""
    order = order.masked_fill(~places, torch.inf)
    return order.argsort(dim=1, stable=True).argsort(1)


def draw_passes(order: Tensor, hidden: Tensor, passes: int, block_length: int | None) -> Tensor:
    """The pass that draws each hidden token: block after block and, within a block, by rising `order`, about as many in
    each of its passes.

    order: (N, M) noise; hidden: (N, M) bool, False on padding; block_length: places of a block, None: one block
    Returns (N, M) in 0 .. number of blocks * passes - 1, and -1 on padding
    """
    M = order.shape[1]
    plan = []
    first = 0  # pass of the block
    for place in torch.arange(M).split(block_length or M):
        block = hidden[:, place]                                                     # (N, m)
        count = block.sum(1, keepdim=True).clamp(min=1)                              # (N, 1)
        number = rank(order[:, place], block)                                        # (N, m)
        turn = first + number * passes // count                                      # (N, m)
        plan.append(turn.masked_fill(~block, -1))
        first += passes
    return torch.cat(plan, 1)


def count_passes(places: int, block_length: int | None, passes: int) -> int:
    """The passes of all blocks of a text with this many hidden places. passes: number of passes of a block"""
    if block_length is None:
        return passes
    return math.ceil(places / block_length) * passes


@torch.no_grad()
def fill_in_passes(
        model: nn.Module,
        input: Tensor,                     # (P, T) texts with MASK
        position: Tensor,                  # (P, M) from masked_positions
        hidden: Tensor,                    # (P, M) from masked_positions
        uniform: Tensor,                   # (P, G, T) noise for tokens by column of the text, on the CPU
        order: Tensor,                     # (P, G, T) noise for the order of the places, on the CPU
        passes: int,                       # of each block
        padding: Tensor | None = None,     # (P,) number of leading columns without a token; None: none in any text
        block_length: int | None = None,   # hidden tokens of a block; None: one block
        unmask_order: str = "random",      # a name in UNMASK_ORDERS
        end_ids: Sequence[int] = (),       # a row ends with one of these, once all tokens before it are drawn
        **sampling) -> tuple:
    """Fills in hidden tokens in several passes; passes=1 draws the same tokens as predict_and_sample_tokens.

    If the order depends on the policy, each pass draws all hidden tokens of its block and keeps the first of them, as
    LLaDA does (arXiv 2502.09992). Passes then draw the same place again: uniform is (all passes, P, G, T). Places after
    the end of a row are not drawn.
    sampling: temperature, top_p, top_k, min_p
    Returns target (N, M), their logp (N, M) and the pass (N, M) that drew each, the texts read (N, all passes, T), and
    the KeptTokens of the drawn tokens in order, or None if all are kept. Where nothing is drawn target and logp are 0,
    and the pass is -1
    """
    _, G, T = uniform.shape[-3:]
    device = input.device
    text = input.repeat_interleave(G, 0)                                             # (N, T)
    column = position.repeat_interleave(G, 0)                                        # (N, M)
    hidden = hidden.repeat_interleave(G, 0)                                          # (N, M)
    if padding is not None:
        padding = padding.repeat_interleave(G)                                       # (N,)
    order = order.flatten(0, 1)                                                      # (N, T)
    order = order.gather(1, column.cpu())                                            # (N, M)
    order_by_policy = None
    if depends_on_policy(unmask_order):
        order_by_policy = unmask_order
    else:
        order = order_of(unmask_order, order)
    # plan, turn and ended stay on the CPU: they decide which texts a pass reads, and on a GPU that would be a wait
    plan = draw_passes(order, hidden, passes, block_length)                          # (N, M)
    total = count_passes(position.shape[1], block_length, passes)
    uniform = uniform.expand(total, *uniform.shape[-3:])                             # (all passes, P, G, T)
    turn = torch.full_like(plan, -1)                                                 # (N, M)
    ended = torch.zeros(len(plan), 1, dtype=torch.bool)                              # (N, 1)
    target = torch.zeros_like(column)
    logp = torch.zeros(column.shape, device=device)
    collector = KeptCollector()
    read = []
    for i in range(total):
        read.append(text)
        now = (plan == i) & ~ended                                                   # (N, M)
        if not now.any():  # no text has as many hidden tokens as there are passes, or all have ended
            continue
        drawn = now
        if order_by_policy:
            block = plan // passes == i // passes
            drawn = block & (turn < 0) & ~ended
        # In the first pass the g = G completions of a problem still share their text; later g is 1
        g = G if i == 0 else 1
        wanted = drawn.unflatten(0, (-1, g)).any(1)                                  # (N / g, M)
        noise = uniform[i].reshape(-1, g, T)                                         # (N / g, g, T)
        own_padding = None
        if padding is not None:
            own_padding = padding[::g]                                               # (N / g,)
        token, token_logp, token_order, kept = draw_hidden(
            model, text[::g], column[::g], noise, wanted,
            padding=own_padding, unmask_order=order_by_policy, **sampling)           # (N / g, g, M) each
        token = token.flatten(0, 1)                                                  # (N, M)
        token_logp = token_logp.flatten(0, 1)                                        # (N, M)
        if order_by_policy:
            token_order = token_order.flatten(0, 1)                                  # (N, M)
            place = rank(token_order.cpu(), drawn)                                   # (N, M)
            count = now.sum(1, keepdim=True)                                         # (N, 1)
            now = drawn & (place < count)
        if kept is not None:
            number = wanted.flatten().cumsum(0).view_as(wanted) - 1                  # (N / g, M) in `kept`
            number = number.repeat_interleave(g, 0)                                  # (N, M)
            index = now.flatten().nonzero()[:, 0]                                    # (k,)
            collector.add(index, kept[number[now]])
        turn[now] = i
        now = now.to(device, non_blocking=True)
        target = torch.where(now, token, target)
        logp = torch.where(now, token_logp, logp)
        text = fill_in(text, column, now, target[:, None])[:, 0]
        if end_ids:
            is_end = torch.isin(target, ids_on(device, *end_ids)).cpu()              # (N, M)
            complete = (turn >= 0).int().cumprod(1).bool()                           # (N, M) so are all before it
            ended = (is_end & complete).any(1, keepdim=True)
    turn = turn.to(device, non_blocking=True)
    texts = torch.stack(read, 1)                                                     # (N, all passes, T)
    return target, logp, turn, texts, collector.joined()
