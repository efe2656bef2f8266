"""Runs of every kind on a pretended GPU: nothing is on two devices at once, and the CPU rarely waits for it."""

import contextlib
import copy
import io
import os
import pathlib
import re
import tempfile
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from core.distributed import Distributed
from core.models import save_model
from core.pretrain import main as pretrain
from core.sample import main as sample
from grpo.policies.policy import ModelPolicy
from grpo.tools import gpu_check
from grpo.train_grpo import main as train
from tests.families import model_folder, write_sums
from tests.pretend_cuda import DeviceMix, PretendCuda
from tests.tiny import (
    CAUSAL,
    TEXT,
    causal_model,
    config,
    judge,
    model,
    read_records,
    run_script,
    save,
    write_prompt_dataset,
    write_text_dataset,
)

SMALL = ("--device=cuda", "--batch_size=2", "--group_size=3", "--max_iters=2", "--warmup_iters=0", "--eval_problems=2",
         "--eval_completions=2", "--eval_interval=2", "--save_interval=1", "--log_interval=1")
TEXTS = ("--dataset=FOLDER/text", "--block_size=16", "--generator_checkpoint=FOLDER/fill.safetensors",
         "--judge_checkpoint=FOLDER/judge.safetensors", *SMALL)
REWARDED = ("--max_new_tokens=24", "--reward_file=FOLDER/own.py", "--reward_functions=distinct", *SMALL)
PROMPTS = ("--dataset=FOLDER/sums", "--generator_checkpoint=FOLDER/causal.safetensors", *REWARDED)
LLAMA = ("--dataset=FOLDER/sums.jsonl", "--generator_checkpoint=FOLDER/llama", *REWARDED)
TWO_STEPS = ("--ppo_epochs=2", "--minibatches=2", "--top_p=0.9")
JOBS = {  # {name: arguments of grpo/train_grpo.py}
    "fill": (*TEXTS, "--credit_window=2", "--gold_judge_checkpoint=FOLDER/judge.safetensors"),
    "passes": (*TEXTS, "--unmask_steps=3", "--top_p=1.0", "--fill_estimator=one_step", "--micro_batch_tokens=64"),
    "causal": (*PROMPTS, *TWO_STEPS, "--min_p=0.01", "--judge_checkpoint=FOLDER/judge.safetensors",
               "--reward_functions=('judge', 'distinct')"),
    "exact_kl": (*PROMPTS, "--kl_estimator=exact", "--grad_checkpoint=True", "--optimizer=muon", "--ref_offload=True",
                 "--reference_mode=ema"),
    "shaped": (*PROMPTS, "--zero_std=resample", "--mask_truncated=True", "--overlong_buffer=2", "--ref_offload=True",
               "--reference_mode=periodic", "--reference_update_freq=1", "--reward_normalisation=group",
               "--stop_sequences=('e', 'a')"),
    "ahead": (*PROMPTS, "--max_staleness=1", "--train_pass_k=2", "--zero_std=drop", "--kl_beta=0", "--ratio_to=sampler"),
    "any_order": (*PROMPTS, "--generator_checkpoint=FOLDER/any_order.safetensors", "--top_p=0.9", "--unmask_steps=2",
                  "--block_length=3", "--unmask_order=confidence"),
    "environment": (*PROMPTS, "--environment=Ask", "--reward_functions=environment", "--max_turns=3", "--kl_in_reward=True",
                    f"--stop_sequences={tuple('abcdefghijklm')}"),
    "teacher": (*PROMPTS, "--teacher_checkpoint=FOLDER/teacher.safetensors", "--kl_beta=0"),
    "llama": LLAMA,
    "qwen_lora": (*LLAMA, "--generator_checkpoint=FOLDER/qwen2", "--lora_rank=2", "--top_p=1.0",
                  "--reward_functions=reward_model", "--reward_model_checkpoint=FOLDER/llama_reward"),
    "doctor": (*PROMPTS, "--doctor=True"),
}
RESUMED = "causal"  # in the middle of an iteration
CEILINGS = {  # {name: host syncs for each token of a completion in sampling, and for each optimizer step}; they may fall
    "fill": (0.84, 1.0),
    "passes": (0.67, 1.0),
    "causal": (0.43, 1.0),
    "exact_kl": (0.42, 1.0),
    "shaped": (0.59, 1.0),
    "ahead": (0.43, 2.0),
    "any_order": (4.1, 1.0),
    "environment": (1.2, 1.0),
    "teacher": (0.42, 1.0),
    "llama": (0.51, 3.0),
    "qwen_lora": (0.18, 3.0),
    "doctor": (0.42, 1.0),
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


def write_world(folder):
    """Writes the models and data of the jobs. Returns the folder."""
    write_text_dataset(folder / "text", TEXT)
    write_prompt_dataset(folder / "sums")
    write_sums(folder / "sums.jsonl")
    (folder / "own.py").write_text(OWN)
    save(folder / "fill.safetensors", model())
    save(folder / "judge.safetensors", judge())
    nets = {"causal": causal_model(scale=3.0), "teacher": causal_model(1, 3.0),
            "any_order": model(tokenizer=CAUSAL, block_size=64)}
    for name, net in nets.items():
        save_model(str(folder / f"{name}.safetensors"), net, CAUSAL)
    for family in ("llama", "llama_reward", "qwen2"):
        model_folder(folder / family, family)
    return folder


def measured(name, folder):
    """Runs a job. Returns its syncs a token, its syncs a step, and lines that tell where they are."""
    out, tokens, sample = folder / f"out-{name}", [], ModelPolicy.sample

    def counted(*arguments):
        rollouts = sample(*arguments)
        tokens.append(rollouts.target.shape[1])
        return rollouts

    argv = [part.replace("FOLDER", str(folder)) for part in (*JOBS[name], f"--out_dir={out}")]
    if name == "qwen_lora":
        pytest.importorskip("peft")  # here, because bitsandbytes, which it imports, would look for CUDA's libraries
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, PretendCuda() as gpu, mock.patch.object(ModelPolicy, "sample", counted):
        with contextlib.suppress(SystemExit):  # of the doctor
            train(argv)
        if name == RESUMED and "RANK" not in os.environ:
            train([*argv, "--max_iters=3", "--resume=True"])
    assert not gpu.mixes and bool(gpu.replays) != bool({"fill", "passes", "any_order"} & {name})
    steps = sum("loss" in record for record in read_records(out / "metrics.jsonl")) or 1
    syncs = {phase: sum(n for (where, _), n in gpu.syncs.items() if where == phase) for phase in ("token", "step")}
    lines = [f"{n:6d} {phase:<6} {line}" for (phase, line), n in gpu.syncs.most_common()]
    return round(syncs["token"] / sum(tokens), 2), round(syncs["step"] / steps, 2), lines


def main(argv):
    """Prints the host syncs of jobs, of those that are named by line; on several ranks: FOLDER JOB."""
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(argv.pop(0)) if "RANK" in os.environ else write_world(pathlib.Path(made))
        for name in argv or JOBS:
            token, step, lines = measured(name, folder)
            print(f"{name:<12}{token:7.2f} a token{step:7.2f} a step", *(lines if argv else ()), sep="\n", flush=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_run_is_on_one_device_and_rarely_waits(name, world):
    token, step, lines = measured(name, world)
    most = CEILINGS[name]
    assert token <= most[0] and step <= most[1], "\n".join((f"{token} a token, {step} a step, at most {most}", *lines))


@pytest.mark.slow
def test_two_ranks_exchange_tensors_of_the_right_device(world):
    done = run_script("tests/pretend_cuda.py", world, "causal", ranks=2)
    assert done.returncode == 0, done.stderr
    row = re.search(r"([\d.]+) a token +([\d.]+) a step", done.stdout)
    assert float(row[2]) <= CEILINGS["causal"][1], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ("--mode=masked_fill", "--dataset=FOLDER/text"), ("--mode=language_model", "--dataset=FOLDER/sums"),
    ("--mode=sequence_scorer", "--dataset=FOLDER/text", "--fill_checkpoints=('FOLDER/fill.safetensors',)")])
