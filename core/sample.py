"""Fills in a text of yours: every mask character is one hidden token.

python core/sample.py --checkpoint=data/char_diffusion/pretrained/generator.safetensors --text='The ____ of the ____'
"""

import os
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.checkpoint_manager import load_model, load_tokenizer
from core.config import load_config, run_script
from core.distributed import detect_device
from core.logger import highlight
from core.model import MASKED_FILL
from core.sampling import draw_uniforms, fill_once


@dataclass(frozen=True)
class SampleConfig:
    """Which generator fills which text, how often and how boldly."""

    checkpoint: str = "out-grpo/model.safetensors"
    text: str = ""
    mask_character: str = "_"
    num_samples: int = 5
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 1337
    device: str = "auto"

    def __post_init__(self):
        if len(self.mask_character) != 1:
            raise ValueError(f"mask_character={self.mask_character!r} must be one character")
        if self.num_samples < 1 or self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"num_samples={self.num_samples} must be at least 1, "
                             f"temperature={self.temperature} above 0, top_p={self.top_p} in (0, 1]")


def encode_with_masks(text, mask_character, tokenizer):
    """(ids, mask), each (1, T): the text with MASK where the mask character stands."""
    ids = []
    for i, part in enumerate(text.split(mask_character)):
        ids += [tokenizer.mask_token_id] * (i > 0) + tokenizer.encode(part)
    ids = torch.tensor([ids])
    mask = ids == tokenizer.mask_token_id
    if mask.all():
        raise ValueError(f"--text={text!r} has no usable characters beside {mask_character!r} to go by")
    if not mask.any():
        raise ValueError(f"--text={text!r} has nothing to fill in: write {mask_character!r} for every hidden character")
    return ids, mask


def main(argv):
    """Prints num_samples completions of the text; on a terminal, what was filled in is highlighted."""
    config, _ = load_config(SampleConfig, argv)
    device = detect_device(config.device)
    model, _ = load_model(config.checkpoint, device, MASKED_FILL)
    tokenizer = load_tokenizer(config.checkpoint)
    ids, mask = encode_with_masks(config.text, config.mask_character, tokenizer)
    noise = draw_uniforms(config.seed, 0, [0], (config.num_samples, ids.shape[1]))
    filled = fill_once(model, ids.to(device), mask, noise, config.temperature, config.top_p)[0]
    for row in filled.tolist():
        print(highlight(tokenizer.decode(row), mask[0].tolist(), sys.stdout.isatty()))


if __name__ == "__main__":
    run_script(main)
