"""Problems in, Rollouts out. What kind of generator it was is known here and nowhere after."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch.nn import functional as F

from core.batch import masked_positions, unpack_batch
from core.losses import kept_tokens, sampling_logp
from core.model import LANGUAGE_MODEL, Cache
from core.sampling import (Stop, draw_uniforms, fill_in, fill_in_passes, generate, join_generations,
                           predict_and_sample_tokens)
from grpo.fill_views import FILL_ESTIMATORS, Written
from grpo.rewards import as_columns


@dataclass
class Rollouts:
    """N completions of P problems (rows i*G .. i*G+G-1 answer problem i) and what was known when they were sampled.

    R distinct inputs were read: R = P for one-pass fill-in, where a whole group shares one input; R = N for causal
    completions, which share their prompt.
    """
    prompt: torch.Tensor | None     # (P, S) what the inputs of a problem go on from, read once; None: inputs are whole
    padding: torch.Tensor | None    # (P or R,) leading columns of prompt, or else of inputs, that hold no token
    inputs: torch.Tensor            # (R, T) what the policy reads
    position: torch.Tensor          # (R, M) which output positions speak about the chosen tokens
    length: torch.Tensor | None     # (R,)   how many of them count, on the CPU; None: all, padding is masked alone
    target: torch.Tensor            # (N, M) the token chosen at each position
    mask: torch.Tensor              # (N, M) 1.0 where the policy chose, 0.0 where padded
    old_logp: torch.Tensor          # (N, M) its log-probability under the distribution it was drawn from
    kept: torch.Tensor | None       # (R, M, V) the tokens that could be drawn there; None: all
    ref_logp: torch.Tensor | None   # (N, M) log-probability of the token under the reference, on the same kept tokens
    ref_full: torch.Tensor | None   # (R, M, V) the reference's whole distribution, untruncated, for the exact KL
    truth: torch.Tensor | None      # (N, M) the true text's tokens, where there is one
    truncated: torch.Tensor | None  # (N,) bool: ran out of room before its end
    longest: int                    # tokens that a completion can have
    kl_estimator: str               # config's, or what suits the kind of generator
    tokens: torch.Tensor | None     # (N, T) completed texts of one length, as a judge reads them; None: read texts()
    texts: Callable | None          # () -> (prompts, completions, {field: values}), N each: what rewards read
    problems: int                   # P
    place: torch.Tensor | None = None   # (N, M) where in `tokens` the chosen ones stand
    scored: torch.Tensor | None = None  # (N, M) 1.0 where the inputs let the policy speak; None: everywhere
    views: int = 0                  # so many texts of one length stand side by side in a row of inputs, read apart
    advantage: torch.Tensor | None = None  # (N, 1 or M) how much better each completion, or token, is than its group

    def select(self, problems):
        """The rollouts of some problems, given by their indices on the CPU, and the indices of their completions."""
        if not self.problems:
            return self, problems
        G = len(self.target) // self.problems

        def part(x):
            if not torch.is_tensor(x):
                return x
            return x.unflatten(0, (self.problems, -1))[problems.to(x.device)].flatten(0, 1)

        completions = (problems[:, None] * G + torch.arange(G)).flatten().to(self.target.device)
        parts = {f.name: part(getattr(self, f.name)) for f in fields(self)}
        return Rollouts(**parts | {"problems": len(problems)}), completions

    def read(self, model):
        """The model's states at the chosen positions, (R, M, C): a prompt is read once, with gradients, for all of its
        completions."""
        if self.views:  # a prompt, if there is one, is the first of the texts
            h = model.states(self.inputs.reshape(len(self.inputs) * self.views, -1))
            h = h.view(len(self.inputs), -1, h.shape[-1])                            # (R, views * T, C)
            if self.prompt is not None:
                first = model.states(self.prompt).repeat_interleave(len(h) // self.problems, 0)
                h = torch.cat((first, h), 1)
            return h.gather(1, self.position[..., None].expand(-1, -1, h.shape[-1]))
        if self.prompt is None:
            return model.states(self.inputs, self.position, padding=self.padding)
        past = Cache()
        model.states(self.prompt, past=past, padding=self.padding)
        times = len(self.inputs) // self.problems
        padding = None if self.padding is None else self.padding.repeat_interleave(times)
        return model.states(self.inputs, self.position, past.repeat(times), padding)


def join_rollouts(parts):
    """[(rollouts, reward (P, G), credit (P, G, 1 or M))] of one kind of generator, before their advantages, as one."""
    parts = [part for part in parts if part[0].problems] or parts[:1]
    rollouts = [part[0] for part in parts]
    assert len({r.prompt is None for r in rollouts}) == 1, "one kind of rollouts"
    causal, shared = rollouts[0].length is not None, rollouts[0].prompt is not None
    M = max(r.target.shape[1] for r in rollouts)
    read = lambda r: r.prompt.shape[1] if shared else r.inputs.shape[1] - r.target.shape[1]
    S = max(map(read, rollouts))                                                     # columns before the first to speak
    padded = any(r.padding is not None or read(r) < S for r in rollouts)

    def right(x, size, value=0):
        """x with its second dimension filled up to `size` behind its end."""
        return x if x is None else F.pad(x, (0, 0) * (x.dim() - 2) + (0, size - x.shape[1]), value=value)

    def widened(r):
        names = ("target", "mask", "old_logp", "ref_logp", "ref_full", "place", "scored", "truth")
        r = replace(r, texts=None, kept=right(r.kept, M, True), **{name: right(getattr(r, name), M) for name in names})
        if not causal:
            return replace(r, position=right(r.position, M))
        # Left padding grows where the prompt is: in `prompt`, or else in front of `inputs`
        first, front = S - read(r), r.prompt if shared else r.inputs
        if padded:
            r.padding = (0 if r.padding is None else r.padding) + front.new_full((len(front),), first)
        start = 0 if shared else S
        r.inputs = right(r.inputs if shared else F.pad(r.inputs, (first, 0)), start + M)
        r.prompt = F.pad(r.prompt, (first, 0)) if shared else None
        r.position = torch.arange(start, start + M, device=r.inputs.device).expand(len(r.inputs), M)
        return r

    rollouts = [widened(r) for r in rollouts]

    def joined(name):
        x = [getattr(r, name) for r in rollouts]
        return torch.cat(x) if torch.is_tensor(x[0]) else sum(x) if name == "problems" else x[0]

    K = max(part[2].shape[2] for part in parts)
    credit = torch.cat([F.pad(part[2], (0, K - part[2].shape[2])) for part in parts])
    return Rollouts(**{f.name: joined(f.name) for f in fields(Rollouts)}), torch.cat([p[1] for p in parts]), credit


def join(batches):
    """Micro-batches of numpy arrays as one."""
    return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


@torch.no_grad()
def collect(policy, batch, step, config, tokenizer, device, autocast, micro_batch=None):
    """Samples group_size completions of every problem of `batch`, which is of DatasetConsumer or PromptConsumer.

    config: has group_size, seed, temperature, top_p, top_k, min_p and, for prompts, max_new_tokens, stop_sequences,
    response_prefix and shared_prompt. micro_batch: problems at a time, the cut of the training forward
    """
    kind = collect_completions if policy.config.mode == LANGUAGE_MODEL else collect_fills
    return kind(policy, batch, step, config, tokenizer, device, autocast, micro_batch)


def collect_fills(policy, batch, step, config, tokenizer, device, autocast, micro_batch):
    """Fill-in. In one pass each input is read once for its whole group, and sampler and scorer read it in the same cut,
    to the same bits."""
    input, target, mask = unpack_batch(batch, device)                                # (P, T)
    P, T = input.shape
    G, S, truncation = config.group_size, config.unmask_steps, (config.top_p, config.top_k, config.min_p)
    position, chosen = masked_positions(mask, device)                                # (P, M)
    once = S == 1 and config.fill_estimator in ("trajectory", "one_step")
    noise = draw_uniforms(config.seed, step, batch["number"], (G, T) if once else (4, G, T))
    noise = noise if device.type == "mps" else noise.to(device, non_blocking=True)   # MPS has no float64
    parts = []
    for part in torch.arange(P).split(micro_batch or P):
        part = slice(int(part[0]), int(part[-1]) + 1)
        with autocast:
            if once:
                parts.append(fill_once_for_group(policy, input[part], position[part], noise[part], config.temperature,
                                                 truncation))
            else:
                parts.append(fill_in_passes(policy, input[part], position[part], chosen[part], noise[part, 0],
                                            noise[part, 1], S, config.temperature, *truncation))
    tokens, logp, turn, read, kept = (None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True))
    row = torch.arange(P, device=device).repeat_interleave(G)                        # (N,)
    text = fill_in(input, position, chosen, tokens.view(P, G, -1)).flatten(0, 1)     # (N, T)
    views = {"inputs": input, "position": position}
    if not once:
        written = Written(input, text, position[row], chosen[row], turn, read, noise[:, 2:], tokenizer.mask_token_id)
        views = FILL_ESTIMATORS[config.fill_estimator](written)

    def texts():
        prompts, truths = ([tokenizer.decode(ids) for ids in x.tolist()] for x in (input, target))
        repeated = lambda x: [text for text in x for _ in range(G)]
        return repeated(prompts), [tokenizer.decode(ids) for ids in text.tolist()], {"answer": repeated(truths)}

    known = dict(prompt=None, padding=None, length=None, target=tokens, mask=chosen[row], old_logp=logp, kept=kept,
                 ref_logp=None, ref_full=None, place=position[row],
                 truth=target.gather(1, position)[row], truncated=None,
                 longest=config.block_size, tokens=text, texts=texts, problems=P,
                 kl_estimator=config.kl_estimator or ("k3" if config.kl_in_reward or config.kl_importance else "exact"))
    return Rollouts(**known | views)


def fill_once_for_group(policy, input, position, noise, temperature, truncation):
    """One pass, in the form of fill_in_passes: target and logp (N, M), and kept (P, M, V) or None."""
    logits = policy(input, position)                                                 # (P, M, V)
    tokens, logp = predict_and_sample_tokens(lambda *_: logits, input, position, noise, temperature, *truncation)
    kept = None if truncation == (1.0, 0, 0.0) else kept_tokens(sampling_logp(logits, temperature), *truncation)
    return tokens.flatten(0, 1), logp.flatten(0, 1), None, None, kept


def collect_completions(policy, batch, step, config, tokenizer, device, autocast, micro_batch):
    """Left-to-right completions of prompts, in a form in which a group's prompt is read once (shared_prompt), or
    repeated for every completion."""
    cut = max(0, min(int(batch["padding"].min()), batch["input"].shape[1] - 2))      # two columns to share a prompt
    move = lambda x: torch.from_numpy(x).to(device, non_blocking=True)
    prompt, padding = move(batch["input"][:, cut:].copy()), move(batch["padding"] - cut)  # (P, S), (P,)
    padding = padding if (batch["padding"] > cut).any() else None
    P, S = prompt.shape
    G, stop = config.group_size, Stop(tokenizer, config.stop_sequences, config.response_prefix)
    noise, parts = draw_uniforms(config.seed, step, batch["number"], (G, config.max_new_tokens)), []
    for part in torch.arange(P).split(micro_batch or P):
        with autocast:
            parts.append(generate(policy, prompt[part], None if padding is None else padding[part], noise[part], stop,
                                  config.temperature, config.top_p, config.top_k, config.min_p))
    out = join_generations(parts)
    M, length = out.target.shape[1], out.mask.sum(1).long().cpu()                    # (N,)
    repeated = lambda x: x.repeat_interleave(G, 0)
    if config.shared_prompt and S > 1:  # the last token of the prompt is read with the completion: it speaks first
        inputs, first = torch.cat((repeated(prompt[:, -1:]), out.target[:, :-1]), 1), 0   # (N, M)
        prompt = prompt[:, :-1]
    else:
        inputs, first = torch.cat((repeated(prompt), out.target[:, :-1]), 1), S - 1  # (N, S + M - 1)
        prompt, padding = None, None if padding is None else repeated(padding)
    position = torch.arange(first, first + M, device=device).expand(P * G, M)

    def texts():
        written = [stop.text(ids[:n]) for ids, n in zip(out.target.tolist(), length.tolist(), strict=True)]
        prompts, columns = as_columns([record for record in batch["record"] for _ in range(G)])
        return prompts, written, columns

    return Rollouts(prompt=prompt, padding=padding, inputs=inputs, position=position, length=length, target=out.target,
                    mask=out.mask, old_logp=out.logp, kept=out.kept, ref_logp=None, ref_full=None, truth=None,
                    truncated=out.truncated.to(device), longest=config.max_new_tokens,
                    kl_estimator=config.kl_estimator or "k3", tokens=None, texts=texts, problems=P)
