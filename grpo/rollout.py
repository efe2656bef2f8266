"""The records of a rollout: what was sampled, what is read to score it, its texts and its rewards."""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional as F

from core.performance.batching import parts_of_tokens
from core.performance.kept_tokens import KeptTokens


class Policy(Protocol):
    """A generator as the algorithm sees it: it writes completions, and it can be asked how likely they were.

    `device` is where it computes, `vocabulary` the number of tokens that it can write, `kl_estimator` ("exact" or "k3")
    the one that suits it, `Reading` the class of what it reads, `suffix` the ending of the name of what `save` writes:
    ".safetensors" of a file of ours, "" of a folder.
    """

    def sample(self, problems, iteration, config):
        """Rollouts of config.group_size completions of every problem, with the log-probability of each token as drawn.
        The noise depends on (config.seed, iteration, number of the problem, member of the group) alone."""

    def states(self, reading):
        """Hidden states (K, C) that predict the sampled tokens which reading.index() lists."""

    def project(self, states):
        """(K, C) -> (K, V) float32 logits over the V tokens that it can write. One that it must not write has a very
        negative logit; minus infinity would make the exact KL NaN."""

    def frozen(self):
        """A policy that stays as this one is now: the reference."""

    def parameters(self):
        """What is trained, in an order of its own."""

    def parameters_by_kind(self):
        """{"matrices", "embeddings", "vectors"}: the same, for the optimizers."""

    def weights(self):
        """{name: tensor}, sharing memory with the policy: what a checkpoint holds and a remote sampler gets."""

    def load_weights(self, weights):
        """Takes over weights that `weights` gave."""

    def save(self, path, **facts):
        """Writes a model file or folder with which others can use the policy; facts: plain values to keep in it."""

    def to(self, device):
        """Moves it to another device."""

    # Only samplers in other processes need the parts of `sample`: write(problems, iteration, config) -> what was
    # written, join([written, ...]) of different problems, and rollouts(problems, written, config).
    # Only a policy whose model is sharded needs calls(reading) -> number of times that `states` calls the model, and
    # idle_loss(times); its `save` also gets `weights`.
    # Only a run that grpo/build.py puts together also needs `model` and `tokenizer` (for checks between the models),
    # stored_states(config), compile() and, for evaluation on prompts, greedy(problems, config).


