"""This project's training step and TRL's on the same work and the same GPT-2, in turns on one machine."""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from bench.sides import in_turns, problems, record_of
from core.distributed import Distributed
from core.huggingface.model import HuggingFaceModel
from core.model import LANGUAGE_MODEL
from core.optim import build_optimizers
from core.settings.optional import quiet_transformers, require
from core.settings.setting import Count, Settings
from grpo.build import LEFT_TO_RIGHT, build_reference, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.policies import causal
from grpo.rewards import Scored

NEEDS = "bench.py peer", "trl accelerate"  # who needs TRL, what pip is to install
PROMPTS = 32       # steps until TRL's prompts come again
NEVER = "<never>"  # ends a completion, but stands behind the model's vocabulary
MEAN_LENGTH = 24   # tokens of completions that end by themselves, on average
NO_STOP, STOP = 0.9, 1 - 1e-6  # of a flat distribution, noise below the first never draws the last token, STOP does
WARMUP = 1         # steps of each side that are not counted


@dataclass(frozen=True)
class Work:
    """One step of a causal model of GPT-2's shape: completions of prompts, a KL to a reference, one update."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    vocab_size: int = 128        # the last id ends a completion
    batch_size: int = 8          # prompts
    group_size: int = 8          # completions of each
    prompt_length: int = 32
    completion_length: int = 64  # tokens of each completion, at most
    mixed: bool = False          # completions end at lengths of a geometric distribution with mean MEAN_LENGTH

    def prompts(self, step):
        """(P, T) token ids of a step's prompts."""
        return np.random.default_rng(step).integers(self.stop_id, size=(self.batch_size, self.prompt_length))

    @property
    def stop_id(self):
        return self.vocab_size - 1

    def lengths(self, step):
        """(P, G) tokens of each completion of a step, with the one that ends it."""
        shape = (self.batch_size, self.group_size)
        if not self.mixed:
            return np.full(shape, self.completion_length)
        drawn = np.random.default_rng([step, MEAN_LENGTH]).geometric(1 / MEAN_LENGTH, shape)
        return drawn.clip(max=self.completion_length)


S = {"n_layer": 6, "n_head": 6, "n_embd": 384}
LONG = {"prompt_length": 256, "mixed": True}
OF_A_CPU = {"T": Work(), "S": Work(**S), "T_mixed": Work(mixed=True), "S_mixed": Work(**S, mixed=True),
            "T_long": Work(**LONG), "S_long": Work(**S, **LONG)}
MEDIUM = Work(n_layer=24, n_head=16, n_embd=1024, vocab_size=50_257, batch_size=4, prompt_length=64,
              completion_length=256)
CASES = OF_A_CPU | {"M": MEDIUM}


@dataclass(frozen=True)
class PeerConfig(Settings):
    """The settings of `bench.py peer`."""

    cases: str = ",".join(OF_A_CPU)
        # names of cases: T 4 layers x 128, S 6 x 384; mixed lengths; long prompts; M, for a GPU, GPT-2 medium
    batching: bool = False  # TRL samples by continuous batching of transformers
    steps: Count = 5  # measured steps of each side, in turns; the median is reported
    device: str = "cpu"  # cpu, cuda or mps
    dtype: str = "float32"  # float32 or bfloat16

    def conflicts(self):
        yield set(self.cases.split(",")) - CASES.keys(), "cases", f"must be names of {', '.join(CASES)}"
        mixed = [case for case in self.cases.split(",") if CASES[case].mixed]
        yield (self.batching and mixed, "batching cases",
               f"continuous batching cannot end completions at the lengths of {', '.join(mixed)}; choose other cases")


def our_steps(work, device, dtype, turn):
    """This project's side."""
    config = GRPOConfig(
        batch_size=work.batch_size, group_size=work.group_size, max_new_tokens=work.completion_length, temperature=1.0,
        top_p=1.0, kl_beta=0.04, kl_estimator="k3", learning_rate=1e-4, device=device, dtype=dtype)
    dist = Distributed(device, dtype)
    tokenizer = SimpleNamespace(
        base_vocab_size=work.vocab_size, vocab_size=work.vocab_size, banned_token_ids=(), mask_token_id=None,
        stop_token_ids=(work.stop_id,) if work.mixed else (), decode=lambda ids: "".join(map(letter, ids)))
    model = HuggingFaceModel(gpt2(quiet_transformers("GPT-2", "model"), work), tokenizer, LANGUAGE_MODEL)
    policy = make_policy(LEFT_TO_RIGHT, model.to(dist.device), tokenizer, config, dist)
    reference = build_reference(config, policy, dist)
    optimizers = build_optimizers(policy, config, dist.device.type)
    if work.mixed:
        causal.draw_uniforms = noise_that_ends(work, causal.draw_uniforms)

    def rewards(rollouts):
        shares = share_of_letter(rollouts.texts.completions, rollouts.mask.sum(1).tolist(), work, step)
        return Scored(torch.tensor(shares, device=dist.device).view(-1, work.group_size))

    step = 0
    go_on = turn(None)
    while go_on:
        batch = problems(work.prompts(step))
        start = time.perf_counter()
        grpo_training_step(policy, reference, rewards, lambda _: batch, optimizers, step, config, dist)
        go_on = turn(record_of(start, dist.device))
        step += 1


