"""The causal policy: a language model that completes prompts from left to right.

A group's prompt is read once, in sampling and, with gradients, in training; its completions read it through a cache.
"""

import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from core.cache import new_cache
from core.distributions import draw_uniforms
from core.generation import Generation, Stop, generate
from core.performance.batching import parts_of_like_length
from core.performance.sharding import anchor
from core.prompts import as_columns, prefill
from grpo.policies.policy import ModelPolicy
from grpo.rollout import Inputs, Rollouts, Texts
from grpo.sampling_settings import SamplingSettings

PART_TOKENS = 128       # what reading one more part of like length costs on a CPU, in tokens
GPU_PART_TOKENS = 2048  # the same on a GPU, which starts as many kernels for a small part as for a large one


@dataclass
class CausalInputs(Inputs):
    """Prompts and completions. The last token of a prompt is read with each completion, whose first token it
    predicts."""
    prompt: Tensor         # (P, T) all but the last token of each prompt, reversed, so that padding comes last
    prompt_length: Tensor  # (P,) number of these tokens
    tokens: Tensor         # (P, G, M) the prompt's last token, then all but the last token of the completion


class CausalPolicy(ModelPolicy):
    """Completes prompts (batches of PromptConsumer)."""

    kl_estimator = "k3"
    inputs_type = CausalInputs

    def sample_part(self, problems: dict, iteration: int, settings: SamplingSettings) -> Rollouts:
        stop = self._stop(settings)
        episodes = None
        if settings.environment is not None:
            from grpo.environments import Episodes
            episodes = Episodes(problems, iteration, settings, stop)
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        shape = (settings.group_size, settings.max_new_tokens)
        noise = draw_uniforms(settings.seed, iteration, problems["number"], shape)   # (P, G, max_new_tokens)
        with self.autocast():
            complete = partial(generate, self.model)
            if self.decoder is not None:
                complete = partial(self.decoder, rows=self.rows(settings))
            generation = complete(prompt, self.on_device(padding), noise, stop, episodes, **settings.for_tokens())
        return self.rollouts(problems, generation, settings, episodes)

    @cached_property
    def decoder(self) -> Any:
        """On a GPU what completes prompts in CUDA graphs, if it can run the model; else None."""
        if self.device.type == "cuda":
            from core.performance.decode import Decoder, can_decode
            return Decoder(self.model) if can_decode(self.model) else None

    def frozen(self) -> "CausalPolicy":
        twin = super().frozen()
        vars(twin).pop("decoder", None)  # it has this policy's model
        return twin

    def at_once(self, settings: SamplingSettings) -> int:
        """All problems, where rows that have ended are filled with the next ones."""
        return super().at_once(settings) if self.decoder is None else sys.maxsize

    def rollouts(self, problems: dict, generation: Generation, settings: SamplingSettings,
                 episodes: Any = None) -> Rollouts:
        """Rollouts of completions (core/generation.py: Generation) of problems, whoever sampled them."""
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        P, T = prompt.shape
        G = settings.group_size
        target, mask = generation.target, generation.mask                            # (N, M) each
        last = prompt[:, -1:].repeat_interleave(G, 0)                                # (N, 1)
        tokens = torch.cat((last, target[:, :-1]), 1)                                # (N, M)
        # Turns of an environment ended at the stop sequences
        stop = self._stop(settings) if settings.environment is None else Stop(self.tokenizer)
        chosen = mask.bool().cpu().unflatten(0, (P, G))                              # (P, G, M)
        prompt_length = T - 1 - padding                                              # (P,)
        inputs = CausalInputs(
            chosen=chosen,
            size=prompt_length + lengths(chosen).sum(1),
            prompt=prompt[:, :-1].flip(1).cpu(),
            prompt_length=prompt_length,
            tokens=tokens.unflatten(0, (P, G)).cpu())
        texts = completion_texts(stop, problems, target, mask, generation.truncated)
        if episodes is not None:
            texts.columns |= episodes.columns()
            texts.metrics |= episodes.close()
        return Rollouts(
            target, mask,
            train_mask=mask,
            old_logp=generation.logp,
            truncated=generation.truncated,
            max_tokens=settings.max_new_tokens,
            inputs=inputs.with_kept(generation.kept),
            texts=texts)

    def _stop(self, settings):
        return Stop(self.tokenizer, settings.stop_sequences, settings.response_prefix)

    def _prompt(self, problems):
        """The prompts (P, T) without columns that are padding in every row, and how much of each is padding, (P,)."""
        prompt, padding = torch.from_numpy(problems["input"]), torch.from_numpy(problems["padding"])
        cut = min(int(padding.min()), prompt.shape[1] - 2)  # two columns stay, so that there is something to share
        prompt = F.pad(prompt, (-cut, 0))                   # cuts columns off, or adds one to prompts of one token
        return self.put(prompt), padding - cut

    def states(self, rollouts: Rollouts) -> Tensor:
        """Reads prompts of like length together, and then their completions of like length."""
        # The states are read part after part, those of padding too. state_number tells which of them predicts a token:
        #
        #     completions 1 and 2, read first   a b c    their state_number   0 1 2
        #                                       d e .                         3 4 5
        #     completion 0, read next           f g                           6 7
        #     result, in the order of chosen    f g a b c d e
        inputs = rollouts.inputs
        tokens = inputs.tokens.flatten(0, 1)                                         # (N, M)
        chosen = inputs.chosen.flatten(0, 1)                                         # (N, M)
        state_number = torch.zeros(tokens.shape, dtype=torch.long)                   # (N, M)
        read, count = [], 0
        with self.autocast():
            for problems, parts in self._plan(rollouts):
                length = inputs.prompt_length[problems]                              # (p,)
                T = max(1, int(length.max()))
                prompt = self.put(inputs.prompt[problems, :T].flip(1))               # (p, T)
                padding = self.on_device(T - length)                                 # (p,) or None
                past = new_cache(self.model)
                of_prompt = self.model.states(prompt, past=past, padding=padding)    # (p, T, C)
                for completions in parts:
                    problem = completions // rollouts.group_size                     # (n,)
                    prompt_of = self.put(torch.searchsorted(problems, problem))      # (n,) its row of `prompt`
                    own_padding = None if padding is None else padding[prompt_of]    # (n,)
                    m = int(lengths(chosen[completions]).max())
                    part = self.put(tokens[completions, :m])                         # (n, m)
                    h = self.model.states(part, None, past.expand(prompt_of), own_padding)  # (n, m, C)
                    h = anchor(h, of_prompt, self.model)
                    read.append(h.flatten(0, 1))
                    numbers = torch.arange(count, count + part.numel())
                    state_number[completions, :m] = numbers.view(part.shape)
                    count += part.numel()
        return torch.cat(read)[self.put(state_number[chosen])]

    def calls(self, rollouts: Rollouts) -> int:
        return sum(1 + len(parts) for _, parts in self._plan(rollouts))

    def _plan(self, rollouts):
        """Yields problems whose prompts are read together, and the parts of their completions that are, as indices."""
        G = rollouts.group_size
        length = lengths(rollouts.inputs.chosen).flatten()                           # (N,)
        overhead = GPU_PART_TOKENS if self.device.type == "cuda" else PART_TOKENS
        for problems in parts_of_like_length(rollouts.inputs.prompt_length, overhead):
            completions = (problems[:, None] * G + torch.arange(G)).flatten()        # (p G,)
            parts = parts_of_like_length(length[completions], overhead)
            yield problems, [completions[part] for part in parts]

    def greedy(self, problems: dict, settings: SamplingSettings) -> Texts:
        """The likeliest completion of every prompt: Texts (P,)."""
        likeliest = replace(settings, group_size=1, top_k=1, sample_rows=self.rows(settings))
        return self.sample(problems, 0, likeliest).texts


