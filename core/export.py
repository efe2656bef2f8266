"""Exports a model to a folder that transformers loads.

It takes a causal generator of ours, or a Hugging Face model, whose adapter is merged into the weights.

python core/export.py --checkpoint=data/arithmetic/pretrained/generator.safetensors --out=arithmetic-hf
python core/export.py --checkpoint=out-grpo/model --out=merged --dtype=bfloat16
"""

import os
import sys
from dataclasses import dataclass
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.config import load_config
from core.errors import UsageError, run_script
from core.huggingface.card import copy_card
from core.huggingface.export import write_generator
from core.huggingface.files import writing_folder
from core.huggingface.load import open_transformer
from core.models import is_huggingface, load_model, load_tokenizer, model_of_run
from core.settings.optional import quiet_transformers
from core.settings.setting import Name, Settings


@dataclass(frozen=True)
class ExportConfig(Settings):
    """The settings of core/export.py and their defaults."""

    checkpoint: Name = "out-grpo/model.safetensors"
        # a causal model of ours, a Hugging Face folder (an adapter too) or hf:owner/name
    out: str = ""  # the folder to write; it must not exist yet
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the written weights: float32, bfloat16

    def conflicts(self):
        exists = os.path.lexists(self.out) or os.path.lexists(f"{self.out}.tmp")
        yield self.out and exists, "out", "or its .tmp exists; name another folder"

    def __post_init__(self, origin):
        super().__post_init__(origin)
        if not self.out:
            raise UsageError("which folder? name the one to write, --out=FOLDER")


def main(argv):
    """Writes the folder, or nothing at all."""
    config, _ = load_config(ExportConfig, argv)
    quiet_transformers(config.out, "out")
    path = model_of_run(config.checkpoint)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    with writing_folder(config.out) as folder:
        tokenizer = load_tokenizer(path)
        facts = {}
        if is_huggingface(path):
            net, _ = open_transformer(path, "checkpoint", None)  # an adapter is merged, in float32
            net.to(dtype).save_pretrained(folder)
            tokenizer.save(folder)
        else:
            model, facts = load_model(path)
            write_generator(model, tokenizer, folder, dtype)
        copy_card(folder, path, facts)
    print(f"wrote {config.out} ({config.dtype})")


if __name__ == "__main__":
    run_script(main)
