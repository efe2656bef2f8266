"""Fill-in sampling: a masked-fill model samples the hidden tokens of a text, all in one forward pass."""

import torch
from torch import Tensor, nn

from core.distributions import draw_tokens, in_parts, noise_on
from core.errors import Mistake, definition, is_own_function, others, parameters_of


# Orders of several passes

def random(noise: Tensor) -> Tensor:
    """Orders places at random, all orders equally likely."""
    return noise


def left_to_right(noise: Tensor) -> Tensor:
    """Orders places from left to right."""
    M = noise.shape[-1]
    return torch.linspace(0, 1, M).expand_as(noise)


def confidence(logp: Tensor, ids: Tensor) -> Tensor:
    """Orders places by the probability of their drawn tokens, highest first (LLaDA, arXiv 2502.09992)."""
    return -logp.gather(1, ids)


# Functions that give each hidden place a number; within a block, places with the lowest numbers are filled first.
# There are two kinds. One takes uniform noise (N, M) for the M hidden places of N texts, from left to right, and
# returns numbers of the same shape. The other has the parameters `logp` (K, V), the log-probabilities at K places at
# temperature 1 without truncation, and `ids` (K, G), the tokens that the pass drew there, and returns (K, G). Such an
# order depends on the policy. The log-probability of a token is then an estimate, because it leaves out the
# probability of the order.
UNMASK_ORDERS = {
    "random": random,
    "left_to_right": left_to_right,
    "confidence": confidence,
}


def depends_on_policy(unmask_order: str) -> bool:
    """True if an order of UNMASK_ORDERS depends on the policy: its function has a parameter logp."""
    function = UNMASK_ORDERS[unmask_order]
    parameters = parameters_of(function, f"unmask_order={unmask_order!r}")
    return "logp" in parameters


def order_of(unmask_order: str, *inputs: Tensor) -> Tensor:
    """Calls a function of UNMASK_ORDERS. Returns its number for each place, in the shape of the last argument.
    inputs: (noise,) or (logp, ids). Raises Mistake if a user's function returns anything else."""
    function = UNMASK_ORDERS[unmask_order]
    if is_own_function(function):
        return function(*inputs)
    named = f"unmask_order={unmask_order!r}"
    with others(f"{named} failed", "correct it", definition(function)):
        order = function(*inputs)
    last = inputs[-1]
    if isinstance(order, Tensor) and order.shape == last.shape:
        order = order.to(last.device, torch.float32)
        if order.isfinite().all():
            return order
    shape = tuple(last.shape)
    raise Mistake(f"{definition(function)}: {named} must return a tensor of finite numbers in float32 of the shape "
                  f"{shape}, that of its last argument")


def check_order(unmask_order: str) -> None:
    """Raises Mistake unless the function of an order returns a number for each place."""
    if depends_on_policy(unmask_order):
        logp = torch.zeros(2, 3).log_softmax(-1)
        ids = torch.zeros(2, 4, dtype=torch.long)
        order_of(unmask_order, logp, ids)
    else:
        noise = torch.full((2, 3), 0.5)
        order_of(unmask_order, noise)


# One pass

def predict_and_sample_tokens(
        model: nn.Module,
        input: Tensor,     # (P, T) texts with MASK
        position: Tensor,  # (P, M) from masked_positions
        uniform: Tensor,   # (P, G, T) noise in [0, 1) by column of the text
        hidden: Tensor,    # (P, M) bool on the CPU, False where no token is drawn, as on padding
        **sampling) -> tuple:
    """Samples G tokens at the hidden positions of every input, in one forward per input.

    sampling: temperature, a number or (P, 1); top_p, top_k, min_p
    Returns target (P, G, M) ids and their logp (P, G, M) under the distribution drawn from, both 0 where nothing is
    drawn, and the KeptTokens of the K True entries of `hidden`, in order, or None if all tokens are kept
    """
    target, logp, _, kept = draw_hidden(model, input, position, uniform, hidden, **sampling)
    return target, logp, kept


