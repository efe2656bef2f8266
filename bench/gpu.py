"""Measures one GPU: its own speed, golden runs, sampling and training of random models, and what training learns.

python bench/gpu.py machine golden training    # checks your GPU; docs/results.md has figures
python bench/gpu.py sampling generate --shapes=0.5B --out=found.jsonl
python bench/gpu.py learn --model=FOLDER --dataset=FILE --settings="{'max_new_tokens': 160, 'max_iters': 60}"
python bench/gpu.py scratch                    # a model of 25 M parameters, supervised, then by GRPO
python bench/gpu.py sampling --mini=True       # tiny sizes on a CPU, to try a part
python bench/bench.py peer --cases=M --device=cuda --dtype=bfloat16    # TRL's step and this one on GPT-2 medium

machine   versions, TFLOP/s of a matrix product, GB/s of a copy
golden    golden runs that differ from the CPU's numbers (tests/golden/golden.py)
sampling  tokens a second of 64 to 512 completions at once, with top_p and with an adapter; kernels by time
training  tokens a second, share of the peak, memory of a training step; kernels by time
generate  tokens a second of transformers' generate on the rows of `sampling`
learn     config/grpo_smollm2.py, or another config, model and dataset, with several seeds side by side
scratch   Countdown with four numbers from scratch

Each finding is a JSON object on a line of its own.
"""

import gc
import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch.profiler import ProfilerActivity, profile

from bench.learning import learn, scratch
from bench.random_models import SIZES, Trial, random_net
from bench.sides import started
from core.config import load_config
from core.errors import ROOT, Mistake, UsageError, run_script
from core.files import writing
from core.settings.optional import quiet_transformers
from core.settings.setting import Count, Name, Positive, Settings

GIB = 2**30
GROUP = 8        # completions of a problem
SAMPLED = {  # {(rank of the adapter, 0 for none; compile): pairs of completions at once and top_p}
    (0, False): ((64, 1.0), (256, 1.0), (512, 0.95), (512, 1.0)),
    (16, False): ((64, 1.0), (256, 1.0)),
    (0, True): ((64, 1.0), (512, 0.95), (512, 1.0))}
# The logits of random weights hardly differ, so that top_p would keep most of the vocabulary; at this temperature it
# keeps tens or hundreds, as of a trained model
SHARP = 0.1
TRAINED = (  # rank, grad_checkpoint, problems, compile
    (0, True, 4, False), (0, False, 4, False), (16, True, 4, False), (16, False, 4, False), (0, True, 16, False),
    (0, True, 4, True), (0, False, 4, True), (16, False, 4, True))
GENERATED = 64, 512  # completions at once
FEWER = 16       # a miniature divides the completions at once by this
KERNELS = 14     # kernels that are shown
REPEATS = 3      # samplings and steps; the first captures graphs and is not counted


