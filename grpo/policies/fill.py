"""The fill-in policy: a masked-fill model that samples the hidden tokens of a text, in one pass or in several.

In one pass the logits depend on the masked text alone, so the completions of a group share one forward and backward.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from core.data import masked_positions, unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from grpo.policies.policy import ModelPolicy
from grpo.rollout import Inputs, Rollouts, Texts
from grpo.sampling_settings import SamplingSettings


@dataclass
class FillInputs(Inputs):
    """The texts in which the sampled tokens of each problem are scored: W texts of T columns."""
    texts: Tensor                  # (P, W, T)
    position: Tensor               # (P, 1 or G, M) the column of each sampled token in its text
    text: Tensor | None = None     # (P, G, M) the number of this text, in 0 .. W - 1; None: there is one
    padding: Tensor | None = None  # (P,) leading columns of the texts without a token; None: none

    @classmethod
    def of_state(cls, saved: dict) -> Self:
        """Reads states from before `text` was a field, too: there a position counted the columns of all texts."""
        if "text" not in saved and saved["texts"].shape[1] > 1:
            T = saved["texts"].shape[2]
            saved = saved | {"text": saved["position"] // T, "position": saved["position"] % T}
        return super().of_state(saved)


class FillPolicy(ModelPolicy):
    """Fills in the hidden tokens of windows of text (batches of DatasetConsumer)."""

    kl_estimator = "exact"
    inputs_type = FillInputs

    def sample_part(self, problems: dict, iteration: int, settings: SamplingSettings) -> Rollouts:
        input, truth, mask = unpack_batch(problems, self.device)                     # (P, T) each
        position, hidden = masked_positions(mask, self.device)                       # (P, M), (P, M) on the CPU
        P, T = input.shape
        G = settings.group_size
        noise = draw_uniforms(settings.seed, iteration, problems["number"], (2, G, T))  # (P, 2, G, T)
        of_tokens = noise[:, 0]                                                      # (P, G, T)
        texts, text = input[:, None], None                                           # (P, 1, T)
        with self.autocast():
            if settings.unmask_steps == 1:
                target, logp, kept = predict_and_sample_tokens(
                    self.model, input, position, of_tokens, hidden, **settings.for_tokens())
            else:
                from core.fill_in_passes import fill_in_passes
                target, logp, turn, read, kept = fill_in_passes(
                    self.model, input, position, hidden, of_tokens,
                    order=noise[:, 1],
                    passes=settings.unmask_steps,
                    **settings.for_tokens())
                texts, text = texts_to_score(input, turn, read, settings.fill_estimator)
        target = target.view(P, G, -1)                                               # (P, G, M)
        was_hidden = self.put(hidden)                                                # (P, M)
        filled = fill_in(input, position, was_hidden, target)                        # (P, G, T)
        sampled = was_hidden[:, None].expand_as(target)                              # (P, G, M)
        mask = sampled.flatten(0, 1).float()                                         # (N, M)
        true = truth.gather(1, position)[:, None]                                    # (P, 1, M)
        correct = (target == true) & sampled                                         # (P, G, M)
        metrics = {"mean_token_accuracy": (correct.sum(), sampled.sum())}
        rows = 1 if text is None else G
        inputs = FillInputs(
            chosen=hidden[:, None].expand(-1, rows, -1),
            size=torch.full((P,), texts[0].numel()),
            texts=texts.cpu(),
            position=position[:, None].expand(-1, rows, -1).cpu(),
            text=None if text is None else text.cpu())
        return Rollouts(
            target.flatten(0, 1), mask, mask,
            old_logp=logp.reshape(mask.shape),
            truncated=torch.zeros_like(mask[:, 0], dtype=torch.bool),
            max_tokens=settings.block_size,
            inputs=inputs.with_kept(kept),
            texts=self._texts(problems, filled, position, metrics))

    def _texts(self, problems, filled, position, metrics):
        """Texts of problems, filled (P, G, T), position (P, M)."""
        G = filled.shape[1]
        filled = filled.flatten(0, 1).cpu()                                          # (N, T)
        prompts = self._decoded(problems["input"], G)
        answers = self._decoded(problems["target"], G)
        return Texts(
            prompts, self._decoded(filled), {"answer": answers},
            tokens=list(filled),
            completion_ids=filled.tolist(),
            place=position.repeat_interleave(G, 0),
            metrics=metrics)

    def _decoded(self, ids, times=1):
        """The text of each row of ids, `times` in a row."""
        texts = [self.tokenizer.decode(row) for row in ids.tolist()]
        return [text for text in texts for _ in range(times)]

    def states(self, rollouts: Rollouts) -> Tensor:
        inputs = rollouts.inputs
        if inputs.text is not None:
            return self.states_in_texts(rollouts)
        state_number = inputs.chosen.flatten().nonzero()[:, 0]                       # (K,)
        text = self.put(inputs.texts[:, 0])                                          # (P, T)
        column = self.put(inputs.position[:, 0])                                     # (P, M)
        with self.autocast():
            h = self.model.states(text, column)                                      # (P, M, C) these states alone
        return h.flatten(0, 1)[self.put(state_number)]

    def states_in_texts(self, rollouts: Rollouts) -> Tensor:
        """Reads the texts in which tokens are scored, without the columns that are padding in all."""
        inputs = rollouts.inputs
        P, W, _ = inputs.texts.shape
        problem = inputs.chosen.nonzero()[:, 0]                                      # (K,)
        text = problem * W                                                           # (K,) among the P W texts
        if inputs.text is not None:
            text = text + inputs.text[inputs.chosen]
        column = inputs.position[inputs.chosen]                                      # (K,)
        read, row = text.unique(return_inverse=True)                                 # (U,) texts, (K,) in 0 .. U - 1
        cut, padding = 0, None
        if inputs.padding is not None:
            cut = int(inputs.padding.min())
            padding = self.on_device((inputs.padding - cut)[read // W])              # (U,) or None
        tokens = self.put(inputs.texts.flatten(0, 1)[read, cut:])                    # (U, T - cut)
        with self.autocast():
            h = self.model.states(tokens, padding=padding)                           # (U, T - cut, C)
        return h[self.put(row), self.put(column - cut)]


def texts_to_score(input: Tensor, turn: Tensor, read: Tensor, estimator: str) -> tuple:
    """The W texts (P, W, T) of each problem in which its tokens are scored, and the number (P, G, M) of the text of
    each token; None if there is one.

    trajectory: each token in the text that its pass read, which is exact (LLaDA arXiv 2502.09992 in sampling; TraceRL
        arXiv 2509.06949 in training). All first passes read the problem, so W = 1 + (S - 1) G
    one_step: all tokens in the problem, as if they were independent (the mean field that d1 starts from,
        arXiv 2504.12216)
    input: (P, T); turn: (N, M) and read: (N, S, T) of fill_in_passes
    """
    P, T = input.shape
    S = read.shape[1]
    if S == 1 or estimator == "one_step":
        return input[:, None], None
    later = read[:, 1:].reshape(P, -1, T)                                            # (P, (S - 1) G, T)
    texts = torch.cat((input[:, None], later), 1)                                    # (P, W, T)
    turn = turn.unflatten(0, (P, -1))                                                # (P, G, M)
    member = torch.arange(turn.shape[1], device=turn.device)[:, None]                # (G, 1)
    text = (member * (S - 1) + turn).where(turn > 0, 0)                              # (P, G, M) 0 is the problem
    return texts, text
