"""Fill-in sampling: a masked-fill model samples the hidden tokens of a text, all in one forward pass."""

import torch

from core.distributions import draw_tokens, noise_on
from core.masking import masked_positions


def predict_and_sample_tokens(model, input, position, uniform, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
                              hidden=None):
    """Samples G tokens at the hidden positions of every input, in one forward per input.

    input: (P, T) texts with MASK; position: (P, M) from masked_positions; uniform: (P, G, T) noise by column of
    the text
    temperature: a number, or (P, 1)
    hidden: (P, M) bool on the CPU, False where no token is drawn, as on padding; None: everywhere
    Returns target (P, G, M) ids and their logp (P, G, M) under the distribution drawn from, both 0 where nothing is
    drawn, and the KeptTokens of the K positions where a token is, in order, or None for all tokens
    """
    P, M = position.shape
    if hidden is None:
        hidden = torch.ones(P, M, dtype=torch.bool)
    row, number = (x.to(input.device) for x in hidden.nonzero(as_tuple=True))        # (K,) each
    h = model.states(input, position)[row, number]                                   # (K, C)
    column = position[row, number]                                                   # (K,)
    noise = noise_on(input.device, uniform)                                          # (P, G, T)
    noise = noise[row.to(noise.device), :, column.to(noise.device)]                  # (K, G)
    if torch.is_tensor(temperature):
        temperature = temperature[row]                                               # (K, 1)
    ids, ids_logp, kept = draw_tokens(model, h, noise, temperature, top_p, top_k, min_p)
    target = ids.new_zeros(P, M, uniform.shape[1])
    logp = ids_logp.new_zeros(target.shape)
    target[row, number] = ids
    logp[row, number] = ids_logp
    return target.transpose(1, 2), logp.transpose(1, 2), kept


def fill_in(input, position, hidden, target):
    """Puts sampled tokens into their texts.

    input: (P, T); position, hidden: (P, M), hidden True or 1.0 but on padding; target: (P, G, M)
    Returns (P, G, T)
    """
    G = target.shape[1]
    text = input[:, None].expand(-1, G, -1)                                          # (P, G, T)
    column = position[:, None].expand(-1, G, -1)                                     # (P, G, M)
    token = torch.where(hidden[:, None] > 0, target, text.gather(2, column))         # padding keeps what is there
    return text.scatter(2, column, token)


@torch.no_grad()
def fill_once(model, input, mask, uniform, temperature=1.0, top_p=1.0):
    """The completed texts alone: input, mask (P, T), uniform (P, G, T), temperature as above -> (P, G, T)."""
    position, hidden = masked_positions(mask, input.device)                          # (P, M) each
    target, _, _ = predict_and_sample_tokens(model, input, position, uniform, temperature, top_p, hidden=hidden)
    return fill_in(input, position, hidden.to(input.device), target)
