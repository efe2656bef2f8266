"""This project's training step and TRL's on the same work, in turns on one machine."""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch

from bench.sides import in_turns, memory_in_use, problems, wait_for_device
from core.distributed import Distributed
from core.huggingface.model import HuggingFaceModel
from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from core.settings.optional import quiet_transformers, require
from core.settings.ranges import check_choices, check_ranges
from core.training_step import build_optimizers
from grpo.build import build_reference, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import Scored

NEEDS = "bench.py peer", "trl accelerate"  # who needs TRL, what pip is to install
PROMPTS = 32       # steps until TRL's prompts come again
ROWS = 16          # TRL's fastest number of completions in a forward pass on two cores
NEVER = "<never>"  # a token behind the model's vocabulary ends a completion, so none ends by itself
WARMUP = 1         # steps of each side that are not counted
NAMES = ("TRL, best", "ours", "ours, same GPT-2")
ABOUT = """Medians of steps in turns. TRL's best: no gradient checkpointing, up to 16 completions in a forward pass,
no logging, fused AdamW."""


@dataclass(frozen=True)
class Work:
    """One step of a causal model of GPT-2's shape: completions of prompts, a KL to a reference, one update."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    vocab_size: int = 128
    batch_size: int = 8          # prompts
    group_size: int = 8          # completions of each
    prompt_length: int = 32
    completion_length: int = 64  # tokens of each completion

    def prompts(self, step):
        """(P, T) token ids of a step's prompts."""
        return np.random.default_rng(step).integers(self.vocab_size, size=(self.batch_size, self.prompt_length))


S = {"n_layer": 6, "n_head": 6, "n_embd": 384}
CASES = {"T": Work(), "S": Work(**S), "T_long": Work(prompt_length=256), "S_long": Work(**S, prompt_length=256)}


@dataclass(frozen=True)
class PeerConfig:
    """The settings of `bench.py peer`."""

    cases: str = ",".join(CASES)  # names of cases: T 4 layers x 128, S 6 x 384; long prompts
    steps: int = 5                # measured steps of each side, in turns; the median is reported
    device: str = "cpu"           # cpu, cuda or mps
    dtype: str = "float32"        # float32 or bfloat16

    def __post_init__(self):
        for case in self.cases.split(","):
            if case not in CASES:
                raise ValueError(f"cases: {case!r} is not one of {', '.join(CASES)}")
        check_ranges(self, {"steps": "[1, inf)"})
        check_choices(self, {"device": ("cpu", "cuda", "mps"), "dtype": ("float32", "bfloat16")})


def our_steps(work, device, dtype, huggingface, turn):
    """This project's side. huggingface: on a model of transformers"""
    config = GRPOConfig(
        batch_size=work.batch_size, group_size=work.group_size, max_new_tokens=work.completion_length, temperature=1.0,
        top_p=1.0, kl_beta=0.04, kl_estimator="k3", learning_rate=1e-4, device=device, dtype=dtype)
    dist = Distributed(device, dtype)
    tokenizer = SimpleNamespace(  # one letter for each id
        base_vocab_size=work.vocab_size, vocab_size=work.vocab_size, banned_token_ids=(), mask_token_id=None,
        stop_token_ids=(), decode=lambda ids: "".join(chr(33 + i % 90) for i in ids))
    if huggingface:
        model = HuggingFaceModel(gpt2(quiet_transformers("GPT-2", "model"), work), tokenizer, LANGUAGE_MODEL)
    else:
        torch.manual_seed(0)
        sizes = (work.prompt_length + work.completion_length, work.n_layer, work.n_head, work.n_embd)
        model = GPT(GPTConfig(LANGUAGE_MODEL, work.vocab_size, work.vocab_size, *sizes))
    policy = make_policy(model.to(dist.device), tokenizer, config, dist)
    reference = build_reference(config, policy, dist)
    optimizers = build_optimizers(policy, config, dist.device.type)

    def rewards(rollouts):
        lengths = rollouts.mask.sum(1).int().tolist()
        shares = share_of_letter(rollouts.texts.completions, lengths, work)
        return Scored(torch.tensor(shares, device=dist.device).view(-1, work.group_size))

    step = 0
    go_on = turn(None)
    while go_on:
        batch = problems(work.prompts(step))
        start = time.perf_counter()
        grpo_training_step(policy, reference, rewards, lambda _: batch, optimizers, step, config, dist)
        go_on = turn(record_of(start, dist.device))
        step += 1


