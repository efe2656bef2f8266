"""Runs this code on your GPU and prints a table to paste; docs/one_gpu.md says what to expect.

python grpo/tools/gpu_check.py
python grpo/tools/gpu_check.py --quick=True   # one golden run, steps of a tiny model: to try the script
"""

import gc
import pathlib
import re
import subprocess
import sys
import time
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from core.config import load_config
from core.distributed import Distributed
from core.huggingface.lora import add_adapter
from core.huggingface.model import HuggingFaceModel
from core.model import LANGUAGE_MODEL
from core.optim import build_optimizers
from core.settings.optional import quiet_transformers
from core.settings.script import run_script
from core.settings.setting import Settings, setting
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import Scored

GIB = 2**30
STEPS = 3  # the first loads kernels and is not counted
WAYS = (0, True), (16, True), (16, False)  # rank of the adapter, 0: all weights are trained; grad_checkpoint
SHAPES = {  # width, inner width, layers, heads, their keys, of a Qwen2.5; GiB on 80 GB for each of WAYS
    "0.5 B": ((896, 4864, 24, 14, 2), (13.5, 6.0, 17.6)),
    "1.5 B": ((1536, 8960, 28, 12, 2), (30.9, 9.0, 33.3)),
    "tiny": ((64, 128, 2, 4, 2), (0.0, 0.0, 0.0))}
TOKENIZER = SimpleNamespace(
    base_vocab_size=151_936, vocab_size=151_936, banned_token_ids=(), mask_token_id=None, stop_token_ids=(), decode=str)


class CheckConfig(Settings):
    quick: bool = setting(False, "one golden run, steps of a tiny model: to try the script")


def machine(device):
    if device.type != "cuda":
        return f"{device}, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    return (f"{torch.cuda.get_device_name(device)}, capability {major}.{minor}, "
            f"{torch.cuda.mem_get_info(device)[1] / GIB:.1f} GiB, torch {torch.__version__}")


def scripts(dist, quick):
    """Golden runs against the CPU's numbers, TRL's steps beside ours: scripts, because grpo/ imports neither."""
    for dtype in ("float32", "bfloat16"):
        where = f"--device={dist.device.type}", f"--dtype={dtype}"
        out = script("tests/golden/golden.py", *where, *["arithmetic"] * quick)
        found = re.findall(r"^(\w+): (.*)$", out, re.M)
        differ = [f"{name}: {what}" for name, what in found if what != "equal"]
        yield f"golden runs, {dtype}", "; ".join(differ) or f"{len(found)} as on the CPU"
    if dist.device.type == "cuda":
        yield "bench.py peer", script("bench/bench.py", "peer", "--device=cuda", "--dtype=bfloat16").split("\n")[-1]


def script(*argv):
    """The output of a script and, if it failed, the last line of its errors."""
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True)
    error = done.stderr.strip().split("\n")[-1]
    return done.stdout.strip() + f"\nfailed: {error}" * bool(done.returncode and error)


def steps(dist, quick):
    """Speed and memory of training steps."""
    for name in ("tiny",) if quick else ("0.5 B", "1.5 B"):
        shape, figures = SHAPES[name]
        for (rank, checkpoint), gib in zip(WAYS, figures, strict=True):
            config = GRPOConfig(
                batch_size=4, max_new_tokens=8 if quick else 256, top_p=1.0, lora_rank=rank, grad_checkpoint=checkpoint)
            try:
                found = take_steps(shape, config, dist)
            except torch.OutOfMemoryError:
                found = "out of memory"
            gc.collect()
            what = (f"LoRA of rank {rank}" if rank else "all weights") + ", grad_checkpoint" * checkpoint
            yield f"{name}, {what}", f"{found}, by docs/one_gpu.md {gib}"


def take_steps(shape, config, dist):
    """Takes steps on random prompts, and says how fast they were and what they needed."""
    P, times, on_gpu = config.batch_size, [], dist.device.type == "cuda"
    policy = make_policy(model_of(shape, config, dist), TOKENIZER, config, dist)
    optimizers = build_optimizers(policy, config, dist.device.type)
    prompts = np.random.default_rng(0).integers(TOKENIZER.vocab_size, size=(P, 64))
    problems = {"input": prompts, "padding": np.zeros(P, dtype=np.int64), "number": np.arange(P),
                "record": [{"prompt": "a", "text": "a", "tokens": ids} for ids in prompts.tolist()]}

    def note_time():
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    def rewards(rollouts):
        note_time()  # sampling ends, training begins
        return Scored(torch.rand(P, config.group_size, device=dist.device))

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(STEPS):
        note_time()
        grpo_training_step(policy, None, rewards, lambda _: problems, optimizers, step, config, dist)
    note_time()
    sampling, training = np.diff(times).reshape(STEPS, 2)[1:].mean(0)
    tokens, peak = P * config.group_size * config.max_new_tokens, torch.cuda.max_memory_allocated() / GIB
    return f"{tokens / sampling:,.0f} tokens/s sampled, {tokens / training:,.0f} trained, peak {peak:.1f} GiB"


def model_of(shape, config, dist):
    """A Qwen2.5 with random weights."""
    transformers = quiet_transformers("Qwen2.5", "model")
    width, inner, n_layer, n_head, n_key = shape
    net = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=TOKENIZER.vocab_size, hidden_size=width, intermediate_size=inner, num_hidden_layers=n_layer,
        num_attention_heads=n_head, num_key_value_heads=n_key, tie_word_embeddings=True))
    if config.has_adapter:
        net = add_adapter(net.to(dist.dtype), config)
    return HuggingFaceModel(net, TOKENIZER, LANGUAGE_MODEL, config).to(dist.device)


def main(argv):
    quick = load_config(CheckConfig, argv)[0].quick
    with Distributed() as dist:
        print(f"| what | found |\n|---|---|\n| machine | {machine(dist.device)} |", flush=True)
        if dist.device.type != "cuda" and not quick:
            print("| all else | skipped without a GPU; --quick=True tries it |")
            return
        for part in (scripts, steps):
            for what, found in part(dist, quick):
                print(f"| {what} | {found} |", flush=True)


if __name__ == "__main__":
    run_script(main)
