"""The causal policy: a language model that completes prompts from left to right.

In sampling and in training, the prompt of a group is read once and its completions read it through a cache. In training
the prompt gets gradients too.
"""

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from core.cache import new_cache
from core.distributions import draw_uniforms
from core.generation import Generation, Stop, generate
from core.performance.batching import parts_of_like_length
from core.performance.sharding import touch
from core.prompts import as_columns, prefill
from grpo.policies.policy import ModelPolicy
from grpo.rollout import Inputs, Rollouts, Texts
from grpo.sampling_settings import SamplingSettings

PART_TOKENS = 128       # cost of reading an additional part on a CPU, in tokens
GPU_PART_TOKENS = 2048  # the same on a GPU, which launches as many kernels for a small part as for a large one


@dataclass
class CausalInputs(Inputs):
    """Prompts and completions. The last token of a prompt is read with each completion, because its state predicts the
    first sampled token."""
    prompt: Tensor         # (P, T) all but the last token of each prompt, reversed, so that padding comes last
    prompt_length: Tensor  # (P,) number of tokens in each row of `prompt`
    tokens: Tensor         # (P, G, M) the prompt's last token, then all but the last token of the completion


class CausalPolicy(ModelPolicy):
    """Completes prompts (batches of PromptConsumer)."""

    kl_estimator = "k3"
    inputs_type = CausalInputs

    def sample_part(self, problems: dict, iteration: int, settings: SamplingSettings) -> Rollouts:
        stop = Stop(self.tokenizer, settings.stop_sequences, settings.response_prefix)
        episodes = None
        if settings.environment is not None:
            from grpo.environments import Episodes
            episodes = Episodes(problems, iteration, settings, stop)
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        shape = settings.group_size, settings.max_new_tokens
        noise = draw_uniforms(settings.seed, iteration, problems["number"], shape)   # (P, G, max_new_tokens)
        arguments = {
            "prompt": self.put(prompt),
            "padding": self.on_device(padding),
            "uniform": noise,
            "stop": stop,
            "turns": episodes,
            **settings.for_tokens()}
        with self.autocast():
            if self.decoder is None:
                generation = generate(self.model, **arguments)
            else:
                rows = self.sampling_batch(settings)
                generation = self.decoder(rows=rows, **arguments)
        rollouts = self.rollouts(problems, generation, settings)
        if episodes is not None:
            episodes.add_to(rollouts.texts)
            rollouts.texts.metrics |= episodes.close()
        return rollouts

    @cached_property
    def decoder(self) -> Any:
        """A Decoder of the model, which uses CUDA graphs; None without a GPU or if a Decoder cannot run the model."""
        if self.device.type != "cuda":
            return None
        from core.performance.decode import Decoder, can_decode
        if not can_decode(self.model):
            return None
        return Decoder(self.model)

    def frozen(self) -> "CausalPolicy":
        twin = super().frozen()
        vars(twin).pop("decoder", None)  # the cached decoder uses this policy's model
        return twin

    def problems_at_once(self, settings: SamplingSettings) -> int:
        """Returns sys.maxsize (all problems) with a decoder, which refills finished rows."""
        if self.decoder is None:
            return super().problems_at_once(settings)
        return sys.maxsize

    def rollouts(self, problems: dict, generation: Generation, settings: SamplingSettings) -> Rollouts:
        """Makes Rollouts of completions that this policy or a sampler has sampled."""
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        P, T = prompt.shape
        G = settings.group_size
        target = generation.target                                                   # (N, M)
        mask = generation.mask                                                       # (N, M)
        last = prompt[:, -1:].repeat_interleave(G, 0)                                # (N, 1)
        sampled = target[:, :-1].cpu()                                               # (N, M - 1)
        tokens = torch.cat((last, sampled), 1)                                       # (N, M)
        tokens = tokens.unflatten(0, (P, G))                                         # (P, G, M)
        chosen = mask.bool().cpu()                                                   # (N, M)
        chosen = chosen.unflatten(0, (P, G))                                         # (P, G, M)
        prompt_length = T - 1 - padding                                              # (P,)
        size = prompt_length + lengths(chosen).sum(1)                                # (P,)
        reversed_prompt = prompt[:, :-1].flip(1)                                     # (P, T - 1)
        inputs = CausalInputs(
            chosen=chosen,
            size=size,
            prompt=reversed_prompt,
            prompt_length=prompt_length,
            tokens=tokens)
        inputs = inputs.with_kept(generation.kept)
        sequences = settings.stop_sequences
        if settings.environment is not None:  # they end turns, after which the text continues
            sequences = ()
        stop = Stop(self.tokenizer, sequences, settings.response_prefix)
        texts = completion_texts(stop, problems, target, mask, generation.truncated)
        return Rollouts(
            target=target,
            mask=mask,
            train_mask=mask,
            old_logp=generation.logp,
            truncated=generation.truncated,
            max_tokens=settings.max_new_tokens,
            inputs=inputs,
            texts=texts)

    def _prompt(self, problems):
        """Returns the prompts (P, T) without columns that are padding in all rows, and the padding (P,) of each row, on
        the CPU."""
        prompt = torch.from_numpy(problems["input"])
        padding = torch.from_numpy(problems["padding"])
        # At least two columns remain: the last token, read with each completion, and a column that the completions
        # share. If prompts have only one column, cut is -1, and F.pad adds a column of padding.
        shared = int(padding.min())
        cut = min(shared, prompt.shape[1] - 2)
        prompt = F.pad(prompt, (-cut, 0))
        return prompt, padding - cut

    def states(self, rollouts: Rollouts) -> Tensor:
        """Reads prompts of similar length in batches, and their completions in batches of similar length."""
        # A prompt is read once, and all completions of its group read it through the cache. Its last token, c or j, is
        # read with each completion instead, because its state predicts the first sampled token:
        #
        #     prompt, . is padding   completion   tokens that are read   tokens that their states predict
        #     0   . a b | c          0            c d e                  d e f
        #                            1            c k                    k l
        #     1   g h i | j          2            j m n                  m n o
        #
        # The states are concatenated in reading order, and state_number has the index of each state. If completion 1,
        # which is shorter, is read first, and then 0 and 2 together, state_number is
        #
        #     completion 0   2 3 4
        #     completion 1   0 1
        #     completion 2   5 6 7
        inputs = rollouts.inputs
        tokens = inputs.tokens.flatten(0, 1)                                         # (N, M)
        chosen = inputs.chosen.flatten(0, 1)                                         # (N, M)
        state_number = torch.zeros(tokens.shape, dtype=torch.long)                   # (N, M)
        states = []
        count = 0
        with self.autocast():
            for problems, parts in self._plan(rollouts):
                length = inputs.prompt_length[problems]                              # (p,)
                longest = int(length.max())
                T = max(1, longest)
                prompt = inputs.prompt[problems, :T].flip(1)                         # (p, T)
                prompt = self.put(prompt)
                padding = self.on_device(T - length)                                 # (p,) or None
                past = new_cache(self.model)
                of_prompt = self.model.states(prompt, past=past, padding=padding)    # (p, T, C)
                for completions in parts:
                    problem = completions // rollouts.group_size                     # (n,)
                    row = torch.searchsorted(problems, problem)                      # (n,) in `prompt`
                    row = self.put(row)
                    own_padding = None
                    if padding is not None:
                        own_padding = padding[row]                                   # (n,)
                    own_past = past.expand(row)
                    length = lengths(chosen[completions])                            # (n,)
                    m = int(length.max())
                    part = self.put(tokens[completions, :m])                         # (n, m)
                    h = self.model.states(part, past=own_past, padding=own_padding)  # (n, m, C)
                    h = touch(h, of_prompt, self.model)
                    states.append(h.flatten(0, 1))
                    end = count + part.numel()
                    numbers = torch.arange(count, end)
                    state_number[completions, :m] = numbers.view(part.shape)
                    count = end
        number = self.put(state_number[chosen])                                      # (K,)
        return torch.cat(states)[number]

    def calls(self, rollouts: Rollouts) -> int:
        count = 0
        for _, parts in self._plan(rollouts):
            count += 1 + len(parts)  # one call for the prompts, one for each part of their completions
        return count

    def _plan(self, rollouts):
        """Yields (problems, parts): the indices of problems whose prompts are read together, and a list of tensors with
        the indices of their completions, one for each part that is read together."""
        G = rollouts.group_size
        length = lengths(rollouts.inputs.chosen)                                     # (P, G)
        length = length.flatten()                                                    # (N,)
        overhead = PART_TOKENS
        if self.device.type == "cuda":
            overhead = GPU_PART_TOKENS
        for problems in parts_of_like_length(rollouts.inputs.prompt_length, overhead):
            first = problems[:, None] * G                                            # (p, 1)
            completions = (first + torch.arange(G)).flatten()                        # (p G,)
            parts = parts_of_like_length(length[completions], overhead)
            yield problems, [completions[part] for part in parts]

    def greedy(self, problems: dict, settings: SamplingSettings) -> Texts:
        """Completes every prompt greedily. Returns Texts (P,)."""
        rows = self.sampling_batch(settings)
        settings = replace(settings, group_size=1, top_k=1, sample_rows=rows)
        rollouts = self.sample(problems, 0, settings)
        return rollouts.texts


