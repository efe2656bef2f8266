"""A policy, its problems, and the vLLM sampler of a server in the test process; fixtures that make them.

The kind "real" is a real server, which VLLM_URL names: docs/scaling.md has the commands to start one. VLLM_MODEL is the
model that it serves, as generator_checkpoint names it. A model of this project, by default that of data/arithmetic, is
brought whole; a folder in Hugging Face format gets an adapter.
"""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from core.huggingface.export import write_generator
from core.huggingface.settings import LoraConfig
from core.models import is_huggingface, load_model, load_tokenizer
from core.prompts import PromptConsumer
from grpo.policies.causal import CausalPolicy
from grpo.samplers import vllm_http
from grpo.samplers.sync_check import SyncCheck
from grpo.samplers.vllm import VllmSampler
from tests.families import model_folder, write_sums
from tests.tiny import CAUSAL, ROOT, causal_model, one_process, prompt_config
from tests.vllm_server import running

vllm_http.WAITS = (0.0, 0.0, 0.0, 0.0)
SMALL = {"batch_size": 2, "group_size": 2, "max_new_tokens": 6, "temperature": 0.8, "sampler_timeout": 20.0}
KINDS = ("ours", "qwen3", "adapter")  # a model of ours; one with several ends and rows behind its vocabulary; LoRA
URL = os.environ.get("VLLM_URL")
MODEL = os.environ.get("VLLM_MODEL", os.path.join(ROOT, "data", "arithmetic", "pretrained", "generator.safetensors"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: the folder that the server is started with}, and the sums that models in Hugging Face format complete."""
    root = tmp_path_factory.mktemp("vllm")
    write_generator(causal_model(scale=3.0), CAUSAL, str(root / "ours"))
    qwen3 = model_folder(root / "qwen3", "qwen3", longest=64)
    return {"ours": str(root / "ours"), "qwen3": qwen3, "adapter": qwen3, "real": MODEL,
            "sums": write_sums(root / "sums.jsonl")}


class World:
    """A policy, its problems, a server of its first weights, and the sampler between them."""

    def __init__(self, kind, folders, prompts, out, server, **settings):
        self.server, lora = server, {}
        if kind == "adapter" or (kind == "real" and is_huggingface(MODEL)):
            lora = {"lora_rank": 4}
        self.config = prompt_config(sampler="vllm", vllm_url=server.url, out_dir=str(out), kl_beta=0.0, **lora,
                                    **SMALL | settings)
        if kind == "ours":
            self.policy, data = CausalPolicy(causal_model(scale=3.0), CAUSAL), prompts
        else:
            model, _ = load_model(folders[kind], adapter=LoraConfig(**lora))
            self.policy, data = CausalPolicy(model, load_tokenizer(folders[kind])), folders["sums"]
        tokenizer = None if kind == "ours" else self.policy.tokenizer
        self.data = PromptConsumer(data, self.config.batch_size, self.config.seed, tokenizer=tokenizer)
        self.problems = self.data.problems("train", 0)
        self.connect()

    def connect(self):
        """A new sampler, as that of a run that begins."""
        self.sampler = VllmSampler(self.policy, self.config, one_process())
        self.sync_check = SyncCheck(self.sampler, self.policy, self.problems, self.config)

    def sync(self, version):
        self.sampler.sync(self.policy.weights(), version)
        self.sync_check.begin(version)
        self.sync_check.check()

    def write(self, problems=None, iteration=0):
        self.sampler.start(self.problems if problems is None else problems, iteration)
        return self.sampler.finish()[0]

    def move(self, size=0.05, seed=0):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, self.policy.parameters()):
                p.add_(size * (p.abs().mean() + 0.1) * torch.randn(p.shape, generator=g))

    def life(self):
        """The first batch, a step of training, and the next batch."""
        self.sync(0)
        self.write()
        self.move()
        self.sync(1)
        return self.write(iteration=1)


@pytest.fixture
def world(folders, prompts, tmp_path):
    """(kind, settings of the server in `started`, settings) -> a World, whose server is ended after the test."""
    opened = []

    def make(kind="ours", started=None, **settings):
        if kind == "real":
            opened.append(contextlib.nullcontext(SimpleNamespace(url=URL)))
        else:
            opened.append(running(folders[kind], **(started or {})))
        out = tmp_path / f"out{len(opened)}"
        return World(kind, folders, prompts, out, opened[-1].__enter__(), **settings)

    yield make
    for server in opened:
        server.__exit__(None, None, None)
