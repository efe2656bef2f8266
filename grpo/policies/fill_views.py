"""Estimators of the log-probability of a completion that a masked-diffusion policy sampled in several passes.

An estimator chooses the texts that are read for a problem and, for each sampled token, the text and the place whose
hidden state predicts it. `trajectory` is the probability of what was sampled, and the gradient of `agrpo` is that of
`trajectory` in expectation; the others are published estimates that read fewer texts. The cost is the number of texts
read for a group of G completions sampled in S passes.

Each returns the W texts of each problem (P, W, T); the position (P, 1 or G, M) of each token in them, one text after
another, in a row for each completion or in one for the group; and the weight (P, G, M) of each token in the loss, 0
for one that it does not score, or None: all count the same.
"""

from dataclasses import dataclass

import torch

FINE = 2**20          # agrpo draws its start as a whole number of such parts of a step between passes
PROMPT_MASKED = 0.15  # share of the visible text that prompt_mask hides, as in d1


@dataclass
class Filled:
    """G completions of each of P texts, and noise for the estimators that hide tokens again."""
    input: torch.Tensor     # (P, T) the problems
    text: torch.Tensor      # (P, G, T) the completed texts
    position: torch.Tensor  # (P, 1, M) where in its text each sampled token is
    hidden: torch.Tensor    # (P, 1, M) bool: True where a token was hidden, False on padding
    turn: torch.Tensor      # (P, G, M) the pass that drew the token, -1 on padding
    read: torch.Tensor      # (P, G, S, T) the text that each pass read
    noise: torch.Tensor     # (P, 2, G, T) float32
    mask_id: int            # the token that hides another
    passes_read: int = 2    # passes of a completion that agrpo and step_merge read

    def first_text(self, texts_each):
        """(G, 1) the index of the first text of each completion, if each has `texts_each` of the problem's texts."""
        number = torch.arange(self.text.shape[1], device=self.text.device)           # (G,)
        return number[:, None] * texts_each

    def uniform(self):
        """(P, G, 1) a random number from 0 to 1 for each completion."""
        return self.noise[:, 1, :, -1:]

    def passes(self):
        """(P, G, 1) the number of passes of each completion up to the last one that drew a token."""
        return self.turn.masked_fill(~self.hidden, -1).amax(2, keepdim=True) + 1

    def read_by(self, passes):
        """The texts (P, G n, T) that these passes (P, G, n) of each completion read."""
        S, T = self.read.shape[2:]
        where = passes.clamp(0, S - 1)[..., None]                                    # (P, G, n, 1)
        where = where.expand(*passes.shape, T)
        return self.read.gather(2, where).flatten(1, 2)

    def share(self, chosen):
        """(P, G, 1) the share of the hidden tokens that is chosen (P, G, M)."""
        return chosen.sum(2, keepdim=True) / self.hidden.sum(2, keepdim=True).clamp(min=1)

    def random_share(self, low=0.0, high=1.0):
        """(P, G, M) bool: each hidden token with a chance t that is uniform in [low, high] for each completion; at
        least one token."""
        t = low + (high - low) * self.uniform()                                      # (P, G, 1)
        noise = self.noise[:, 0].take_along_dim(self.position, 2)                    # (P, G, M)
        noise = noise.masked_fill(~self.hidden, 2.0)
        least = noise.amin(2, keepdim=True)                                          # (P, G, 1)
        return (noise < t) | (noise == least)

    def masked_again(self, chosen):
        """The completed texts with the chosen tokens (P, G, M) hidden again, (P, G, T)."""
        hide = torch.zeros_like(self.text, dtype=torch.bool)
        hide = hide.scatter(2, self.position.expand_as(chosen), chosen & self.hidden)
        return self.text.masked_fill(hide, self.mask_id)


def trajectory(x):
    """Each token in the text of the pass that drew it: exact. (LLaDA arXiv 2502.09992 in sampling; TraceRL,
    arXiv 2509.06949, in training.) Reads 1 + (S - 1) G texts."""
    S, T = x.read.shape[2:]
    if S == 1:
        return one_step(x)
    later = x.read[:, :, 1:].flatten(1, 2)                                           # (P, G (S - 1), T)
    texts = torch.cat((x.input[:, None], later), 1)                                  # (P, W, T)
    text = x.first_text(S - 1) + x.turn
    text = text.where(x.turn > 0, 0)                                                 # (P, G, M) 0 is the problem itself
    return texts, text * T + x.position, None


