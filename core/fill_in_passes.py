"""Fill-in sampling in several passes: each pass reads the tokens that were drawn in the passes before it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from core.device import ids_on
from core.distributions import KeptCollector
from core.fill_in import depends_on_policy, draw_hidden, fill_in, order_of


def rank(order: Tensor, places: Tensor) -> Tensor:
    """Ranks the given places by ascending order, (N, M) in 0 .. number of places - 1; other places have higher ranks.
    order: (N, M) numbers; places: (N, M) bool"""
    order = order.masked_fill(~places, torch.inf)
    place = order.argsort(dim=1, stable=True)                                        # (N, M) the place of each rank
    return place.argsort(1)                                                          # its inverse


def draw_passes(
        order: Tensor,                          # (N, M) noise
        hidden: Tensor,                         # (N, M) bool, False on padding
        passes: int,                            # of each block
        block_length: int | None) -> Tensor:    # places of a block; None: one block
    """Assigns each hidden token to a pass: block after block and, within a block, by ascending `order`, with about
    equally many tokens in each pass. Returns (N, M) in 0 .. number of blocks * passes - 1, and -1 on padding."""
    M = order.shape[1]
    plan = []
    first = 0  # pass of the block
    for block in torch.arange(M).split(block_length or M):
        is_hidden = hidden[:, block]                                                 # (N, m)
        count = is_hidden.sum(1, keepdim=True)                                       # (N, 1)
        number = rank(order[:, block], is_hidden)                                    # (N, m) in 0 .. count - 1
        planned = first + number * passes // count.clamp(min=1)
        planned = planned.masked_fill(~is_hidden, -1)
        plan.append(planned)
        first += passes
    return torch.cat(plan, 1)


def count_passes(places: int, block_length: int | None, passes: int) -> int:
    """Counts the passes over all blocks of a text with this many hidden places. passes: number of passes of a block"""
    if block_length is None:
        return passes
    blocks = math.ceil(places / block_length)
    return blocks * passes


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
        end_ids: Sequence[int] = (),       # a text ends with one of these, once all tokens before it are drawn
        **sampling) -> tuple:
    """Fills in hidden tokens in several passes; passes=1 draws the same tokens as predict_and_sample_tokens.

    If the order depends on the policy, each pass draws all hidden tokens of its block and keeps the first of them in
    this order, as LLaDA does (arXiv 2502.09992). Several passes then draw the same place: uniform is (all passes, P, G,
    T). Places after the end of a text are not drawn.
    sampling: temperature, top_p, top_k, min_p
    Returns target (N, M), their logp (N, M) and the pass (N, M) that drew each, the texts read (N, all passes, T), and
    the KeptTokens of the drawn tokens in order, or None if all are kept. Where nothing is drawn, target and logp are 0
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
    # plan, drawn_in and ended stay on the CPU. They decide which texts a pass reads, so on a GPU each pass would wait
    # for them
    plan = draw_passes(order, hidden, passes, block_length)                          # (N, M)
    N, M = plan.shape
    total = count_passes(M, block_length, passes)
    uniform = uniform.expand(total, *uniform.shape[-3:])                             # (all passes, P, G, T)
    drawn_in = torch.full_like(plan, -1)                                             # (N, M)
    ended = torch.zeros(N, 1, dtype=torch.bool)
    target = torch.zeros_like(column)                                                # (N, M)
    logp = torch.zeros(N, M, device=device)
    collector = KeptCollector()
    texts_read = []
    for i in range(total):
        texts_read.append(text)
        due = (plan == i) & ~ended                                                   # (N, M) get a token in this pass
        if not due.any():  # every text has fewer hidden tokens than passes, or has ended
            continue
        drawn = due
        if order_by_policy:  # the plan gives only the number of tokens; they are chosen once all are drawn
            block = plan // passes == i // passes
            drawn = block & (drawn_in < 0) & ~ended
        # In the first pass the g = G completions of a problem still have the same text, which is read once for all.
        # In later passes each has its own: g = 1.
        g = G if i == 0 else 1
        wanted = drawn.unflatten(0, (-1, g))                                         # (N / g, g, M)
        wanted = wanted.any(1)                                                       # (N / g, M) by one of the g
        noise = uniform[i].reshape(-1, g, T)                                         # (N / g, g, T)
        padding_read = None
        if padding is not None:
            padding_read = padding[::g]                                              # (N / g,)
        token, token_logp, token_order, kept = draw_hidden(                          # (N / g, g, M) each but kept
            model,
            text[::g],
            column[::g],
            noise,
            wanted,
            padding=padding_read,
            unmask_order=order_by_policy,
            **sampling)
        token = token.flatten(0, 1)                                                  # (N, M)
        token_logp = token_logp.flatten(0, 1)                                        # (N, M)
        if order_by_policy:
            token_order = token_order.flatten(0, 1)                                  # (N, M)
            number = rank(token_order.cpu(), drawn)                                  # (N, M) in this order
            count = due.sum(1, keepdim=True)                                         # (N, 1)
            due = drawn & (number < count)
        if kept is not None:
            # `kept` has an item for each True of wanted, in order; number is its index for each place
            number = wanted.flatten().cumsum(0) - 1
            number = number.view_as(wanted)                                          # (N / g, M)
            number = number.repeat_interleave(g, 0)                                  # (N, M)
            index = due.flatten().nonzero()                                          # (k, 1)
            kept = kept[number[due]]
            collector.add(index[:, 0], kept)
        drawn_in[due] = i
        due = due.to(device, non_blocking=True)
        target = torch.where(due, token, target)
        logp = torch.where(due, token_logp, logp)
        filled = fill_in(text, column, due, target[:, None])                         # (N, 1, T)
        text = filled[:, 0]
        if end_ids:
            is_end = torch.isin(target, ids_on(device, *end_ids))                    # (N, M)
            is_drawn = drawn_in >= 0
            complete = is_drawn.int().cumprod(1)                                     # (N, M) 1: all up to it are
            ended = is_end.cpu() & complete.bool()
            ended = ended.any(1, keepdim=True)                                       # (N, 1)
    drawn_in = drawn_in.to(device, non_blocking=True)
    texts_read = torch.stack(texts_read, 1)                                          # (N, all passes, T)
    return target, logp, drawn_in, texts_read, collector.joined()
