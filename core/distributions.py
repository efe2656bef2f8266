"""Distributions over tokens: what is drawn from, how it is drawn, and log-probabilities. In float32 and nats."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from core.model import at_least_float32

SAMPLING = 1               # keeps this noise apart from the stream that draws problems (core/dataset_consumer.py)
LOGITS_AT_ONCE = 2**25     # most numbers in one tensor of logits
LARGE_VOCABULARY = 2**14   # from here on the likeliest tokens are looked for first: sorting all of them is slow
TOP_PART = 1024            # number of likeliest tokens that are looked for first
FEW = 1 / 16               # share of a large vocabulary up to which a token is drawn among the kept ones alone


def sampling_logp(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Log-probabilities of the distribution that is sampled from, and that sampled tokens are therefore scored with.

    logits: (..., V); temperature: a number, or a tensor that broadcasts against logits
    Returns (..., V): log-softmax of logits / temperature, renormalised over the tokens kept, -inf elsewhere.
    """
    logp = (at_least_float32(logits) / temperature).log_softmax(-1)                  # (..., V)
    if truncates(top_p, top_k, min_p):
        logp = restrict(logp, kept_tokens(logp.detach(), top_p, top_k, min_p))
    return logp


def truncates(top_p, top_k, min_p):
    """Whether these settings exclude any token from being drawn."""
    return top_p < 1 or top_k > 0 or min_p > 0


def restrict(logp, kept):
    """logp (..., V) renormalised over the tokens where kept (..., V) is true, -inf elsewhere. kept=None keeps all; kept
    may also be the KeptTokens of logp (K, V)."""
    if kept is None:
        return logp
    mask = kept.dense(logp.shape[-1]) if isinstance(kept, KeptTokens) else kept
    return logp.masked_fill(~mask, -torch.inf).log_softmax(-1)


def kept_tokens(logp, top_p=1.0, top_k=0, min_p=0.0):
    """Which tokens may be drawn: the top_k likeliest (0: all), of them the nucleus, of it those at least min_p times as
    likely as the likeliest (arXiv 2407.01082). logp: (..., V). Returns (..., V) bool."""
    kept = torch.ones_like(logp, dtype=torch.bool)
    if limited := 0 < top_k < logp.shape[-1]:
        kept = torch.zeros_like(kept).scatter(-1, logp.topk(top_k, dim=-1).indices, True)
    if top_p < 1:
        whole = logp.shape[-1] >= LARGE_VOCABULARY and not limited  # to normalise it once more would take time
        kept = kept & nucleus(logp if whole else restrict(logp, kept), top_p)
    if min_p > 0:
        kept = kept & (logp >= logp.amax(-1, keepdim=True) + math.log(min_p))
    kept[..., :1] |= ~kept.any(-1, keepdim=True)  # where logp is NaN, no token passes all three
    return kept


def nucleus(logp, top_p):
    """The smallest set of most likely tokens whose probability reaches top_p (arXiv 1904.09751); of equally likely ones
    it takes the first. (..., V) bool."""
    if logp.shape[-1] < LARGE_VOCABULARY:
        return nucleus_of_all(logp, top_p)
    rows = logp.reshape(-1, logp.shape[-1])                                          # (R, V)
    kept, open_rows = nucleus_of_top_part(rows, top_p)
    if open_rows.any():
        kept[open_rows] = nucleus_of_all(rows[open_rows], top_p)
    return kept.view_as(logp)


def nucleus_of_all(logp, top_p):
    """The nucleus of (..., V) by sorting all tokens."""
    ordered, order = logp.exp().sort(dim=-1, descending=True, stable=True)           # (..., V)
    kept = ordered.cumsum(-1) - ordered < top_p                                      # (..., V) mass before it < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def nucleus_of_top_part(logp, top_p):
    """The nucleus of (R, V) among the TOP_PART likeliest tokens, and (R,) bool, where it may reach beyond them."""
    top, ids = logp.topk(TOP_PART, dim=-1)                                           # (R, TOP_PART)
    ids, by_id = ids.sort(-1)  # the order in which topk lists equally likely tokens depends on the device
    ordered, order = top.gather(-1, by_id).exp().sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    kept[:, 0] = True
    # Tokens that are as likely as the last of the top part may lie outside of it
    open_rows = ordered.masked_fill(~kept, torch.inf).amin(-1) <= ordered[:, -1]     # (R,)
    return torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids.gather(-1, order), kept), open_rows


