"""Runs of every kind on a pretended GPU: nothing is on two devices at once, and the CPU rarely waits for it."""

import contextlib
import io
import json
import os
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from bench import gpu as on_gpu
from core.device import NVIDIA, detect_device, detect_dtype, gpu_logits_at_once
from core.distributed import Distributed
from core.errors import Mistake
from core.models import is_small, save_model
from core.pretrain import main as pretrain
from core.sample import main as sample
from grpo import reference
from grpo.policies.policy import ModelPolicy
from grpo.train_grpo import main as train
from tests.families import base_model, model_folder, write_sums
from tests.pretend_cuda import DeviceMix, PretendCuda
from tests.pretend_mps import PretendMps
from tests.tiny import (
    CAUSAL,
    TEXT,
    causal_model,
    judge,
    model,
    read_records,
    save,
    without_clock,
    write_prompt_dataset,
    write_text_dataset,
)

SMALL = ("--device=cuda", "--batch_size=2", "--group_size=3", "--max_iters=2", "--warmup_iters=0", "--eval_problems=2",
         "--eval_completions=2", "--eval_interval=2", "--save_interval=1", "--log_interval=1")
TEXTS = ("--dataset=FOLDER/text", "--block_size=16", "--generator_checkpoint=FOLDER/fill.safetensors",
         "--judge_checkpoint=FOLDER/judge.safetensors", *SMALL)
PROMPTS = ("--dataset=FOLDER/sums", "--generator_checkpoint=FOLDER/causal.safetensors", "--max_new_tokens=24",
           "--reward_file=FOLDER/own.py", "--reward_functions=distinct", *SMALL)
JOBS = {  # {name: arguments of grpo/train_grpo.py, most host syncs for each sampled token, and for each step}
    "fill": ((*TEXTS, "--credit_window=2", "--gold_judge_checkpoint=FOLDER/judge.safetensors"), 0.84, 1.0),
    "passes": ((*TEXTS, "--unmask_steps=3", "--top_p=1.0", "--fill_estimator=one_step", "--micro_batch_tokens=64"),
               0.67, 1.0),
    "causal": ((*PROMPTS, "--ppo_epochs=2", "--minibatches=2", "--top_p=0.9", "--min_p=0.01",
                "--judge_checkpoint=FOLDER/judge.safetensors", "--reward_functions=('judge', 'distinct')"), 0.43, 1.0),
    "exact_kl": ((*PROMPTS, "--kl_estimator=exact", "--grad_checkpoint=True", "--optimizer=muon", "--ref_offload=True",
                  "--reference_mode=ema"), 0.42, 1.0),
    "any_order": ((*PROMPTS, "--generator_checkpoint=FOLDER/any_order.safetensors", "--top_p=0.9", "--unmask_steps=2",
                   "--block_length=3", "--unmask_order=confidence"), 4.1, 1.0),
    "environment": ((*PROMPTS, "--environment=Ask", "--reward_functions=environment", "--max_turns=3",
                     "--kl_in_reward=True", f"--stop_sequences={tuple('abcdefghijklm')}"), 1.2, 1.0),
    "qwen_lora": ((*PROMPTS, "--dataset=FOLDER/sums.jsonl", "--generator_checkpoint=FOLDER/qwen2", "--lora_rank=2",
                   "--top_p=1.0", "--reward_functions=reward_model",
                   "--reward_model_checkpoint=FOLDER/llama_reward"), 0.18, 3.0),
}
OWN = """
from grpo.environments import environment
from grpo.rewards import reward


@reward(0, 1)
def distinct(completions, **columns):
    return [len(set(text)) / max(1, len(text)) for text in completions]


@environment
class Ask:
    def reset(self, record):
        pass

    def step(self, text):
        return "?", float(len(text))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The folder with the models and data of the jobs."""
    folder = tmp_path_factory.mktemp("world")
    write_text_dataset(folder / "text", TEXT)
    write_prompt_dataset(folder / "sums")
    write_sums(folder / "sums.jsonl")
    (folder / "own.py").write_text(OWN)
    save(folder / "fill.safetensors", model())
    save(folder / "judge.safetensors", judge())
    nets = {"causal": causal_model(scale=3.0), "any_order": model(tokenizer=CAUSAL, block_size=64)}
    for name, net in nets.items():
        save_model(str(folder / f"{name}.safetensors"), net, CAUSAL)
    for family in ("llama_reward", "qwen2"):
        model_folder(folder / family, family)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_run_is_on_one_device_and_rarely_waits(name, world):
    arguments, *most = JOBS[name]
    out, tokens, sample = world / f"out-{name}", [], ModelPolicy.sample

    def counted(*arguments):
        rollouts = sample(*arguments)
        tokens.append(rollouts.target.shape[1])
        return rollouts

    argv = [part.replace("FOLDER", str(world)) for part in (*arguments, f"--out_dir={out}")]
    if name == "qwen_lora":
        pytest.importorskip("peft")  # here, because bitsandbytes, which it imports, would look for CUDA's libraries
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, PretendCuda() as gpu, mock.patch.object(ModelPolicy, "sample", counted):
        train(argv)
        if name == "causal":  # in the middle of an iteration
            train([*argv, "--max_iters=3", "--resume=True"])
    assert not gpu.mixes and bool(gpu.replays) != bool({"fill", "passes", "any_order"} & {name})
    trained = [record for record in read_records(out / "metrics.jsonl") if "loss" in record]
    assert all(record["memory_gib"] == 0 for record in trained), "the pretended GPU has no memory"
    steps = len(trained)
    for phase, count, limit in (("token", sum(tokens), most[0]), ("step", steps, most[1])):
        waits = {line: n for (where, line), n in gpu.syncs.items() if where == phase}
        assert round(sum(waits.values()) / count, 2) <= limit, (phase, count, waits)


