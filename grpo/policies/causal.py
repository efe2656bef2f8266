"""The causal policy: a language model that completes prompts from left to right.

A group's prompt is read once, in sampling and, with gradients, in training; its completions read it through a cache.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from core.distributions import draw_uniforms
from core.generation import Stop, generate
from core.performance.batching import parts_of_like_length
from core.performance.sharding import anchor
from core.prompts import as_columns
from grpo.policies.model_policy import ModelPolicy
from grpo.rollout import Reading, Rollouts, Texts

PART_TOKENS = 128  # what reading one more part of like length costs, in tokens


@dataclass
class CausalReading(Reading):
    """Prompts with their completions. The last token of a prompt is read with the completions: it predicts the first
    token of each."""
    prompt: torch.Tensor         # (P, T) all but the last token of each prompt, the last of these first: padding comes
                                 # last, as everywhere
    prompt_length: torch.Tensor  # (P,) number of them, on the CPU
    inputs: torch.Tensor         # (P, G, M) the prompt's last token, then all but the last token of the completion

    ON_CPU = ("chosen", "prompt_length")

    def length(self):
        """(N,) number of tokens of each completion."""
        return self.chosen.sum(2).flatten()

    def sizes(self):
        return self.prompt_length + self.counts()


class CausalPolicy(ModelPolicy):
    """Completes prompts (batches of PromptConsumer)."""

    Reading = CausalReading
    kl_estimator = "k3"

    def sample_part(self, problems, iteration, config, budget):
        """config: group_size, seed, temperature, top_p, top_k, min_p, max_new_tokens, stop_sequences,
        response_prefix"""
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        shape = (config.group_size, config.max_new_tokens)
        noise = draw_uniforms(config.seed, iteration, problems["number"], shape)
        with self.autocast():
            generation = generate(self.model, prompt, self._padding(padding), noise, self._stop(config),
                                  config.temperature, config.top_p, config.top_k, config.min_p, budget)
        return self.rollouts(problems, generation, config)

    def rollouts(self, problems, generation, config):
        """Rollouts of completions (core/generation.py: Generation) of problems, whoever sampled them."""
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        (P, T), G = prompt.shape, config.group_size
        target, mask = generation.target, generation.mask                            # (N, M) each
        M = target.shape[1]
        length = mask.sum(1).long().cpu()                                            # (N,)
        last = prompt[:, -1:].repeat_interleave(G, 0)                                # (N, 1)
        reading = CausalReading(
            G, (torch.arange(M) < length[:, None]).view(P, G, M), generation.kept, prompt[:, :-1].flip(1),
            T - 1 - padding, torch.cat((last, target[:, :-1]), 1).view(P, G, M))
        truncated = generation.truncated.to(self.device)
        metrics = {"completion_length": (mask.sum(), P * G), "truncated": (truncated.sum(), P * G)}
        return Rollouts(target, mask, train_mask=mask, old_logp=generation.logp, truncated=truncated,
                        max_tokens=config.max_new_tokens, reading=reading,
                        texts=self._texts(problems, prompt, padding, target, length, config, metrics))

    def _texts(self, problems, prompt, padding, target, length, config, metrics):
        """Texts of the completions target (N, M), of `length` (N,) tokens, of prompts (P, T)."""
        G, stop = config.group_size, self._stop(config)
        records = [record for record in problems["record"] for _ in range(G)]
        prompts, columns = as_columns(records)
        tokens, completion_ids = [], []
        for n, (row, end) in enumerate(zip(target, length.tolist(), strict=True)):
            ids = row[:end].tolist()
            completion_ids.append(ids)
            if ids and ids[-1] in self.tokenizer.stop_token_ids:
                end -= 1
            tokens.append(torch.cat((prompt[n // G, int(padding[n // G]) :], row[:end])))
        begins = (prompt.shape[1] - padding).repeat_interleave(G)                    # (N,) length of the prompt
        place = begins[:, None] + torch.arange(target.shape[1])                      # (N, M)
        return Texts(prompts, [stop.text(ids) for ids in completion_ids], columns, tokens, completion_ids,
                     place.to(self.device), metrics)

    def _stop(self, config):
        return Stop(self.tokenizer, config.stop_sequences, config.response_prefix)

    def _prompt(self, problems):
        """The prompts (P, T) without columns that are padding in every row, and how much of each is padding, (P,)."""
        prompt, padding = torch.from_numpy(problems["input"]), torch.from_numpy(problems["padding"])
        cut = min(int(padding.min()), prompt.shape[1] - 2)  # two columns stay, so that there is something to share
        prompt = F.pad(prompt, (-cut, 0))                   # cuts columns off, or adds one to prompts of one token
        return prompt.to(self.device, non_blocking=True), padding - cut

    def _padding(self, padding):
        """The padding on the device, or None if there is none: attention is faster without."""
        return padding.to(self.device) if padding.any() else None

    def states(self, reading):
        """Reads prompts of like length together, and then their completions of like length."""
        with self.autocast():
            found = [part for problems, parts in self._plan(reading) for part in self._read(reading, problems, parts)]
        length, M = reading.length(), reading.inputs.shape[2]                        # (N,)
        place, numbers = torch.arange(M), []
        for completions, h in found:
            number = completions[:, None] * M + place[: h.shape[1]]                  # (n, m)
            is_padding = place[: h.shape[1]] >= length[completions, None]
            numbers.append(number.masked_fill(is_padding, len(length) * M).flatten())  # behind all others
        order = torch.cat(numbers).argsort()[: int(length.sum())]
        h = torch.cat([h.flatten(0, 1) for _, h in found])
        return h[order.to(h.device)]                                                 # (K, C) in the order of the index

    def _read(self, reading, problems, parts):
        """Yields (completions (n,), their states (n, m, C)) for each of the parts of `_plan`."""
        T = max(1, int(reading.prompt_length[problems].max()))
        prompt = reading.prompt[problems.to(self.device), :T].flip(1)                # (p, T)
        padding = self._padding(T - reading.prompt_length[problems])                 # (p,) or None
        past = self.model.new_cache()
        of_prompt = self.model.states(prompt, past=past, padding=padding)            # (p, T, C)
        length, inputs = reading.length(), reading.inputs.flatten(0, 1)              # (N,), (N, M)
        for which, completions in parts:
            which = which.to(self.device)
            own_padding = None if padding is None else padding[which]                # (n,)
            tokens = inputs[completions.to(self.device), : int(length[completions].max())]  # (n, m)
            h = self.model.states(tokens, None, past.expand(which), own_padding)     # (n, m, C)
            yield completions, anchor(h, of_prompt, self.model)

    def calls(self, reading):
        return sum(1 + len(parts) for _, parts in self._plan(reading))

    def _plan(self, reading):
        """Yields problems whose prompts are read together, and the parts of their completions that are: pairs of (n,)
        indices, of the prompt among these and of the completion among all N."""
        G, length = reading.group_size, reading.length()                             # (N,)
        for problems in parts_of_like_length(reading.prompt_length, PART_TOKENS):
            which = torch.arange(len(problems)).repeat_interleave(G)                 # (p G,)
            completions = (problems[:, None] * G + torch.arange(G)).flatten()        # (p G,)
            parts = parts_of_like_length(length[completions], PART_TOKENS)
            yield problems, [(which[part], completions[part]) for part in parts]

    def stored_states(self, config):
        """The most states (K) of a problem that kept tokens or reference distributions are stored for."""
        return config.group_size * config.max_new_tokens

    @torch.no_grad()
    def greedy(self, problems, config):
        """The likeliest completion of every prompt, as texts (P,)."""
        prompt, padding = self._prompt(problems)
        stop = self._stop(config)
        noise = torch.zeros(len(prompt), 1, config.max_new_tokens)
        with self.autocast():
            out = generate(self.model, prompt, self._padding(padding), noise, stop, top_k=1)
        return [stop.text(ids[: int(n)]) for ids, n in zip(out.target.tolist(), out.mask.sum(1), strict=True)]
