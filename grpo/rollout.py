"""The interface of a policy, and the records of a rollout: completions, their texts, rewards and log-probabilities."""

from dataclasses import dataclass, field, fields, is_dataclass, replace

import torch
from torch.nn import functional as F

from core.distributions import entropy, in_parts, restrict, rows_at_once, sampling_logp
from grpo.losses import exact_kl

REWARD = "environment_reward"  # the column of Texts with the sum of an episode's rewards, None where it failed
TURNS = "environment_turns"    # ... with [(column in which a turn begins, its reward)] of each episode


class Policy:
    """A generator as the algorithm sees it: it samples completions, and it scores them. A kind of generator defines
    sample, states and project; score and distributions are made of them.

    device: where it computes; vocabulary: number of tokens that it can sample; kl_estimator: "exact" or "k3", the one
    that suits it; suffix: the ending of the name of what `save` writes, "" of a folder
    parameters(): those that are trained; parameters_by_kind(): {"matrices", "embeddings", "vectors"}, the same
    weights(): {name: tensor}, sharing memory with the policy; load_weights(weights): takes over what `weights` gave
    frozen(): a policy that stays as this one is now; to(device): moves it
    save(path, **facts): writes a model file or folder; facts: plain values to keep in it
    Only a policy whose model is sharded needs calls(rollouts) -> number of times that `states` calls the model, and
    idle_loss(times); its `save` also gets `weights`. Only a run that grpo/build.py puts together also needs `model`,
    `tokenizer`, compile() and, to evaluate prompts, greedy(problems, config).
    """

    def sample(self, problems, iteration, config):
        """Rollouts of config.group_size completions of every problem, with the log-probability of each token as drawn.
        The noise depends on (config.seed, iteration, number of the problem, member of the group) alone."""

    def states(self, rollouts):
        """Hidden states (K, C): one for each True of rollouts.inputs["chosen"], in its order."""

    def project(self, states):
        """(K, C) -> (K, V) float32 logits over the V tokens that it can sample. One that it must not sample has a very
        negative logit; minus infinity would make the exact KL NaN."""

    def score(self, rollouts, temperature, learn_entropy=False):
        """Scores of the sampled tokens, each read once. Logits are made for them alone, and in parts if they are many.

        learn_entropy: the entropy has a gradient
        """
        h = self.states(rollouts)                                                    # (K, C)
        index = rollouts.index().to(h.device, non_blocking=True)                     # (K, g)
        target = rollouts.target.flatten()[index]                                    # (K, g)
        kept = rollouts.inputs.get("kept")
        if kept:
            kept = kept[0].join(kept)
        reference = rollouts.inputs.get("reference")
        if reference:
            reference = torch.cat(reference).to(h.device)                            # (K, V)

        def token_scores(h, target, kept, reference):
            full = sampling_logp(self.project(h), temperature)                       # (K, V)
            drawn = restrict(full, kept)                                             # (K, V)
            kl = [] if reference is None else [exact_kl(full, reference)]            # (K,)
            read = full if learn_entropy else full.detach()
            return drawn.gather(-1, target), entropy(read), *kl

        found = in_parts(token_scores, self.vocabulary, h, target, kept, reference)
        return Scores(*(rollouts.by_token(x, index) for x in found))

    def distributions(self, rollouts, temperature):
        """The untruncated log-probabilities (k, V) at the states of each problem, a list. Written in place, so that
        besides them only the logits of one part exist."""
        h = self.states(rollouts)                                                    # (K, C)
        full = torch.empty(len(h), self.vocabulary, device=h.device)                 # (K, V)
        size = rows_at_once(self.vocabulary, h.device)
        for part, states in zip(full.split(size), h.split(size), strict=True):
            part.copy_(sampling_logp(self.project(states), temperature))
        return full.split(counts(rollouts.inputs["chosen"]))