@pytest.mark.slow
@pytest.mark.parametrize("device", [PretendCuda, PretendMps])
@pytest.mark.parametrize("more", [
    ("--mode=masked_fill", "--dataset=FOLDER/text"), ("--mode=language_model", "--dataset=FOLDER/sums"),
    ("--mode=sequence_scorer", "--dataset=FOLDER/text", "--fill_checkpoints=('FOLDER/fill.safetensors',)")])
def test_supervised_training_and_samples_are_on_one_device(more, device, world):
    small = (f"--device={device.kind}", "--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=24", "--max_iters=2",
             "--eval_interval=2", "--batch_size=4", "--warmup_iters=0", f"--out_dir=FOLDER/{device.kind}{more[0]}")
    with device() as gpu:
        pretrain([part.replace("FOLDER", str(world)) for part in (*more, *small)])
        if "scorer" not in more[0]:
            path = f"{world}/{device.kind}{more[0]}/model.safetensors"
            sample(["--text=5+_=", f"--checkpoint={path}", f"--device={device.kind}", "--max_new_tokens=5"])
    assert not gpu.mixes


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_run_on_an_apple_gpu_is_on_one_device_and_needs_no_float64(name, world):
    more = ("--device=mps", f"--out_dir={world}/mps-{name}")
    if name == "causal":
        more += ("--advantage=gdpo", "--optimizer=adamw")
    if name == "qwen_lora":
        pytest.importorskip("peft")
        more += ("--device=auto",)
    argv = [part.replace("FOLDER", str(world)) for part in (*JOBS[name][0], *more)]
    with contextlib.redirect_stdout(io.StringIO()), PretendMps() as gpu:
        train(argv)
        train([*argv, "--max_iters=3", "--resume=True"])
    assert not gpu.mixes
    starts = json.loads((world / f"mps-{name}" / "config.json").read_text())["starts"]
    assert [start["device"] for start in starts] == ["mps", "mps"]


@pytest.mark.slow
@pytest.mark.parametrize("job, more", [
    ("fill", ()), ("exact_kl", ()), ("exact_kl", ("--reference_mode=static", "--kl_estimator=k3"))])
