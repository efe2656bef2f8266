"""How likely a masked-diffusion policy was to write what it wrote: which texts are read to tell, and where.

Only `trajectory` is the probability of what was sampled; the others are published estimates that read fewer texts. Each
returns fields of Rollouts. Cost is in texts read for a group of G completions written in S passes.
"""

import torch

PROMPT_MASKED = 0.15  # the share of the visible text that prompt_mask hides, as in d1


class Written:
    """A batch of completions: input (P, T), text (N, T), place and hidden (N, M), turn (N, M), read (N, S, T), and
    noise (P, 2, G, T) of its own; mask_id is what hides a token."""

    def __init__(self, input, text, place, hidden, turn, read, noise, mask_id):
        self.input, self.text, self.place, self.hidden = input, text, place, hidden
        self.turn, self.read, self.noise, self.mask_id = turn, read, noise.float().to(input.device), mask_id

    def some(self):
        """(N, M) bool: hidden places drawn each with a chance t that is uniform for each completion; at least one."""
        noise, t = (self.noise[:, i].flatten(0, 1) for i in (0, 1))                  # (N, T)
        noise = noise.gather(1, self.place).masked_fill(self.hidden == 0, 2.0)       # (N, M)
        return (noise < t[:, :1]) | (noise == noise.amin(1, keepdim=True))

    def hiding(self, chosen):
        """The completed texts with these places (N, M) hidden again, (N, T)."""
        hide = torch.zeros_like(self.text, dtype=torch.bool).scatter(1, self.place, chosen & (self.hidden > 0))
        return self.text.masked_fill(hide, self.mask_id)


def trajectory(w):
    """Each token in the pass that drew it, given what the passes before had drawn: exact. (LLaDA arXiv 2502.09992 in
    sampling; TraceRL, arXiv 2509.06949, in training.) Reads 1 + (S - 1) G texts."""
    S, T = w.read.shape[1:]
    if S == 1:
        return one_step(w)
    return {"prompt": w.input, "inputs": w.read[:, 1:].flatten(1), "views": S - 1,
            "position": w.turn.clamp(min=0) * T + w.place}


def one_step(w):
    """All tokens from the text with all of them hidden, as if independent (the mean field that d1 starts from,
    arXiv 2504.12216). Exact for S = 1. Reads 1 text."""
    G = len(w.text) // len(w.input)
    return {"inputs": w.input, "position": w.place[::G]}


def prompt_mask(w):
    """one_step with 15% of the visible text hidden too (diffu-GRPO of d1, arXiv 2504.12216, which hides other places in
    each epoch; here one draw serves a rollout). Reads 1 text."""
    hide = w.noise[:, 0, 0] < PROMPT_MASKED                                          # (P, T)
    G = len(w.text) // len(w.input)
    return {"inputs": w.input.masked_fill(hide, w.mask_id), "position": w.place[::G]}


def random_mask(w):
    """A random share of the tokens, given the rest of the completion (UniGRPO of MMaDA, arXiv 2505.15809). The others
    are not trained on. One draw serves all epochs of a rollout, where the paper draws anew. Reads G texts."""
    chosen = w.some()
    return {"inputs": w.hiding(chosen), "position": w.place, "scored": w.hidden * chosen}


def coupled(w):
    """Every token once, in one of two complementary halves of random size (coupled-GRPO of DiffuCoder,
    arXiv 2506.20639, which adds the fully hidden text). Reads 2 G texts."""
    chosen = w.some()
    T = w.text.shape[1]
    return {"inputs": torch.cat((w.hiding(chosen), w.hiding(~chosen)), 1), "views": 2,
            "position": torch.where(chosen, w.place, T + w.place)}


FILL_ESTIMATORS = {"trajectory": trajectory, "one_step": one_step, "prompt_mask": prompt_mask,
                   "random_mask": random_mask, "coupled": coupled}