def draw_hidden(
        model: nn.Module,
        input: Tensor,
        position: Tensor,
        uniform: Tensor,
        hidden: Tensor,
        temperature: float | Tensor = 1.0,
        padding: Tensor | None = None,     # (P,) number of leading columns without a token; None: none in any text
        unmask_order: str | None = None,   # an order of UNMASK_ORDERS that depends on the policy
        **truncation) -> tuple:
    """Samples like predict_and_sample_tokens. Texts without a hidden token are not read.

    Returns target, logp, order and kept. order: (P, G, M) the numbers that unmask_order gives the drawn tokens, or
    None without it
    """
    # Indices are found on the CPU: on a GPU nonzero and unique would wait for the work before them
    index = hidden.nonzero()                                                         # (K, 2)
    read, row = index[:, 0].unique(return_inverse=True)  # (R,) texts with a hidden token, (K,) in 0 .. R - 1
    if len(read) == 0:
        read = index.new_zeros(1)  # no token is drawn, but some models cannot read a batch of no texts
    device = input.device
    read = read.to(device, non_blocking=True)
    row = row.to(device, non_blocking=True)
    index = index.to(device, non_blocking=True)
    text, place = index.unbind(1)                                                    # (K,) each
    if padding is not None:
        padding = padding[read]                                                      # (R,)
    if torch.is_tensor(temperature):
        temperature = temperature[text]                                              # (K, 1)
    h = model.states(input[read], position[read], padding=padding)                   # (R, M, C)
    h = h[row, place]                                                                # (K, C)
    column = position[text, place]                                                   # (K,)
    noise = noise_on(device, uniform)                                                # (P, G, T)
    text_of_noise = text.to(noise.device)
    column_of_noise = column.to(noise.device)
    noise = noise[text_of_noise, :, column_of_noise]                                 # (K, G)
    ids, logp, kept = draw_tokens(model, h, noise, temperature, **truncation)        # (K, G) each

    def at_places(x):
        """Puts x (K, G) at the hidden places. Returns (P, G, M), 0 elsewhere."""
        G = x.shape[1]
        whole = x.new_zeros(*position.shape, G)                                      # (P, M, G)
        whole[text, place] = x
        return whole.mT

    order = None
    if unmask_order is not None:
        order = order_of_tokens(model, unmask_order, h, ids)                         # (K, G)
        order = at_places(order)
    return at_places(ids), at_places(logp), order, kept


def order_of_tokens(
        model: nn.Module,
        unmask_order: str,
        h: Tensor,                 # (K, C) states
        ids: Tensor) -> Tensor:    # (K, G) the tokens drawn there
    """Returns the numbers (K, G) that an order that depends on the policy gives to drawn tokens."""
    def order_of_part(h, ids):
        logp = model.project(h).log_softmax(-1)
        order = order_of(unmask_order, logp, ids)
        return (order,)

    order, = in_parts(order_of_part, model.vocabulary, h, ids)
    return order


def fill_in(
        input: Tensor,              # (P, T)
        position: Tensor,           # (P, M)
        hidden: Tensor,             # (P, M) bool, False on padding
        target: Tensor) -> Tensor:  # (P, G, M)
    """Puts sampled tokens into their texts. Returns (P, G, T)."""
    G = target.shape[1]
    # Padding in `position` is a column of the text, too. Its own token is written back to it.
    unchanged = input.gather(1, position)                                            # (P, M)
    is_hidden = hidden[:, None]                                                      # (P, 1, M)
    token = torch.where(is_hidden, target, unchanged[:, None])                       # (P, G, M)
    column = position[:, None].expand_as(target)                                     # (P, G, M)
    texts = input[:, None].repeat(1, G, 1)                                           # (P, G, T)
    return texts.scatter_(2, column, token)
