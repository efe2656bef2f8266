"""The fill-in policy: a masked-fill model that samples the hidden tokens of a text in one or several passes.

With one pass the logits depend only on the masked text, so the completions of a group share a forward and a backward
pass.
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
    """The texts in which the sampled tokens are scored: W texts of T columns for each problem."""
    texts: Tensor                  # (P, W, T)
    position: Tensor               # (P, 1 or G, M) column of each sampled token in its text
    text: Tensor | None = None     # (P, 1 or G, M) index of its text, in 0 .. W - 1; None: W = 1, or an old state
    padding: Tensor | None = None  # (P,) number of leading columns of the texts without a token; None: 0

    def __post_init__(self):
        super().__post_init__()
        P, _, T = self.texts.shape
        if self.text is None:
            # In states of earlier versions, which lack `text`, a position is text * T + column. With W = 1 `text` is 0,
            # so the division is also right for new inputs without `text`.
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
                    self.model, input, position, of_tokens, hidden,
                    **settings.for_tokens())
                texts = input[:, None]                                               # (P, 1, T)
                text_number = None
            else:
                from core.fill_in_passes import fill_in_passes
                target, logp, drawn_in, texts_read, kept = fill_in_passes(
                    self.model, input, position, hidden, of_tokens, of_order,
                    passes=settings.unmask_steps,
                    **settings.for_tokens())
                texts, text_number = texts_to_score(
                    input, drawn_in, texts_read, settings.fill_estimator)
        target = target.view(P, G, -1)                                               # (P, G, M)
        was_hidden = self.put(hidden)                                                # (P, M)
        filled = fill_in(input, position, was_hidden, target)                        # (P, G, T)
        sampled = was_hidden[:, None].expand_as(target)                              # (P, G, M) False on padding
        true = truth.gather(1, position)                                             # (P, M)
        correct = (target == true[:, None]) & sampled                                # (P, G, M)
        accuracy = correct.sum(), sampled.sum()

        chosen = hidden[:, None]                                                     # (P, 1, M)
        if text_number is not None:  # with one text the group shares its states; with several, each member has its own
            chosen = chosen.expand(-1, G, -1)                                        # (P, G, M)
        column = position[:, None].expand_as(chosen)
        size = torch.full((P,), texts[0].numel())
        inputs = FillInputs(
            chosen=chosen,
            size=size,
            texts=texts.cpu(),
            position=column.cpu(),
            text=text_number)
        inputs = inputs.with_kept(kept)
        completions = self._texts(problems, filled, position, accuracy)
        mask = sampled.flatten(0, 1).float()                                         # (N, M)
        target = target.flatten(0, 1)                                                # (N, M)
        logp = logp.reshape(mask.shape)
        truncated = mask.new_zeros(P * G, dtype=torch.bool)
        return Rollouts(
            target=target,
            mask=mask,
            train_mask=mask,
            old_logp=logp,
            truncated=truncated,
            max_tokens=settings.block_size,
            inputs=inputs,
            texts=completions)

    def _texts(self, problems, filled, position, accuracy):
        """Makes the Texts of completions. filled: (P, G, T); position: (P, M); accuracy: (correct tokens, tokens)"""
        G = filled.shape[1]
        filled = filled.flatten(0, 1).cpu()                                          # (N, T)
        prompts = self._decoded(problems["input"], G)
        completions = self._decoded(filled)
        answers = self._decoded(problems["target"], G)
        place = position.repeat_interleave(G, 0)                                     # (N, M)
        metrics = {"mean_token_accuracy": accuracy}
        return Texts(
            prompts,
            completions,
            columns={"answer": answers},
            tokens=list(filled),
            completion_ids=filled.tolist(),
            place=place,
            metrics=metrics)

    def _decoded(self, ids, copies=1):
        """Decodes each row of ids. Returns a list in which each text is repeated `copies` times."""
        decoded = []
        for row in ids.tolist():
            text = self.tokenizer.decode(row)
            decoded += [text] * copies
        return decoded

    def states(self, rollouts: Rollouts) -> Tensor:
        # states_in_texts could also read one text, but it computes the states of all T columns instead of the hidden
        # columns: gradients would be summed in another order, which changes their last bits.
        inputs = rollouts.inputs
        if inputs.texts.shape[1] > 1:
            return self.states_in_texts(rollouts)
        text = inputs.texts[:, 0]                                                    # (P, T)
        column = inputs.position[:, 0]                                               # (P, M)
        index = inputs.chosen.flatten().nonzero()[:, 0]                              # (K,)
        with self.autocast():
            h = self.model.states(self.put(text), self.put(column))                  # (P, M, C)
        h = h.flatten(0, 1)                                                          # (P M, C)
        return h[self.put(index)]

    def states_in_texts(self, rollouts: Rollouts) -> Tensor:
        """Reads each text with scored tokens once, without columns that are padding in all texts."""
        # All indices are computed on the CPU, where the inputs are. On a GPU nonzero, unique and int would synchronise
        inputs = rollouts.inputs
        W = inputs.texts.shape[1]
        problem, _, _ = inputs.chosen.nonzero(as_tuple=True)                         # (K,)
        column = inputs.position[inputs.chosen]                                      # (K,)
        text = problem * W + inputs.text[inputs.chosen]                              # (K,) in 0 .. P W - 1
        read, row = text.unique(return_inverse=True)  # (U,) texts to read, (K,) in 0 .. U - 1
        cut = int(inputs.padding.min())
        column = column - cut
        problem_read = read // W                                                     # (U,)
        padding = inputs.padding[problem_read] - cut                                 # (U,)
        padding = self.on_device(padding)                                            # (U,) or None
        texts = inputs.texts.flatten(0, 1)                                           # (P W, T)
        tokens = self.put(texts[read, cut:])                                         # (U, T - cut)
        with self.autocast():
            h = self.model.states(tokens, padding=padding)                           # (U, T - cut, C)
        return h[self.put(row), self.put(column)]


def texts_to_score(
        input: Tensor,              # (P, T) the problems: texts with hidden tokens
        drawn_in: Tensor,           # (N, M) from fill_in_passes
        texts_read: Tensor,         # (N, S, T) from fill_in_passes with S passes
        estimator: str) -> tuple:
    """Returns the texts in which the tokens of each problem are scored, (P, W, T), and the index of each token's text,
    (P, G, M) on the CPU, or None for one_step.

    estimator:
    trajectory: each token is scored in the text that its pass read, which is exact (LLaDA arXiv 2502.09992 for
        sampling; TraceRL arXiv 2509.06949 for training). All first passes read the problem, so W = 1 + G (S - 1)
    one_step: all tokens are scored in the problem, as if they were independent (the mean-field approximation that d1,
        arXiv 2504.12216, builds on), so W = 1
    """
    P, T = input.shape
    problem = input[:, None]                                                         # (P, 1, T)
    if estimator == "one_step":
        return problem, None
    # Text 0 is the problem. The texts of later passes follow, grouped by member
    N, S, _ = texts_read.shape
    G = N // P
    later = texts_read[:, 1:]                                                        # (N, S - 1, T)
    later = later.reshape(P, G * (S - 1), T)
    texts = torch.cat((problem, later), 1)                                           # (P, W, T)
    drawn_in = drawn_in.view(P, G, -1).cpu()                                         # (P, G, M)
    member = torch.arange(G)[:, None]                                                # (G, 1)
    text_number = member * (S - 1) + drawn_in                                        # (P, G, M)
    return texts, text_number.where(drawn_in > 0, 0)