def test_supervised_training_and_samples_are_on_one_device(more, world):
    small = ("--device=cuda", "--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=24", "--max_iters=2",
             "--eval_interval=2", "--batch_size=4", "--warmup_iters=0", f"--out_dir=FOLDER/{more[0]}")
    with PretendCuda() as gpu:
        pretrain([part.replace("FOLDER", str(world)) for part in (*more, *small)])
        if "scorer" not in more[0]:
            sample(["--text=5+_=", f"--checkpoint={world}/{more[0]}/model.safetensors", "--device=cuda", "--max_new_tokens=5"])
    assert not gpu.mixes


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_on_a_pretended_one():
    c = config(batch_size=4, max_new_tokens=8, lora_rank=4, grad_checkpoint=True)
    with PretendCuda() as gpu, Distributed("cuda") as dist:
        found = gpu_check.steps((64, 128, 2, 4, 2), c, dist)
    assert not gpu.mixes and gpu.replays and "with CUDA graphs" in found


def in_backward():
    layer = torch.nn.Linear(3, 3).to("cuda")
    layer(torch.ones(2, 3)).sum().backward()


def optimizer_state():
    layer = torch.nn.Linear(3, 3).to("cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(2):
        layer(torch.ones(2, 3, device="cuda")).sum().backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].cpu()


