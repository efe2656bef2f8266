"""The fill-in policy: a masked-fill model that samples the hidden tokens of a text, in one pass or in several.

In one pass the logits depend only on the masked text, so the completions of a group share one forward and backward.
"""

from dataclasses import dataclass

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
    text: Tensor | None = None     # (P, 1 or G, M) number of this text, in 0 .. W - 1
    padding: Tensor | None = None  # (P,) number of leading columns of the texts without a token; None: 0

    def __post_init__(self):
        super().__post_init__()
        P, _, T = self.texts.shape
        if self.text is None:  # a position counts the columns of all texts, as in old states, or there is only one text
            self.text = self.position // T
            self.position = self.position % T
        if self.padding is None:
            self.padding = torch.zeros(P, dtype=torch.long)


class FillPolicy(ModelPolicy):
    """Fills in the hidden tokens of windows of text (batches of DatasetConsumer)."""

    kl_estimator = "exact"
    inputs_type = FillInputs

    def sample_part(self, problems: dict, iteration: int, settings: SamplingSettings) -> Rollouts:
        input, truth, mask = unpack_batch(problems, self.device)                     # (P, T) each
        position, hidden = masked_positions(mask, self.device)                       # (P, M), (P, M) on the CPU
        P, T = input.shape
        G = settings.group_size
        shape = 2, G, T
        noise = draw_uniforms(settings.seed, iteration, problems["number"], shape)   # (P, 2, G, T)
        of_tokens, of_order = noise.unbind(1)                                        # (P, G, T) each
        with self.autocast():
            if settings.unmask_steps == 1:
                target, logp, kept = predict_and_sample_tokens(
                    self.model, input, position, of_tokens, hidden, **settings.for_tokens())
                texts, text = input[:, None], None                                   # (P, 1, T)
            else:
                from core.fill_in_passes import fill_in_passes
                target, logp, turn, read, kept = fill_in_passes(
                    self.model, input, position, hidden, of_tokens, of_order, settings.unmask_steps,
                    **settings.for_tokens())
                texts, text = texts_to_score(input, turn, read, settings.fill_estimator)
        target = target.view(P, G, -1)                                               # (P, G, M)
        was_hidden = self.put(hidden)                                                # (P, M)
        filled = fill_in(input, position, was_hidden, target)                        # (P, G, T)
        sampled = was_hidden[:, None].expand_as(target)                              # (P, G, M) False on padding
        true = truth.gather(1, position)[:, None]                                    # (P, 1, M)
        correct = (target == true) & sampled                                         # (P, G, M)
        accuracy = correct.sum(), sampled.sum()

        rows = 1 if text is None else G  # in one text the group shares its states
        chosen = hidden[:, None].expand(P, rows, -1)                                 # (P, rows, M)
        column = position[:, None].expand_as(chosen)                                 # (P, rows, M)
        size = torch.full((P,), texts[0].numel())
        inputs = FillInputs(
            chosen=chosen,
            size=size,
            texts=texts.cpu(),
            position=column.cpu(),
            text=text)
        texts = self._texts(problems, filled, position, accuracy)
        mask = sampled.flatten(0, 1).float()                                         # (N, M)
        target = target.flatten(0, 1)                                                # (N, M)
        logp = logp.reshape(mask.shape)                                              # (N, M)
        truncated = mask.new_zeros(P * G, dtype=torch.bool)
        return Rollouts(
            target, mask, mask,
            old_logp=logp,
            truncated=truncated,
            max_tokens=settings.block_size,
            inputs=inputs.with_kept(kept),
            texts=texts)

    def _texts(self, problems, filled, position, accuracy):
        """Texts of problems. filled: (P, G, T); position: (P, M); accuracy: (correct tokens, tokens)"""
        G = filled.shape[1]
        filled = filled.flatten(0, 1).cpu()                                          # (N, T)
        prompts = self._decoded(problems["input"], G)
        completions = self._decoded(filled)
        answers = self._decoded(problems["target"], G)
        place = position.repeat_interleave(G, 0)                                     # (N, M)
        return Texts(
            prompts, completions, {"answer": answers},
            tokens=list(filled),
            completion_ids=filled.tolist(),
            place=place,
            metrics={"mean_token_accuracy": accuracy})

    def _decoded(self, ids, times=1):
        """The text of each row of ids, repeated `times` times."""
        texts = [self.tokenizer.decode(row) for row in ids.tolist()]
        return [text for text in texts for _ in range(times)]

    def states(self, rollouts: Rollouts) -> Tensor:
        inputs = rollouts.inputs
        if inputs.texts.shape[1] > 1:
            return self.states_in_texts(rollouts)
        state_number = inputs.chosen.flatten().nonzero()[:, 0]                       # (K,)
        text = self.put(inputs.texts[:, 0])                                          # (P, T)
        column = self.put(inputs.position[:, 0])                                     # (P, M)
        with self.autocast():
            h = self.model.states(text, column)                                      # (P, M, C), not of all T columns
        return h.flatten(0, 1)[self.put(state_number)]

    def states_in_texts(self, rollouts: Rollouts) -> Tensor:
        """Reads only the texts in which tokens are scored, without the columns that are padding in all of them."""
        # All of these indices are computed on the CPU, where the inputs are: there nonzero, unique and int wait for
        # nothing, while on a GPU each of them would wait for the work before it
        inputs = rollouts.inputs
        W = inputs.texts.shape[1]
        problem, _, _ = inputs.chosen.nonzero(as_tuple=True)                         # (K,)
        text = problem * W + inputs.text[inputs.chosen]                              # (K,) among the P W texts
        column = inputs.position[inputs.chosen]                                      # (K,)
        read, row = text.unique(return_inverse=True)                                 # (U,) texts, (K,) in 0 .. U - 1
        cut = int(inputs.padding.min())
        padding = inputs.padding[read // W] - cut                                    # (U,)
        padding = self.on_device(padding)                                            # (U,) or None
        texts = inputs.texts.flatten(0, 1)                                           # (P W, T)
        tokens = self.put(texts[read, cut:])                                         # (U, T - cut)
        with self.autocast():
            h = self.model.states(tokens, padding=padding)                           # (U, T - cut, C)
        return h[self.put(row), self.put(column - cut)]


def texts_to_score(input: Tensor, turn: Tensor, read: Tensor, estimator: str) -> tuple:
    """The W texts (P, W, T) of each problem in which its tokens are scored, and the number (P, G, M) of each token's
    text, on the CPU; None if there is only one.

    trajectory: each token in the text that its pass read, which is exact (LLaDA arXiv 2502.09992 in sampling; TraceRL
        arXiv 2509.06949 in training). All first passes read the problem, so W = 1 + (S - 1) G
    one_step: all tokens in the problem, as if they were independent (the mean field that d1 starts from,
        arXiv 2504.12216), so W = 1
    input: (P, T); turn: (N, M) and read: (N, S, T) of fill_in_passes
    """
    P, T = input.shape
    problem = input[:, None]                                                         # (P, 1, T)
    later_passes = read.shape[1] - 1
    if later_passes == 0 or estimator == "one_step":
        return problem, None
    # Text 0 is the problem; then come the texts of later passes: all of the first member, all of the second, ...
    turn = turn.unflatten(0, (P, -1)).cpu()                                          # (P, G, M)
    G = turn.shape[1]
    later = read[:, 1:]                                                              # (N, S - 1, T)
    later = later.reshape(P, G * later_passes, T)
    texts = torch.cat((problem, later), 1)                                           # (P, W, T)
    member = torch.arange(G)[:, None]                                                # (G, 1)
    text = member * later_passes + turn                                              # (P, G, M)
    return texts, text.where(turn > 0, 0)