def noise_that_ends(work, draw):
    """draw_uniforms with noise that ends each completion at its length."""
    def drawn(seed, step, numbers, shape):
        noise = NO_STOP * draw(seed, step, numbers, shape)                           # (P, G, M)
        last = torch.from_numpy(work.lengths(step)[numbers] - 1)[..., None]          # (P, G, 1)
        return noise.scatter(2, last, STOP)
    return drawn


def gpt2(transformers, work):
    """A random GPT-2 of this size, without dropout, the same in every process."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=work.vocab_size, n_positions=work.prompt_length + work.completion_length, n_layer=work.n_layer,
        n_head=work.n_head, n_embd=work.n_embd, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
        eos_token_id=None))


def trl_steps(work, device, dtype, batching, turn):
    """TRL's side at its fastest: no checkpointing, on two cores few rows at once, no logging, fused AdamW.
    batching: as in PeerConfig"""
    trl = require("trl", *NEEDS)
    datasets = require("datasets", *NEEDS)
    transformers = quiet_transformers("GPT-2", "model")
    datasets.disable_progress_bars()
    prompts = ["".join(map(letter, ids)) for step in range(PROMPTS) for ids in work.prompts(step)]
    rows = work.batch_size * work.group_size
    at_once = rows if device == "cuda" else min(16, rows)  # the fastest on two cores

    def share(completions, completion_ids, trainer_state, **_):
        return share_of_letter(completions, map(len, completion_ids), work, trainer_state.global_step)

    class EachStep(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.wait(None, control)

        def on_step_end(self, args, state, control, **_):
            self.wait(record_of(self.start, args.device), control)

        def wait(self, record, control):
            control.should_training_stop = not turn(record)
            self.start = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        gpt2(transformers, work).save_pretrained(folder)
        config = trl.GRPOConfig(
            folder, per_device_train_batch_size=at_once, gradient_accumulation_steps=rows // at_once,
            num_generations=work.group_size, max_completion_length=work.completion_length, beta=0.04, temperature=1.0,
            top_p=1.0, num_iterations=1, learning_rate=1e-4, max_steps=10**6, lr_scheduler_type="constant",
            use_cpu=device == "cpu", bf16=dtype == "bfloat16", seed=0, report_to="none", save_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False, logging_strategy="no", optim="adamw_torch_fused",
            use_transformers_continuous_batching=batching)
        trainer = trl.GRPOTrainer(
            folder, share, config, datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer_of(transformers, work), callbacks=[EachStep()])
        if work.mixed:
            generate = trainer.model.generate
            trainer.model.generate = lambda *arguments, **named: generate(
                *arguments, **named, logits_processor=[logits_that_end(work, trainer.state.global_step)])
        trainer.train()


def logits_that_end(work, step):
    """A logits processor: before the length of a completion any token but the one that ends it, then only that."""
    lengths = torch.from_numpy(work.lengths(step).flatten())                         # (N,)
    is_stop = torch.arange(work.vocab_size) == work.stop_id                          # (V,)

    def process(ids, scores):
        reached = ids.shape[1] - work.prompt_length + 1 >= lengths                   # (N,)
        excluded = (reached[:, None] != is_stop).to(scores.device)                   # (N, V)
        return scores.masked_fill(excluded, -torch.inf)
    return process


def letter(i):
    """The character of a token id, never a space: a prompt's end would be cut."""
    return chr(0x100 + i)


def tokenizer_of(transformers, work):
    """A tokenizer of one character for each id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    plain = Tokenizer(models.WordLevel({letter(i): i for i in range(work.vocab_size)}))
    end = letter(work.stop_id) if work.mixed else NEVER
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=end, pad_token=end)


def share_of_letter(completions, lengths, work, step):
    """The reward of the work: how often each completion, all of the lengths of this step, has the first letter."""
    assert [*map(int, lengths)] == work.lengths(step).flatten().tolist()
    return [text.count(letter(0)) / work.completion_length for text in completions]


def run_peer(c):
    """Prints medians of the steps of each case, and a JSON object with TRL's seconds divided by ours."""
    require("trl", *NEEDS)
    os.environ["HF_HUB_OFFLINE"] = "1"  # of the children
    result = {}
    for case in c.cases.split(","):
        setup = CASES[case], c.device, c.dtype
        print(f"\n{case}: {CASES[case]}, {c.device}, {c.dtype}, {os.cpu_count()} cores")
        print(f"{'':<22}{'seconds of a step':>18}{'peak MB':>18}")
        found = in_turns([(trl_steps, *setup, c.batching), (our_steps, *setup)], WARMUP + c.steps)
        seconds = []
        for side, records in zip(("TRL", "ours"), found, strict=True):
            seconds.append(median(record["seconds"] for record in records[WARMUP:]))
            print(f"{side:<22}{seconds[-1]:>18.3f}{records[-1]['megabytes']:>18.0f}", flush=True)
        result[f"ratio_{case}"] = round(seconds[0] / seconds[1], 2)
    print(json.dumps(result))