def token_logp(logp, target):
    """Log-probability of each token. logp: (..., V); target: (...) ids. Returns (...)."""
    return logp.gather(-1, target[..., None]).squeeze(-1)


def entropy(logp):
    """Entropy of each distribution. logp: (..., V) -> (...)."""
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)


def draw_uniforms(seed, step, numbers, shape):
    """Uniform noise in [0, 1), float64, (len(numbers), *shape), on the CPU.

    Row i depends on (seed, step, numbers[i]) alone: a problem's samples are the same on every device, in whatever
    batch, micro-batch or rank it is drawn.
    """
    rows = [np.random.default_rng([SAMPLING, seed, step, int(number)]).random(shape) for number in numbers]
    return torch.from_numpy(np.stack(rows))


def sample_from(logp, uniform):
    """Inverse-CDF sampling: a token is drawn where the cumulative probability first exceeds the noise.

    logp: (P, M, V) log-probabilities; uniform: (P, G, M) in [0, 1)
    Returns ids (P, G, M), never one of probability 0; where logp is NaN, any
    """
    cdf = logp.to(uniform.device, torch.float64, copy=True).exp_().cumsum_(-1)       # (P, M, V)
    u = uniform.transpose(1, 2).contiguous() * cdf[..., -1:]                         # (P, M, G) below the last one
    ids = torch.searchsorted(cdf, u, right=True).clamp_(max=logp.shape[-1] - 1)      # (P, M, G) NaN would be V
    return ids.to(logp.device).transpose(1, 2)                                       # (P, G, M)


