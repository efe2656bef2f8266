"""The loops to read give the numbers of the trainer, which has everything else switched off."""

import json

import pytest
import torch

from core.model import freeze
from core.models import load_model
from grpo import plain, plain_causal
from grpo.train_grpo import main
from tests.tiny import ROOT

STEPS = 20
LOOPS = {"grpo_example": (plain, {"P": 2, "G": 4, "T": 64}, "--block_size=64", "--dtype=float32"),
         "grpo_arithmetic": (plain_causal, {"P": 4, "G": 4, "optimizer_name": "adamw"},
                             "--optimizer=adamw")}  # Muon's orthogonalisation would enlarge rounding errors


@pytest.mark.slow
@pytest.mark.parametrize("config", LOOPS)
def test_the_loop_to_read_gives_the_numbers_and_weights_of_the_trainer(config, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loop, sizes, *settings = LOOPS[config]
    main([f"config/{config}.py", f"--batch_size={sizes['P']}", f"--group_size={sizes['G']}", *settings,
          f"--max_iters={STEPS}", "--eval_problems=2", "--eval_completions=2", f"--out_dir={tmp_path}"])
    with open(tmp_path / "metrics.jsonl") as f:
        records = [record for record in map(json.loads, f) if "loss" in record]
    folder = "arithmetic" if loop is plain_causal else "char_diffusion"
    policy, _ = load_model(f"data/{folder}/pretrained/generator.safetensors")
    models = [policy]
    if loop is plain:
        models.append(freeze(load_model(f"{plain.PRETRAINED}/small_judge.safetensors")[0]))
    found = list(loop.train(*models, **sizes, steps=STEPS))
    assert len(found) == len(records) == STEPS
    for step, record in zip(found, records, strict=True):
        for name, value in step.items():
            assert value == pytest.approx(record[name], rel=2e-3, abs=1e-5), (name, record["step"])
    trained, _ = load_model(str(tmp_path / "model.safetensors"))
    for name, weight in policy.state_dict().items():
        torch.testing.assert_close(weight, trained.state_dict()[name], rtol=0, atol=2e-4, msg=name)