def test_a_reference_that_waits_on_the_cpu_gives_the_same_losses(job, more, world):
    runs, waits, placed_on = [], [], reference.placed_on

    def noted(policy, device):
        waits[-1].add(policy.device.type)
        return placed_on(policy, device)

    for offload in (True, False):
        out = world / f"offload-{job}{len(more)}{offload}"
        argv = (*JOBS[job][0], "--kl_beta=0.5", "--learning_rate=0.01", *more, f"--ref_offload={offload}",
                f"--out_dir={out}")
        waits.append(set())
        with contextlib.redirect_stdout(io.StringIO()), PretendCuda():
            with mock.patch.object(reference, "placed_on", noted):
                train([part.replace("FOLDER", str(world)) for part in argv])
        runs.append(without_clock(read_records(out / "metrics.jsonl")))
    assert waits == [{"cpu"}, {"cuda"}]
    assert runs[0] == runs[1]
    assert max(record.get("mean_kl", 0.0) for record in runs[0]) > 0


NONE, CARDS, ONE_CARD, MAC = {}, {"gpus": 2}, {"gpus": 1, "visible": "3"}, {"apple": True}
CUT_OFF, HIDDEN = {"broken": True}, {"broken": True, "visible": ""}  # a GPU that torch cannot use; one that is hidden


