"""The fill-in policy: a masked-fill model that writes the hidden tokens of a text, in one pass or in several.

In one pass the logits depend on the masked text alone, so the completions of a group share one forward and backward.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from core.dataset_consumer import unpack_batch
from core.distributions import draw_uniforms
from core.fill_in import fill_in, predict_and_sample_tokens
from core.fill_in_passes import fill_in_passes
from core.masking import masked_positions
from core.performance.batching import cat_padded
from core.performance.kept_tokens import KeptBudget, KeptTokens
from grpo.policies.fill_views import FILL_ESTIMATORS, View, Written
from grpo.policies.model_policy import ModelPolicy
from grpo.rollout import Reading, Rollouts, Texts


@dataclass
class FillReading(Reading):
    """W texts of one length for each problem, and the places in them that predict sampled tokens."""
    texts: torch.Tensor     # (P, W, T)
    position: torch.Tensor  # (P, r, M) place in the W texts of a problem, one after another; r = 1 or G rows
    places: torch.Tensor    # (P, r, M) bool, on the CPU: which of them there are

    ON_CPU = ("places",)

    @property
    def chosen(self):
        return self.places.flatten(0, 1)                                             # (R, M)

    def sizes(self):
        return torch.full((self.problems,), self.texts.shape[1:].numel())

    @staticmethod
    def alike(parts):
        M = max(part.position.shape[2] for part in parts)
        wide = lambda x: F.pad(x, (0, M - x.shape[2]))
        return [replace(part, position=wide(part.position), places=wide(part.places)) for part in parts]


@dataclass
class Filled:
    """What the policy wrote into P texts, N = P * G completions of at most M tokens."""
    target: torch.Tensor        # (N, M) the tokens
    logp: torch.Tensor          # (N, M) log-probability under the distribution drawn from
    turn: torch.Tensor | None   # (N, M) the pass that drew the token; None: one pass
    read: torch.Tensor | None   # (N, S, T) the text that each pass read; None: one pass
    kept: KeptTokens | None     # the tokens that could be drawn at the hidden places in order; None: all
    noise: torch.Tensor | None  # (P, 2, G, T) for estimators that hide tokens again; None: one pass

    @classmethod
    def join(cls, parts):
        """The completions of different texts as one."""
        target, logp = cat_padded([part.target for part in parts]), cat_padded([part.logp for part in parts])
        kept = KeptTokens.join([part.kept for part in parts])
        if parts[0].turn is None:
            return cls(target, logp, None, None, kept, None)
        return cls(target, logp, cat_padded([part.turn for part in parts], -1),
                   torch.cat([part.read for part in parts]), kept, torch.cat([part.noise for part in parts]))


class FillPolicy(ModelPolicy):
    """Writes the hidden tokens of windows of text (batches of DatasetConsumer)."""

    Reading, kl_estimator, join = FillReading, "exact", staticmethod(Filled.join)

    @torch.no_grad()
    def write(self, problems, iteration, config):
        """A Filled. config: group_size, batch_size (problems at a time), seed, temperature, top_p, top_k, min_p,
        unmask_steps, fill_estimator, stored_megabytes"""
        input, _, mask = unpack_batch(problems, self.device)                         # (P, T) each
        (P, T), G = input.shape, config.group_size
        position, places = masked_positions(mask, self.device)                       # (P, M), (P, M) on the CPU
        one_pass = config.unmask_steps == 1 and config.fill_estimator in ("trajectory", "one_step")
        noise = draw_uniforms(config.seed, iteration, problems["number"], (G, T) if one_pass else (4, G, T))
        write, parts, budget = self._one_pass if one_pass else self._passes, [], KeptBudget(config.stored_megabytes)
        for part in torch.arange(P).split(config.batch_size):
            part = slice(int(part[0]), int(part[-1]) + 1)
            with self.autocast():
                *found, kept = write(input[part], position[part], places[part], noise[part], config, budget)
            parts.append(Filled(*found, kept, None if one_pass else noise[part, 2:].float()))
        return Filled.join(parts)

    @torch.no_grad()
    def rollouts(self, problems, out, config):
        """config: group_size, fill_estimator, block_size"""
        input, target, mask = unpack_batch(problems, self.device)                    # (P, T) each
        P, G = len(input), config.group_size
        position, places = masked_positions(mask, self.device)                       # (P, M), (P, M) on the CPU
        chosen, tokens = places.to(self.device).float(), out.target                  # (P, M), (N, M)
        row = torch.arange(P, device=self.device).repeat_interleave(G)               # (N,)
        text = fill_in(input, position, chosen, tokens.view(P, G, -1)).flatten(0, 1)  # (N, T)
        if out.turn is None:
            view = View(input[:, None], position[:, None])
        else:
            view = FILL_ESTIMATORS[config.fill_estimator](Written(
                input, text, position[row], chosen[row], out.turn, out.read, out.noise.to(self.device),
                self.tokenizer.mask_token_id))
        hidden, truth = chosen[row], target.gather(1, position)[row]                 # (N, M) each
        metrics = {"mean_token_accuracy": (((tokens == truth) * hidden).sum(), hidden.sum())}
        prompts = self._decode(input.repeat_interleave(G, 0))
        answers = self._decode(target.repeat_interleave(G, 0))
        texts = Texts(prompts, self._decode(text), {"answer": answers}, tokens=list(text),
                      completion_ids=text.tolist(), place=position[row], metrics=metrics, size=text.numel())
        reading = FillReading(G, out.kept, view.texts, view.position, places[:, None].expand(view.position.shape))
        return Rollouts(group_size=G, target=tokens, mask=hidden,
                        train_mask=hidden if view.train_mask is None else view.train_mask, old_logp=out.logp,
                        truncated=torch.zeros(P * G, dtype=torch.bool, device=self.device),
                        max_tokens=config.block_size, reading=reading, texts=texts)

    def _one_pass(self, input, position, places, noise, config, budget):
        """target, logp (N, M), no turns and texts read, and the KeptTokens of the hidden tokens of P texts or None."""
        tokens, logp, kept = predict_and_sample_tokens(self.model, input, position, noise, config.temperature,
                                                       config.top_p, config.top_k, config.min_p, places)
        if kept is not None:
            budget.add(kept)
        return tokens.flatten(0, 1), logp.flatten(0, 1), None, None, kept

    def _passes(self, input, position, places, noise, config, budget):
        """target, logp, turn (N, M), the texts read (N, S, T), and the KeptTokens of N texts' hidden tokens or None."""
        return fill_in_passes(self.model, input, position, places, noise[:, 0], noise[:, 1], config.unmask_steps,
                              config.temperature, config.top_p, config.top_k, config.min_p, budget)

    def _decode(self, ids):
        """(N, T) token ids as N texts."""
        return [self.tokenizer.decode(row) for row in ids.tolist()]

    def states(self, reading):
        P, W = reading.texts.shape[:2]
        with self.autocast():
            if W == 1:
                h = self.model.states(reading.texts[:, 0], reading.position.flatten(1))  # (P, r M, C)
            else:
                h = self.model.states(reading.texts.flatten(0, 1)).unflatten(0, (P, W)).flatten(1, 2)  # (P, W T, C)
                h = h.gather(1, reading.position.flatten(1)[..., None].expand(-1, -1, h.shape[-1]))
        h, where = h.flatten(0, 1), reading.places.flatten().nonzero().squeeze(1)    # (R M, C), (K,)
        return h if len(where) == len(h) else h[where.to(h.device)]

    def stored_states(self, config):
        """The most states (K) of a problem that kept tokens or reference distributions are stored for."""
        one_text = config.unmask_steps == 1 and config.fill_estimator == "trajectory"
        shared = one_text or config.fill_estimator in ("one_step", "prompt_mask")
        return (1 if shared else config.group_size) * max(1, round(config.mask_high * config.block_size))
