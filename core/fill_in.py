"""Fill-in sampling: a masked-fill model samples the hidden tokens of a text, all in one forward pass."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from core.distributions import draw_tokens, noise_on
from core.errors import Mistake, definition, is_own_function, others, parameters_of


# Orders of several passes

def random(noise: Tensor) -> Tensor:
    """Every order is equally likely."""
    return noise


def left_to_right(noise: Tensor) -> Tensor:
    """The first places first."""
    return torch.linspace(0, 1, noise.shape[-1]).expand_as(noise)


def confidence(logp: Tensor, ids: Tensor) -> Tensor:
    """The likeliest of the drawn tokens first (LLaDA, arXiv 2502.09992)."""
    return -logp.gather(1, ids)


# Functions that give each place a number; of a block the places with the lowest come first. They take the uniform noise
# of N texts with M hidden places from left to right and return numbers of its shape, (N, M). Those with the parameters
# `logp` (K, V), the log-probabilities at K places at temperature 1 without truncation, and `ids` (K, G), the tokens
# that the pass drew there, return (K, G): such an order depends on the policy, so log-probabilities are estimates.
UNMASK_ORDERS = {
    "random": random,
    "left_to_right": left_to_right,
    "confidence": confidence,
}


def depends_on_policy(unmask_order: str) -> bool:
    """True if an order of UNMASK_ORDERS depends on what the policy makes likely: its function has a parameter logp."""
    return "logp" in parameters_of(UNMASK_ORDERS[unmask_order], f"unmask_order={unmask_order!r}")


def order_of(unmask_order: str, *inputs: Tensor) -> Tensor:
    """The numbers that an order of UNMASK_ORDERS gives to places. inputs: its arguments, (noise,) or (logp, ids).
    Returns a tensor of the shape of the last of them. Raises Mistake if a user's function returns anything else."""
    function, named = UNMASK_ORDERS[unmask_order], f"unmask_order={unmask_order!r}"
    if is_own_function(function):
        return function(*inputs)
    with others(f"{named} failed", "correct it", definition(function)):
        order = function(*inputs)
    shape = inputs[-1].shape
    if isinstance(order, Tensor) and order.shape == shape:
        order = order.to(inputs[-1].device, torch.float32)
        if order.isfinite().all():
            return order
    raise Mistake(f"{definition(function)}: {named} must return a tensor of finite numbers in float32 of the shape "
                  f"{tuple(shape)}, that of its last argument")


def check_order(unmask_order: str) -> None:
    """Raises Mistake unless the function of an order returns a number for each place."""
    if depends_on_policy(unmask_order):
        logp = torch.zeros(2, 3).log_softmax(-1)
        order_of(unmask_order, logp, torch.zeros(2, 4, dtype=torch.long))
    else:
        order_of(unmask_order, torch.full((2, 3), 0.5))


# One pass

def predict_and_sample_tokens(model: nn.Module, input: Tensor, position: Tensor, uniform: Tensor,
                              hidden: Tensor | None = None, temperature: float | Tensor = 1.0,
                              padding: Tensor | None = None, **truncation) -> tuple:
    """Samples G tokens at the hidden positions of every input, in one forward per input.

    input: (P, T) texts with MASK; position: (P, M) from masked_positions; uniform: (P, G, T) noise by column of
    the text
    hidden: (P, M) bool on the CPU, False where no token is drawn, as on padding; None: everywhere
    temperature: a number, or (P, 1); padding: (P,) number of leading columns without a token, or None for none
    truncation: top_p, top_k, min_p
    Returns target (P, G, M) ids and their logp (P, G, M) under the distribution drawn from, both 0 where nothing is
    drawn, and the KeptTokens of the K positions where a token is, in order, or None for all tokens
    """
    if hidden is None:
        hidden = torch.ones(position.shape, dtype=torch.bool)
    target, logp, _, kept = draw_hidden(model, input, position, uniform, hidden, temperature, padding, **truncation)
    return target, logp, kept


def draw_hidden(model: nn.Module, input: Tensor, position: Tensor, uniform: Tensor, hidden: Tensor,
                temperature: float | Tensor = 1.0, padding: Tensor | None = None, order: Callable | None = None,
                **truncation) -> tuple:
    """Does what predict_and_sample_tokens does, and returns, third of four, the order of the tokens (P, G, M).
    order: a function of states (K, C) and ids (K, G) that returns it, (K, G); None: zeros"""
    row, number = hidden.nonzero().to(input.device, non_blocking=True).unbind(1)     # (K,) each
    h = model.states(input, position, padding=padding)[row, number]                  # (K, C)
    column = position[row, number]                                                   # (K,)
    noise = noise_on(input.device, uniform)                                          # (P, G, T)
    noise = noise[row.to(noise.device), :, column.to(noise.device)]                  # (K, G)
    if torch.is_tensor(temperature):
        temperature = temperature[row]                                               # (K, 1)
    ids, logp, kept = draw_tokens(model, h, noise, temperature, **truncation)        # (K, G) each
    order_of_ids = order(h, ids) if order else torch.zeros_like(logp)
    found = []
    for x in (ids, logp, order_of_ids):
        whole = x.new_zeros(*position.shape, x.shape[1])                             # (P, M, G)
        whole[row, number] = x
        found.append(whole.mT)
    return *found, kept


def fill_in(input: Tensor, position: Tensor, hidden: Tensor, target: Tensor) -> Tensor:
    """Puts sampled tokens into their texts.

    input: (P, T); position, hidden: (P, M), hidden False on padding; target: (P, G, M)
    Returns (P, G, T)
    """
    there = input.gather(1, position)                                                # (P, M)
    token = torch.where(hidden[:, None], target, there[:, None])                     # (P, G, M)
    column = position[:, None].expand_as(target)
    text = input[:, None].repeat(1, target.shape[1], 1)                              # (P, G, T)
    return text.scatter_(2, column, token)
