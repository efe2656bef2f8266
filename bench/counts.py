"""Counts what a GPU would do, without one: operations, bytes and passes over the logits of a token and of a step.

python bench/counts.py                                      # 0.5B and 1.5B: a token of 64 and of 512 rows, a step
python bench/counts.py --shapes=0.5B --by_line=True         # which lines launch them
python bench/counts.py --shapes=Qwen3-1.7B --lora_rank=16 --rows=64 --top_p=0.95
python bench/counts.py --memory=True --shapes=3B --lora_rank=16 --grad_checkpoint=True --prompt_length=200
python bench/counts.py --compiled=True                      # kernels of a compiled layer, from inductor on this CPU

Shapes are those of bench/random_models.py. A token: Decoder.step, for all rows at once. A step: scores, loss and
backward pass of a micro-batch. bench/fake_gpu.py says what an operation is. The [model] turns counts into seconds of
an H100 with the constants below, which fit what was measured there (docs/results.md) within a tenth, training of an
adapter within a fifth; the bound is what bytes and FLOPs alone would take. Memory is the formula of
docs/one_gpu.md with what autograd keeps: for each layer and token of a micro-batch (bytes, bfloat16)

                                    Qwen2.5                           Qwen3 adds
    all weights                     26 C + 8 H D + 8 I + 2 L          6 (H + K) D
    LoRA of rank r                  18 C + 10 H D + 8 I + 14 r + 2 L  4 (H + K) D

with width C, an MLP of width I, H heads and K key heads of size D, L = prompt + completion tokens. A completion also
keeps 4 H D for each token of its prompt. With grad_checkpoint 4 C (LoRA: 2 C), while one layer at a time keeps all.
"""

import contextlib
import os
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch._inductor import config as inductor
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler

from bench.fake_gpu import FakeGPU
from bench.random_models import SIZES, Trial
from core.config import load_config
from core.device import moved
from core.errors import run_script
from core.generation import Generation, Stop
from core.performance.decode import COLUMNS, POLL_STEPS, Decoder
from core.settings.setting import Count, Natural, Positive, Settings, Share
from grpo.grpo_training_step import rollout_loss
from grpo.losses import token_weights
from grpo.sampling_settings import SamplingSettings
from grpo.step_settings import StepSettings
from grpo.sums import Sums

GIB = 2**30
GROUP = 8  # completions of a problem
ROWS = 64, 512
COMPILED = "fused", "products", "others"
PRODUCTS_CALLED = {"mm", "addmm", "bmm", "baddbmm", "_linear_pointwise", "linear"}
KINDS = "elementwise", "products", "attention", "head"
# [model] of an H100
KERNEL = 2.2e-6      # seconds of a small kernel in a CUDA graph
BANDWIDTH = 3.0e12   # bytes a second
PRODUCTS = 600e12    # FLOPs a second of large products; training reaches TRAINED of it
TRAINED = 0.6
FACTOR = 1.2         # measured time is so much longer
LAUNCH = 28e-6       # seconds of Python for an operation of training
PEAK = 989e12        # FLOPs a second in the datasheet
GOALS = {("0.5B", 64): 25_000, ("0.5B", 512): 90_000}  # tokens a second of rows
SHARES = {"0.5B": 0.2, "1.5B": 0.3}                    # of PEAK in training


