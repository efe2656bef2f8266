"""Rollouts: completions with their texts, log-probabilities and rewards, and the buffer that holds them."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from core.checkpoint_manager import as_plain
from core.device import moved, values_of
from core.distributions import KeptTokens
from core.errors import Mistake
from grpo.sums import Sums

REWARD = "environment_reward"  # the column of Texts with the sum of an episode's rewards, None where it failed
TURNS = "environment_turns"    # the column of Texts with an episode's turns: a list of [text, answer, reward]
SHUFFLE = 3                    # seed entry that separates this noise from the noise of problems and samples
MOST_EVALUATIONS = 1000


@dataclass
class Scores:
    """Scores of N completions of M tokens under one policy; 0 where no state predicts the token."""
    logp: Tensor              # (N, M) of each sampled token, under the distribution that it is drawn from
    entropy: Tensor           # (N, M) of the whole distribution; it may have a gradient
    kl: Tensor | None = None  # (N, M) exact KL to the reference, if rollouts.inputs has its distributions


@dataclass
class Texts:
    """N completions as rewards and people read them. A policy without text only fills in completion_ids."""
    prompts: list         # N texts
    completions: list     # N texts
    columns: dict         # {field of the records: list of N}
    tokens: list          # N whole texts as token ids, without padding and stop token
    completion_ids: list  # N lists of token ids: each completion as it was sampled, with the stop token that ended it
    place: Tensor | None  # (N, M) the position of each sampled token in its whole text
    metrics: dict         # {name: (sum, count)} of means that the policy wants logged

    @classmethod
    def join(cls, parts: "Sequence[Texts]") -> "Texts":
        """Joins the Texts of different problems; missing fields of records become None."""
        joined = join_fields(parts)
        for name in joined["columns"]:
            column = []
            for part in parts:
                missing = [None] * len(part.prompts)
                column += part.columns.get(name, missing)
            joined["columns"][name] = column
        return cls(**joined)


@dataclass(kw_only=True)
class Inputs:
    """The inputs with which a policy scores rollouts again. Each field is a tensor on the CPU or a list, with one item
    for each problem, or None. Each kind of policy adds fields in a subclass:

        @dataclass
        class TableInputs(Inputs):
            row: Tensor  # (P,)
    """
    chosen: Tensor                 # (P, 1 or G, M) bool: the tokens to score; 1 if all of a group have the same states
    size: Tensor | None = None     # (P,) number of tokens that are read, for micro_batch_tokens
    kept: list | None = None       # P KeptTokens: the tokens that could be drawn at each state; None: all
    reference: list | None = None  # P tensors (k, V): the reference's distribution at each state, for the exact KL

    def __post_init__(self):
        problems = len(self.chosen)
        for name, x in values_of(self).items():
            has_items = isinstance(x, (Tensor, list)) and len(x) == problems
            if x is not None and not has_items:
                raise Mistake(f"{type(self).__name__}: {name} must be a tensor or a list with an item for each of "
                              f"{problems} problems, or None")

    def counts(self) -> list:
        """The number of states of each problem."""
        return self.chosen.flatten(1).sum(1).tolist()

    def with_kept(self, kept: KeptTokens | None) -> Self:
        """These inputs with the KeptTokens of all states; None: all tokens could be drawn."""
        if kept is None:
            return self
        return replace(self, kept=kept.split(self.counts()))

    def select(self, problems: Tensor) -> Self:
        """The inputs of these problems, given by their indices on the CPU."""
        selected = select_tensors(self, problems)
        for name, x in values_of(self).items():
            if isinstance(x, list):
                selected[name] = [x[i] for i in problems.tolist()]
        return replace(self, **selected)

    @classmethod
    def of_state(cls, saved: dict) -> Self:
        """Rebuilds inputs from the dictionary of their fields in a state. Raises Mistake for another kind of inputs."""
        known = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.default is MISSING}
        if needed - saved.keys() or saved.keys() - known:
            raise Mistake(f"the state has the inputs {', '.join(sorted(saved))}, which are not those of "
                          f"{cls.__name__}; set inputs_type of the policy's class to the class of its inputs")
        if saved.get("kept") is not None:
            kept = [KeptTokens(**of_problem) for of_problem in saved["kept"]]
            saved = saved | {"kept": kept}
        return cls(**saved)


@dataclass
class Rollouts:
    """N = P * G completions of P problems (rows i*G .. i*G+G-1 answer problem i) of at most M sampled tokens.

    The inputs stay on the CPU.
    """
    target: Tensor                       # (N, M) the sampled tokens
    mask: Tensor                         # (N, M) 1.0 where the policy chose the token, 0.0 on padding
    train_mask: Tensor                   # (N, M) 1.0 where the token is in the loss
    old_logp: Tensor                     # (N, M) log-probability under the distribution drawn from
    truncated: Tensor                    # (N,) bool: hit the limit on its tokens
    max_tokens: int                      # the most tokens that a completion can have
    inputs: Inputs                       # what the policy reads to score them again
    texts: Texts | None = None           # what rewards read; None once rewards are known
    proximal_logp: Tensor | None = None  # (N, M) the ratio's denominator; None: the policy itself, the ratio is 1
    ref_logp: Tensor | None = None       # (N, M) of the token under the reference, on the same kept tokens
    advantage: Tensor | None = None      # (N, 1 or M) how much better each completion, or token, is

    def __post_init__(self):
        if not isinstance(self.inputs, Inputs):
            raise Mistake(f"the inputs of Rollouts are of the type {type(self.inputs).__name__}; make them a dataclass "
                          "below grpo.rollout.Inputs, with a field for each of their entries")

    @property
    def has_reference(self) -> bool:
        return self.ref_logp is not None or self.inputs.reference is not None

    @property
    def problems(self) -> int:
        return len(self.inputs.chosen)

    @property
    def group_size(self) -> int:
        return max(1, len(self.target) // max(1, self.problems))

    def by_problem(self, x: Tensor) -> Tensor:
        """(N, ...) -> (P, G, ...)."""
        return x.view(self.problems, self.group_size, *x.shape[1:])

    def index(self) -> Tensor:
        """(K, g) indices into the flattened N x M sampled tokens: state k predicts g tokens.

        If a group shares its states, g = G: with P = 1, G = 2, M = 3 and chosen = [[[1, 0, 1]]] the indices are
        [[0, 3], [2, 5]]. Otherwise g = 1.
        """
        chosen = self.inputs.chosen
        P, rows, M = chosen.shape                                                    # rows: 1 or G
        g = self.group_size // rows
        completion = torch.arange(len(self.target)).view(P, rows, g)
        problem, row, column = chosen.nonzero(as_tuple=True)                         # (K,) each
        return completion[problem, row] * M + column[:, None]                        # (K, g)

    def by_token(self, x: Tensor, index: Tensor) -> Tensor:
        """Scatters x (K,) or (K, g), a value for each state, to the tokens of `index` (K, g): (N, M), 0 elsewhere."""
        x = x.view(len(x), -1).expand_as(index)                                      # (K, g)
        flat = x.new_zeros(self.target.numel())                                      # (N M,)
        flat = flat.index_copy(0, index.flatten(), x.flatten())
        return flat.view_as(self.target)

    def micro_batches(self, size: int, tokens: int | None = None, problems: Tensor | None = None) -> list:
        """Micro-batches of problems, as a list of index tensors.

        size: problems in each; tokens: instead, the most tokens in each, padding included, of problems of similar size
        problems: indices of the problems to read; None: all
        """
        if problems is None:
            problems = torch.arange(self.problems)
        if tokens is None:
            return [part for part in problems.split(size) if len(part)]
        if self.inputs.size is None:
            raise Mistake("micro_batch_tokens: this policy's inputs have no size, the number of tokens of each problem "
                          "(grpo/rollout.py: Inputs); add it, or leave micro_batch_tokens out")
        from core.performance.batching import parts_of_tokens
        return [problems[part] for part in parts_of_tokens(self.inputs.size[problems], tokens)]

    def select(self, problems: Tensor) -> tuple:
        """The rollouts of these problems, given by their indices on the CPU, and the indices of their completions."""
        G = self.group_size
        completions = problems[:, None] * G + torch.arange(G)                        # (p, G)
        completions = completions.flatten().to(self.target.device, non_blocking=True)
        selected = select_tensors(self, completions)
        inputs = self.inputs.select(problems)
        return replace(self, **selected, texts=None, inputs=inputs), completions


@dataclass
class Scored:
    """The rewards of N = P * G completions. Scored(reward) is enough: the other fields have defaults."""
    reward: Tensor                               # (P, G) NaN where a completion is not scored
    credit: Tensor | None = None                 # (P, G, 1 or M) reward of each completion, or of each sampled token
    values: dict = field(default_factory=dict)   # {name of a reward: (N,)}
    metrics: dict = field(default_factory=dict)  # {name: (sum, count)} that rewards logged
    penalty: Tensor | float = 0.0                # (P, G, 1 or M) added to the credit; groups are compared without it
    weight: Tensor | float = 1.0                 # (P, G, 1) factor on the advantage of each completion

    def __post_init__(self):
        if self.credit is None:
            self.credit = self.reward[..., None]

    @property
    def per_token(self) -> bool:
        return self.credit.shape[2] > 1

    def counted(self, mask: Tensor) -> Tensor:
        """(P, G, 1 or M) 1.0 where a credit counts: 0.0 where the reward was skipped and on padding of mask (N, M)."""
        is_scored = (~self.reward.isnan()).float()                                   # (P, G)
        counted = is_scored[..., None].expand_as(self.credit)
        if self.per_token:
            counted = counted * mask.view_as(counted)
        return counted

    def differ(self) -> Tensor:
        """(P,) bool: groups whose rewards are not all equal."""
        if self.per_token:
            compared = self.reward                                                   # (P, G)
        else:
            compared = self.credit[..., 0]                                           # (P, G) normalised
        return differing(compared.masked_fill(self.reward.isnan(), torch.nan))

    def select(self, problems: Tensor) -> "Scored":
        """The rewards of these problems, given by their indices on the CPU, without their values and metrics."""
        return Scored(**select_tensors(self, problems))


def differing(x: Tensor) -> Tensor:
    """(P,) bool: groups whose numbers x (P, G) are not all equal. NaN does not count."""
    missing = x.isnan()
    highest = x.masked_fill(missing, -torch.inf).amax(1)                             # (P,)
    lowest = x.masked_fill(missing, torch.inf).amin(1)
    return highest > lowest


def select_tensors(record: Any, rows: Tensor) -> dict:
    """{name: these rows} of the fields of a record that are tensors."""
    selected = {}
    for name, x in values_of(record).items():
        if isinstance(x, Tensor):
            selected[name] = x[rows.to(x.device, non_blocking=True)]
    return selected


def join(parts: Sequence) -> Any:
    """Joins records of different problems into one.

    Tensors: rows concatenated, padded with zeros on the right; lists: concatenated; tuples (sum, count): added;
    dictionaries and records: each value joined; anything else: the value of the first
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if first.dim() > 1:
            longest = max(part.shape[-1] for part in parts)
            padded = []
            for part in parts:
                missing = longest - part.shape[-1]
                padded.append(F.pad(part, (0, missing)))
            parts = padded
        return torch.cat(parts)
    if isinstance(first, Texts):
        return Texts.join(parts)
    if isinstance(first, list):
        return list(chain(*parts))
    if isinstance(first, tuple):
        totals, counts = zip(*parts, strict=True)
        return sum(totals), sum(counts)
    if isinstance(first, dict):
        joined = {}
        for name in dict.fromkeys(chain(*parts)):
            joined[name] = join([part[name] for part in parts if name in part])
        return joined
    if is_dataclass(first):
        return replace(first, **join_fields(parts))
    return first


