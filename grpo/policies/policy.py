"""The interface of a policy, and the code that all policies share: scores, precision, weights, copies, files."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from core.cache import new_cache
from core.distributed import autocast
from core.distributions import LARGE_VOCABULARY, KeptTokens, entropy, in_parts, restrict, rows_at_once, sampling_logp
from core.model import try_compiled
from core.models import save_model
from core.tokenizer import Tokenizer
from grpo.losses import exact_kl
from grpo.rollout import Inputs, Rollouts, Scores, join
from grpo.sampling_settings import SamplingSettings


class Policy:
    """The interface of a generator for the algorithm: it samples completions and scores them. Subclasses define sample,
    states and project; score and distributions are built on these methods.

    device: the device of the model; vocabulary: number of tokens that it can sample; kl_estimator: the default, "exact"
    or "k3"; suffix: file name extension for `save`, "" for a folder
    parameters(): the trained parameters; parameters_by_kind(): the same, under "matrices", "embeddings", "vectors"
    weights(): {name: tensor}, sharing memory with the policy; load_weights(weights): loads the result of `weights`
    inputs_type: the class of rollouts.inputs, from which a resumed run restores the inputs
    frozen(): a copy that later training does not change; to(device): moves the policy
    save(path, **facts): writes a model file or folder; facts: plain values to store in it
    Only a policy with a sharded model needs calls(rollouts) -> number of times that `states` calls the model; its
    `save` also gets `weights`. Only runs built by grpo/build.py also need `model`, `tokenizer`, compile(),
    try_compiled() and, to evaluate prompts, greedy(problems, settings).
    """

    inputs_type = Inputs

    def sample(self, problems: dict, iteration: int, settings: SamplingSettings) -> Rollouts:
        """Samples settings.group_size completions of every problem. The Rollouts include the log-probability of each
        token under the sampling distribution. The noise depends only on settings.seed, iteration, the number of the
        problem and the member of the group."""

    def states(self, rollouts: Rollouts) -> Tensor:
        """Returns hidden states (K, C), one for each True in rollouts.inputs.chosen, in the same order."""

    def project(self, states: Tensor) -> Tensor:
        """(K, C) -> (K, V) float32 logits over the vocabulary. A banned token has a very negative logit, because minus
        infinity would make the exact KL and, of a large vocabulary, the entropy NaN."""

    def identity(self) -> dict:
        """Returns facts that must match to load a saved state, besides the names and shapes of the weights."""
        return {}

    def score(
            self,
            rollouts: Rollouts,
            temperature: float,
            learn_entropy: bool = False) -> Scores:  # True: the entropy has a gradient
        """Scores the sampled tokens, reading each once. Computes logits of these tokens only, in parts if need be."""
        h = self.states(rollouts)                                                    # (K, C)
        index = rollouts.index()                                                     # (K, g)
        index = index.to(h.device, non_blocking=True)
        target = rollouts.target.flatten()[index]                                    # (K, g)
        inputs = rollouts.inputs
        kept = None
        if inputs.kept:
            kept = KeptTokens.join(inputs.kept)
        reference = None
        if inputs.reference:
            reference = torch.cat(inputs.reference)                                  # (K, V)
            reference = reference.to(h.device)

        def token_scores(h, target, kept, reference):
            logits = self.project(h)
            full = sampling_logp(logits, temperature)                                # (K, V)
            drawn = restrict(full, kept)                                             # (K, V)
            # The KL must precede the gather: backward sums the gradients of `full` in reverse order, and the last bit
            # of a float32 sum depends on the order
            kl = None
            if reference is not None:
                kl = exact_kl(full, reference)                                       # (K,)
            logp = drawn.gather(-1, target)                                          # (K, g)
            if not learn_entropy:
                full = full.detach()
            return logp, entropy(full), kl

        # A small vocabulary would gain nothing, and its gradients would get other last bits than those of earlier runs
        if self.vocabulary >= LARGE_VOCABULARY and kept is None and not learn_entropy:
            from core.performance.head import token_scores_in_few_passes
            token_scores = partial(token_scores_in_few_passes, self.project, temperature)
        logp, entropies, kl = in_parts(
            token_scores,
            self.vocabulary,
            h,
            target,
            kept,
            reference)
        logp = rollouts.by_token(logp, index)                                        # (N, M)
        entropies = rollouts.by_token(entropies, index)
        if kl is not None:
            kl = rollouts.by_token(kl, index)
        return Scores(logp, entropies, kl)

    def distributions(self, rollouts: Rollouts, temperature: float) -> Sequence[Tensor]:
        """Returns a tensor for each problem: the untruncated log-probabilities (k, V) at its states."""
        h = self.states(rollouts)                                                    # (K, C)
        # Written in place: concatenating the parts would need twice the memory
        K = len(h)
        full = torch.empty(K, self.vocabulary, device=h.device)
        size = rows_at_once(self.vocabulary, h.device)
        for i in range(0, K, size):
            part = slice(i, i + size)
            logits = self.project(h[part])
            full[part] = sampling_logp(logits, temperature)
        counts = rollouts.inputs.counts()
        return full.split(counts)


class ModelPolicy(Policy):
    """A policy with a model (interface: core/model.py) and its tokenizer. Subclasses define sample_part and states.

    The model is always in eval mode, because dropout would make the first ratio differ from 1.
    """

    def __init__(
            self,
            model: nn.Module,
            tokenizer: Tokenizer,
            dtype: torch.dtype = torch.float32,
            grad_checkpoint: bool = False):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.dtype = dtype
        model.grad_checkpoint = grad_checkpoint

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocabulary(self) -> int:
        return self.model.vocabulary

    @property
    def suffix(self) -> str:
        return self.model.suffix

    @torch.no_grad()
    def sample(self, problems: dict, iteration: int, settings: SamplingSettings) -> Rollouts:
        """Samples Rollouts of all problems, a few problems at a time."""
        count = len(problems["number"])
        size = self.problems_at_once(settings)
        rollouts = []
        for i in range(0, count, size):
            rows = slice(i, i + size)
            part = {key: x[rows] for key, x in problems.items()}
            sampled = self.sample_part(part, iteration, settings)
            if settings.top_k == 1:  # the drawn tokens were the only ones that could be drawn
                index = sampled.index()[:, 0]
                ids = sampled.target.flatten().cpu()[index]                          # (K,)
                kept = KeptTokens(ids.int(), torch.ones_like(ids))
                sampled.inputs = sampled.inputs.with_kept(kept)
            rollouts.append(sampled)
        return join(rollouts)

    def sampling_batch(self, settings: SamplingSettings) -> int:
        """Returns the number of completions sampled in parallel. On a GPU, sampling all is as fast as a few."""
        if settings.sample_rows:
            return settings.sample_rows
        if self.device.type == "cpu":
            problems = settings.batch_size
        else:
            problems = settings.problems
        return problems * settings.group_size

    def problems_at_once(self, settings: SamplingSettings) -> int:
        """Returns the number of problems passed to sample_part at a time."""
        completions = self.sampling_batch(settings)
        return max(1, completions // settings.group_size)

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.dtype)

    def put(self, x: Tensor) -> Tensor:
        """Copies a tensor from the CPU to the device without synchronising."""
        return x.to(self.device, non_blocking=True)

    def on_device(self, padding: Tensor) -> Tensor | None:
        """Copies padding (P,) to the device. Returns None if no text has padding, because attention is faster then."""
        if not padding.any():
            return None
        return self.put(padding)

    def project(self, states: Tensor) -> Tensor:
        with self.autocast():
            return self.model.project(states)

    def frozen(self) -> "ModelPolicy":
        twin = copy.copy(self)
        twin.model = self.model.frozen()
        return twin

    def parameters(self) -> Iterator:
        return self.model.parameters()

    def parameters_by_kind(self) -> dict:
        return self.model.parameters_by_kind()

    def weights(self) -> dict:
        return self.model.weights()

    def load_weights(self, weights: dict) -> None:
        from core.performance.sharding import shard_like
        own = self.model.weights()
        sharded = {}  # tensors of sharded parameters are sharded; others stay whole
        for name, x in weights.items():
            sharded[name] = shard_like(x, own[name])
        self.model.load_weights(sharded)

    def calls(self, rollouts: Rollouts) -> int:
        """Returns the number of times that `states` calls the model."""
        return 1

    def identity(self) -> dict:
        return self.model.identity()

    def save(self, path: str, **facts) -> None:
        """facts: also the gathered `weights` of a sharded model"""
        save_model(path, self.model, self.tokenizer, **facts)

    def to(self, device: torch.device | str) -> None:
        self.model.to(device)

    def compile(self) -> None:
        """Compiles the layers. A reference is a separate copy, so it must be compiled separately."""
        self.model.compile_layers()

    def try_compiled(self) -> None:
        """Reads two texts. Raises Mistake if the layers cannot be compiled."""
        tokens = torch.zeros(2, 2, dtype=torch.long, device=self.device)
        past = new_cache(self.model)
        with self.autocast():
            try_compiled(self.model.states, tokens, None, past, tokens[0])