def play(machine, monkeypatch):
    """Lets torch and the system say what a machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.get("gpus", 0) > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.get("gpus", 0))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: machine.get("apple", False))
    monkeypatch.setattr(os.path, "exists", lambda path: path == NVIDIA and machine.get("broken", False))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if "visible" in machine:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine["visible"])


@pytest.mark.parametrize("machine, name, rank, small, expected", [
    (NONE, "auto", 0, False, "cpu"), (NONE, "auto", 1, True, "cpu"), (NONE, "cpu", 1, False, "cpu"),
    (CARDS, "auto", 0, False, "cuda:0"), (CARDS, "auto", 1, True, "cuda:1"), (CARDS, "cuda", 1, False, "cuda:1"),
    (CARDS, "cuda:1", 0, False, "cuda:1"), (CARDS, "cpu", 1, False, "cpu"), (ONE_CARD, "auto", 3, False, "cuda:0"),
    (MAC, "auto", 0, False, "mps"), (MAC, "auto", 0, True, "cpu"), (MAC, "mps", 0, True, "mps"),
    (MAC | CARDS, "auto", 0, True, "cuda:0"), (CUT_OFF, "cpu", 0, False, "cpu"), (HIDDEN, "auto", 0, False, "cpu")])
def test_the_device_is_the_best_that_is_there_or_the_one_that_is_named(
        machine, name, rank, small, expected, monkeypatch):
    play(machine, monkeypatch)
    assert str(detect_device(name, rank, small)) == expected


@pytest.mark.parametrize("machine, name, rank, word", [
    (NONE, "cuda", 0, "auto"), (NONE, "mps", 0, "auto"), (NONE, "tpu", 0, "auto"), (CARDS, "cuda:x", 0, "auto"),
    (CARDS, "mps", 0, "auto"), (MAC, "cuda", 0, "mps"), (CARDS, "auto", 2, "ranks"), (CARDS, "cuda:2", 0, "device"),
    (ONE_CARD, "cuda:1", 0, "device"), (CUT_OFF, "auto", 0, "device='cpu'")])
def test_a_device_that_is_not_there_is_refused(machine, name, rank, word, monkeypatch):
    play(machine, monkeypatch)
    with pytest.raises(Mistake, match=word):
        detect_device(name, rank)


@pytest.mark.parametrize("device, native, expected", [
    ("cpu", False, {"auto": "float32", "float32": "float32", "bfloat16": "bfloat16"}),
    ("mps", False, {"auto": "float32", "float32": "float32", "bfloat16": "bfloat16"}),
    ("cuda", True, {"auto": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}),
    ("cuda", False, {"auto": "float32", "float32": "float32", "bfloat16": "float32"})])
def test_the_precision_is_bfloat16_where_a_gpu_computes_in_it_or_a_setting_says_so(
        device, native, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    found = {name: str(detect_dtype(name, torch.device(device))).removeprefix("torch.") for name in expected}
    assert found == expected


def test_on_a_mac_auto_takes_the_cpu_for_a_small_model_and_says_so(world, capsys):
    small = [is_small(path) for path in (None, str(world / "causal.safetensors"), str(world / "qwen2"), "hf:a/b")]
    assert small == [True, True, False, False]
    with PretendMps():
        assert detect_device("auto").type == detect_device("mps", small=True).type == "mps"
        assert capsys.readouterr().err == ""
        assert detect_device("auto", small=True).type == "cpu"
    assert capsys.readouterr().err.count("\n") == 1
    with PretendCuda():
        assert detect_device("auto", small=True).type == "cuda"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_gpu_that_would_emulate_bfloat16_computes_in_float32(dtype, capsys):
    with PretendCuda(capability=(8, 0)), Distributed("cuda", dtype) as dist:
        assert dist.dtype == torch.bfloat16 and capsys.readouterr().err == ""
    with PretendCuda(capability=(7, 5)), Distributed("cuda", dtype) as dist:
        assert dist.dtype == torch.float32
    assert capsys.readouterr().err.count("\n") == (dtype == "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "qwen_lora"])
def test_no_model_of_a_run_multiplies_in_bfloat16_where_it_would_be_emulated(name, world):
    argv = [part.replace("FOLDER", str(world)) for part in (*JOBS[name][0], f"--out_dir={world}/old-{name}")]
    if name == "qwen_lora":
        pytest.importorskip("peft")
        scorer = model_folder(world / "half_reward", "llama_reward")
        base_model(scorer).bfloat16().save_pretrained(scorer)
        argv.append(f"--reward_model_checkpoint={scorer}")
    with contextlib.redirect_stdout(io.StringIO()), PretendCuda(capability=(7, 5)) as gpu:
        train([*argv, "--dtype=bfloat16", "--max_iters=1"])
    assert not gpu.mixes


@pytest.mark.parametrize("gigabytes", [8, 12, 24, 80])
def test_six_parts_of_logits_in_float32_leave_most_of_a_gpu(gigabytes):
    with PretendCuda(memory=gigabytes * 2**30) as gpu:
        assert 6 * 4 * gpu_logits_at_once.__wrapped__(gpu.device) <= gpu.memory / 5


REFUSED = {  # {what CUDA refuses: code}
    "a sum": lambda: torch.ones(3, device="cuda") + torch.ones(3),
    "an index": lambda: torch.arange(3)[torch.tensor([0, 1], device="cuda")],
    "an embedding": lambda: torch.nn.Embedding(3, 2).to("cuda")(torch.tensor([0, 1])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_pretended_gpu_refuses_what_cuda_refuses(name):
    with PretendCuda() as gpu, pytest.raises(DeviceMix):
        REFUSED[name]()
    assert len(gpu.mixes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("part, ranks", [("sampling", {0: 9, 16: 3}), ("training", {0: 5, 16: 3})])
def test_the_measurements_of_a_gpu_run_on_one_for_every_way_to_train(part, ranks, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(on_gpu, "profiler", lambda device: profile(activities=[ProfilerActivity.CPU]))
    monkeypatch.setattr("core.huggingface.model.compiled", lambda function: function)  # dynamo knows no pretended GPU
    with PretendCuda() as gpu:
        found = list(on_gpu.PARTS[part](on_gpu.GPUConfig(mini=True, device="cuda")))
    assert not gpu.mixes and gpu.replays
    assert Counter(finding["lora_rank"] for finding in found) == ranks
    assert all(finding.get("CUDA graphs", True) and finding.get("peak GiB", 0) is not None for finding in found)


def test_the_pretended_gpu_allows_training_and_counts_where_the_cpu_waits():
    waits = (lambda x: float(x.sum()), lambda x: x.tolist(), lambda x: x[x > 1], lambda x: x.cpu(),
             lambda x: x.new_tensor([1.0]), lambda x: torch.ones(1).to("cuda"), lambda x: x[torch.tensor([0])])
    with PretendCuda() as gpu:
        x = torch.arange(3.0).to("cuda", non_blocking=True)
        layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).to("cuda", non_blocking=True)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        with gpu.no_syncs():
            y = checkpoint(layer, x.expand(2, 3), use_reentrant=False)
            y.float().square().sum().backward()
            optimizer.step()
        assert all(p.grad.is_cuda for p in layer.parameters()) and not gpu.mixes and not gpu.syncs
        for number, call in enumerate(waits, 1):
            call(x)
            assert sum(gpu.syncs.values()) == number