def join_fields(parts: Sequence) -> dict:
    """{name: the field of all parts, joined} of records of one type."""
    joined = {}
    for name in values_of(parts[0]):
        joined[name] = join([values_of(part)[name] for part in parts])
    return joined


@dataclass(frozen=True)
class Facts:
    """The findings of an optimizer step about its rollouts, over all ranks."""
    scored: bool    # a reward scored a completion
    taught: bool    # a token has an advantage
    differed: bool  # the rewards of a group differ
    varied: dict    # {reward: number of groups in which its values differ}
    skipped: dict   # {reward: number of completions that it skipped}


class DataBuffer:
    """Holds the rollouts of one iteration, hands out their minibatches, and keeps the results of evaluations.

    The trainer owns it, and a training step fills and reads it. The order of minibatches depends only on (seed, rank,
    id of the rollout, epoch), so that a resumed run continues within an iteration.
    """

    def __init__(self, seed: int = 0, rank: int = 0):
        self.seed = seed
        self.rank = rank
        self.rollouts = None   # of the current iteration, until its last minibatch
        self.sums = None       # the Sums of their metrics
        self.stored = 0        # number of rollouts that were stored, and the id of the current ones
        self.queue = []        # [(epoch, part, parts)] of the minibatches to come
        self.evaluations = []  # [{"step": step, metric: number}], the first is never dropped
        self.facts = None      # the Facts of the last step

    def store_rollout_data(self, rollouts: Rollouts, sums: Sums) -> int:
        """Takes rollouts with their advantage and the sums of their metrics. Returns their id."""
        assert self.rollouts is None and rollouts.advantage is not None
        self.stored += 1
        self.rollouts, self.sums = rollouts, sums
        return self.stored

    def prepare_training_batch(self, id: int, epochs: int = 1, minibatches: int = 1) -> None:
        """Queues `epochs` passes over a rollout, each in `minibatches` parts of its problems, shuffled anew."""
        assert id == self.stored, id
        self.queue = []
        for epoch in range(epochs):
            self.queue += [(epoch, part, minibatches) for part in range(minibatches)]

    def next_minibatch(self) -> tuple:
        """A minibatch (rollouts, sums) of the queue. The last minibatch releases the rollouts."""
        epoch, part, parts = self.queue.pop(0)
        rollouts, sums = self.rollouts, self.sums
        if not self.queue:
            self.release()
        if parts > 1:  # groups stay whole: their completions share a forward
            rng = np.random.default_rng([SHUFFLE, self.seed, self.rank, self.stored, epoch])
            order = rng.permutation(rollouts.problems)
            problems = np.sort(np.array_split(order, parts)[part])
            rollouts, _ = rollouts.select(torch.from_numpy(problems))
        return rollouts, sums

    def release(self) -> None:
        """Empties the queue and releases the rollouts."""
        self.rollouts = None
        self.sums = None
        self.queue = []

    def store_evaluation_data(self, step: int, metrics: dict) -> None:
        """Keeps the metrics {name: number} of an evaluation, in place of an earlier one of this step. Beyond
        MOST_EVALUATIONS every second is dropped."""
        self.evaluations = [record for record in self.evaluations if record["step"] < step]
        if len(self.evaluations) == MOST_EVALUATIONS:
            del self.evaluations[1::2]
        self.evaluations.append({"step": step, **metrics})

    def get_buffer_statistics(self) -> dict:
        """Numbers of the minibatches to come, the rollouts stored so far, and the evaluations that are kept."""
        return {
            "minibatches": len(self.queue),
            "stored": self.stored,
            "evaluations": len(self.evaluations)}

    def state_dict(self) -> dict:
        """Returns the state as plain tensors and values."""
        sums = []
        if self.sums is not None:
            sums = list(self.sums.entries.items())
        return {
            "rollouts": as_plain(self.rollouts),
            "sums": sums,
            "stored": self.stored,
            "queue": self.queue,
            "evaluations": self.evaluations}

    def load_state_dict(
            self,
            state: dict,
            device: torch.device | str = "cpu",
            inputs_type: type = Inputs) -> None:
        """Loads a state. inputs_type: the policy's class of Inputs"""
        self.stored = state["stored"]
        self.queue = state["queue"]
        self.evaluations = state["evaluations"]
        saved = state["rollouts"]
        if not saved:
            return
        inputs = inputs_type.of_state(saved["inputs"])
        self.rollouts = moved(Rollouts(**saved | {"inputs": inputs}), device)
        if isinstance(state["sums"], dict):
            self.sums = sums_of_old_state(state["sums"])
        else:
            self.sums = Sums(state["sums"])


def sums_of_old_state(saved: dict) -> Sums:
    """Converts the sums of an earlier version's state: {name: (sum, count)}, with the kind as a prefix of the name."""
    sums = Sums()
    for name, (total, count) in saved.items():
        if name == "_mismatch_max":
            sums.highest("mismatch_max", total)
        elif name == "_taught":
            sums.internal("tokens with an advantage", total)
        elif name == "varied in groups: ":
            sums.internal("groups that differ", total)
        elif name.startswith("varied in groups: "):
            sums.varied(name.removeprefix("varied in groups: "), total)
        elif name.startswith("skipped/"):
            sums.skipped(name.removeprefix("skipped/"), total)
        elif name.startswith("_"):
            sums.internal(name.removeprefix("_"), total)
        elif name.startswith("logged by a reward: "):
            sums.logged(name.removeprefix("logged by a reward: "), total, count)
        elif count is None:
            sums.sum(name, total)
        else:
            sums.mean(name, total, count)
    if sums.has_mean("mismatch_kl"):
        _, tokens = saved["mismatch_kl"]
        sums.internal("tokens of the mismatch", tokens)
    return sums
