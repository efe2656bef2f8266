"""Estimators of the log-probability of a completion that a masked-diffusion policy sampled in several passes.

`trajectory` is the probability of what was sampled, and the gradient of `agrpo` is that of `trajectory` in expectation;
the others are published estimates that read fewer texts. An estimator returns the W texts (P, W, T) that are read for
each problem; the position (P, 1 or G, M) in them, one text after another, whose state predicts each sampled token; and
the weight (P, G, M) of each token in the loss, 0 for one that it does not score, or None: all count the same.
"""

from dataclasses import dataclass

import torch

PASSES_READ = 2  # passes of a completion that agrpo and step_merge read
FINE = 2**20     # agrpo draws its start as a whole number of such parts of a step between passes


@dataclass
class Filled:
    """G completions of each of P texts."""
    input: torch.Tensor     # (P, T) the problems
    position: torch.Tensor  # (P, 1, M) where in its text each sampled token is
    hidden: torch.Tensor    # (P, 1, M) bool: True where a token was hidden, False on padding
    turn: torch.Tensor      # (P, G, M) the pass that drew the token, -1 on padding
    read: torch.Tensor      # (P, G, S, T) the text that each pass read
    uniform: torch.Tensor   # (P, G, 1) float32, a random number from 0 to 1 for each completion

    @property
    def passes_read(self):
        """PASSES_READ, or as many as there are."""
        return min(PASSES_READ, self.read.shape[2])

    def first_text(self, texts_each):
        """(G, 1) the index of the first text of each completion, if each has `texts_each` of the problem's texts."""
        return torch.arange(self.turn.shape[1], device=self.turn.device)[:, None] * texts_each

    def passes(self):
        """(P, G, 1) the number of passes of each completion up to the last one that drew a token."""
        return self.turn.masked_fill(~self.hidden, -1).amax(2, keepdim=True) + 1

    def read_by(self, passes):
        """The texts (P, G n, T) that these passes (P, G, n) of each completion read."""
        where = passes.clamp(0, self.read.shape[2] - 1)[..., None]                   # (P, G, n, 1)
        return self.read.take_along_dim(where, 2).flatten(1, 2)


def read_in_segments(x, K):
    """Each token in the text that the first pass of its segment read, of K (at most S) segments of like length into
    which the S passes are cut. Reads 1 + (K - 1) G texts."""
    if K == 1:  # one text, and one place for the whole group
        return x.input[:, None], x.position, None
    S = x.passes().clamp(min=1)                                                      # (P, G, 1)
    segments = S.clamp(max=K)
    number = torch.arange(1, K, device=S.device)                                     # (K - 1,)
    begin = (number * S + segments - 1) // segments                                  # (P, G, K - 1)
    texts = torch.cat((x.input[:, None], x.read_by(begin)), 1)                       # (P, W, T)
    segment = x.turn * segments // S                                                 # (P, G, M)
    text = x.first_text(K - 1) + segment
    text = text.where(segment > 0, 0)                                                # 0 is the problem itself
    return texts, text * x.input.shape[1] + x.position, None


def trajectory(x):
    """A segment for each pass: exact. (LLaDA arXiv 2502.09992 in sampling; TraceRL, arXiv 2509.06949, in training.)"""
    return read_in_segments(x, x.read.shape[2])


def step_merge(x):
    """PASSES_READ segments: StepMerge of d2, arXiv 2509.21474."""
    return read_in_segments(x, x.passes_read)


def one_step(x):
    """One segment: all tokens as if they were independent (the mean field that d1 starts from, arXiv 2504.12216)."""
    return read_in_segments(x, 1)


def agrpo(x):
    """The tokens of k of the S passes, each with the weight S / k: an unbiased estimate of the gradient of `trajectory`
    (Amortized GRPO, arXiv 2510.04019). k = PASSES_READ; the passes are drawn at equal distances from a random start.
    Reads k G texts."""
    S = x.passes()                                                                   # (P, G, 1)
    k = S.clamp(max=x.passes_read)
    number = torch.arange(x.passes_read, device=S.device)                            # (k,)
    start = (x.uniform * FINE).long()                                                # (P, G, 1)
    passes = (number * FINE + start) * S // (k * FINE)                               # (P, G, k)
    passes = passes.masked_fill(number >= k, -1)  # a completion with fewer passes
    drew = x.turn[..., None] == passes[..., None, :]                                 # (P, G, M, k)
    scored = drew.any(-1) & x.hidden                                                 # (P, G, M)
    text = x.first_text(x.passes_read) + drew.int().argmax(-1)
    T = x.input.shape[1]
    return x.read_by(passes), text * T + x.position, scored * S / k


FILL_ESTIMATORS = {"trajectory": trajectory, "agrpo": agrpo, "step_merge": step_merge, "one_step": one_step}
AS_DRAWN = ("trajectory", "agrpo")     # those that score a token in the text that it was drawn from