def lengths(chosen: Tensor) -> Tensor:
    """(...,) number of columns up to the last nonzero column of chosen (..., M)."""
    M = chosen.shape[-1]
    number = torch.arange(1, M + 1, device=chosen.device)                            # (M,)
    number = number * (chosen > 0)                                                   # (..., M)
    return number.amax(-1)


def completion_texts(
        stop: Stop,
        problems: dict,
        target: Tensor,     # (N, M) tokens
        mask: Tensor,       # (N, M) 1.0 where a token was sampled
        truncated: Tensor,  # (N,) bool
        ) -> Texts:
    """Makes the Texts of N = P * G completions."""
    N, M = target.shape
    G = N // len(problems["record"])
    records = [record for record in problems["record"] for _ in range(G)]
    prompts, columns = as_columns(records)
    begin = []
    tokens = []
    completion_ids = []
    completions = []
    length = lengths(mask).tolist()
    for record, ids, end in zip(records, target.tolist(), length, strict=True):
        ids = ids[:end]
        completion_ids.append(ids)
        given = prefill(record["prompt"])  # the beginning of the answer, if the prompt contains it
        completions.append(given + stop.text(ids))
        if ids and ids[-1] in stop.ids:
            ids = ids[:-1]
        prompt_ids = record["tokens"]
        begin.append(len(prompt_ids))
        whole = torch.tensor([*prompt_ids, *ids])
        tokens.append(whole)
    begin = torch.tensor(begin)[:, None]                                             # (N, 1)
    place = begin + torch.arange(M)                                                  # (N, M)
    metrics = {
        "completion_length": (mask.sum(), N),
        "truncated": (truncated.sum(), N)}
    return Texts(
        prompts,
        completions,
        columns,
        tokens,
        completion_ids,
        place=place,
        metrics=metrics)
