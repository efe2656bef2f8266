"""The policy that answers prompts in any order: a masked-fill model completes a prompt with masked places behind it.

The places are cut into blocks, filled one after another, each in several passes. A completion is what stands up to its
first end token; what was drawn behind it is not trained on, and no reward sees it.
"""

from types import SimpleNamespace

import torch
from torch.nn import functional as F

from core.distributions import draw_uniforms
from core.fill_in import fill_in
from core.fill_in_passes import fill_in_passes
from core.generation import Stop
from grpo.policies.causal import completion_texts
from grpo.policies.fill import FillPolicy, FillReading
from grpo.policies.fill_views import FILL_ESTIMATORS, Filled
from grpo.policies.model_policy import sampling_of
from grpo.rollout import Rollouts


class PromptFillPolicy(FillPolicy):
    """Completes prompts (batches of PromptConsumer) with a masked-fill model."""

    def sample_part(self, problems, iteration, config, budget):
        """config: group_size, seed, temperature, top_p, top_k, min_p, max_new_tokens, unmask_steps, block_length,
        unmask_order, fill_estimator"""
        prompt = torch.from_numpy(problems["input"]).to(self.device)                 # (P, T)
        padding = torch.from_numpy(problems["padding"])                              # (P,)
        P, T = prompt.shape
        G, L = config.group_size, config.max_new_tokens
        input = F.pad(prompt, (0, L), value=self.tokenizer.mask_token_id)            # (P, T + L)
        position = torch.arange(T, T + L, device=self.device).expand(P, L)           # (P, L)
        hidden = torch.ones(P, L, dtype=torch.bool)
        noise = draw_uniforms(config.seed, iteration, problems["number"], (4 * G * L + T,))
        of_prompt, noise = noise[:, 4 * G * L :], noise[:, : 4 * G * L].view(P, 4, G, L)
        noise = torch.cat((of_prompt[:, None, None].expand(P, 4, G, T), noise), 3)   # (P, 4, G, T + L)
        order = noise[:, 1]
        if config.unmask_order == "left_to_right":
            order = torch.linspace(0, 1, T + L).expand_as(order)
        with self.autocast():
            target, logp, turn, read, kept = fill_in_passes(
                self.model, input, position, hidden, noise[:, 0], order, config.unmask_steps, budget,
                padding=padding.to(self.device) if padding.any() else None,
                block_length=config.block_length,
                by_confidence=config.unmask_order == "confidence",
                end_ids=self.tokenizer.stop_token_ids,
                **sampling_of(config))
        ends = torch.isin(target, torch.tensor(self.tokenizer.stop_token_ids, device=self.device)) & (turn >= 0)
        before = ends.int().cumsum(1) - ends.int()                                   # (N, L) ends to the left
        of_completion = (before == 0) & (turn >= 0)                                  # (N, L)
        grouped = of_completion.view(P, G, L)
        shown = target.where(of_completion, self.tokenizer.mask_token_id)            # (N, L)
        text = fill_in(input, position, hidden.to(self.device), shown.view(P, G, L))
        filled = Filled(
            input, text, position[:, None], grouped,
            turn=turn.view(P, G, L),
            read=read.unflatten(0, (P, G)),
            noise=noise[:, 2:].float().to(self.device),
            mask_id=self.tokenizer.mask_token_id)
        views, place, scored = FILL_ESTIMATORS[config.fill_estimator](filled)
        if kept is not None:
            kept = kept[of_completion[turn >= 0].nonzero().squeeze(1)]
        stop = Stop(self.tokenizer, prefix=config.response_prefix)
        mask, truncated = of_completion.float(), ~ends.any(1)
        return Rollouts(
            target * of_completion, mask,
            train_mask=mask if scored is None else mask * scored.flatten(0, 1),
            old_logp=logp * mask,
            truncated=truncated,
            max_tokens=L,
            reading=FillReading(G, grouped.cpu(), kept, views, place.expand(P, G, L), padding),
            texts=completion_texts(stop, problems, prompt, padding, target, mask, truncated))

    def states(self, reading):
        """Reads the texts that sampled tokens of completions are scored in, without the padding of all of them."""
        _, W, T = reading.texts.shape
        problem = reading.chosen.nonzero()[:, 0].to(self.device)                     # (K,)
        place = reading.position[reading.chosen.to(self.device)]                     # (K,) in the texts of its problem
        used, text = (problem * W + place // T).unique(return_inverse=True)          # (U,), (K,)
        cut = int(reading.padding.min())
        padding = (reading.padding - cut).to(self.device)[used // W]                 # (U,)
        texts = reading.texts.flatten(0, 1)[used, cut:]                              # (U, T - cut)
        with self.autocast():
            h = self.model.states(texts, padding=padding if padding.any() else None) # (U, T - cut, C)
        return h[text, place % T - cut]

    def stored_states(self, config):
        """The most states (K) of a problem that kept tokens or reference distributions are stored for."""
        return config.group_size * config.max_new_tokens

    def greedy(self, problems, config):
        """The completion of every prompt in which each token is the likeliest of its pass, as texts (P,)."""
        likeliest = SimpleNamespace(**vars(config) | {"group_size": 1, "top_k": 1})
        return self.sample(problems, 0, likeliest).texts.completions
