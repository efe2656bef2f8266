"""The fill-in policy: a masked-fill model that samples the hidden tokens of a text, in one pass or in several.

In one pass the logits depend on the masked text alone, so the completions of a group share one forward and backward.
"""

import torch

from core.data import masked_positions, unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from grpo.policies.fill_views import FILL_ESTIMATORS, Filled
from grpo.policies.model_policy import ModelPolicy, inputs_of, sampling_of
from grpo.rollout import Rollouts, Texts


class FillPolicy(ModelPolicy):
    """Fills in the hidden tokens of windows of text (batches of DatasetConsumer).

    Its inputs: texts (P, W, T), W texts of one length for each problem; position (P, 1 or G, M) in them of each sampled
    token, one text after another.
    """

    kl_estimator = "exact"

    def sample_part(self, problems, iteration, config):
        """config: group_size, seed, temperature, top_p, top_k, min_p, unmask_steps, fill_estimator, block_size"""
        input, truth, mask = unpack_batch(problems, self.device)                     # (P, T) each
        position, hidden = masked_positions(mask, self.device)                       # (P, M), (P, M) on the CPU
        P, T = input.shape
        G = config.group_size
        noise = draw_uniforms(config.seed, iteration, problems["number"], (4, G, T))  # (P, 4, G, T) the third is unused
        was_hidden = self.put(hidden)                                                # (P, M)
        if config.unmask_steps == 1 and config.fill_estimator in ("trajectory", "one_step"):
            with self.autocast():
                target, logp, kept = predict_and_sample_tokens(
                    self.model, input, position, noise[:, 0], hidden, **sampling_of(config))
            text = fill_in(input, position, was_hidden, target)                      # (P, G, T)
            views, place, weight = input[:, None], position[:, None], None
        else:
            with self.autocast():
                from core.fill_in_passes import fill_in_passes
                target, logp, turn, read, kept = fill_in_passes(
                    self.model, input, position, hidden, noise[:, 0], noise[:, 1],
                    config.unmask_steps, **sampling_of(config))
            target = target.view(P, G, -1)                                           # (P, G, M)
            text = fill_in(input, position, was_hidden, target)                      # (P, G, T)
            views, place, weight = self._views(input, position, was_hidden[:, None], turn, read, noise, config)
        sampled = was_hidden[:, None].expand_as(target)                              # (P, G, M)
        mask = sampled.flatten(0, 1).float()                                         # (N, M)
        chosen = hidden[:, None].expand(place.shape)                                 # (P, 1 or G, M)
        if weight is not None:
            chosen = chosen & (weight > 0).cpu()
            weight = weight.flatten(0, 1)                                            # (N, M)
        true = truth.gather(1, position)[:, None]                                    # (P, 1, M)
        right = (target == true) & sampled                                           # (P, G, M)
        metrics = {"mean_token_accuracy": (right.sum(), sampled.sum())}
        return Rollouts(
            target.flatten(0, 1), mask, mask,
            old_logp=logp.reshape(mask.shape),
            truncated=torch.zeros_like(mask[:, 0], dtype=torch.bool),
            max_tokens=config.block_size,
            inputs=inputs_of(chosen, kept, torch.full((P,), views[0].numel()), texts=views, position=place),
            token_weight=weight,
            texts=self._texts(problems, text, position, metrics))

    def _views(self, input, position, hidden, turn, read, noise, config):
        """The texts that an estimator reads, places in them, and weights (grpo/policies/fill_views.py).

        input: (P, T); position: (P, M); hidden: (P, 1 or G, M); noise: (P, >= 4, G, T); turn, read: of fill_in_passes
        """
        PG = noise.shape[0], noise.shape[2]
        return FILL_ESTIMATORS[config.fill_estimator](Filled(
            input, position[:, None], hidden,
            turn=turn.unflatten(0, PG),
            read=read.unflatten(0, PG),
            uniform=self.put(noise[:, 3, :, -1:].float())))

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

    def states(self, rollouts):
        texts, position, chosen = (rollouts.inputs[name] for name in ("texts", "position", "chosen"))
        P, W, T = texts.shape
        begin = torch.arange(0, P * W * T, W * T)                                    # (P,)
        place = position + begin[:, None, None]                                      # (P, 1 or G, M)
        read = None
        if W == 1:  # no other states are wanted
            place = torch.arange(position.numel()).view_as(position)                 # (P, 1 or G, M)
            read = self.put(position.flatten(1))                                     # (P, r M)
        with self.autocast():
            h = self.model.states(self.put(texts.flatten(0, 1)), read)               # (P W, T or r M, C)
        return h.flatten(0, 1)[self.put(place[chosen])]
