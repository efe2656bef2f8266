"""Rooms of GRPO training: none is imported before it opens, masks of a user's file."""

import subprocess
import sys

from grpo.build import build_data
from tests.tiny import ROOT, config, one_process


def test_a_room_is_imported_when_it_opens():
    code = (f"import sys; sys.path.insert(0, {ROOT!r}); from grpo.grpo_config import GRPOConfig; GRPOConfig(SETTING); "
            "print(*sys.modules, sep='\\n')")
    for setting, opened in (("", False), ("sampler='ray', lora_rank=4, report_to=('wandb',)", True)):
        done = subprocess.run([sys.executable, "-c", code.replace("SETTING", setting)], capture_output=True, text=True, check=True)
        rooms = ("grpo.samplers.settings", "core.huggingface.settings", "core.trackers")
        assert all((room in done.stdout.split()) == opened for room in rooms)


def test_a_users_file_adds_a_mask(dataset, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import numpy as np\nfrom core.data import mask\n\n\n@mask\ndef first(rng, tokens, count, newline):\n"
                    "    return np.arange(len(tokens)) < count\n")
    c = config(dataset=dataset, generator_checkpoint="x.safetensors", reward_file=str(path), masks={"first": 1.0}, mask_low=0.25,
               mask_high=0.25)
    mask = build_data(c, one_process()).batch("train", 0)["mask"]
    assert (mask.sum(1) == 8).all() and mask[:, :8].all()
