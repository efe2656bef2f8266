"""Estimators of the log-probability of a completion that a masked-diffusion policy wrote in several passes.

An estimator chooses the texts that are read for a problem and, for each sampled token, the text and the place whose
hidden state predicts it. Only `trajectory` is the probability of what was sampled; the others are published
estimates that read fewer texts. The cost is the number of texts read for a group of G completions written in S passes.
"""

from dataclasses import dataclass

import torch

PROMPT_MASKED = 0.15  # share of the visible text that prompt_mask hides, as in d1


@dataclass
class Written:
    """A batch of completions, and noise for the estimators that hide tokens again."""
    input: torch.Tensor   # (P, T) the problems
    text: torch.Tensor    # (N, T) the completed texts
    place: torch.Tensor   # (N, M) where in its text each sampled token is
    hidden: torch.Tensor  # (N, M) 1.0 where a token was hidden, 0.0 on padding
    turn: torch.Tensor    # (N, M) the pass that drew the token, -1 on padding
    read: torch.Tensor    # (N, S, T) the text that each pass read
    noise: torch.Tensor   # (P, 2, G, T) float32
    mask_id: int          # the token that hides another

    def first_texts(self, texts_each):
        """(P, G, 1) for each completion of a group, the index of the first of its texts among those of the problem."""
        P, G = len(self.input), len(self.text) // len(self.input)
        return (torch.arange(G, device=self.text.device) * texts_each)[None, :, None].expand(P, G, 1)

    def by_problem(self, x):
        """(N, ...) -> (P, G, ...)."""
        return x.unflatten(0, (len(self.input), -1))

    def random_share(self):
        """(N, M) bool: each hidden token with a chance t that is uniform for each completion; at least one token."""
        noise, t = (self.noise[:, i].flatten(0, 1) for i in (0, 1))  # (N, T) each
        noise = noise.gather(1, self.place).masked_fill(self.hidden == 0, 2.0)       # (N, M)
        return (noise < t[:, :1]) | (noise == noise.amin(1, keepdim=True))

    def masked_again(self, chosen):
        """The completed texts with the chosen tokens (N, M) hidden again, (N, T)."""
        hide = torch.zeros_like(self.text, dtype=torch.bool).scatter(1, self.place, chosen & (self.hidden > 0))
        return self.text.masked_fill(hide, self.mask_id)


@dataclass
class View:
    """The texts that are read, and where the sampled tokens are predicted: by a row each, or by a row for the group."""
    texts: torch.Tensor                # (P, W, T) W texts for each problem
    position: torch.Tensor             # (P, 1 or G, M) the token's place in the W texts, one after another
    train_mask: torch.Tensor | None = None  # (N, M) 1.0 where the estimator scores the token; None: everywhere


def trajectory(w):
    """Each token in the text of the pass that drew it: exact. (LLaDA arXiv 2502.09992 in sampling; TraceRL,
    arXiv 2509.06949, in training.) Reads 1 + (S - 1) G texts."""
    S, T = w.read.shape[1:]
    if S == 1:
        return one_step(w)
    turn, place = w.by_problem(w.turn), w.by_problem(w.place)                        # (P, G, M) each
    text = torch.where(turn > 0, w.first_texts(S - 1) + turn, 0)                     # (P, G, M) 0 is the problem itself
    later = w.by_problem(w.read[:, 1:]).flatten(1, 2)                                # (P, G (S - 1), T)
    return View(torch.cat((w.input[:, None], later), 1), text * T + place)


def one_step(w):
    """All tokens in the text with all of them hidden, as if they were independent (the mean field that d1 starts from,
    arXiv 2504.12216). Exact for S = 1. Reads 1 text."""
    return View(w.input[:, None], w.by_problem(w.place)[:, :1])


def prompt_mask(w):
    """one_step with 15% of the visible text hidden too (diffu-GRPO of d1, arXiv 2504.12216, which hides other places in
    each epoch; here one draw serves a rollout). Reads 1 text."""
    hide = w.noise[:, 0, 0] < PROMPT_MASKED                                          # (P, T)
    return View(w.input.masked_fill(hide, w.mask_id)[:, None], w.by_problem(w.place)[:, :1])


def random_mask(w):
    """A random share of the tokens, given the rest of the completion (UniGRPO of MMaDA, arXiv 2505.15809). The others
    are not trained on. One draw serves all epochs of a rollout, where the paper draws anew. Reads G texts."""
    chosen, T = w.random_share(), w.text.shape[1]
    return View(w.by_problem(w.masked_again(chosen)), w.first_texts(1) * T + w.by_problem(w.place), w.hidden * chosen)


def coupled(w):
    """Every token once, in one of two complementary halves of random size (coupled-GRPO of DiffuCoder,
    arXiv 2506.20639; its code adds the fully hidden text, hides a share t of .2 to .8, and weights the halves by 1 / t
    and 1 / (1 - t)). Reads 2 G texts."""
    chosen, T = w.random_share(), w.text.shape[1]
    halves = torch.stack((w.masked_again(chosen), w.masked_again(~chosen)), 1)       # (N, 2, T)
    text = w.first_texts(2) + w.by_problem((~chosen).long())                         # (P, G, M)
    return View(w.by_problem(halves).flatten(1, 2), text * T + w.by_problem(w.place))


FILL_ESTIMATORS = {"trajectory": trajectory, "one_step": one_step, "prompt_mask": prompt_mask,
                   "random_mask": random_mask, "coupled": coupled}