@dataclass
class Reading:
    """What a policy reads to score completions of P problems; the fields of a kind have a row for each problem.

    `chosen` (R, M) bool, on the CPU, marks the places of R rows, in the order of their problems, whose states predict
    sampled tokens. With R < N rows, N / R completions of a group share the states of a row.
    """
    group_size: int
    kept: KeptTokens | None       # the tokens that could be drawn at each of the K places; None: all

    ON_CPU = ()  # fields from which indices are made, without waiting for the device

    @property
    def problems(self):
        return len(getattr(self, self.fields_by_problem()[0].name))

    @staticmethod
    def alike(parts):
        """Readings of one kind, padded to the same shape for join. A kind that pads nothing keeps this one."""
        return parts

    @classmethod
    def join(cls, parts):
        """Readings of different problems as one."""
        parts = cls.alike(parts)
        rows = {f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in cls.fields_by_problem()}
        return cls(parts[0].group_size, KeptTokens.join([part.kept for part in parts]), **rows)

    @classmethod
    def fields_by_problem(cls):
        return [f for f in fields(cls) if f.name not in ("group_size", "kept")]

    def index(self):
        """(K, g) indices into the N x M sampled tokens, flattened: state k predicts the tokens of its row."""
        R, M = self.chosen.shape
        g = self.problems * self.group_size // max(1, R)
        row, place = self.chosen.nonzero(as_tuple=True)                              # (K,) each
        return (row[:, None] * g + torch.arange(g)) * M + place[:, None]             # (K, g)

    def counts(self):
        """(P,) number of states of each problem."""
        rows = self.chosen.sum(1)                                                    # (R,)
        return rows.view(self.problems, len(rows) // max(1, self.problems)).sum(1)

    def sizes(self):
        """(P,) number of tokens that are read for each problem, on the CPU; of a kind that has no own, its states."""
        return self.counts()

    def micro_batches(self, config, problems=None):
        """The problems, all or those given by their indices, in parts that are read together: config.batch_size of
        them, or with micro_batch_tokens as many of like size as have that many tokens. A list of index tensors."""
        problems = torch.arange(self.problems) if problems is None else problems
        if config.micro_batch_tokens is None:
            return list(problems.split(config.batch_size)) if len(problems) else []
        return [problems[part] for part in parts_of_tokens(self.sizes()[problems], config.micro_batch_tokens)]

    def select(self, problems):
        """The reading of these problems, given by their indices on the CPU."""
        kept = None if self.kept is None else self.kept[places_of(problems, self.counts())]
        rows = {f.name: getattr(self, f.name) for f in self.fields_by_problem()}
        return replace(self, kept=kept, **{name: x[problems.to(x.device)] for name, x in rows.items()})

    def to(self, device):
        moved = {f.name: x.to(device) for f in fields(self)
                 if torch.is_tensor(x := getattr(self, f.name)) and f.name not in self.ON_CPU}
        return replace(self, kept=None if self.kept is None else self.kept.to(device), **moved)


def places_of(problems, counts):
    """Which of the K states belong to these problems, problem p having counts[p] of them, one after another."""
    end = counts.cumsum(0)
    return torch.cat([torch.arange(0), *(torch.arange(end[p] - counts[p], end[p]) for p in problems)])


@dataclass
class Texts:
    """N completions as rewards and people read them; dropped once rewards are known."""
    prompts: list         # N texts
    completions: list     # N texts
    columns: dict         # {field of the records: list of N}
    tokens: list          # N whole texts as token ids, without padding and stop token
    completion_ids: list  # N lists of token ids: each completion as it was sampled, with the stop token that ended it
    place: torch.Tensor   # (N, M) where in its whole text each sampled token is
    metrics: dict         # {name: (sum, count)} of means that the policy wants logged
    size: torch.Tensor    # number of tokens that tokens_per_second counts


@dataclass
class Rollouts:
    """N = P * G completions of P problems (rows i*G .. i*G+G-1 answer problem i) of at most M sampled tokens."""
    group_size: int
    target: torch.Tensor                           # (N, M) the sampled tokens
    mask: torch.Tensor                             # (N, M) 1.0 where the policy chose the token, 0.0 on padding and in
                                                   # completions that importance='sequence_mask' rejects
    train_mask: torch.Tensor                       # (N, M) 1.0 where the loss sees the token
    old_logp: torch.Tensor                         # (N, M) log-probability under the distribution drawn from
    truncated: torch.Tensor                        # (N,) bool: ran out of room before its end
    max_tokens: int                                # the most tokens that a completion can have
    reading: Reading                               # what the policy reads to score them
    texts: Texts | None = None                     # what rewards read; None once rewards are known
    ref_logp: torch.Tensor | None = None           # (N, M) of the token under the reference, on the same kept tokens
    ref_distributions: torch.Tensor | None = None  # (K, V) the reference's, untruncated, for the exact KL
    advantage: torch.Tensor | None = None          # (N, 1 or M) how much better each completion, or token, is

    @property
    def problems(self):
        return len(self.target) // self.group_size

    def by_problem(self, x):
        """(N, ...) -> (P, G, ...)."""
        return x.view(self.problems, self.group_size, *x.shape[1:])

    def to(self, device):
        return moved(self, device)

    def select(self, problems):
        """The rollouts of these problems, given by their indices on the CPU, and the indices of their completions."""
        completions = (problems[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        rows = completions.to(self.target.device)
        ref_distributions = self.ref_distributions
        if ref_distributions is not None:
            places = places_of(problems, self.reading.counts())
            ref_distributions = ref_distributions[places.to(ref_distributions.device)]
        by_completion = {name: x[rows] for name in BY_COMPLETION if (x := getattr(self, name)) is not None}
        return replace(self, **by_completion, ref_distributions=ref_distributions, texts=None,
                       reading=self.reading.select(problems)), rows


@dataclass
class Scored:
    """The rewards of N = P * G completions.

    Scored(reward) is enough: the other fields have defaults.
    """
    reward: torch.Tensor                         # (P, G) NaN where a completion is not scored
    credit: torch.Tensor | None = None           # (P, G, 1 or M) reward of each completion, or of each sampled token
    values: dict = field(default_factory=dict)   # {name of a reward: (N,)}
    weight: torch.Tensor | None = None           # (P, G) factor on the advantage of each completion
    compared: torch.Tensor | None = None         # (P, G) a group teaches something if these differ; None: the reward
    metrics: dict | None = None                  # {name: (sum, count)} that rewards logged; None: none of them can log

    def __post_init__(self):
        self.credit = self.reward[..., None] if self.credit is None else self.credit
        self.weight = torch.ones_like(self.reward) if self.weight is None else self.weight
        self.compared = self.reward if self.compared is None else self.compared

    def select(self, useful):
        """The problems for which useful (P,) is True, without their values and metrics."""
        return Scored(self.reward[useful], self.credit[useful], weight=self.weight[useful],
                      compared=self.compared[useful])

    @classmethod
    def join(cls, parts):
        """Joins the rewards of different problems, without values and metrics. The credit of tokens is padded with
        zeros on the right to the longest."""
        parts = [part for part in parts if len(part.reward)] or parts[:1]
        longest = max(part.credit.shape[2] for part in parts)
        credit = torch.cat([F.pad(part.credit, (0, longest - part.credit.shape[2])) for part in parts])
        return cls(torch.cat([part.reward for part in parts]), credit,
                   weight=torch.cat([part.weight for part in parts]),
                   compared=torch.cat([part.compared for part in parts]))


def moved(x, device):
    """A dataclass of tensors, and of what else can be moved, on another device."""
    return replace(x, **{f.name: value.to(device) for f in fields(x) if hasattr(value := getattr(x, f.name), "to")})


def plain(x):
    """The fields of a dataclass as plain tensors and values, and those of the dataclasses in it."""
    return {f.name: plain(value) if is_dataclass(value := getattr(x, f.name)) else value for f in fields(x)}


BY_TOKEN = ("target", "mask", "train_mask", "old_logp", "ref_logp")  # fields of (N, M)
BY_COMPLETION = (*BY_TOKEN, "truncated", "advantage")                # fields with a row for each completion


def join_rollouts(parts):
    """Rollouts of different problems by one policy as one, padded to the longest completion, without their texts.

    Raises AssertionError for rollouts with an advantage: a baseline may be that of the whole step
    """
    parts = [part for part in parts if part.problems] or parts[:1]
    assert all(part.advantage is None for part in parts), "join before compute_rollout_advantages"
    M = max(part.target.shape[1] for part in parts)
    known = [name for name in BY_TOKEN if getattr(parts[0], name) is not None]
    joined = {name: torch.cat([F.pad(x := getattr(part, name), (0, M - x.shape[1])) for part in parts])
              for name in known}
    distributions = [part.ref_distributions for part in parts]
    return replace(parts[0], **joined, truncated=torch.cat([part.truncated for part in parts]), texts=None,
                   ref_distributions=None if distributions[0] is None else torch.cat(distributions),
                   reading=type(parts[0].reading).join([part.reading for part in parts]))
