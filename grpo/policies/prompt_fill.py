"""The any-order policy: a masked-fill model completes a prompt, which is followed by masked positions.

The places are cut into blocks, filled one after another, each in several passes. A completion is what stands up to its
first end token or stop sequence; what was drawn behind it is not trained on, and no reward sees it.
"""

import torch
from torch import nn
from torch.nn import functional as F

from core.distributions import draw_uniforms
from core.fill_in import depends_on_policy
from core.fill_in_passes import count_passes, fill_in_passes
from core.generation import Stop
from core.settings.setting import Settings
from grpo.policies.causal import CausalPolicy, completion_texts
from grpo.policies.fill import FillPolicy, views_of
from grpo.policies.policy import inputs_of, sampling_of
from grpo.rollout import Rollouts


class PromptFillPolicy(FillPolicy):
    """Completes prompts (batches of PromptConsumer) with a masked-fill model. Its inputs: those of FillPolicy, and
    padding (P,), the number of leading columns of a problem's texts without token."""

    def __init__(self, model: nn.Module, *settings):
        if hasattr(model, "answer_prompts"):  # one of Hugging Face
            model.answer_prompts()
        super().__init__(model, *settings)

    greedy = CausalPolicy.greedy  # each token is the likeliest of its pass
    states = FillPolicy.states_in_texts

    def sample_part(self, problems: dict, iteration: int, config: Settings) -> Rollouts:
        """config: group_size, seed, temperature, top_p, top_k, min_p, max_new_tokens, unmask_steps, block_length,
        unmask_order, fill_estimator, stop_sequences, response_prefix"""
        prompt = self.put(torch.from_numpy(problems["input"]))                       # (P, T)
        padding = torch.from_numpy(problems["padding"])                              # (P,)
        P, T = prompt.shape
        G, L = config.group_size, config.max_new_tokens
        input = F.pad(prompt, (0, L), value=self.tokenizer.mask_token_id)            # (P, T + L)
        position = torch.arange(T, T + L, device=self.device).expand(P, L)           # (P, L)
        draws = 1
        if depends_on_policy(config.unmask_order):  # each pass draws a place again
            draws = count_passes(L, config.block_length, config.unmask_steps)
        noise = draw_uniforms(config.seed, iteration, problems["number"], (1 + draws, G, L))
        noise = F.pad(noise, (T, 0)).transpose(0, 1)                                 # (1 + draws, P, G, T + L)
        of_tokens = noise[[0, *range(2, 1 + draws)]]                                 # (draws, P, G, T + L)
        with self.autocast():
            target, logp, turn, read, kept = fill_in_passes(
                self.model, input, position,
                hidden=torch.ones(P, L, dtype=torch.bool),
                uniform=of_tokens,
                order=noise[1],
                passes=config.unmask_steps,
                padding=self.on_device(padding),
                block_length=config.block_length,
                unmask_order=config.unmask_order,
                end_ids=self.tokenizer.stop_token_ids,
                **sampling_of(config))
        drawn = turn >= 0                                                            # (N, L)
        stop = Stop(self.tokenizer, config.stop_sequences, config.response_prefix)
        end = stop(target, 0) & drawn                                                # the first one of a row counts
        ends_before = end.int().cumsum(1) - end.int()
        of_completion = drawn & (ends_before == 0)                                   # (N, L)
        if kept is not None:
            kept = kept[of_completion.cpu()[drawn.cpu()].nonzero().squeeze(1)]
        views, place = views_of(input, position, turn, read, config.fill_estimator)
        mask = of_completion.float()
        truncated = ~end.any(1)
        return Rollouts(
            target * of_completion, mask, mask,
            old_logp=logp * mask,
            truncated=truncated,
            max_tokens=L,
            inputs=inputs_of(
                of_completion.view(P, G, L).cpu(), kept, views.shape[1] * (T + L - padding),
                texts=views,
                position=place.expand(P, G, L),
                padding=padding),
            texts=completion_texts(stop, problems, target, mask, truncated))