def texts_of_passes(policy, rollouts, n):
    """Completion n of rollouts as a text after each of its passes, its masked tokens as the tokenizer shows them: a
    list, [] of a single pass. The rollouts are those of `trajectory`, whose positions tell the pass of a token."""
    reading, chosen = rollouts.reading, rollouts.mask[n] > 0                         # (M,)
    W, T = reading.texts.shape[1:]
    if W == 1 or not chosen.any():
        return []
    p, g = divmod(n, reading.group_size)
    later = (W - 1) // reading.group_size  # passes after the first
    turn = (reading.position[p, g].to(chosen.device) // T - g * later).clamp(min=0)[chosen]
    ids = torch.tensor(rollouts.texts.completion_ids[n], device=chosen.device)
    place = rollouts.texts.place[n][chosen]
    begin = max(0, int(place[-1]) + 1 - len(ids))  # of the completion, if it stands behind a prompt
    texts = []
    for i in range(int(turn.max()) + 1):
        masked = ids.index_fill(0, place[turn > i] - begin, policy.tokenizer.mask_token_id)
        texts.append(policy.tokenizer.decode(masked.tolist()))
    return texts


def one_step(x):
    """All tokens in the text with all of them hidden, as if they were independent (the mean field that d1 starts from,
    arXiv 2504.12216). Exact for S = 1. Reads 1 text."""
    return x.input[:, None], x.position, None


def prompt_mask(x):
    """one_step with 15% of the visible text hidden too (diffu-GRPO of d1, arXiv 2504.12216, which hides other places in
    each epoch; here one draw serves a rollout). Reads 1 text."""
    hide = x.noise[:, 0, 0] < PROMPT_MASKED                                          # (P, T)
    text = x.input.masked_fill(hide, x.mask_id)
    return text[:, None], x.position, None


def agrpo(x):
    """The tokens of k of the S passes, each with the weight S / k: an unbiased estimate of the gradient of `trajectory`
    (Amortized GRPO, arXiv 2510.04019). k = passes_read; the passes are drawn at equal distances from a random start.
    Reads k G texts."""
    S = x.passes()                                                                   # (P, G, 1)
    k = S.clamp(max=x.passes_read)
    number = torch.arange(x.passes_read, device=S.device)                            # (k,)
    start = (x.uniform() * FINE).long()                                              # (P, G, 1)
    passes = (number * FINE + start) * S // (k * FINE)                               # (P, G, k)
    passes = passes.masked_fill(number >= k, -1)  # a completion with fewer passes
    drew = x.turn[..., None] == passes[..., None, :]                                 # (P, G, M, k)
    scored = drew.any(-1) & x.hidden                                                 # (P, G, M)
    text = x.first_text(x.passes_read) + drew.int().argmax(-1)
    T = x.text.shape[2]
    return x.read_by(passes), text * T + x.position, scored * S / k


def step_merge(x):
    """Each token in the text that the first pass of its segment read: the S passes are cut into K segments of like
    length (StepMerge of d2, arXiv 2509.21474). K = passes_read; exact for K = S. Reads 1 + (K - 1) G texts."""
    S = x.passes()                                                                   # (P, G, 1)
    K = x.passes_read
    begin = (torch.arange(1, K, device=S.device) * S + K - 1) // K                   # (P, G, K - 1)
    segment = x.turn * K // S.clamp(min=1)                                           # (P, G, M)
    text = x.first_text(K - 1) + segment
    text = text.where(segment > 0, 0)                                                # 0 is the problem itself
    texts = torch.cat((x.input[:, None], x.read_by(begin)), 1)                       # (P, W, T)
    return texts, text * x.text.shape[2] + x.position, None


def random_mask(x):
    """A random share t of the tokens, given the rest of the completion, with the weight 1 / t (UniGRPO of MMaDA,
    arXiv 2505.15809). One draw serves all epochs of a rollout, where the paper draws anew. Reads G texts."""
    chosen = x.random_share()
    T = x.text.shape[2]
    return x.masked_again(chosen), x.first_text(1) * T + x.position, chosen / x.share(chosen)


def coupled(x):
    """Every token once, in one of two complementary halves, of which the first has a share t of .2 to .8 of the tokens.
    The halves have the weights 1 / (2 t) and 1 / (2 (1 - t)) (coupled-GRPO of DiffuCoder, arXiv 2506.20639; its code
    also scores every token in the fully hidden text). Reads 2 G texts."""
    chosen = x.random_share(0.2, 0.8)
    T = x.text.shape[2]
    halves = torch.stack((x.masked_again(chosen), x.masked_again(~chosen)), 2)       # (P, G, 2, T)
    text = x.first_text(2) + (~chosen).long()                                        # (P, G, M)
    share = x.share(chosen)                                                          # (P, G, 1)
    count = 1 + (share < 1)  # if one half has all tokens, the other has none
    weight = 1 / torch.where(chosen, share, 1 - share) / count                       # (P, G, M)
    return halves.flatten(1, 2), text * T + x.position, weight.masked_fill(~x.hidden, 0.0)


FILL_ESTIMATORS = {"trajectory": trajectory, "agrpo": agrpo, "step_merge": step_merge, "one_step": one_step,
                   "prompt_mask": prompt_mask, "random_mask": random_mask, "coupled": coupled}
AS_DRAWN = ("trajectory", "agrpo")     # those that score a token in the text that it was drawn from
READ_PASSES = ("agrpo", "step_merge")  # those that read `passes_read` of the passes
