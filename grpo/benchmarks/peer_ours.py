"""Our side of the comparison with other trainers: grpo_training_step on given work."""

import time
from types import SimpleNamespace

import numpy as np
import torch

from core.distributed import Distributed
from core.huggingface.model import HuggingFaceModel
from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from core.settings.optional import quiet_transformers
from core.training_step import build_optimizers
from grpo.benchmarks.work import gpt2, wait_for_device
from grpo.build import build_reference, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.policies import causal
from grpo.rewards import Scored

NO_STOP, STOP = 0.9, 1 - 1e-6  # of a flat distribution, noise below the first never draws the last token, STOP does


def our_steps(work, huggingface, settings, turn):
    """Trains in turns (grpo/benchmarks/side.py). huggingface: on a model of transformers; settings: of GRPOConfig."""
    config = GRPOConfig(**{"batch_size": work.batch_size, "group_size": work.group_size, "temperature": 1.0,
                           "top_p": 1.0, "kl_beta": 0.04, "kl_estimator": "k3", "learning_rate": 1e-4,
                           "max_new_tokens": work.completion_length} | settings)
    dist = Distributed(config.device, config.dtype)
    tokenizer, make = letters(work), hugging_face_model if huggingface else our_model
    policy = make_policy(make(work, tokenizer).to(dist.device), tokenizer, config, dist)
    reference, optimizers = build_reference(config, policy, dist), build_optimizers(policy, config, dist.device.type)
    clock, seen, step = time_optimizers(optimizers), {}, 0
    if work.mixed:
        causal.draw_uniforms = ending_noise(work, causal.draw_uniforms)
    rewards, go_on = letter_counter(seen), turn(None)
    while go_on:
        clock["optimizer"], start = 0.0, time.perf_counter()
        metrics = grpo_training_step(policy, reference, rewards, lambda _: problems(work, step, config, dist),
                                     optimizers, config.learning_rate, step, config, dist)
        wait_for_device(dist.device)
        whole = time.perf_counter() - start
        check_lengths(seen["lengths"], work.lengths(step)[problems(work, step, config, dist)["number"]].flatten())
        go_on = turn(phases(metrics, clock["optimizer"], whole))
        step += 1
    dist.close()


def our_model(work, tokenizer):
    """A random GPT of this size."""
    torch.manual_seed(0)
    return GPT(GPTConfig(LANGUAGE_MODEL, work.vocab_size, work.vocab_size, work.prompt_length + work.completion_length,
                         work.n_layer, work.n_head, work.n_embd))


def hugging_face_model(work, tokenizer):
    return HuggingFaceModel(gpt2(quiet_transformers("GPT-2", "model"), work), tokenizer, LANGUAGE_MODEL)


def letters(work):
    """A tokenizer of one letter for each id. Only mixed work has a token that ends a completion."""
    return SimpleNamespace(base_vocab_size=work.vocab_size, vocab_size=work.vocab_size, banned_token_ids=(),
                           stop_token_ids=(work.stop_id,) * work.mixed, mask_token_id=None,
                           decode=lambda ids: "".join(chr(33 + i % 90) for i in ids))


def ending_noise(work, draw):
    """draw_uniforms with noise that ends each completion at the length that the work has drawn for it."""
    def drawn(seed, step, numbers, shape):
        noise = NO_STOP * draw(seed, step, numbers, shape)                           # (P, G, M)
        last = torch.from_numpy(work.lengths(step)[numbers] - 1)[..., None]          # (P, G, 1)
        return noise.scatter(2, last, STOP)
    return drawn


def problems(work, step, config, dist):
    """This rank's share of a step's prompts, as a batch of PromptConsumer."""
    numbers = np.arange(config.batch_size) + dist.rank * config.batch_size
    records = [{"text": "a", "prompt": "a"} for _ in numbers]
    return {"input": work.prompts(step)[numbers], "padding": np.zeros(len(numbers), dtype=np.int64), "number": numbers,
            "record": np.array([*records, None], dtype=object)[:-1]}


def letter_counter(seen):
    """Rewards: the share of the letter a in a completion. Puts the lengths of the completions into `seen`."""
    def rewards(rollouts):
        seen["lengths"] = rollouts.mask.sum(1).long().cpu().numpy()                  # (N,)
        share = [text.count("a") / max(1, len(text)) for text in rollouts.texts.completions]
        return Scored(torch.tensor(share, device=rollouts.mask.device).view(-1, rollouts.group_size))
    return rewards


def check_lengths(found, drawn):
    """Raises AssertionError unless completions have the lengths that were drawn for them."""
    assert list(found) == list(drawn), f"lengths {list(found)} are not those that were drawn, {list(drawn)}"


def time_optimizers(optimizers):
    """A dictionary whose "optimizer" grows by the seconds of each optimizer step."""
    clock = {"optimizer": 0.0}

    def before(*_):
        clock["start"] = time.perf_counter()

    def after(*_):
        clock["optimizer"] += time.perf_counter() - clock["start"]

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    return clock


def phases(metrics, optimizer, whole):
    """Seconds of the phases of a step, from its metrics."""
    found = {"generation": metrics["time/collect"], "reference": metrics.get("time/reference", 0.0),
             "policy": metrics["time/train"] - optimizer, "optimizer": optimizer}
    return found | {"rest": whole - sum(found.values()), "step": whole}
