"""The causal policy: a language model that completes prompts from left to right.

A group's prompt is read once, in sampling and, with gradients, in training; its completions read it through a cache.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from core.distributions import draw_uniforms
from core.generation import Stop, generate, join_generations
from core.performance.batching import parts_of_like_length
from core.performance.kept_tokens import KeptBudget
from core.performance.sharding import anchor
from core.prompts import as_columns
from grpo.policies.model_policy import ModelPolicy
from grpo.rollout import Reading, Rollouts, Texts

PART_TOKENS = 128  # what reading one more part of like length costs, in tokens


@dataclass
class CausalReading(Reading):
    """Prompts with their completions. The last token of a prompt is read with the completions: it predicts the first
    token of each."""
    prompt: torch.Tensor   # (P, T) all but the last token of each prompt, padded on the left
    padding: torch.Tensor  # (P,) number of columns of prompt that hold no token, on the CPU
    inputs: torch.Tensor   # (P, G, M) the prompt's last token, then all but the last token of the completion
    length: torch.Tensor   # (P, G) number of tokens of each completion, on the CPU

    ON_CPU = ("padding", "length")

    @property
    def chosen(self):
        return torch.arange(self.inputs.shape[2]) < self.length.flatten()[:, None]   # (N, M)

    def sizes(self):
        return self.prompt.shape[1] - self.padding + self.length.sum(1)

    @staticmethod
    def alike(parts):
        T, M = max(part.prompt.shape[1] for part in parts), max(part.inputs.shape[2] for part in parts)
        return [replace(part, prompt=F.pad(part.prompt, (T - part.prompt.shape[1], 0)),
                        padding=part.padding + T - part.prompt.shape[1],
                        inputs=F.pad(part.inputs, (0, M - part.inputs.shape[2]))) for part in parts]


class CausalPolicy(ModelPolicy):
    """Completes prompts (batches of PromptConsumer)."""

    Reading, kl_estimator = CausalReading, "k3"
    # Where the two are False, a prompt is read again with each completion, and all rows are padded to the longest. The
    # gradient is the same: tools/check_model.py and tests compare it.
    shared_prompt = True
    like_lengths = True

    @torch.no_grad()
    def write(self, problems, iteration, config):
        """A Generation. config: group_size, batch_size (problems at a time), seed, temperature, top_p, top_k, min_p,
        max_new_tokens, stop_sequences, response_prefix, stored_megabytes"""
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        P, G = len(prompt), config.group_size
        stop, parts = self._stop(config), []
        noise = draw_uniforms(config.seed, iteration, problems["number"], (G, config.max_new_tokens))
        shown = self._padding(padding)                                               # (P,) or None
        truncation = (config.temperature, config.top_p, config.top_k, config.min_p)
        budget = KeptBudget(config.stored_megabytes)
        for part in torch.arange(P).split(config.batch_size):
            with self.autocast():
                parts.append(generate(self.model, prompt[part], None if shown is None else shown[part], noise[part],
                                      stop, *truncation, budget=budget))
        return join_generations(parts)

    join = staticmethod(join_generations)

    def rollouts(self, problems, out, config):
        prompt, padding = self._prompt(problems)                                     # (P, T), (P,)
        P, G, stop = len(prompt), config.group_size, self._stop(config)
        length = out.mask.sum(1).long().cpu()                                        # (N,)
        repeated = prompt[:, -1:].repeat_interleave(G, 0)                            # (N, 1)
        reading = CausalReading(G, out.kept, prompt[:, :-1], padding,
                                torch.cat((repeated, out.target[:, :-1]), 1).unflatten(0, (P, G)), length.view(P, G))
        truncated = out.truncated.to(self.device)
        metrics = {"completion_length": (out.mask.sum(), P * G), "truncated": (truncated.sum(), P * G)}
        start = (prompt.shape[1] - padding).repeat_interleave(G)[:, None]            # (N, 1) length of the prompt
        place = (start + torch.arange(out.target.shape[1])).to(self.device)          # (N, M)
        completion_ids = [ids[:n] for ids, n in zip(out.target.tolist(), length.tolist(), strict=True)]
        prompts, columns = as_columns([record for record in problems["record"] for _ in range(G)])
        texts = Texts(prompts, [stop.text(ids) for ids in completion_ids], columns,
                      tokens=self._whole_texts(prompt, padding, out.target, length), completion_ids=completion_ids,
                      place=place, metrics=metrics, size=out.mask.sum())
        return Rollouts(group_size=G, target=out.target, mask=out.mask, train_mask=out.mask, old_logp=out.logp,
                        truncated=truncated, max_tokens=config.max_new_tokens, texts=texts, reading=reading)

    def _stop(self, config):
        return Stop(self.tokenizer, config.stop_sequences, config.response_prefix)

    def _prompt(self, problems):
        """The prompts (P, T) without columns that are padding in every row, and how much of each is padding, (P,)."""
        cut = max(0, min(int(problems["padding"].min()), problems["input"].shape[1] - 2))  # two columns share a prompt
        prompt = torch.from_numpy(problems["input"][:, cut:].copy()).to(self.device, non_blocking=True)
        return prompt, torch.from_numpy(problems["padding"] - cut)

    def _padding(self, padding):
        """The padding on the device, or None if there is none: attention is faster without."""
        return padding.to(self.device) if padding.any() else None

    def _whole_texts(self, prompt, padding, target, length):
        """N tensors of token ids, of prompt and completion, without padding and stop token."""
        texts, G = [], len(target) // max(1, len(prompt))
        for n, (row, end) in enumerate(zip(target, length.tolist(), strict=True)):
            end -= bool(end and int(row[end - 1]) in self.tokenizer.stop_token_ids)
            texts.append(torch.cat((prompt[n // G, int(padding[n // G]) :], row[:end])))
        return texts

    def states(self, reading):
        """Reads prompts of like length together, and then their completions of like length."""
        (P, G, M), T = reading.inputs.shape, reading.prompt.shape[1]
        length, found, numbers = reading.length.flatten(), [], []                    # (N,)
        with self.autocast():
            for problems, completions, parts in self._plan(reading):
                cut = max(0, min(int(reading.padding[problems].min()), T - 1))
                prompt = reading.prompt[problems.to(self.device), cut:]              # (p, T - cut)
                past, padding, unused = self._read_prompt(prompt, reading.padding[problems] - cut)
                for part in parts:
                    rows, m = completions[part], int(length[completions[part]].max())
                    inputs = reading.inputs.flatten(0, 1)[rows.to(self.device), :m]  # (n, m)
                    h = self._read_completions(inputs, prompt, past, padding, part // G).flatten(0, 1)
                    found.append(h if unused is None else anchor(h, unused, self.model))
                    place = torch.arange(m)
                    number = (rows[:, None] * M + place).masked_fill(place >= length[rows, None], P * G * M)
                    numbers.append(number.flatten())                                 # (n m,)
        h, K = torch.cat(found) if len(found) > 1 else found[0], int(length.sum())
        if len(found) == 1 and len(h) == K:
            return h
        return h[torch.cat(numbers).argsort()[:K].to(h.device)]                      # (K, C) in the order of the index

    def calls(self, reading):
        """Number of times that `states` calls the model."""
        with_prompt = bool(self.shared_prompt and reading.prompt.shape[1])
        return sum(with_prompt + len(parts) for *_, parts in self._plan(reading))

    def _plan(self, reading):
        """Yields (problems whose prompts are read together, their completions (p G,), parts of these that are)."""
        G, length = reading.inputs.shape[1], reading.length.flatten()                # (N,)
        for problems in self._alike(reading.prompt.shape[1] - reading.padding):
            completions = problems.repeat_interleave(G) * G + torch.arange(G).repeat(len(problems))  # (p G,)
            yield problems, completions, self._alike(length[completions])

    def _alike(self, length):
        """The rows (n,) in parts of like length that are read together."""
        if not self.like_lengths:
            return [torch.arange(len(length))]
        return parts_of_like_length(length, PART_TOKENS)

    def _read_prompt(self, prompt, padding):
        """(a cache of the prompts, or None if they are read again with each completion; their padding or None; the
        prompts' states if there is a cache, or None)"""
        padding = self._padding(padding)                                             # (p,) or None
        if not self.shared_prompt or not prompt.shape[1]:
            return None, padding, None
        past = self.model.new_cache()
        h = self.model.states(prompt, past=past, padding=padding)                    # (p, T - cut, C)
        return past, padding, h

    def _read_completions(self, inputs, prompt, past, padding, which):
        """States (n, m, C) of completions (n, m); which: (n,) the index of each one's prompt, on the CPU."""
        which = which.to(inputs.device)
        padding = None if padding is None else padding[which]                        # (n,)
        if past is not None:
            return self.model.states(inputs, None, past.expand(which), padding)
        return self.model.states(torch.cat((prompt[which], inputs), 1), padding=padding)[:, prompt.shape[1] :]

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
