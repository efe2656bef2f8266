"""Our side of the comparison with other trainers: grpo_training_step on given work."""

import time
from types import SimpleNamespace

import torch

from core.distributed import Distributed
from core.huggingface.model import HuggingFaceModel
from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from core.settings.optional import quiet_transformers
from core.training_step import build_optimizers
from grpo.benchmarks.work import check_lengths, gpt2, problems, record_of, share_of_letter
from grpo.build import build_reference, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.policies import causal
from grpo.rewards import Scored

NO_STOP, STOP = 0.9, 1 - 1e-6  # of a flat distribution, noise below the first never draws the last token, STOP does


def our_steps(work, device, dtype, huggingface, turn):
    """Trains in turns (grpo/benchmarks/side.py). huggingface: on a model of transformers"""
    config = GRPOConfig(
        batch_size=work.batch_size, group_size=work.group_size, max_new_tokens=work.completion_length, temperature=1.0,
        top_p=1.0, kl_beta=0.04, kl_estimator="k3", learning_rate=1e-4, device=device, dtype=dtype)
    dist = Distributed(device, dtype)
    tokenizer = tokenizer_of(work)
    policy = make_policy(model_of(work, tokenizer, huggingface).to(dist.device), tokenizer, config, dist)
    reference = build_reference(config, policy, dist)
    optimizers = build_optimizers(policy, config, dist.device.type)
    if work.mixed:
        causal.draw_uniforms = ending_noise(work, causal.draw_uniforms)

    def rewards(rollouts):
        check_lengths(rollouts.mask.sum(1).int().tolist(), work, step)
        share = torch.tensor(share_of_letter(rollouts.texts.completions), device=dist.device)
        return Scored(share.view(-1, work.group_size))

    step = 0
    go_on = turn(None)
    while go_on:
        batch = problems(work.prompts(step))
        start = time.perf_counter()
        grpo_training_step(policy, reference, rewards, lambda _: batch, optimizers, step, config, dist)
        go_on = turn(record_of(start, dist.device))
        step += 1


def model_of(work, tokenizer, huggingface):
    """A random model of this size: a GPT of this project, or GPT-2 of transformers."""
    if huggingface:
        return HuggingFaceModel(gpt2(quiet_transformers("GPT-2", "model"), work), tokenizer, LANGUAGE_MODEL)
    torch.manual_seed(0)
    longest = work.prompt_length + work.completion_length
    sizes = (longest, work.n_layer, work.n_head, work.n_embd)
    return GPT(GPTConfig(LANGUAGE_MODEL, work.vocab_size, work.vocab_size, *sizes))


def tokenizer_of(work):
    """A tokenizer of one letter for each id. Only mixed work has a token that ends a completion."""
    return SimpleNamespace(
        base_vocab_size=work.vocab_size,
        vocab_size=work.vocab_size,
        banned_token_ids=(),
        stop_token_ids=(work.stop_id,) if work.mixed else (),
        mask_token_id=None,
        decode=lambda ids: "".join(chr(33 + i % 90) for i in ids))


def ending_noise(work, draw):
    """draw_uniforms with noise that ends each completion at the length that the work has drawn for it."""
    def drawn(seed, step, numbers, shape):
        noise = NO_STOP * draw(seed, step, numbers, shape)                           # (P, G, M)
        last = torch.from_numpy(work.lengths(step)[numbers] - 1)[..., None]          # (P, G, 1)
        return noise.scatter(2, last, STOP)
    return drawn
