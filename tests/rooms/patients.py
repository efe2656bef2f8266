"""Runs of the shipped small models on a few records, which the tests of the doctor make ill."""

import os
from types import SimpleNamespace

from core.distributed import Distributed
from grpo.build import build_data, build_models, build_rewards
from grpo.doctor.checks import examine
from grpo.grpo_config import GRPOConfig
from tests.tiny import ROOT, TEXT, jsonl, write_text_dataset

SUMS = [(a, b) for a in (7, 36, 58, 245, 901) for b in (4, 19, 62, 88, 730, 4096)]
SHIPPED = {name: os.path.join(ROOT, "data", name, "pretrained") for name in ("arithmetic", "char_diffusion")}


def solved(a, b):
    """A sum of the arithmetic task with its answer and a completion that gives it."""
    return {"prompt": f"{a}+{b}=", "answer": str(a + b),
            "completion": f"<start_working_out>{a}+{b}<end_working_out><SOLUTION>{a + b}</SOLUTION>"}


def sums(**changes):
    """Records of the arithmetic task; a change replaces a field, or leaves it out if it is None."""
    records = [solved(a, b) | changes | {"split": "val" if i % 5 == 0 else "train"} for i, (a, b) in enumerate(SUMS)]
    return [{key: x for key, x in record.items() if x is not None} for record in records]


def completing(folder, records=None, **settings):
    """The parts of a run that completes these records, or those of sums()."""
    dataset = jsonl(folder / "records.jsonl", *(sums() if records is None else records))
    return parts({"dataset": dataset, "generator_checkpoint": f"{SHIPPED['arithmetic']}/generator.safetensors",
                  "reward_functions": ("math_number",), "max_new_tokens": 48, "group_size": 8} | settings)


def filling(folder, **settings):
    """The parts of a run that fills in text for the shipped judge."""
    write_text_dataset(folder / "text", TEXT)
    files = {f"{name}_checkpoint": f"{SHIPPED['char_diffusion']}/{name}.safetensors" for name in ("generator", "judge")}
    return parts({"dataset": str(folder / "text"), "block_size": 64, "group_size": 4, "dtype": "float32"}
                 | files | settings)


def parts(settings):
    """What grpo/train_grpo.py builds of these settings."""
    config = GRPOConfig(**{"batch_size": 4, "temperature": 1.0, "top_p": 1.0, "eval_problems": 4, "max_iters": 20,
                           "eval_completions": 4, "device": "cpu", "out_dir": "unwritten"} | settings)
    dist = Distributed("cpu", config.dtype)
    data = build_data(config, dist)
    models = build_models(config, data, dist)
    rewards = build_rewards(config, models, data, dist)
    return SimpleNamespace(config=config, models=models, rewards=rewards, data=data, dist=dist)


def examined(run):
    """The DoctorStep of the parts of a run."""
    return examine(run.config, run.models, run.rewards, run.data, run.dist)


def expect(result, fine, sentence, remedy=""):
    """Checks whether a check finds all fine, and texts that its sentence and its remedy contain."""
    assert result[0] is fine, result
    assert sentence in result[1] and remedy in result[2], result
    assert fine or result[2], "what is not fine has a remedy"