def values():
    torch.zeros(3, device="cuda")[torch.tensor([0, 1])] = torch.ones(2)


REFUSED = {  # {what CUDA refuses: code}
    "a sum": lambda: torch.ones(3, device="cuda") + torch.ones(3),
    "cat": lambda: torch.cat([torch.ones(3).cuda(), torch.ones(3)]),
    "stack of numbers": lambda: torch.stack([torch.ones((), device="cuda"), torch.ones(())]),
    "an index": lambda: torch.arange(3)[torch.tensor([0, 1], device="cuda")],
    "a mask": lambda: torch.arange(3)[torch.ones(3, device="cuda") > 0],
    "values": values,
    "an array": lambda: torch.ones(3, device="cuda").numpy(),
    "an embedding": lambda: torch.nn.Embedding(3, 2).to("cuda")(torch.tensor([0, 1])),
    "another GPU": lambda: torch.ones(3, device="cuda:1"),
    "the input of a layer": in_backward,
    "the state of an optimizer": optimizer_state,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_found(name):
    with PretendCuda() as gpu, pytest.raises(DeviceMix):
        REFUSED[name]()
    assert len(gpu.mixes) == 1


def test_what_cuda_allows_is_allowed():
    with PretendCuda() as gpu:
        x = torch.arange(6.0, device="cuda").view(2, 3)
        assert x.device == torch.device("cuda:0") and x.T.is_cuda and not x.is_cpu and not x.cpu().is_cuda
        assert all(y.is_cuda for y in (x + torch.tensor(1.0), x[torch.tensor([0])], torch.zeros_like(x), x.new_zeros(2)))
        assert not x.new_zeros(2, device="cpu").is_cuda and copy.deepcopy(x).is_cuda
        layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).to("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            y = checkpoint(layer, x, use_reentrant=False)
        y.float().square().sum().backward()
        assert y.dtype == torch.bfloat16 and all(p.grad.is_cuda for p in layer.parameters())
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        optimizer.step()
        assert all(x.is_cuda for state in optimizer.state.values() for x in state.values())
    assert not torch.cuda.is_available() and not gpu.mixes


def test_what_waits_for_the_gpu_is_counted():
    waits = (lambda x: float(x.sum()), lambda x: x.tolist(), lambda x: x[x > 1], lambda x: x.nonzero(), lambda x: x.cpu(),
             lambda x: x.new_tensor([1.0]), lambda x: bool((x > 1).any()), lambda x: torch.tensor([1.0], device="cuda"),
             lambda x: torch.ones(1).to("cuda"), lambda x: x[torch.tensor([0])], lambda x: x[[0, 1]],
             lambda x: x.index_put_((x.long(),), torch.ones(())), lambda x: torch.ones(3).copy_(x))
    free = (lambda x: x.sum(), lambda x: torch.ones(3).to("cuda", non_blocking=True), lambda x: x.float(),
            lambda x: torch.zeros(2, device="cuda"), lambda x: x.masked_fill(x > 1, 0.0), lambda x: x[x.long()],
            lambda x: torch.where(x > 1, x, 0.0), lambda x: torch.ones(2).tolist(), lambda x: x[1:].fill_(0.0))
    with PretendCuda() as gpu:
        x = torch.arange(3.0).to("cuda", non_blocking=True)
        for number, call in enumerate(waits, 1):
            call(x)
            assert sum(gpu.syncs.values()) == number
            with pytest.raises(AssertionError), gpu.no_syncs():
                call(x)
        with gpu.no_syncs():
            for call in free:
                call(x)
