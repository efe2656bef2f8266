"""Sampling: tokens and the log-probabilities of the distribution that they were drawn from."""

import numpy as np
import torch

from core.batch import masked_positions
from core.losses import sampling_logp, token_logp


SAMPLING = 1  # keeps this noise apart from the stream that draws problems (core/dataset_consumer.py)


def draw_uniforms(seed, step, numbers, shape):
    """Uniform noise in [0, 1), float64, (len(numbers), *shape), on the CPU.

    Row i depends on (seed, step, numbers[i]) alone: a problem's samples are the same on every device, in whatever
    batch, micro-batch or rank it is drawn.
    """
    rows = [np.random.default_rng([SAMPLING, seed, step, int(number)]).random(shape) for number in numbers]
    return torch.from_numpy(np.stack(rows))


def sample_from(logp, uniform):
    """Inverse-CDF sampling. logp: (P, M, V) log-probabilities; uniform: (P, G, M) in [0, 1). Returns ids (P, G, M)."""
    cdf = logp.to(uniform.device).double().exp().cumsum(-1)                          # (P, M, V)
    u = uniform.transpose(1, 2).contiguous() * cdf[..., -1:]                         # (P, M, G)
    ids = torch.searchsorted(cdf, u, right=True)                                     # (P, M, G) skips probability 0
    last = (logp > -torch.inf).int().cumsum(-1).argmax(-1, keepdim=True)             # (P, M, 1) last possible token
    return torch.minimum(ids.to(logp.device), last).transpose(1, 2)


def predict_and_sample_tokens(model, input, position, uniform, temperature=1.0, top_p=1.0):
    """Fills the masked positions of every input G times in one forward per input.

    input: (P, T); position: (P, M) from masked_positions; uniform: (P, G, T) noise by place in the text
    Returns target (P, G, M) ids and logp (P, G, M), their log-probabilities under the distribution drawn from.
    """
    logp = sampling_logp(model(input, position), temperature, top_p)                 # (P, M, V)
    G = uniform.shape[1]
    noise = uniform.to("cpu" if input.device.type == "mps" else input.device)        # MPS has no float64
    noise = noise.gather(2, position.to(noise.device)[:, None].expand(-1, G, -1))    # (P, G, M)
    target = sample_from(logp, noise)                                                # (P, G, M)
    return target, token_logp(logp[:, None].expand(-1, G, -1, -1), target)


def fill_in(input, position, chosen, target):
    """Puts sampled tokens into their texts.

    input: (P, T); position, chosen: (P, M); target: (P, G, M)
    Returns (P, G, T)
    """
    G = target.shape[1]
    text = input[:, None].expand(-1, G, -1)                                          # (P, G, T)
    where = position[:, None].expand(-1, G, -1)                                      # (P, G, M)
    kept = torch.where(chosen[:, None] > 0, target, text.gather(2, where))           # padding rewrites what was there
    return text.scatter(2, where, kept)


@torch.no_grad()
def fill_once(model, input, mask, uniform, temperature=1.0, top_p=1.0):
    """The completed texts alone: input, mask (P, T), uniform (P, G, T) -> (P, G, T)."""
    position, chosen = masked_positions(mask, input.device)
    target, _ = predict_and_sample_tokens(model, input, position, uniform, temperature, top_p)
    return fill_in(input, position, chosen, target)
