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
from grpo.benchmarks.comparison import wait_for_device
from grpo.benchmarks.work import gpt2, record_of
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
    tokenizer = tokenizer_of(work)
    model = model_of(work, tokenizer, huggingface).to(dist.device)
    policy = make_policy(model, tokenizer, config, dist)
    reference = build_reference(config, policy, dist)
    optimizers = build_optimizers(policy, config, dist.device.type)
    clock = OptimizerClock(optimizers)
    rewards = LetterCounter()
    if work.mixed:
        causal.draw_uniforms = ending_noise(work, causal.draw_uniforms)
    step = 0
    go_on = turn(None)
    while go_on:
        batch = problems(work, step, config, dist)
        clock.seconds = 0.0
        start = time.perf_counter()
        metrics = grpo_training_step(policy, reference, rewards, lambda _: batch, optimizers, step, config, dist)
        wait_for_device(dist.device)
        whole = time.perf_counter() - start
        drawn = work.lengths(step)[batch["number"]].flatten()
        assert list(rewards.lengths) == list(drawn), f"lengths {rewards.lengths} are not those that were drawn, {drawn}"
        phases = {"generation": metrics["time/collect"], "reference": metrics.get("time/reference", 0.0),
                  "policy": metrics["time/train"] - clock.seconds, "optimizer": clock.seconds}
        go_on = turn(record_of(phases, whole, dist.device))
        step += 1
    dist.close()


def model_of(work, tokenizer, huggingface):
    """A random model of this size: a GPT of this project, or GPT-2 of transformers."""
    if huggingface:
        return HuggingFaceModel(gpt2(quiet_transformers("GPT-2", "model"), work), tokenizer, LANGUAGE_MODEL)
    torch.manual_seed(0)
    longest = work.prompt_length + work.completion_length
    return GPT(GPTConfig(LANGUAGE_MODEL, work.vocab_size, work.vocab_size, longest, work.n_layer, work.n_head,
                         work.n_embd))


def tokenizer_of(work):
    """A tokenizer of one letter for each id. Only mixed work has a token that ends a completion."""
    return SimpleNamespace(base_vocab_size=work.vocab_size, vocab_size=work.vocab_size, banned_token_ids=(),
                           stop_token_ids=(work.stop_id,) if work.mixed else (), mask_token_id=None,
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
    records = np.empty(len(numbers), dtype=object)
    records[:] = [{"text": "a", "prompt": "a"} for _ in numbers]
    return {"input": work.prompts(step)[numbers], "padding": np.zeros(len(numbers), dtype=np.int64), "number": numbers,
            "record": records}


class LetterCounter:
    """Rewards: the share of the letter a in a completion. Keeps the lengths of the completions."""

    def __call__(self, rollouts):
        self.lengths = rollouts.mask.sum(1).long().cpu().numpy()                     # (N,)
        share = [text.count("a") / max(1, len(text)) for text in rollouts.texts.completions]
        return Scored(torch.tensor(share, device=rollouts.mask.device).view(-1, rollouts.group_size))


class OptimizerClock:
    """Adds up the seconds of optimizer steps."""

    def __init__(self, optimizers):
        self.seconds = 0.0
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.before)
            optimizer.register_step_post_hook(self.after)

    def before(self, *_):
        self.start = time.perf_counter()

    def after(self, *_):
        self.seconds += time.perf_counter() - self.start