def lengths(chosen: Tensor) -> Tensor:
    """(...,) the number of columns up to the last one in which chosen (..., M) is not 0."""
    place = torch.arange(1, chosen.shape[-1] + 1, device=chosen.device)              # (M,)
    return (place * (chosen > 0)).amax(-1)


def completion_texts(stop: Stop, problems: dict, target: Tensor, mask: Tensor, truncated: Tensor) -> Texts:
    """Texts of N = P * G completions. target: (N, M) tokens; mask: (N, M) 1.0 where one was sampled; truncated: (N,)
    bool"""
    N, M = target.shape
    G = N // len(problems["record"])
    records = [record for record in problems["record"] for _ in range(G)]
    prompts, columns = as_columns(records)
    ends = stop.tokenizer.stop_token_ids
    tokens, completion_ids, completions = [], [], []
    for record, ids, length in zip(records, target.tolist(), lengths(mask).tolist(), strict=True):
        ids = ids[:length]
        completion_ids.append(ids)
        completions.append(prefill(record["prompt"]) + stop.text(ids))
        ended = bool(ids) and ids[-1] in ends
        tokens.append(torch.tensor([*record["tokens"], *ids[: length - ended]]))
    begin = torch.tensor([len(record["tokens"]) for record in records])              # (N,)
    place = begin[:, None] + torch.arange(M)                                         # (N, M)
    metrics = {"completion_length": (mask.sum(), N), "truncated": (truncated.sum(), N)}
    return Texts(
        prompts, completions, columns, tokens, completion_ids,
        place=place, metrics=metrics)
