"""Small data sets, models and batches that the tests share."""

import os
import re
import subprocess
import sys

import torch

from core.checkpoint_manager import freeze, save_model
from core.dataset_consumer import DatasetConsumer, write_dataset
from core.distributed import Distributed
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig
from core.prompts import PromptConsumer, write_prompts
from core.tokenizer import CharTokenizer
from grpo.grpo_config import GRPOConfig
from grpo.rewards import Rewards

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls watch from their old oak tree".split()
TEXT = "".join(" ".join(WORDS[(i * j + j) % len(WORDS)] for j in range(9)) + "\n" for i in range(120))
TOKENIZER, CAUSAL = CharTokenizer(), CharTokenizer(stop=True)


def write_text_dataset(folder, text):
    cut = len(text) * 4 // 5
    write_dataset(str(folder), {"train": TOKENIZER.encode(text[:cut]), "val": TOKENIZER.encode(text[cut:])}, TOKENIZER)


def write_prompt_dataset(folder, count=60):
    """Sums of small numbers: prompts of two lengths."""
    pairs = [(a, b) for a in range(5, 13) for b in range(5, 13)][:count]
    records = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)} for a, b in pairs]
    write_prompts(str(folder), records, CAUSAL)
    return str(folder)


def model(mode=MASKED_FILL, seed=0, scale=8.0, tokenizer=TOKENIZER, **settings):
    """A tiny model; `scale` enlarges its weights, so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 33, "tied": False} | settings
    net = GPT(GPTConfig(mode=mode, vocab_size=tokenizer.vocab_size, base_vocab_size=tokenizer.base_vocab_size,
                        **settings))
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 2:
                p.mul_(scale)
    return net.eval()


def causal_model(seed=0, scale=8.0, **settings):
    """A tiny language model of CAUSAL's vocabulary."""
    return model(LANGUAGE_MODEL, seed, scale, tokenizer=CAUSAL, **{"block_size": 64} | settings)


def prompt_consumer(folder, c, **settings):
    return PromptConsumer(folder, c.batch_size, c.seed, **settings)


def judge(seed=5, **settings):
    return freeze(model(SEQUENCE_SCORER, seed, **settings))


def save(path, net):
    save_model(str(path), net, TOKENIZER)
    return str(path)


def config(**settings):
    settings = {"block_size": 32, "batch_size": 4, "group_size": 4, "temperature": 1.0, "top_p": 1.0,
                "learning_rate": 1e-2, "min_lr": 1e-2, "grad_clip": 0.0, "warmup_iters": 0, "max_iters": 4,
                "device": "cpu"} | settings
    return GRPOConfig(**settings)


def consumer(dataset, c, **settings):
    return DatasetConsumer(dataset, MASKED_FILL, c.block_size, c.batch_size, c.seed, masks=c.masks, mask_low=c.mask_low,
                           mask_high=c.mask_high, **settings)


def rewards(c, scorer):
    return Rewards(c, scorer, TOKENIZER)


def documented_keys():
    """What stands in the first column of the tables of docs/metrics.md; <name> and <i> stand for any word."""
    with open(os.path.join(ROOT, "docs", "metrics.md")) as f:
        cells = [line.split("|")[1] for line in f if line.startswith("| `")]
    return {key for cell in cells for key in re.findall("`([^`]+)`", cell)}


def undocumented(keys):
    """Those of the metrics that docs/metrics.md does not explain."""
    known = [re.sub("<[^>]+>", "[^/]+", key) for key in documented_keys()]
    return [key for key in keys if not any(re.fullmatch(pattern, key) for pattern in known)]


class Catcher:
    """In an optimizer's place: keeps the gradient of its last step, flattened, and moves nothing."""

    def __init__(self, policy):
        self.policy, self.param_groups, self.gradient = policy, [{"lr": 0.0}], None

    def step(self):
        self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters()])

    def zero_grad(self, set_to_none):
        self.policy.zero_grad()


def one_process():
    return Distributed("cpu")


def run_script(*arguments, ranks=1, cwd=ROOT, threads=None, **environment):
    """Runs a script of the repository as a user would. Returns the finished process with its output."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0",
                    "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    env = os.environ | {"OMP_NUM_THREADS": str(threads or (1 if ranks > 1 else 2))} | environment
    return subprocess.run([*command, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True,
                          timeout=600)
