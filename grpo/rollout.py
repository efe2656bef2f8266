"""The interface of a policy, and the records of a rollout: completions, their texts, their rewards."""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional as F

from core.performance.batching import parts_of_tokens
from core.performance.kept_tokens import KeptTokens

REWARD = "environment_reward"  # the column of Texts with the sum of an episode's rewards, None where it failed
TURNS = "environment_turns"    # ... with [(column in which a turn begins, its reward)] of each episode


class Policy(Protocol):
    """A generator as the algorithm sees it: it samples completions, and it can be asked how likely they were.

    device: where it computes; vocabulary: number of tokens that it can sample; kl_estimator: "exact" or "k3", the one
    that suits it; Reading: the class of what it reads; suffix: the ending of the name of what `save` writes, "" of a
    folder
    parameters(): those that are trained; parameters_by_kind(): {"matrices", "embeddings", "vectors"}, the same
    weights(): {name: tensor}, sharing memory with the policy; load_weights(weights): takes over what `weights` gave
    frozen(): a policy that stays as this one is now; to(device): moves it
    save(path, **facts): writes a model file or folder; facts: plain values to keep in it
    Only a policy whose model is sharded needs calls(reading) -> number of times that `states` calls the model, and
    idle_loss(times); its `save` also gets `weights`. Only a run that grpo/build.py puts together also needs `model`,
    `tokenizer`, compile() and, to evaluate prompts, greedy(problems, config).
    """

    def sample(self, problems, iteration, config):
        """Rollouts of config.group_size completions of every problem, with the log-probability of each token as drawn.
        The noise depends on (config.seed, iteration, number of the problem, member of the group) alone."""

    def states(self, reading):
        """Hidden states (K, C) that predict the sampled tokens which reading.index() lists."""

    def project(self, states):
        """(K, C) -> (K, V) float32 logits over the V tokens that it can sample. One that it must not sample has a very
        negative logit; minus infinity would make the exact KL NaN."""