@dataclass(frozen=True)
class GPUConfig(Settings):
    """Sizes of the measurements, and the files of a run that learns."""

    device: Annotated[str | None, ("cuda", "cpu")] = None  # None: cuda, with mini the CPU
    mini: bool = False  # tiny sizes, to try the parts
    out: str = ""  # a file that the findings are appended to

    # Speed and memory: random weights
    shapes: tuple[str, ...] = ("0.5B", "1.5B")  # names in SIZES of random_models.py, most of Qwen2.5
    dtype: Annotated[str, ("bfloat16", "float32")] = "bfloat16"  # precision of matrix products
    peak_tflops: Positive = 989.0  # of the GPU's datasheet, for the share that training reaches; H100, H200: 989

    # What training learns
    model: str = ""  # of learn: a folder in Hugging Face format, or a file of this project; empty: that of the config
    dataset: str = ""  # of learn: a folder or a file of records; empty: that of the config
    config: str = ""  # of learn; empty: config/grpo_smollm2.py, with mini config/grpo_arithmetic.py
    settings: dict | None = None  # of learn: other settings of train_grpo.py, such as {'max_iters': 60}
    seeds: Count = 3  # of learn: runs side by side
    folder: Name = "out-bench"  # of the runs

    def conflicts(self):
        yield set(self.shapes) - SIZES.keys(), "shapes", f"must be names of {', '.join(SIZES)}"

    @property
    def device_used(self):
        return self.device or ("cpu" if self.mini else "cuda")

    def rows(self, count):
        """The number of completions that stands for `count`."""
        return max(GROUP, count // FEWER) if self.mini else count

    @property
    def sizes(self):
        """{name: Size} of the models with random weights."""
        names = ("mini",) if self.mini else self.shapes
        return {name: SIZES[name] for name in names}


def machine(c):
    """Versions and speed of the machine."""
    transformers = quiet_transformers("Qwen2.5", "model")
    found = {"torch": torch.__version__, "transformers": transformers.__version__, "cores": os.cpu_count()}
    if c.device_used == "cuda":
        found["GPU"] = torch.cuda.get_device_name()
        found["GiB"] = round(torch.cuda.mem_get_info()[1] / GIB, 1)
    width = 256 if c.mini else 8192
    x = torch.randn(width, width, device=c.device_used).to(getattr(torch, c.dtype))
    much = x.new_empty(2**20 if c.mini else 2**29)
    product, copy = seconds_of(lambda: x @ x, x.device), seconds_of(much.clone, x.device)
    yield found | {"TFLOP/s": round(2 * width**3 / product / 1e12, 3), "GB/s": round(2 * much.nbytes / copy / 1e9, 1)}


def seconds_of(call, device, times=10):
    """The mean seconds of a call, after three that are not counted."""
    for _ in range(3):
        call()
    start = started(device)
    for _ in range(times):
        call()
    return (started(device) - start) / times


def golden(c):
    """The golden runs that differ from the CPU's numbers, in both precisions."""
    names = ["arithmetic"] if c.mini else []
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "tests/golden/golden.py", f"--device={c.device_used}", f"--dtype={dtype}", *names]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        equal = re.findall(r"^\w+: equal$", done.stdout, re.M)
        differ = [line for line in done.stdout.splitlines() if line not in equal]
        yield {"dtype": dtype, "exit code": done.returncode, "equal": len(equal), "differ": differ}


def sampling(c):
    """Tokens a second of completions that are sampled at once."""
    for (name, size), ((rank, is_compiled), ways) in itertools.product(c.sizes.items(), SAMPLED.items()):
        gc.collect()  # of the model before it
        trial = Trial(size, c.device_used, c.dtype, lora_rank=rank, compile=is_compiled, group_size=GROUP)
        found = {"shape": name, "lora_rank": rank, "compile": is_compiled}
        for rows, top_p in ways:
            way = {"batch_size": c.rows(rows) // GROUP, "top_p": top_p, "temperature": SHARP if top_p < 1 else 1.0}
            yield found | way | measured_sampling(trial, way)
        way["max_new_tokens"] = size.completion_length // 8
        trial.sample(**way)
        with profiler(trial.dist.device) as profiled:
            _, seconds = trial.sample(**way)
        yield found | way | kernels(profiled, seconds, trial.dist.device)


def measured_sampling(trial, way):
    """Speed of sampling with these changes of the config."""
    found = [trial.sample(**way) for _ in range(REPEATS)]
    rollouts, first = found[0]
    seconds = min(seconds for _, seconds in found[1:])
    completions, length = rollouts.target.shape
    return {"completions": completions, "CUDA graphs": trial.has_graphs, "first seconds": round(first, 2),
            "seconds": round(seconds, 3), "tokens a second": round(completions * length / seconds),
            "ms a token": round(1e3 * seconds / length, 2)}


def training(c):
    """Tokens a second, share of the peak, and memory of the training half of a step."""
    for (name, size), (rank, checkpoint, problems, is_compiled) in itertools.product(c.sizes.items(), TRAINED):
        gc.collect()
        settings = {"lora_rank": rank, "grad_checkpoint": checkpoint, "compile": is_compiled}
        found = {"shape": name, **settings, "completions": problems * GROUP}
        settings |= {"batch_size": problems, "group_size": GROUP}
        try:
            yield found | measured_training(Trial(size, c.device_used, c.dtype, **settings), c.peak_tflops)
        except torch.OutOfMemoryError:
            yield found | {"failed": "out of memory"}


def measured_training(trial, peak_tflops):
    """Speed and memory of the steps of a Trial."""
    device, size, count = trial.dist.device, trial.size, trial.config.batch_size
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = [trial.train() for _ in range(REPEATS)]
    memory = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    sampled, trained = (min(seconds) for seconds in zip(*steps[1:], strict=True))
    profiled = profiler(device)
    _, seconds = trial.train(profiled.start)
    profiled.stop()
    completions = count * GROUP * size.completion_length
    # Operations for each weight and token: 2 forward, 2 for the gradient of states, 2 for that of weights, which a
    # frozen base does not need; what grad_checkpoint computes again does not count
    operations = 4 if trial.config.has_adapter else 6
    parameters = trial.policy.model.num_parameters()
    flops = operations * parameters * (completions + count * size.prompt_length)
    return {"seconds of sampling": round(sampled, 3), "of training": round(trained, 3),
            "tokens a second": round(completions / trained), "MFU": round(flops / trained / peak_tflops / 1e12, 4),
            "peak GiB": memory and round(memory, 1), **kernels(profiled, seconds, device)}


def profiler(device):
    """The profiler of what the device does."""
    return profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])


