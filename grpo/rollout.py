"""Problems in, Rollouts out. What kind of generator it was is known here and nowhere after."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from core.batch import masked_positions, unpack_batch
from core.losses import sampling_logp
from core.sampling import draw_uniforms, fill_in, predict_and_sample_tokens


@dataclass
class Rollouts:
    """N completions of P problems (rows i*G .. i*G+G-1 answer problem i) and what was known when they were sampled.

    R distinct inputs were read: R = P for one-pass fill-in, where a whole group shares one input.
    """
    inputs: torch.Tensor            # (R, T) what the policy reads
    position: torch.Tensor          # (R, M) which output positions speak about the chosen tokens
    ref_logp: torch.Tensor | None   # (R, M, V) the reference's log-probabilities there, untruncated
    row: torch.Tensor               # (N,)   which input each completion belongs to
    target: torch.Tensor            # (N, M) the token chosen at each position
    mask: torch.Tensor              # (N, M) 1.0 where the policy chose, 0.0 where padded
    old_logp: torch.Tensor          # (N, M) its log-probability under the distribution it was drawn from
    text: torch.Tensor              # (N, T) the completed texts
    truth: torch.Tensor             # (N, M) the true text's tokens at the chosen positions

    def select(self, inputs):
        """The rollouts of some inputs, given by their indices, with all their completions, and those's indices."""
        G = len(self.row) // len(self.inputs)                                        # completions per input
        completions = (inputs[:, None] * G + torch.arange(G, device=inputs.device)).flatten()
        by_input = ("inputs", "position", "ref_logp")
        parts = {f.name: x if (x := getattr(self, f.name)) is None else x[inputs if f.name in by_input else completions]
                 for f in fields(self)}
        row = torch.arange(len(inputs), device=inputs.device).repeat_interleave(G)
        return Rollouts(**parts | {"row": row}), completions


def join(batches):
    """Micro-batches of numpy arrays as one."""
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


@torch.no_grad()
def collect(policy, reference, batch, step, config, device, autocast, micro_batch=None):
    """Samples group_size completions of every fill-in problem, reading each input once per model.

    batch: of DatasetConsumer, P problems; micro_batch: inputs per forward, so that the sampler reads them in the same
    cut as the training forward and the first ratio is exactly 1
    config: has group_size, temperature, top_p, seed
    """
    input, target, mask = unpack_batch(batch, device)                                # (P, T)
    P, T = input.shape
    G = config.group_size
    position, chosen = masked_positions(mask, device)                                # (P, M)
    noise = draw_uniforms(config.seed, step, batch["number"], (G, T))                # (P, G, T)
    noise = noise if device.type == "mps" else noise.to(device, non_blocking=True)   # MPS has no float64
    tokens, logp, ref_logp = [], [], []
    for start in range(0, P, micro_batch or P):
        part = slice(start, start + (micro_batch or P))
        with autocast:
            sampled = predict_and_sample_tokens(policy, input[part], position[part], noise[part],
                                                config.temperature, config.top_p)
            if reference is not None:
                ref_logp.append(sampling_logp(reference(input[part], position[part]), config.temperature))
        tokens.append(sampled[0])
        logp.append(sampled[1])
    tokens, logp = torch.cat(tokens), torch.cat(logp)                                # (P, G, M)
    text = fill_in(input, position, chosen, tokens)                                  # (P, G, T)
    row = torch.arange(P, device=device).repeat_interleave(G)                        # (N,)
    return Rollouts(inputs=input, position=position, ref_logp=torch.cat(ref_logp) if ref_logp else None, row=row,
                    target=tokens.flatten(0, 1), mask=chosen[row], old_logp=logp.flatten(0, 1), text=text.flatten(0, 1),
                    truth=target.gather(1, position)[row])