@dataclass
class Reading:
    """The tensors that a policy reads to score completions of P problems. A kind adds some with a row for each problem.
    chosen has a row for each completion of a group, or one row whose states all of them share."""
    group_size: int
    chosen: torch.Tensor          # (P, 1 or G, M) bool, on the CPU: a state predicts sampled token m
    kept: KeptTokens | None       # the tokens that could be drawn at each of the K True ones in order; None: all

    ON_CPU = ("chosen",)  # fields from which indices are made, without waiting for the device
    padded = False        # problems that are read together take as many tokens each as the largest of them

    def index(self):
        """(K, g) indices into the N x M sampled tokens, flattened: state k predicts g of them."""
        P, rows, M = self.chosen.shape
        completion = torch.arange(P * self.group_size).view(P, rows, self.group_size // rows)
        problem, row, place = self.chosen.nonzero(as_tuple=True)                     # (K,) each
        return completion[problem, row] * M + place[:, None]

    def counts(self):
        """(P,) number of states of each problem."""
        return self.chosen.flatten(1).sum(1)

    def sizes(self):
        """(P,) number of tokens that are read for each problem, on the CPU; by default, the number of states."""
        return self.counts()

    def micro_batches(self, config, problems=None):
        """The problems, all or those given by their indices, in parts that are read together: config.batch_size of
        them, or with micro_batch_tokens as many of like size as have that many tokens. A list of index tensors."""
        if problems is None:
            problems = torch.arange(len(self.chosen))
        if not len(problems):
            return []
        if config.micro_batch_tokens is None:
            return list(problems.split(config.batch_size))
        parts = parts_of_tokens(self.sizes()[problems], config.micro_batch_tokens, self.padded)
        return [problems[part] for part in parts]

    def select(self, problems):
        """The reading of these problems, given by their indices on the CPU."""
        kept = self.kept
        if kept is not None:
            kept = kept[places_of(problems, self.counts())]
        rows = {name: x[problems.to(x.device)] for name, x in tensors(self).items()}
        return replace(self, kept=kept, **rows)


def places_of(problems, counts):
    """The indices of the states of these problems among all K, problem p having counts[p] of them."""
    end = counts.cumsum(0)
    start = end - counts
    return torch.cat([torch.arange(0), *(torch.arange(start[p], end[p]) for p in problems)])


@dataclass
class Texts:
    """N completions as rewards and people read them. A policy without text fills in completion_ids alone."""
    prompts: list         # N texts
    completions: list     # N texts
    columns: dict         # {field of the records: list of N}
    tokens: list          # N whole texts as token ids, without padding and stop token
    completion_ids: list  # N lists of token ids: each completion as it was sampled, with the stop token that ended it
    place: torch.Tensor | None  # (N, M) where in its whole text each sampled token is
    metrics: dict         # {name: (sum, count)} of means that the policy wants logged

    @classmethod
    def join(cls, parts):
        """Texts of different problems as one; missing fields of records become None."""
        joined = {f.name: join([getattr(part, f.name) for part in parts]) for f in fields(cls)}
        for name in joined["columns"]:
            columns = [part.columns.get(name, [None] * len(part.prompts)) for part in parts]
            joined["columns"][name] = join(columns)
        return cls(**joined)


@dataclass
class Rollouts:
    """N = P * G completions of P problems (rows i*G .. i*G+G-1 answer problem i) of at most M sampled tokens."""
    target: torch.Tensor                           # (N, M) the sampled tokens
    mask: torch.Tensor                             # (N, M) 1.0 where the policy chose the token, 0.0 on padding
    train_mask: torch.Tensor                       # (N, M) 1.0 where the token is in the loss
    old_logp: torch.Tensor                         # (N, M) log-probability under the distribution drawn from
    truncated: torch.Tensor                        # (N,) bool: ran out of room before its end
    max_tokens: int                                # the most tokens that a completion can have
    reading: Reading                               # what the policy reads to score them
    texts: Texts | None = None                     # what rewards read; None once rewards are known
    ref_logp: torch.Tensor | None = None           # (N, M) of the token under the reference, on the same kept tokens
    ref_distributions: torch.Tensor | None = None  # (K, V) the reference's, untruncated, for the exact KL
    advantage: torch.Tensor | None = None          # (N, 1 or M) how much better each completion, or token, is
    token_weight: torch.Tensor | None = None       # (N, M) how often the loss counts a token; None: once

    @property
    def scored(self):
        """(N, M) 1.0 where the loss reads the token: train_mask without those that fill_estimator leaves out."""
        if self.token_weight is None:
            return self.train_mask
        return self.train_mask * (self.token_weight > 0)

    @property
    def has_reference(self):
        return self.ref_logp is not None or self.ref_distributions is not None

    @property
    def group_size(self):
        return self.reading.group_size

    @property
    def problems(self):
        return len(self.reading.chosen)

    def by_problem(self, x):
        """(N, ...) -> (P, G, ...)."""
        return x.view(self.problems, self.group_size, *x.shape[1:])

    def select(self, problems):
        """The rollouts of these problems, given by their indices on the CPU, and the indices of their completions."""
        completions = (problems[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        rows = completions.to(self.target.device)
        selected = tensors(self)
        full = selected.pop("ref_distributions", None)
        selected = {name: x[rows] for name, x in selected.items()}
        if full is not None:
            selected["ref_distributions"] = full[places_of(problems, self.reading.counts()).to(full.device)]
        return replace(self, **selected, texts=None, reading=self.reading.select(problems)), rows


@dataclass
class Scored:
    """The rewards of N = P * G completions. Scored(reward) is enough: the other fields have defaults."""
    reward: torch.Tensor                         # (P, G) NaN where a completion is not scored
    credit: torch.Tensor | None = None           # (P, G, 1 or M) reward of each completion, or of each sampled token
    values: dict = field(default_factory=dict)   # {name of a reward: (N,)}
    weight: torch.Tensor | None = None           # (P, G) factor on the advantage of each completion, for train_pass_k
    metrics: dict = field(default_factory=dict)  # {name: (sum, count)} that rewards logged

    def __post_init__(self):
        if self.credit is None:
            self.credit = self.reward[..., None]

    def select(self, useful):
        """The problems for which useful (P,) is True, without their values and metrics."""
        return Scored(**{name: x[useful] for name, x in tensors(self).items()})


def tensors(record):
    """{name: tensor} of the fields of a record that are tensors."""
    return {f.name: x for f in fields(record) if torch.is_tensor(x := getattr(record, f.name))}


def join(parts):
    """Records of different problems as one: rows one after another, padded with zeros on the right; sums added."""
    first = parts[0]
    if torch.is_tensor(first):
        if first.dim() == 1:
            return torch.cat(parts)
        longest = max(part.shape[-1] for part in parts)
        return torch.cat([F.pad(part, (0, longest - part.shape[-1])) for part in parts])
    if isinstance(first, (KeptTokens, Texts)):
        return type(first).join(parts)
    if isinstance(first, list):
        return sum(parts, [])
    if isinstance(first, tuple):  # (sum, count)
        return tuple(sum(column) for column in zip(*parts, strict=True))
    if isinstance(first, dict):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: join([part[name] for part in parts if name in part]) for name in names}
    if is_dataclass(first):
        return replace(first, **{f.name: join([getattr(part, f.name) for part in parts]) for f in fields(first)})
    return first


def moved(x, device):
    """A record, and all tensors in it, on another device."""
    if hasattr(x, "to"):
        return x.to(device)
    if isinstance(x, (list, tuple)):
        return type(x)(moved(part, device) for part in x)
    if isinstance(x, dict):
        return {name: moved(part, device) for name, part in x.items()}
    if is_dataclass(x):
        stays = getattr(x, "ON_CPU", ())
        return replace(x, **{f.name: moved(getattr(x, f.name), device) for f in fields(x) if f.name not in stays})
    return x


def plain(x):
    """The fields of a dataclass as plain tensors and values, and those of the dataclasses in it."""
    if not is_dataclass(x):
        return x
    return {f.name: plain(getattr(x, f.name)) for f in fields(x)}