@dataclass(frozen=True)
class CountsConfig(Settings):
    """Sizes of what is counted."""

    shapes: tuple[str, ...] = ("0.5B", "1.5B")  # names in SIZES of random_models.py
    rows: Natural = 0  # a token: completions that are written at once, a multiple of 8; 0: 64, and 512
    columns: Count = 512  # a token: width of the cache, a multiple of 256
    top_p: Share = 1.0
    top_k: Natural = 0
    batch_size: Natural = 4  # a step: problems of a micro-batch, with 8 completions each; 0: no step
    prompt_length: Count = 64  # a step: tokens of each prompt
    completion_length: Count = 256  # a step: tokens of each completion
    lora_rank: Natural = 0
    grad_checkpoint: bool | None = None  # None: without and with it
    by_line: bool = False  # operations by line of code
    memory: bool = False  # GiB of a micro-batch, in place of counts
    dtype: Annotated[str, ("bfloat16", "float32")] = "bfloat16"  # memory: float32 with an adapter alone
    logits_gib: Positive = 2.0  # memory: of the largest logits, 1 on cards below 16 GiB, 2 up to 24, else 4
    compiled: bool = False  # kernels of a layer that inductor compiles on this CPU

    def conflicts(self):
        yield set(self.shapes) - SIZES.keys(), "shapes", f"must be names of {', '.join(SIZES)}"
        yield self.rows % GROUP, "rows", f"must be a multiple of {GROUP}"
        yield self.columns % COLUMNS, "columns", f"must be a multiple of {COLUMNS}"
        yield self.dtype == "float32" and not (self.memory and self.lora_rank), "dtype", "needs memory and lora_rank"


class Counted(Exception):
    """Ends sampling after the step that was counted."""


