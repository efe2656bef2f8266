"""Ray's workers sample what the policy samples, whatever their number, with the weights of the last sync.

Here Ray is a stand-in that runs in this process. Real workers, and their deaths, are in test_ray_runs.py.
"""

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from core.errors import Mistake
from core.models import load_model, load_tokenizer
from core.resume import resume_command
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from grpo.policies.causal import CausalPolicy
from grpo.samplers import ray as module
from grpo.samplers.ray import RaySampler, gpus_beside, pack
from grpo.sampling_settings import SamplingSettings
from tests.families import model_folder
from tests.tiny import (
    ROOT, causal_policy, config, consumer, fill_policy, one_process, prompt_config, prompt_consumer, prompt_fill_policy)


class Actor:
    """A worker in this process, which does what it is asked for when the answer is asked for."""

    def __init__(self, *arguments):
        self.worker = module.RayWorker(*arguments)

    def __getattr__(self, name):
        return SimpleNamespace(remote=partial(partial, getattr(self.worker, name)))


RAY = SimpleNamespace(
    is_initialized=lambda: True, put=copy.deepcopy, get=lambda promises, timeout: [promise() for promise in promises],
    remote=lambda **options: lambda cls: SimpleNamespace(remote=Actor))


@pytest.fixture
def world(dataset, prompts, monkeypatch):
    """(kind, settings) -> (RaySampler, policy, iteration -> problems)"""
    monkeypatch.setattr(module, "require_ray", lambda: RAY)

    def made(kind="causal", **settings):
        policy_of, c_of, data_of = causal_policy, prompt_config, partial(prompt_consumer, prompts)
        if kind == "fill":
            policy_of, c_of, data_of = fill_policy, config, partial(consumer, dataset)
        if kind == "any order":
            policy_of = prompt_fill_policy
        c = c_of(sampler="ray", **{"ray_workers": 2} | settings)
        policy = policy_of()
        sampler = RaySampler(lambda config: policy_of(seed=9), policy, c, one_process())
        sampler.sync(policy.weights(), 0)
        return sampler, policy, lambda i: data_of(c).problems("train", i)
    return made


def expect_same(found, policy, problems, iteration, c):
    expected = policy.sample(problems, iteration, SamplingSettings.of(c))
    M = expected.mask > 0
    assert torch.equal(found.mask, expected.mask) and torch.equal(found.target[M], expected.target[M])
    torch.testing.assert_close(found.old_logp[M], expected.old_logp[M], rtol=0, atol=1e-5)
    assert found.texts.completions == expected.texts.completions and found.texts.columns == expected.texts.columns
    for one, other in zip(found.inputs.kept or [], expected.inputs.kept or [], strict=True):
        assert torch.equal(one.ids, other.ids)


@pytest.mark.parametrize("kind, workers, settings", [
    ("causal", 3, {"top_k": 9}), ("causal", 7, {}),  # more workers than problems
    ("fill", 3, {"unmask_steps": 3, "top_p": 0.8}), ("any order", 2, {"unmask_steps": 2, "block_length": 3})])
def test_workers_sample_what_the_policy_samples(world, kind, workers, settings):
    sampler, policy, problems = world(kind, ray_workers=workers, **settings)
    sampler.start(problems(0), 0)
    expect_same(sampler.finish(), policy, problems(0), 0, sampler.config)


def test_a_start_is_sampled_with_the_weights_of_the_last_sync_before_it(world):
    sampler, policy, problems = world(max_staleness=1)
    sampler.start(problems(0), 0)
    sampler.start(problems(1), 1)
    before = copy.deepcopy(policy)
    with torch.no_grad():
        for x in policy.parameters():
            x.mul_(1.2)
    sampler.sync(policy.weights(), 1)
    sampler.start(problems(2), 2)
    for i, writer in enumerate((before, before, policy)):
        expect_same(sampler.finish(), writer, problems(i), i, sampler.config)


class WorkerFailed(Exception):
    pass


