"""A run that is out of memory ends in one line with the settings that lower what it needs."""

import json

import pytest
import torch

from tests.families import model_folder, write_sums
from tests.tiny import read_records, run_here

STEPS = ("--max_iters=3", "--save_interval=1", "--batch_size=2", "--device=cpu", "--dtype=float32")
GRPO = ("--group_size=3", "--kl_beta=0.0", "--eval_problems=2", "--eval_completions=2")
ON_CPU = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
ALL = ("batch_size=2", "group_size=3", "max_new_tokens=4", "block_size=", "micro_batch_tokens=None",
       "sample_rows=None", "grad_checkpoint=False", "dtype=float32", "lora_rank=0", "load_in_4bit=False")


def prompts(folder, dataset):
    pytest.importorskip("transformers")
    return ("grpo/train_grpo.py", *STEPS, *GRPO, f"--dataset={write_sums(folder / 'sums.jsonl')}", "--max_new_tokens=4",
            f"--generator_checkpoint={model_folder(folder / 'llama', 'llama')}", "--reward_functions=('exact_match',)")


def supervised(folder, dataset):
    return ("core/pretrain.py", *STEPS, f"--dataset={dataset}", "--block_size=32", "--n_layer=1", "--n_embd=16",
            "--n_head=2", "--eval_batches=1")


@pytest.mark.parametrize("kind, error, unnamed", [
    (prompts, RuntimeError(ON_CPU), ()),
    (supervised, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
     ("group", "max_new", "micro", "sample", "grad")),
    (supervised, RuntimeError("shapes do not fit"), None)])
def test_out_of_memory_is_one_line_with_the_settings_and_the_run_goes_on_later(
        tmp_path, dataset, monkeypatch, kind, error, unnamed):
    command, out = [*kind(tmp_path, dataset), f"--out_dir={tmp_path / 'out'}"], tmp_path / "out"
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def full(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return clip(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", full)
        if unnamed is None:
            with pytest.raises(RuntimeError, match="shapes"):
                run_here(*command)
            return
        done = run_here(*command)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert {x for x in ALL if x in done.stderr} == {x for x in ALL if not x.startswith(unnamed)}, done.stderr
    last = json.loads((out / "config.json").read_text())["starts"][-1]["end"]
    assert last["ended"] == "failed" and last["step"] == 1 and type(error).__name__ in last["why"]
    resumed = run_here(*command, "--resume=True")
    assert resumed.returncode == 0 and read_records(out / "metrics.jsonl")[-1]["step"] == 3, resumed.stderr