def count_token(size, rows, columns, top_p=1.0, top_k=0, lora_rank=0):
    """{Launch: how often} of a token of `rows` completions. With truncation the first step of each round sorts the
    whole vocabulary, so the second is counted."""
    size = replace(size, prompt_length=columns - POLL_STEPS, completion_length=POLL_STEPS)
    step = Decoder.step
    steps = 0
    with FakeGPU(size.vocabulary) as gpu:
        def counted_step(*args, **settings):
            nonlocal steps
            steps += 1
            if steps == 1:
                step(*args, **settings)
                return
            with gpu.recording():
                step(*args, **settings)
            raise Counted

        trial = Trial(size, "cuda", "bfloat16", lora_rank=lora_rank, group_size=GROUP)
        with mock.patch.object(Decoder, "step", counted_step), contextlib.suppress(Counted):
            trial.sample(batch_size=rows // GROUP, top_p=top_p, top_k=top_k)
    return Counter(gpu.launches)


def count_step(size, problems, lora_rank=0, grad_checkpoint=True):
    """{Launch: how often} of scores, loss and backward pass of a micro-batch of problems."""
    with FakeGPU(size.vocabulary) as gpu:
        trial = Trial(size, "cuda", "bfloat16", lora_rank=lora_rank, grad_checkpoint=grad_checkpoint,
                      batch_size=problems, group_size=GROUP)
        policy, config = trial.policy, trial.config
        settings = StepSettings.of(config, policy)
        rollouts = rollouts_of(trial)
        with gpu.recording():
            scores = policy.score(rollouts, settings.temperature)
            weight = token_weights(rollouts.train_mask, settings.objective.average, rollouts.max_tokens)
            loss = rollout_loss(scores, rollouts, weight, settings, Sums())
            loss.backward()
    return Counter(gpu.launches)


def of_all_layers(count, size, *arguments, **settings):
    """Counts a model of all its layers from models of 2 and 3, because every further layer launches the same."""
    two, three = (count(replace(size, layers=layers), *arguments, **settings) for layers in (2, 3))
    whole = {launch: two[launch] + (size.layers - 2) * (three[launch] - two[launch]) for launch in two | three}
    return Counter({launch: number for launch, number in whole.items() if number})


def total(launches, name="", kinds=KINDS):
    """The sum of a field of Launches of these kinds; without a name, how many they are."""
    return sum(number * (getattr(launch, name) if name else 1)
               for launch, number in launches.items() if launch.kind in kinds)


def rollouts_of(trial):
    """Rollouts of full length on the GPU, which nobody has sampled."""
    config, size = trial.config, trial.size
    shape = config.batch_size * GROUP, size.completion_length                        # (N, M)
    generation = Generation(
        target=torch.ones(shape, dtype=torch.long),
        mask=torch.ones(shape),
        logp=torch.zeros(shape),
        kept=None,
        truncated=torch.zeros(shape[0], dtype=torch.bool))
    rollouts = trial.policy.rollouts(trial.problems(config.batch_size), generation, SamplingSettings.of(config))
    advantage = torch.ones(shape[0], 1)                                              # (N, 1)
    rollouts = replace(rollouts, texts=None, advantage=advantage)
    return moved(rollouts, trial.dist.device)


def seconds_of(launch):
    """[model] of an operation in a CUDA graph."""
    busy = max(launch.bytes / BANDWIDTH, launch.flops / PRODUCTS)
    return FACTOR * (KERNEL + busy if launch.flops else max(KERNEL, busy))


def seconds_of_token(launches):
    """{kind: [model] seconds}"""
    found = dict.fromkeys(KINDS, 0.0)
    for launch, number in launches.items():
        found[launch.kind] += number * seconds_of(launch)
    return found


def seconds_of_step(launches):
    """[model] seconds in which the GPU multiplies, in which it does the rest, and in which Python launches."""
    rest = sum(number * launch.bytes for launch, number in launches.items() if not launch.flops)
    return total(launches, "flops") / PRODUCTS / TRAINED, FACTOR * rest / BANDWIDTH, total(launches) * LAUNCH


def together(gpu, python):
    """[model] seconds of a step whose GPU and Python work at the same time, as far as they can."""
    return max(gpu, python) + min(gpu, python) / 4


def bound(launches):
    """The time in which the GPU could move these bytes, or multiply."""
    return f"bound {1e3 * max(total(launches, 'bytes') / BANDWIDTH, total(launches, 'flops') / PRODUCTS):.2f} ms"


def show(title, launches, logits):
    """Prints operations, bytes and FLOPs by kind. logits: how many the model computes"""
    print(f"\n{title}\n{'':<14}{'operations':>11}{'MB':>10}{'GFLOP':>10}")
    for kind in (*KINDS, "all"):
        kinds = KINDS if kind == "all" else (kind,)
        print(f"{kind:<14}{total(launches, kinds=kinds):>11}{total(launches, 'bytes', kinds) / 1e6:>10.0f}"
              f"{total(launches, 'flops', kinds) / 1e9:>10.1f}")
    on_logits = Counter({launch: number for launch, number in launches.items() if launch.logits})
    print(f"{total(on_logits, 'logits') / logits:.1f} passes over the logits beside products, "
          f"{total(on_logits, 'bytes') / logits:.0f} bytes for each logit")


def show_lines(launches):
    """Prints operations and bytes by line."""
    by_line = {}
    for launch, number in launches.items():
        key = launch.line, launch.kind, launch.name
        count, moved_bytes = by_line.get(key, (0, 0))
        by_line[key] = count + number, moved_bytes + number * launch.bytes
    for (line, kind, name), (count, moved_bytes) in sorted(by_line.items(), key=lambda row: row[1], reverse=True):
        print(f"{count:>6}{moved_bytes / 1e6:>10.1f} MB  {kind:<12} {name:<48} {line}")


def token(c, name, rows):
    """A token of all rows: its table, and what the [model] makes of it."""
    size = SIZES[name]
    launches = of_all_layers(count_token, size, rows, c.columns, c.top_p, c.top_k, c.lora_rank)
    title = f"{name}: a token of {rows} rows, {c.columns} columns, top_p={c.top_p}, top_k={c.top_k}"
    show(f"{title}, lora_rank={c.lora_rank}", launches, rows * size.vocabulary)
    spent = seconds_of_token(launches)
    seconds = sum(spent.values())
    parts = ", ".join(f"{kind} {1e3 * of_kind:.2f}" for kind, of_kind in spent.items())
    print(f"[model] {1e3 * seconds:.2f} ms ({parts}): {rows / seconds:,.0f} tokens a second; {bound(launches)}")
    if goal := GOALS.get((name, rows)):
        left = rows / goal - seconds + spent["elementwise"]
        print(f"{goal:,} tokens a second leave {1e3 * rows / goal:.2f} ms: beside these products, attention and head "
              f"for {max(0, left) / KERNEL / FACTOR:.0f} small elementwise kernels")
    return launches


def step(c, name, grad_checkpoint):
    """A training step: its table, and what the [model] makes of it."""
    size = replace(SIZES[name], prompt_length=c.prompt_length, completion_length=c.completion_length)
    launches = of_all_layers(count_step, size, c.batch_size, c.lora_rank, grad_checkpoint)
    tokens = c.batch_size * GROUP * c.completion_length
    title = f"{name}: a training step of {c.batch_size} x {GROUP} x {c.completion_length} tokens"
    show(f"{title}, lora_rank={c.lora_rank}, grad_checkpoint={grad_checkpoint}", launches, tokens * size.vocabulary)
    products, rest, python = seconds_of_step(launches)
    seconds = together(products + rest, python)
    # The same operations as in bench/gpu.py: what grad_checkpoint computes again does not count
    flops = (4 if c.lora_rank else 6) * parameters(size) * (tokens + c.batch_size * c.prompt_length)
    print(f"[model] {seconds:.3f} s (products {products:.3f}, other kernels {rest:.3f}, launches {python:.3f}): "
          f"{tokens / seconds:,.0f} tokens a second, {flops / seconds / PEAK:.1%} of the peak; {bound(launches)}")
    if share := SHARES.get(name):
        goal = flops / PEAK / share
        left = max(0, goal - python / 4 / 4 - products)
        print(f"{share:.0%} of the peak leave {goal:.3f} s: with a quarter of these operations, "
              f"{total(launches) // 4}, for {left / FACTOR * BANDWIDTH / 1e9:.0f} GB of kernels beside products")
    return launches


def parameters(size):
    """The number of a model's weights, without biases and norms."""
    C, D = size.hidden, size.head_size
    attention = 2 * C * D * (size.heads + size.key_heads)
    embeddings = size.vocabulary * C * (1 if size.is_tied else 2)
    return size.layers * (attention + 3 * C * size.inner) + embeddings


# Memory

def count_kept(size, problems, lora_rank=0, grad_checkpoint=True, dtype="bfloat16"):
    """{"bytes": those that autograd keeps of a micro-batch of problems, without logits and weights, "adapter": number
    of trained weights of an adapter}."""
    kept = {}  # {storage: bytes}
    with FakeGPU(size.vocabulary):
        trial = Trial(size, "cuda", dtype, lora_rank=lora_rank, grad_checkpoint=grad_checkpoint,
                      batch_size=problems, group_size=GROUP)
        weights = list(trial.policy.parameters())

        def keep(x):
            kept[x.untyped_storage()._cdata] = x, x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            states = trial.policy.states(rollouts_of(trial))
        # Weights in bfloat16, which autocast keeps for the block, are not activations
        shapes = {shape for x in weights for shape in (x.shape, x.shape[::-1])}
        count = sum(number for x, number in kept.values() if x.shape not in shapes)
        adapter = sum(x.numel() for x in weights if x.requires_grad) if lora_rank else 0
    del states
    return Counter(bytes=count, adapter=adapter)


def memory(c, name, grad_checkpoint):
    """Prints the GiB of a micro-batch by the formulas of docs/one_gpu.md and of this file's docstring."""
    size = replace(SIZES[name], prompt_length=c.prompt_length, completion_length=c.completion_length)
    tokens = c.batch_size * (c.prompt_length + GROUP * c.completion_length)
    P, VC = parameters(size), size.vocabulary * size.hidden
    kept = of_all_layers(count_kept, size, c.batch_size, c.lora_rank, grad_checkpoint, c.dtype)
    activations = kept["bytes"]
    if grad_checkpoint:  # one layer at a time keeps all
        two, three = (count_kept(replace(size, layers=layers), c.batch_size, c.lora_rank, False, c.dtype)
                      for layers in (2, 3))
        activations += three["bytes"] - two["bytes"]
    width = getattr(torch, c.dtype).itemsize
    of_token = 2 * width * size.layers * size.key_heads * size.head_size
    cache = of_token * c.batch_size * GROUP * (c.prompt_length + c.completion_length)
    working = activations + c.logits_gib * GIB
    if c.lora_rank:
        needed = width * P + 16 * kept["adapter"] + working
    else:
        needed = 14 * P + max(4 * P + 4 * VC, 2 * P + 6 * VC + working)
    print(f"{name}, {c.batch_size} x {GROUP} x {c.completion_length}, lora_rank={c.lora_rank}, "
          f"grad_checkpoint={grad_checkpoint}: {(needed + cache) / GIB:.1f} GiB; activations "
          f"{activations / GIB:.2f} GiB, {kept['bytes'] / tokens / size.layers:.0f} bytes a token and layer; cache "
          f"{cache / GIB:.2f} GiB, {of_token} bytes a token")


# Compiled layers

def compiled(c):
    """Prints the kernels of each program that the layers of a small Qwen2.5 and Qwen3 need on the CPU. Their number
    does not depend on the width. Triton fuses much the same."""
    for family, head in (("Qwen2.5", None), ("Qwen3", 16)):
        size = replace(SIZES["mini"], head=head)
        for way, run in (("tokens", sampled), ("training", trained)):
            torch._dynamo.reset()
            trial = Trial(size, "cpu", "bfloat16", lora_rank=c.lora_rank, batch_size=2, group_size=GROUP,
                          grad_checkpoint=bool(c.grad_checkpoint))
            trial.policy.compile()
            for kernels in kernels_of(lambda run=run, trial=trial: run(trial)):
                print(f"{family}, {way}, a program:", ", ".join(f"{kernels[kind]} {kind}" for kind in COMPILED))


def kernels_of(run):
    """{kind: number of kernels} of each program that inductor makes in run(), by its scheduler."""
    programs = []
    codegen = Scheduler.codegen

    def counted_codegen(scheduler):
        kernels = Counter()
        for node in scheduler.nodes:
            if isinstance(node, ExternKernelSchedulerNode):
                name = str(node.node.python_kernel_name or node.node.op_overload)
                is_product = name.rpartition(".")[2] in PRODUCTS_CALLED
                kernels["products" if is_product else "others"] += 1
            elif not isinstance(node, NopKernelSchedulerNode):
                kernels["fused"] += 1
        programs.append(kernels)
        return codegen(scheduler)

    with mock.patch.object(Scheduler, "codegen", counted_codegen), inductor.patch(force_disable_caches=True):
        run()
    return programs


def sampled(trial):
    """Some tokens of a Decoder, on a CPU."""
    decoder = Decoder(trial.policy.model)
    prompt = torch.ones(2, trial.size.prompt_length, dtype=torch.long)
    padding = torch.zeros(2, dtype=torch.long)
    with trial.policy.autocast():
        decoder(prompt, padding, torch.zeros(2, GROUP, POLL_STEPS, dtype=torch.double), Stop(trial.policy.tokenizer))


def trained(trial):
    """Scores and the backward pass."""
    trial.policy.score(rollouts_of(trial), 1.0).logp.sum().backward()


def main(argv):
    """Prints the counts."""
    c, _ = load_config(CountsConfig, argv)
    if c.compiled:
        return compiled(c)
    for name in c.shapes:
        ways = (False, True) if c.grad_checkpoint is None else (c.grad_checkpoint,)
        if c.memory:
            for way in ways:
                memory(c, name, way)
            continue
        counts = [(token, name, rows) for rows in ((c.rows,) if c.rows else ROWS)]
        if c.batch_size:
            counts += [(step, name, way) for way in ways]
        for count, *which in counts:
            launches = count(c, *which)
            if c.by_line:
                show_lines(launches)


if __name__ == "__main__":
    run_script(main)