@dataclass
class Scores:
    """Scores of N completions of M tokens under one policy; 0 where no state predicts the token."""
    logp: torch.Tensor              # (N, M) of each sampled token, under the distribution that it is drawn from
    entropy: torch.Tensor           # (N, M) of the whole distribution; with a gradient only if learn_entropy
    kl: torch.Tensor | None = None  # (N, M) exact KL to the reference, if rollouts.inputs has its distributions


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
    """N = P * G completions of P problems (rows i*G .. i*G+G-1 answer problem i) of at most M sampled tokens.

    inputs: what the policy reads to score them again. Each entry is a tensor on the CPU, or a list, with one item for
    each problem. The policies share these names, and each adds its own:
        chosen     (P, 1 or G, M) bool: a state predicts sampled token m, of one completion or of the whole group
        kept       P KeptTokens: those that could be drawn at the chosen ones; missing: all tokens
        reference  P tensors (k, V): the reference's distributions there, untruncated, for the exact KL
        size       (P,) number of tokens that are read, for micro_batch_tokens
    """
    target: torch.Tensor                       # (N, M) the sampled tokens
    mask: torch.Tensor                         # (N, M) 1.0 where the policy chose the token, 0.0 on padding
    train_mask: torch.Tensor                   # (N, M) 1.0 where the token is in the loss
    old_logp: torch.Tensor                     # (N, M) log-probability under the distribution drawn from
    truncated: torch.Tensor                    # (N,) bool: hit the limit on its tokens
    max_tokens: int                            # the most tokens that a completion can have
    inputs: dict
    texts: Texts | None = None                 # what rewards read; None once rewards are known
    proximal_logp: torch.Tensor | None = None  # (N, M) what the ratio is to; None: the policy itself, so that it is 1
    ref_logp: torch.Tensor | None = None       # (N, M) of the token under the reference, on the same kept tokens
    advantage: torch.Tensor | None = None      # (N, 1 or M) how much better each completion, or token, is
    token_weight: torch.Tensor | None = None   # (N, M) how often the loss counts a token; None: once

    @property
    def scored(self):
        """(N, M) 1.0 where the loss reads the token: train_mask without those that fill_estimator leaves out."""
        if self.token_weight is None:
            return self.train_mask
        return self.train_mask * (self.token_weight > 0)

    @property
    def has_reference(self):
        return self.ref_logp is not None or "reference" in self.inputs

    @property
    def problems(self):
        return len(self.inputs["chosen"])

    @property
    def group_size(self):
        return max(1, len(self.target) // max(1, self.problems))

    def by_problem(self, x):
        """(N, ...) -> (P, G, ...)."""
        return x.view(self.problems, self.group_size, *x.shape[1:])

    def index(self):
        """(K, g) indices into the N x M sampled tokens, flattened: state k predicts g of them."""
        P, rows, M = self.inputs["chosen"].shape
        completion = torch.arange(len(self.target)).view(P, rows, self.group_size // rows)
        problem, row, place = self.inputs["chosen"].nonzero(as_tuple=True)           # (K,) each
        return completion[problem, row] * M + place[:, None]

    def by_token(self, x, index):
        """Puts x (K,) or (K, g), found at each state, at the tokens of `index` (K, g): (N, M), 0 elsewhere."""
        x = x.view(len(x), -1).expand_as(index)                                      # (K, g)
        return x.new_zeros(self.target.numel()).index_copy(0, index.flatten(), x.flatten()).view_as(self.target)

    def micro_batches(self, config, problems=None):
        """The problems, all or those given by their indices, in parts that are read together: config.batch_size of
        them, or with micro_batch_tokens as many of like size as have that many tokens. A list of index tensors."""
        if problems is None:
            problems = torch.arange(self.problems)
        if config.micro_batch_tokens is None:
            return [part for part in problems.split(config.batch_size) if len(part)]
        from core.performance.batching import parts_of_tokens
        return [problems[part] for part in parts_of_tokens(self.inputs["size"][problems], config.micro_batch_tokens)]

    def select(self, problems):
        """The rollouts of these problems, given by their indices on the CPU, and the indices of their completions."""
        completions = (problems[:, None] * self.group_size + torch.arange(self.group_size)).flatten()
        rows = completions.to(self.target.device, non_blocking=True)
        selected = {name: x[rows] for name, x in tensors(self).items()}
        inputs = {name: pick(x, problems) for name, x in self.inputs.items()}
        return replace(self, **selected, texts=None, inputs=inputs), rows


def counts(chosen):
    """The number of states of each problem, a list. chosen: as in Rollouts"""
    return chosen.flatten(1).sum(1).tolist()


def pick(x, rows):
    """The items of a tensor or of a list that rows (k,) lists."""
    return x[rows] if torch.is_tensor(x) else [x[i] for i in rows.tolist()]


@dataclass
class Scored:
    """The rewards of N = P * G completions. Scored(reward) is enough: the other fields have defaults."""
    reward: torch.Tensor                         # (P, G) NaN where a completion is not scored
    credit: torch.Tensor | None = None           # (P, G, 1 or M) reward of each completion, or of each sampled token
    values: dict = field(default_factory=dict)   # {name of a reward: (N,)}
    metrics: dict = field(default_factory=dict)  # {name: (sum, count)} that rewards logged
    penalty: torch.Tensor | float = 0.0          # (P, G, 1 or M) added to the credit; groups are compared without it
    weight: torch.Tensor | float = 1.0           # (P, G, 1) factor on the advantage of each completion

    def __post_init__(self):
        if self.credit is None:
            self.credit = self.reward[..., None]

    @property
    def per_token(self):
        return self.credit.shape[2] > 1

    def counted(self, mask):
        """(P, G, 1 or M) 1.0 where a credit counts: not of what was skipped, nor on the padding of mask (N, M)."""
        seen = (~self.reward.isnan()).float()[..., None].expand_as(self.credit)
        return seen * mask.view_as(seen) if self.per_token else seen

    def differ(self):
        """(P,) bool: groups whose rewards are not all equal. Normalised rewards are compared as the loss sees them."""
        reward = self.reward if self.per_token else self.credit[..., 0]              # (P, G)
        skipped = self.reward.isnan()
        highest = reward.masked_fill(skipped, -torch.inf).amax(1)                    # (P,)
        lowest = reward.masked_fill(skipped, torch.inf).amin(1)
        return highest > lowest

    def select(self, useful):
        """The problems that useful (p,), on the CPU, lists, without their values and metrics."""
        return Scored(**{name: x[useful.to(x.device, non_blocking=True)] for name, x in tensors(self).items()})


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
    if isinstance(first, Texts):
        return Texts.join(parts)
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
