"""The fill-in policy: a masked-fill model that samples the hidden tokens of a text, in one pass or in several.

In one pass the logits depend on the masked text alone, so the completions of a group share one forward and backward.
"""

import torch
from torch import Tensor

from core.data import masked_positions, unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from core.settings.setting import Settings
from grpo.policies.policy import ModelPolicy, inputs_of, sampling_of
from grpo.rollout import Rollouts, Texts


class FillPolicy(ModelPolicy):
    """Fills in the hidden tokens of windows of text (batches of DatasetConsumer).

    Its inputs: texts (P, W, T), W texts of one length for each problem; position (P, 1 or G, M) in them of each sampled
    token, one text after another.
    """

    kl_estimator = "exact"

    def sample_part(self, problems: dict, iteration: int, config: Settings) -> Rollouts:
        """config: group_size, seed, temperature, top_p, top_k, min_p, unmask_steps, fill_estimator, block_size"""
        input, truth, mask = unpack_batch(problems, self.device)                     # (P, T) each
        position, hidden = masked_positions(mask, self.device)                       # (P, M), (P, M) on the CPU
        P, T = input.shape
        G = config.group_size
        noise = draw_uniforms(config.seed, iteration, problems["number"], (2, G, T))  # (P, 2, G, T)
        views, place = input[:, None], position[:, None]                             # (P, 1, T), (P, 1, M)
        with self.autocast():
            if config.unmask_steps == 1:
                target, logp, kept = predict_and_sample_tokens(
                    self.model, input, position, noise[:, 0], hidden, **sampling_of(config))
            else:
                from core.fill_in_passes import fill_in_passes
                target, logp, turn, read, kept = fill_in_passes(
                    self.model, input, position, hidden, noise[:, 0], noise[:, 1],
                    config.unmask_steps, **sampling_of(config))
                views, place = views_of(input, position, turn, read, config.fill_estimator)
        target = target.view(P, G, -1)                                               # (P, G, M)
        was_hidden = self.put(hidden)                                                # (P, M)
        text = fill_in(input, position, was_hidden, target)                          # (P, G, T)
        sampled = was_hidden[:, None].expand_as(target)                              # (P, G, M)
        mask = sampled.flatten(0, 1).float()                                         # (N, M)
        chosen = hidden[:, None].expand(place.shape)                                 # (P, 1 or G, M)
        true = truth.gather(1, position)[:, None]                                    # (P, 1, M)
        right = (target == true) & sampled                                           # (P, G, M)
        metrics = {"mean_token_accuracy": (right.sum(), sampled.sum())}
        return Rollouts(
            target.flatten(0, 1), mask, mask,
            old_logp=logp.reshape(mask.shape),
            truncated=torch.zeros_like(mask[:, 0], dtype=torch.bool),
            max_tokens=config.block_size,
            inputs=inputs_of(chosen, kept, torch.full((P,), views[0].numel()), texts=views, position=place),
            texts=self._texts(problems, text, position, metrics))

    def _texts(self, problems, text, position, metrics):
        """Texts of problems, text (P, G, T), position (P, M)."""
        G = text.shape[1]
        text = text.flatten(0, 1).cpu()                                              # (N, T)
        prompts, answers = ([x for x in self._decoded(problems[key]) for _ in range(G)] for key in ("input", "target"))
        return Texts(
            prompts, self._decoded(text), {"answer": answers},
            tokens=list(text),
            completion_ids=text.tolist(),
            place=position.repeat_interleave(G, 0),
            metrics=metrics)

    def _decoded(self, ids):
        return [self.tokenizer.decode(row) for row in ids.tolist()]

    def states(self, rollouts: Rollouts) -> Tensor:
        texts, position, chosen = (rollouts.inputs[name] for name in ("texts", "position", "chosen"))
        if texts.shape[1] > 1:
            return self.states_in_texts(rollouts)
        place = chosen.flatten().nonzero()[:, 0]                                     # (K,)
        with self.autocast():  # no other states are wanted
            h = self.model.states(self.put(texts[:, 0]), self.put(position[:, 0]))   # (P, M, C)
        return h.flatten(0, 1)[self.put(place)]

    def states_in_texts(self, rollouts: Rollouts) -> Tensor:
        """Reads the texts in which tokens are scored, without the columns that are padding in all."""
        texts, position, chosen = (rollouts.inputs[name] for name in ("texts", "position", "chosen"))
        P, W, T = texts.shape
        padding = rollouts.inputs.get("padding", torch.zeros(P, dtype=torch.long))   # (P,)
        problem = chosen.nonzero()[:, 0]                                             # (K,)
        number = problem * W + position[chosen] // T                                 # (K,) of its text among P W
        column = position[chosen] % T                                                # (K,) in that text
        used, text = number.unique(return_inverse=True)                              # (U,), (K,)
        cut = int(padding.min())
        tokens = self.put(texts.flatten(0, 1)[used, cut:])                           # (U, T - cut)
        padding = self.on_device((padding - cut)[used // W])                         # (U,) or None
        with self.autocast():
            h = self.model.states(tokens, padding=padding)                           # (U, T - cut, C)
        return h[self.put(text), self.put(column - cut)]


def views_of(input: Tensor, position: Tensor, turn: Tensor, read: Tensor, estimator: str) -> tuple:
    """The W texts (P, W, T) of each problem in which its tokens are scored, and the places (P, 1 or G, M) of these
    tokens in them, one text after another.

    trajectory: each token in the text that its pass read, which is exact (LLaDA arXiv 2502.09992 in sampling; TraceRL
        arXiv 2509.06949 in training). All first passes read the problem, so W = 1 + (S - 1) G
    one_step: all tokens in the problem, as if they were independent (the mean field that d1 starts from,
        arXiv 2504.12216)
    input: (P, T); position: (P, M); turn: (N, M) and read: (N, S, T) of fill_in_passes
    """
    P, T = input.shape
    S = read.shape[1]
    if S == 1 or estimator == "one_step":
        return input[:, None], position[:, None]
    texts = torch.cat((input[:, None], read[:, 1:].reshape(P, -1, T)), 1)            # (P, W, T)
    turn = turn.unflatten(0, (P, -1))                                                # (P, G, M)
    begin = torch.arange(turn.shape[1], device=turn.device)[:, None] * (S - 1)       # (G, 1)
    text = (begin + turn).where(turn > 0, 0)                                         # (P, G, M) 0 is the problem
    return texts, text * T + position[:, None]
