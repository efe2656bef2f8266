"""Fill-in sampling in several passes: each pass reads the tokens that were drawn in the passes before it."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from core.device import ids_on
from core.distributions import KeptCollector, in_parts
from core.fill_in import depends_on_policy, draw_hidden, fill_in, order_of


def draw_passes(order: Tensor, hidden: Tensor, passes: int, block_length: int | None) -> Tensor:
    """The pass that draws each hidden token: block after block and, within a block, by rising `order`, about as many in
    each of its passes.

    order: (N, M) noise; hidden: (N, M) bool, False on padding; block_length: places of a block, None: one block
    Returns (N, M) in 0 .. number of blocks * passes - 1, and -1 on padding
    """
    turns = []
    length = block_length or order.shape[1]
    for block, there in zip(order.split(length, 1), hidden.split(length, 1), strict=True):
        rank = block.masked_fill(~there, torch.inf).argsort(dim=1, stable=True).argsort(1)  # (N, m) rank in the order
        count = there.sum(1, keepdim=True).clamp(min=1)                              # (N, 1)
        turn = len(turns) * passes + rank * passes // count                          # (N, m)
        turns.append(turn.masked_fill(~there, -1))
    return torch.cat(turns, 1)


def count_passes(places: int, block_length: int | None, passes: int) -> int:
    """The passes of all blocks of a text with this many hidden places. passes: those of a block"""
    return passes if block_length is None else math.ceil(places / block_length) * passes


@torch.no_grad()
def fill_in_passes(model: nn.Module, input: Tensor, position: Tensor, hidden: Tensor, uniform: Tensor, order: Tensor,
                   passes: int, padding: Tensor | None = None, block_length: int | None = None,
                   unmask_order: str = "random", end_ids: Sequence[int] = (), **sampling) -> tuple:
    """Fills in hidden tokens in several passes; passes=1 draws what predict_and_sample_tokens draws.

    input: (P, T); position, hidden: (P, M) from masked_positions
    uniform: (P, G, T) noise for tokens by column of the text, on the CPU; (all passes, P, G, T) if the order depends on
    the policy, because passes draw the same place again
    order: (P, G, T) noise for the order of the places, on the CPU
    padding: (P,) number of leading columns of a text without a token, or None for none
    block_length: hidden tokens of a block, which has `passes` of its own; None: one block
    unmask_order: a name in UNMASK_ORDERS. If it depends on the policy, each pass draws all hidden tokens of its block
    and keeps the first of them, as LLaDA does (arXiv 2502.09992)
    end_ids: tokens with which a row ends once all tokens before them are there; the rest of the row is not drawn
    Returns target (N, M), their logp (N, M) and the pass (N, M) that drew each, the texts read (N, all passes, T), and
    the KeptTokens of the drawn tokens in order, or None for all. Where nothing is drawn target and logp are 0, and the
    pass is -1
    """
    G = uniform.shape[-2]
    device = input.device
    text = input.repeat_interleave(G, 0)                                             # (N, T)
    column = position.repeat_interleave(G, 0)                                        # (N, M)
    order = order.flatten(0, 1).gather(1, column.cpu())                              # (N, M)
    by_policy = depends_on_policy(unmask_order)
    if not by_policy:
        order = order_of(unmask_order, order)
    own_padding = None if padding is None else padding.repeat_interleave(G)          # (N,)
    plan = draw_passes(order, hidden.repeat_interleave(G, 0), passes, block_length)  # (N, M)
    total = count_passes(position.shape[1], block_length, passes)
    uniform = uniform.expand(total, *uniform.shape[-3:])                             # (all passes, P, G, T)
    turn = torch.full_like(plan, -1)
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
        if by_policy:
            drawn = (plan // passes == i // passes) & (turn < 0) & ~ended
        inputs = text, column, uniform[i].flatten(0, 1)[:, None], own_padding
        if i == 0:  # the completions of a problem still share their text
            inputs = input, position, uniform[0], padding
        of_tokens = partial(order_of_tokens, model, unmask_order) if by_policy else None
        token, drawn_logp, order_of_pass, kept, number = draw(model, *inputs, drawn, of_tokens, sampling)
        if by_policy:
            order_of_pass = order_of_pass.cpu().masked_fill(~drawn, torch.inf)
            rank = order_of_pass.argsort(dim=1, stable=True).argsort(1)              # (N, M)
            now = drawn & (rank < now.sum(1, keepdim=True))
        if kept is not None:
            collector.add(now.flatten().nonzero().squeeze(1), kept[number[now]])
        turn[now] = i
        now = now.to(device, non_blocking=True)
        target = torch.where(now, token, target)
        logp = torch.where(now, drawn_logp, logp)
        text = fill_in(text, column, now, target[:, None])[:, 0]
        if end_ids:
            end = torch.isin(target, ids_on(device, *end_ids)).cpu()                 # (N, M)
            all_before = (turn >= 0).int().cumprod(1).bool()
            ended = (end & all_before).any(1, keepdim=True)
    return target, logp, turn.to(device, non_blocking=True), torch.stack(read, 1), collector.joined()


def order_of_tokens(model: nn.Module, unmask_order: str, h: Tensor, ids: Tensor) -> Tensor:
    """The order (K, G) of the drawn ids, one that depends on the policy, from states h (K, C)."""
    def of_part(h, ids):
        return (order_of(unmask_order, model.project(h).log_softmax(-1), ids),)

    return in_parts(of_part, model.vocabulary, h, ids)[0]


def draw(model: nn.Module, text: Tensor, column: Tensor, noise: Tensor, padding: Tensor | None, drawn: Tensor,
         order: Callable | None, sampling: dict) -> tuple:
    """Draws tokens of one pass; a text in which none is wanted is not read.

    text: (R, T), each read once for its g completions; column: (R, M); noise: (R, g, T); padding: (R,) or None
    drawn: (R g, M) bool, True where a token is wanted; order: as draw_hidden has it
    Returns tokens, logp and order (R g, M), the KeptTokens or None, and the index (R g, M) of each place in them
    """
    R, g, _ = noise.shape
    wanted = drawn.unflatten(0, (R, g)).any(1)                                       # (R, M)
    rows = wanted.any(1).nonzero().squeeze(1)                                        # (r,)
    here = rows.to(text.device, non_blocking=True)
    own_padding = None if padding is None else padding[here]
    *found, kept = draw_hidden(model, text[here], column[here], noise[rows], wanted[rows], padding=own_padding,
                               order=order, **sampling)
    of_rows = []
    for x in found:                                                                  # (r, g, M)
        whole = x.new_zeros(R, g, column.shape[1])
        whole[here] = x
        of_rows.append(whole.flatten(0, 1))
    number = wanted.flatten().cumsum(0).view_as(wanted) - 1                          # (R, M)
    return *of_rows, kept, number.repeat_interleave(g, 0)
