"""Runs this code on your GPU and prints a table to paste; docs/one_gpu.md says what to expect.

python grpo/tools/gpu_check.py
python bench/bench.py peer --device=cuda --dtype=bfloat16   # speed and memory beside TRL
"""

import gc
import itertools
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

from core.distributed import Distributed
from core.errors import UsageError, run_script
from core.huggingface.lora import add_adapter
from core.huggingface.model import HuggingFaceModel
from core.model import LANGUAGE_MODEL
from core.optim import build_optimizers
from core.settings.optional import quiet_transformers
from grpo.build import LEFT_TO_RIGHT, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import Scored

GIB = 2**30
WAYS = (0, True), (16, True), (16, False)  # rank of the adapter, 0: all weights are trained; grad_checkpoint
SHAPES = {"0.5 B": (896, 4864, 24, 14, 2), "1.5 B": (1536, 8960, 28, 12, 2)}  # arguments of model_of, as of Qwen2.5
TOKENIZER = SimpleNamespace(
    base_vocab_size=151_936, vocab_size=151_936, banned_token_ids=(), mask_token_id=None, stop_token_ids=(), decode=str)


def golden(dtype):
    """The golden runs that differ from the CPU's numbers."""
    command = [sys.executable, "tests/golden/golden.py", "--device=cuda", f"--dtype={dtype}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    differ = re.findall(r"^\w+: (?!equal$).*$", done.stdout, re.M)
    error = done.stderr.strip().rpartition("\n")[2]
    return "; ".join(differ) or (error if done.returncode else "as on the CPU")


def model_of(width, inner, n_layer, n_head, n_key, config, dist):
    """A Qwen2.5 with random weights. inner: width within an MLP; n_key: heads of keys and values"""
    transformers = quiet_transformers("Qwen2.5", "model")
    net = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=TOKENIZER.vocab_size, hidden_size=width, intermediate_size=inner, num_hidden_layers=n_layer,
        num_attention_heads=n_head, num_key_value_heads=n_key, tie_word_embeddings=True))
    if config.has_adapter:
        net = add_adapter(net.to(dist.dtype), config)
    return HuggingFaceModel(net, TOKENIZER, LANGUAGE_MODEL, config.has_adapter).to(dist.device)


def steps(shape, config, dist):
    """Speed and memory of a step on random prompts; the step before it warms up and captures the CUDA graphs."""
    P, times = config.batch_size, []
    policy = make_policy(LEFT_TO_RIGHT, model_of(*shape, config, dist), TOKENIZER, config, dist)
    optimizers = build_optimizers(policy, config, "cuda")
    prompts = np.random.default_rng(0).integers(TOKENIZER.vocab_size, size=(P, 64))
    problems = {"input": prompts, "padding": np.zeros(P, dtype=np.int64), "number": np.arange(P),
                "record": [{"prompt": "a", "text": "a", "tokens": ids} for ids in prompts.tolist()]}

    def note_time():
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    def rewards(rollouts):
        note_time()  # sampling ends, training begins
        return Scored(torch.rand(P, config.group_size, device=dist.device))

    torch.cuda.reset_peak_memory_stats()
    for step in range(2):
        note_time()
        grpo_training_step(policy, None, rewards, lambda _: problems, optimizers, step, config, dist)
    note_time()
    sampling, training = np.diff(times)[-2:] / (P * config.group_size * config.max_new_tokens)
    graphs = "with" if policy.decoder and policy.decoder.captures else "without"
    return (f"{1 / sampling:,.0f} tokens/s sampled {graphs} CUDA graphs, {1 / training:,.0f} trained, "
            f"peak {torch.cuda.max_memory_allocated() / GIB:.1f} GiB")


def rows(dist):
    """Pairs of what was tried and what was found."""
    yield "machine", (f"{torch.cuda.get_device_name(dist.device)}, "
                      f"{torch.cuda.mem_get_info(dist.device)[1] / GIB:.1f} GiB, torch {torch.__version__}")
    for dtype in ("float32", "bfloat16"):
        yield f"golden runs, {dtype}", golden(dtype)
    for (name, shape), (rank, checkpoint) in itertools.product(SHAPES.items(), WAYS):
        config = GRPOConfig(batch_size=4, max_new_tokens=256, top_p=1.0, lora_rank=rank, grad_checkpoint=checkpoint)
        gc.collect()  # of the model before it
        try:
            found = steps(shape, config, dist)
        except torch.OutOfMemoryError:
            found = "out of memory"
        yield f"{name}, lora_rank={rank}, grad_checkpoint={checkpoint}", found


def main(argv):
    with Distributed() as dist:
        if argv or dist.device.type != "cuda":
            raise UsageError(f"python grpo/tools/gpu_check.py has no settings and needs a GPU, not {dist.device}")
        print("| what | found |\n|---|---|")
        for what, found in rows(dist):
            print(f"| {what} | {found} |", flush=True)


if __name__ == "__main__":
    run_script(main)