def gpt2(transformers, work):
    """A random GPT-2 of this size, without dropout, the same in every process."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=work.vocab_size, n_positions=work.prompt_length + work.completion_length, n_layer=work.n_layer,
        n_head=work.n_head, n_embd=work.n_embd, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
        eos_token_id=None))


def trl_steps(work, device, dtype, turn):
    """TRL's side, with the settings with which it is fastest on two cores."""
    trl = require("trl", *NEEDS)
    datasets = require("datasets", *NEEDS)
    transformers = quiet_transformers("GPT-2", "model")
    datasets.disable_progress_bars()
    prompts = ["".join(map(letter, ids)) for step in range(PROMPTS) for ids in work.prompts(step)]
    rows = work.batch_size * work.group_size
    at_once = min(ROWS, rows)

    def share(completions, completion_ids, **_):
        return share_of_letter(completions, [*map(len, completion_ids)], work)

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
            disable_tqdm=True, gradient_checkpointing=False, logging_strategy="no", optim="adamw_torch_fused")
        trainer = trl.GRPOTrainer(
            folder, share, config, datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer_of(transformers, work), callbacks=[EachStep()])
        trainer.train()


def letter(i):
    """The character of a token id. Spaces are left out: a prompt's end would be cut."""
    return chr(33 + i) if i < 94 else chr(0x100 + i)


def tokenizer_of(transformers, work):
    """A tokenizer of one character for each id."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    words = {letter(i): i for i in range(work.vocab_size)}
    plain = Tokenizer(models.WordLevel(words))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=NEVER, pad_token=NEVER)


def record_of(start, device):
    """The record of a step that began at `start`."""
    wait_for_device(device)
    return {"seconds": time.perf_counter() - start, "megabytes": memory_in_use(device)}


def share_of_letter(completions, lengths, work):
    """The reward of the work: the share of the letter a in each completion, all of the length of the work."""
    assert set(lengths) == {work.completion_length}, f"{lengths}"
    return [text.count("a") / max(1, len(text)) for text in completions]


def run_peer(c):
    """Prints a table for each case, and a JSON object with TRL's seconds of a step divided by ours."""
    require("trl", *NEEDS)
    os.environ["HF_HUB_OFFLINE"] = "1"  # of the children
    print(ABOUT)
    result = {}
    for case in c.cases.split(","):
        setup = (CASES[case], c.device, c.dtype)
        records = in_turns([(trl_steps, *setup), (our_steps, *setup, False), (our_steps, *setup, True)],
                           WARMUP + c.steps)
        print(f"\n{case}: {CASES[case]}, {c.device}, {c.dtype}, {os.cpu_count()} cores")
        trl, ours, same_model = report(CASES[case], [found[WARMUP:] for found in records])
        result[f"ratio_{case}"] = round(trl / ours, 2)
        result[f"ratio_{case}_hf"] = round(trl / same_model, 2)
    print(json.dumps(result))


def report(work, records):
    """Prints the table of a case. records: for each side those of its steps. Returns the seconds of a step of each."""
    tokens = work.batch_size * work.group_size * work.completion_length
    seconds = [median(record["seconds"] for record in found) for found in records]
    rows = {
        "": NAMES,
        "seconds of a step": [f"{s:.3f}" for s in seconds],
        "tokens per second": [f"{tokens / s:.0f}" for s in seconds],
        "peak MB": [f"{found[-1]['megabytes']:.0f}" for found in records]}
    for name, cells in rows.items():
        print(f"{name:<22}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    return seconds
