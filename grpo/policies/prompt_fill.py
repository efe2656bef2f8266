"""The any-order policy: a masked-fill model completes a prompt that is followed by masked positions.

The positions are split into blocks, which are filled sequentially, each in several passes. A completion ends at its
first end token or stop sequence; later tokens are neither trained on nor passed to rewards.
"""

import torch
from torch import nn
from torch.nn import functional as F

from core.distributions import draw_uniforms
from core.fill_in import depends_on_policy
from core.fill_in_passes import count_passes, fill_in_passes
from core.generation import Stop
from grpo.policies.causal import CausalPolicy, completion_texts
from grpo.policies.fill import FillInputs, FillPolicy, texts_to_score
from grpo.rollout import Rollouts
from grpo.sampling_settings import SamplingSettings


class PromptFillPolicy(FillPolicy):
    """Completes prompts (batches of PromptConsumer) with a masked-fill model."""

    def __init__(self, model: nn.Module, *settings):
        if hasattr(model, "answer_prompts"):  # a Hugging Face model
            model.answer_prompts()
        super().__init__(model, *settings)

    greedy = CausalPolicy.greedy  # each token is the most likely token of its pass

    states = FillPolicy.states_in_texts

    def sample_part(self, problems: dict, iteration: int, settings: SamplingSettings) -> Rollouts:
        prompt = self.put(torch.from_numpy(problems["input"]))                       # (P, T)
        padding = torch.from_numpy(problems["padding"])                              # (P,)
        P, T = prompt.shape
        G = settings.group_size
        L = settings.max_new_tokens
        input = F.pad(prompt, (0, L), value=self.tokenizer.mask_token_id)            # (P, T + L)
        position = torch.arange(T, T + L, device=self.device)                        # (L,)
        position = position.expand(P, L)
        hidden = torch.ones(P, L, dtype=torch.bool)
        draws = 1  # per position
        if depends_on_policy(settings.unmask_order):  # every pass draws all hidden positions of its block
            draws = count_passes(L, settings.block_length, settings.unmask_steps)
        shape = 1 + draws, G, L
        noise = draw_uniforms(settings.seed, iteration, problems["number"], shape)   # (P, 1 + draws, G, L)
        noise = F.pad(noise, (T, 0)).transpose(0, 1)                                 # (1 + draws, P, G, T + L)
        of_order = noise[1]                                                          # (P, G, T + L)
        of_tokens = torch.cat((noise[:1], noise[2:]))                                # (draws, P, G, T + L)
        with self.autocast():
            target, logp, drawn_in, texts_read, kept = fill_in_passes(
                self.model, input, position, hidden, of_tokens, of_order,
                passes=settings.unmask_steps,
                padding=self.on_device(padding),
                block_length=settings.block_length,
                unmask_order=settings.unmask_order,
                end_ids=self.tokenizer.stop_token_ids,
                **settings.for_tokens())

        drawn = drawn_in >= 0                                                        # (N, L)
        stop = Stop(self.tokenizer, settings.stop_sequences, settings.response_prefix)
        is_end = stop(target, 0) & drawn                                             # (N, L)
        ends = is_end.int()
        ends_before = ends.cumsum(1) - ends
        in_completion = drawn & (ends_before == 0)                                   # (N, L) up to the first end
        if kept is not None:  # it has an item for each drawn token
            stays = in_completion.cpu()[drawn.cpu()]
            kept = kept[stays]

        texts, text_number = texts_to_score(
            input, drawn_in, texts_read, settings.fill_estimator)
        chosen = in_completion.view(P, G, L).cpu()
        column = position[:, None].expand_as(chosen)                                 # (P, G, L)
        size = texts.shape[1] * (T + L - padding)                                    # (P,)
        inputs = FillInputs(
            chosen=chosen,
            size=size,
            texts=texts.cpu(),
            position=column.cpu(),
            text=text_number,
            padding=padding)
        inputs = inputs.with_kept(kept)
        mask = in_completion.float()                                                 # (N, L)
        truncated = ~is_end.any(1)                                                   # (N,)
        completions = completion_texts(stop, problems, target, mask, truncated)
        target = target * in_completion
        logp = logp * mask
        return Rollouts(
            target=target,
            mask=mask,
            train_mask=mask,
            old_logp=logp,
            truncated=truncated,
            max_tokens=L,
            inputs=inputs,
            texts=completions)