@pytest.mark.parametrize("has_state", [True, False])
def test_of_a_worker_that_fails_the_command_that_resumes_is_told_if_there_is_a_state(world, tmp_path, monkeypatch,
                                                                                     has_state):
    monkeypatch.setattr("sys.argv", ["grpo/train_grpo.py"])
    sampler, _, problems = world(out_dir=str(tmp_path))
    if has_state:
        (tmp_path / "state.pt").touch()
    errors = SimpleNamespace(RayTaskError=KeyError, RayError=WorkerFailed)
    get = Mock(side_effect=WorkerFailed("it died"))
    sampler.start(problems(0), 0)
    sampler.ray = SimpleNamespace(get=get, exceptions=errors)
    with pytest.raises(Mistake, match="it died") as found:
        sampler.finish()
    assert (resume_command(str(tmp_path)) in str(found.value)) == has_state


def test_what_workers_say_of_environments_is_said_once(world, monkeypatch, capsys):
    monkeypatch.setattr(module, "WARNED", {"one": "in a worker"})
    worker = module.RayWorker(lambda config: SimpleNamespace(sample=lambda *_: torch.ones(2)), GRPOConfig())
    worker.version = 0
    _, said = worker.sample({}, 0, 0, {})
    assert said == {"one": "in a worker"}
    monkeypatch.setattr("grpo.environments.WARNED", {})
    sampler, *_ = world()
    for _ in range(2):
        sampler.starts.append([lambda: (torch.ones(2), {"one": "in a worker"})] * 2)
        assert len(sampler.finish()) == 4
    assert capsys.readouterr().err == "in a worker\n"


def test_weights_of_every_kind_come_to_the_last_bit():
    weights = {"matrix": torch.randn(3, 4).T, "half": torch.randn(5).bfloat16(), "flags": torch.tensor([True, False])}
    weights["tied"] = weights["matrix"]
    loaded, own = {}, weights | {"half": torch.randn(5)}  # a sharded model is gathered in bfloat16, a worker's is whole
    policy = SimpleNamespace(weights=lambda: own, load_weights=loaded.update, sample=lambda *_: weights["half"])
    packed = pack(weights, torch.nn.Linear(2, 2), torch.bfloat16)
    module.RayWorker(lambda config: policy, GRPOConfig()).sample({}, 0, 1, packed)
    assert all(loaded[name].dtype == x.dtype and torch.equal(loaded[name], x) for name, x in weights.items())
    assert packed["tied"] is packed["matrix"], "Ray stores it once"


def bytes_of(packed):
    return sum(data.nbytes for _, data in {id(x): x for x in packed.values()}.values())


def huggingface_policy(folder, kind, seed=0, dtype=torch.bfloat16, **adapter):
    """A policy of a small model in Hugging Face format whose trained weights depend on the seed."""
    model, _ = load_model(model_folder(folder / kind, kind), adapter=PretrainConfig(**adapter))
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape))
    return CausalPolicy(model, load_tokenizer(str(folder / kind)), dtype)


OF_BFLOAT16 = {
    "causal": partial(causal_policy, dtype=torch.bfloat16), "fill": partial(fill_policy, dtype=torch.bfloat16),
    "tied": partial(causal_policy, dtype=torch.bfloat16, tied=True)}


@pytest.mark.parametrize("kind", [*OF_BFLOAT16, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
    "qwen3", "qwen3 with an adapter", "mamba2"))])