def kernels(profiled, seconds, device):
    """The profile of a call: ms on the device, launches, and [name, launches, ms] of the kernels that take most; on a
    CPU of functions."""
    rows = []
    for row in profiled.key_averages():
        microseconds = row.self_device_time_total if device.type == "cuda" else row.self_cpu_time_total
        if microseconds > 0:  # others are calls of the host
            rows.append((row.key[:70], row.count, round(microseconds / 1e3, 2)))
    rows.sort(key=lambda row: -row[2])
    return {"profiled ms": round(1e3 * seconds, 1), "ms on the device": round(sum(row[2] for row in rows), 1),
            "launches": sum(row[1] for row in rows), "kernels": rows[:KERNELS]}


def generate(c):
    """Tokens a second of transformers' generate, whose cache grows."""
    for (name, size), rows in itertools.product(c.sizes.items(), map(c.rows, GENERATED)):
        net = random_net(size, c.device_used).to(getattr(torch, c.dtype)).eval()
        prompts = torch.randint(size.vocabulary, (rows, size.prompt_length), device=c.device_used)
        seconds = []
        for _ in range(2):
            start = started(prompts.device)
            net.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=size.completion_length, min_new_tokens=size.completion_length, pad_token_id=0)
            seconds.append(started(prompts.device) - start)
        yield {"shape": name, "completions": rows, "seconds": round(seconds[-1], 3),
               "tokens a second": round(rows * size.completion_length / seconds[-1])}


PARTS = {
    "machine": machine,
    "golden": golden,
    "sampling": sampling,
    "training": training,
    "generate": generate,
    "learn": learn,
    "scratch": scratch}


def main(argv):
    """Prints the findings of the parts that the arguments name."""
    parts = [argument for argument in argv if not argument.startswith("-")]
    c, _ = load_config(GPUConfig, [argument for argument in argv if argument.startswith("-")])
    unknown = [part for part in parts if part not in PARTS]
    if not parts or unknown:
        raise UsageError(f"{' '.join(unknown) or 'no part'}: python bench/gpu.py PART... [--key=value], of the parts "
                         f"{', '.join(PARTS)}")
    if c.device_used == "cuda" and not torch.cuda.is_available():
        raise Mistake("torch can use no GPU here: set --device=cpu, or --mini=True to try a part")
    start = time.perf_counter()
    with writing(f"out={c.out}"):
        out = open(c.out or os.devnull, "a")
    with out:
        for part in parts:
            for found in PARTS[part](c):
                line = json.dumps({"part": part, **found, "after": round(time.perf_counter() - start, 1)})
                for file in (sys.stdout, out):
                    print(line, file=file, flush=True)


if __name__ == "__main__":
    run_script(main)
