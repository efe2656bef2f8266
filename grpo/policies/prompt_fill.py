"""The any-order policy: a masked-fill model completes a prompt, which is followed by masked positions.

The places are cut into blocks, filled one after another, each in several passes. A completion is what stands up to its
first end token or stop sequence; what was drawn behind it is not trained on, and no reward sees it.
"""

import torch
from torch.nn import functional as F

from core.distributions import draw_uniforms
from core.fill_in_passes import count_passes, fill_in_passes, order_of_places
from core.generation import Stop
from grpo.policies.causal import CausalPolicy, completion_texts
from grpo.policies.fill import FillPolicy
from grpo.policies.model_policy import inputs_of, sampling_of
from grpo.rollout import Rollouts


class PromptFillPolicy(FillPolicy):
    """Completes prompts (batches of PromptConsumer) with a masked-fill model.

    Its inputs: those of FillPolicy, and padding (P,), the number of leading columns of a problem's texts without token.
    """

    def __init__(self, model, *settings):
        if hasattr(model, "answer_prompts"):  # one of Hugging Face
            model.answer_prompts()
        super().__init__(model, *settings)

    greedy = CausalPolicy.greedy  # each token is the likeliest of its pass

    def sample_part(self, problems, iteration, config):
        """config: group_size, seed, temperature, top_p, top_k, min_p, max_new_tokens, unmask_steps, block_length,
        unmask_order, fill_estimator, stop_sequences, response_prefix"""
        prompt = self.put(torch.from_numpy(problems["input"]))                       # (P, T)
        padding = torch.from_numpy(problems["padding"])                              # (P,)
        P, T = prompt.shape
        G, L = config.group_size, config.max_new_tokens
        input = F.pad(prompt, (0, L), value=self.tokenizer.mask_token_id)            # (P, T + L)
        position = torch.arange(T, T + L, device=self.device).expand(P, L)           # (P, L)
        hidden = torch.ones(P, L, dtype=torch.bool)
        noise = self._noise(problems, iteration, config)                             # (P, >= 4, G, T + L)
        of_passes = noise[:, [0, *range(4, noise.shape[1])]].transpose(0, 1)         # (1 or passes, P, G, T + L)
        order = order_of_places(config.unmask_order, noise[:, 1])                    # (P, G, T + L)
        with self.autocast():
            target, logp, turn, read, kept = fill_in_passes(
                self.model, input, position, hidden, of_passes, order, config.unmask_steps,
                padding=self.on_device(padding),
                block_length=config.block_length,
                by_confidence=config.unmask_order == "confidence",
                end_ids=self.tokenizer.stop_token_ids,
                **sampling_of(config))
        drawn = turn >= 0                                                            # (N, L)
        stop = Stop(self.tokenizer, config.stop_sequences, config.response_prefix)
        end = stop(target, 0) & drawn                                                # the first one of a row counts
        ends_before = end.int().cumsum(1) - end.int()
        of_completion = drawn & (ends_before == 0)                                   # (N, L)
        if kept is not None:
            kept = kept[of_completion.cpu()[drawn.cpu()].nonzero().squeeze(1)]
        chosen = of_completion.view(P, G, L)
        views, place, weight = self._views(input, position, chosen, turn, read, noise, config)
        mask = of_completion.float()
        if weight is not None:
            chosen, weight = chosen & (weight > 0), weight.flatten(0, 1)             # (P, G, L), (N, L)
        truncated = ~end.any(1)
        return Rollouts(
            target * of_completion, mask, mask,
            old_logp=logp * mask,
            truncated=truncated,
            max_tokens=L,
            inputs=inputs_of(chosen.cpu(), kept, views.shape[1] * (T + L - padding), texts=views,
                             position=place.expand(P, G, L), padding=padding),
            token_weight=weight,
            texts=completion_texts(stop, problems, target, mask, truncated))

    def _noise(self, problems, iteration, config):
        """(P, 4, G, T + L) uniform noise; that of the L places does not depend on the length T of the prompts. With
        `confidence`, which draws a place again in each pass, a channel more for each pass but the first."""
        P, T = problems["input"].shape
        G, L = config.group_size, config.max_new_tokens
        channels = 4
        if config.unmask_order == "confidence":
            channels += count_passes(L, config.block_length, config.unmask_steps) - 1
        size = channels * G * L
        noise = draw_uniforms(config.seed, iteration, problems["number"], (size + T,))
        of_places, of_prompt = noise.split((size, T), 1)
        of_prompt = of_prompt[:, None, None].expand(P, channels, G, T)
        return torch.cat((of_prompt, of_places.view(P, channels, G, L)), 3)

    def states(self, rollouts):
        """Reads the texts in which tokens of completions are scored, without the columns that are padding in all."""
        names = "chosen", "texts", "position", "padding"
        chosen, texts, position, padding = (rollouts.inputs[name] for name in names)
        _, W, T = texts.shape
        problem = chosen.nonzero()[:, 0]                                             # (K,)
        number = problem * W + position[chosen] // T                                 # (K,) of its text among P W
        column = position[chosen] % T                                                # (K,) in that text
        used, text = number.unique(return_inverse=True)                              # (U,), (K,)
        if not len(used):  # an estimator left out all tokens; every rank still calls the model as often
            used = number.new_zeros(1)
        cut = int(padding.min())
        tokens = self.put(texts.flatten(0, 1)[used, cut:])                           # (U, T - cut)
        padding = self.on_device((padding - cut)[used // W])                         # (U,) or None
        with self.autocast():
            h = self.model.states(tokens, padding=padding)                           # (U, T - cut, C)
        return h[self.put(text), self.put(column - cut)]