def sample_tokens(logits, uniform, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Draws G tokens at every place; temperature=0 takes the likeliest.

    logits: (P, M, V); uniform: (P, G, M) in [0, 1); temperature: as in sampling_logp
    Returns ids (P, G, M), their log-probability (P, G, M) under the distribution drawn from, and the KeptTokens of the
    P * M places, or None for all
    """
    likeliest, kept, ids = not torch.is_tensor(temperature) and temperature == 0, None, None
    drawn = sampling_logp(logits, 1.0 if likeliest else temperature)                 # (P, M, V)
    if truncates(top_p, top_k, min_p):
        mask = kept_tokens(drawn, top_p, top_k, min_p)                               # (P, M, V)
        kept, V = KeptTokens.of(mask), mask.shape[-1]
        if V < LARGE_VOCABULARY or kept.most > FEW * V:
            drawn = restrict(drawn, mask)
        else:
            ids, there = (x.view(*mask.shape[:2], -1) for x in kept.padded())        # (P, M, most) each
            drawn = drawn.gather(-1, ids).masked_fill(~there, -torch.inf).log_softmax(-1)
    each = lambda x: x[:, None].expand(-1, uniform.shape[1], -1, -1)                 # (P, M, ...) -> (P, G, M, ...)
    target = drawn.argmax(-1)[:, None].expand(uniform.shape) if likeliest else sample_from(drawn, uniform)
    logp = token_logp(each(drawn), target)                                           # (P, G, M)
    return target if ids is None else token_logp(each(ids), target), logp, kept


@dataclass(eq=False)
class KeptTokens:
    """The tokens that truncation kept at each of K places: at a large vocabulary they are few, so their ids are stored,
    those of one place after another."""
    ids: torch.Tensor     # (E,) int32
    counts: torch.Tensor  # (K,) int64, on the CPU: how many of the ids each place has

    LEAST_BYTES = 12      # of a place: its count and one id

    @classmethod
    def of(cls, mask):
        """From (..., V) bool, where a token is kept. Waits for the device."""
        place, ids = mask.reshape(-1, mask.shape[-1]).nonzero(as_tuple=True)         # (E,) each
        return cls(ids.int(), place.bincount(minlength=mask.shape[:-1].numel()).cpu())

    @classmethod
    def join(cls, parts):
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    @property
    def bytes(self):
        return self.ids.nbytes + self.counts.nbytes

    @property
    def most(self):
        """The largest number of tokens that a place has."""
        return int(self.counts.max()) if len(self.counts) else 0

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, index):
        """Those of the places (k,) that index, on the CPU, lists. Neighbours are copied at once: an index of all their
        ids would take more memory than the ids."""
        end = self.counts.cumsum(0)                                                  # (K,)
        runs = index.tensor_split(((index.diff() != 1).nonzero().squeeze(1) + 1).tolist()) if len(index) else ()
        ids = [self.ids[end[run[0]] - self.counts[run[0]] : end[run[-1]]] for run in runs]
        return KeptTokens(torch.cat([self.ids[:0], *ids]), self.counts[index])

    def split(self, size):
        """A list of parts of `size` places each, the last of what is left."""
        counts = self.counts.split(size)
        ids = self.ids.split([int(part.sum()) for part in counts])
        return [KeptTokens(*part) for part in zip(ids, counts, strict=True)]

    def to(self, device):
        return KeptTokens(self.ids.to(device), self.counts)

    def dense(self, vocabulary):
        """(K, V) bool."""
        place = torch.arange(len(self)).repeat_interleave(self.counts).to(self.ids.device)  # (E,)
        mask = torch.zeros(len(self), vocabulary, dtype=torch.bool, device=self.ids.device)
        mask[place, self.ids.long()] = True
        return mask

    def padded(self):
        """(K, most) int64, the ids of each place and then zeros, and (K, most) bool: which of them are ids."""
        there = (torch.arange(self.most) < self.counts[:, None]).to(self.ids.device)
        return torch.zeros_like(there, dtype=torch.long).masked_scatter(there, self.ids.long()), there


def positions(begin, counts):
    """begin[0] .. begin[0] + counts[0] - 1, then those of begin[1], and so on. begin, counts: (k,). Returns (E,)."""
    shift = begin - (counts.cumsum(0) - counts)                                      # (k,)
    return shift.repeat_interleave(counts) + torch.arange(int(counts.sum()))


class KeptCollector:
    """Collects kept tokens while they are sampled, and puts them in the order of their places."""

    def __init__(self, budget=None):
        """budget: a KeptBudget that they count towards, or None for no limit."""
        self.budget, self.parts = budget, []

    def add(self, place, kept):
        """place: (k,) on the CPU, a number for each place of kept, by which they are put in order."""
        self.parts.append((place, kept))
        if self.budget is not None:
            self.budget.add(kept)

    def joined(self):
        """The KeptTokens of all places, in ascending order of their numbers; None if there are none."""
        if not self.parts:
            return None
        place, counts = (torch.cat(x) for x in zip(*((place, kept.counts) for place, kept in self.parts), strict=True))
        order = place.argsort()
        begin = torch.empty_like(counts)
        begin[order] = counts[order].cumsum(0) - counts[order]  # where its ids begin among those of all
        ids = self.parts[0][1].ids.new_empty(int(counts.sum()))
        for (_, kept), part in zip(self.parts, begin.split([len(kept) for _, kept in self.parts]), strict=True):
            ids[positions(part, kept.counts).to(ids.device)] = kept.ids
        return KeptTokens(ids, counts[order])


class KeptBudget:
    """The memory that the kept tokens of an iteration may take. How many truncation keeps is known only when they are
    sampled, so too many are refused then, before memory runs out."""

    def __init__(self, megabytes):
        self.megabytes, self.places, self.ids, self.bytes = megabytes, 0, 0, 0

    def add(self, kept):
        """Raises ValueError if the kept tokens so far need more than stored_megabytes."""
        self.places, self.ids = self.places + len(kept), self.ids + len(kept.ids)
        self.bytes += kept.bytes
        if self.bytes > self.megabytes * 2**20:
            raise ValueError(
                f"stored_megabytes={self.megabytes} is not enough: the first {self.places} sampled tokens "
                f"could be any of {self.ids / self.places:.0f} on average, and the ids of these take "
                f"{self.bytes / 2**20:.1f} MB; set top_p=1.0, top_k=0 and min_p=0.0, which store nothing, or top_k=50, "
                "lower batch_size, group_size or the length, or raise stored_megabytes")


def in_parts(function, vocabulary, *tensors):
    """function(*tensors) on few enough rows at a time that its logits stay below LOGITS_AT_ONCE numbers.

    function: tensors of K rows (or KeptTokens of K places, or None) -> a tuple of tensors of K rows. Where it is cut,
    the backward pass computes each part again instead of keeping it, so that memory is bounded in both directions.
    """
    K, size = len(tensors[0]), max(1, LOGITS_AT_ONCE // vocabulary)
    if K <= size:
        return function(*tensors)
    parts = zip(*([None] * -(-K // size) if x is None else x.split(size) for x in tensors), strict=True)
    return tuple(map(torch.cat, zip(*(checkpoint(function, *part, use_reentrant=False) for part in parts))))