def test_of_a_run_in_bfloat16_linear_layers_come_in_half_the_bytes_and_no_bit_of_a_sample_changes(
        world, dataset, prompts, tmp_path, kind):
    if kind in OF_BFLOAT16:
        make = OF_BFLOAT16[kind]
    else:
        pytest.importorskip("peft")
        adapter = {"lora_rank": 4} if "adapter" in kind else {}
        make = partial(huggingface_policy, tmp_path, kind.split()[0], **adapter)
    policy, c = make(), (config if kind == "fill" else prompt_config)(sampler="ray", ray_workers=2)
    data = consumer(dataset, c) if kind == "fill" else prompt_consumer(prompts, c, tokenizer=policy.tokenizer)
    sampler = RaySampler(lambda config: make(seed=9), policy, c, one_process())
    sampler.sync(policy.weights(), 0)
    sampler.start(data.problems("train", 0), 0)
    found = sampler.finish()
    expected = policy.sample(data.problems("train", 0), 0, SamplingSettings.of(c))
    for name in ("target", "mask", "old_logp"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    half, whole = (bytes_of(pack(policy.weights(), policy.model, dtype)) for dtype in (torch.bfloat16, torch.float32))
    of_linear, others = 0, 0
    for p in filter(lambda p: p.requires_grad, policy.parameters()):
        readers = [type(layer) for layer in policy.model.modules() if getattr(layer, "weight", None) is p]
        if set(readers) == {torch.nn.Linear}:
            of_linear += p.numel()
        else:
            others += p.numel()
    assert (half, whole) == (2 * of_linear + 4 * others, 4 * (of_linear + others)) and of_linear


@pytest.mark.parametrize("visible, rank, ranks, names", [
    ("", 0, 1, ["1", "2", "3"]), ("", 1, 2, ["3"]), ("4,5,6", 1, 3, ["5"])])
def test_workers_get_the_gpus_that_no_rank_trains_on_else_that_of_their_rank(monkeypatch, visible, rank, ranks, names):
    for name, x in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, str(x))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_beside(SimpleNamespace(device=torch.device("cuda", rank))) == names


CONFIGS = [
    GRPOConfig(),
    GRPOConfig(sampler="ray", ray_workers=3, generator_checkpoint="hf:a/b", lora_rank=4, lora_targets="q,v",
               template="model", chat_template_kwargs={"thinking": False}, task_type="general", kl_target=0.1,
               reward_functions=("exact_match", "length_penalty"), reward_weights=(1.0, 0.5), overlong_buffer=8,
               reward_settings={"length_max": 80}, entropy_bonus=0.01, clip_high=0.3, report_to=("wandb",)),
    GRPOConfig(judge_checkpoint="j", credit_window=2, unmask_steps=4, fill_estimator="one_step", top_p=1.0,
               masks={"random": 1.0}, reference_mode="ema", ema_alpha=0.5, sampler="vllm",
               vllm_url="http://localhost:8000"),
    GRPOConfig(teacher_checkpoint="t", kl_beta=0.0, distill_beta=0.5, group_size=1, eval_interval=7, save_interval=3),
    PretrainConfig(mode="sequence_scorer", fill_checkpoints=("a", "b"), n_layer=2, export="e", wandb_log=True),
]
IN_ANOTHER_PROCESS = """
import json, pickle, sys
sys.path.insert(0, sys.argv[1])
configs = pickle.load(sys.stdin.buffer)
from dataclasses import asdict
print(json.dumps([[type(c).__module__, type(c).__name__, asdict(c)] for c in configs]))
"""


@pytest.mark.parametrize("c", CONFIGS, ids=range(len(CONFIGS)))
def test_a_copied_config_is_equal_and_of_the_same_type(c):
    for twin in (pickle.loads(pickle.dumps(c)), copy.copy(c), copy.deepcopy(c), replace(c)):
        assert type(twin) is type(c) and twin == c and asdict(twin) == asdict(c)
    changed = replace(pickle.loads(pickle.dumps(c)), seed=5, device="cpu")
    assert type(changed) is type(c) and asdict(changed) == asdict(c) | {"seed": 5, "device": "cpu"}
    assert changed != c


@pytest.mark.slow
def test_configs_are_the_same_in_a_process_that_has_imported_nothing_yet():
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, ROOT], input=pickle.dumps(CONFIGS),
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    expected = [[type(c).__module__, type(c).__name__, asdict(c)] for c in CONFIGS]
    assert json.loads(done.stdout) == json.loads(json.dumps(expected))
