"""Fills in a text of yours, where each _ is one hidden token, or completes it: left to right, or in any order.

python core/sample.py --checkpoint=data/char_diffusion/pretrained/generator.safetensors --text='The ____ of the ____'
python core/sample.py --checkpoint=data/arithmetic/pretrained/generator.safetensors --text='347+85='
python core/sample.py --checkpoint=data/countdown/pretrained/any_order.safetensors --text='6 6 21:33=' \
    --unmask_steps=8 --max_new_tokens=12 --unmask_order=confidence
python core/sample.py --checkpoint=hf:Qwen/Qwen3-0.6B --text='What is 347 + 85?'
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.config import load_config
from core.data import masked_positions
from core.device import detect_device
from core.distributions import draw_uniforms
from core.fill_in import UNMASK_ORDERS, fill_in
from core.fill_in_passes import count_passes, fill_in_passes, order_of_places
from core.generation import Stop, generate
from core.huggingface.tokenizer import HuggingFaceTokenizer
from core.logger import highlight
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER
from core.models import load_model, load_tokenizer
from core.prompts import MODEL, TEMPLATES, PromptFormat
from core.settings.script import run_script
from core.settings.setting import Settings, setting
from core.tokenizer_kinds import filled

HIDDEN = "_"  # stands for a hidden token
NEW_TOKENS = 128  # most tokens of a causal model's completion, if max_new_tokens is None


class SampleConfig(Settings):
    """The settings of core/sample.py and their defaults."""

    checkpoint: str = setting("out-grpo/model.safetensors", "a model file, a Hugging Face folder, or hf:owner/name")
    text: str = setting("", "the text to complete, or to fill in, where each _ is one hidden token")
    template: str | None = setting(
        None, "plain, chat, math, code, or model: its chat template. None: that, or else plain", (*TEMPLATES, MODEL))
    unmask_steps: int = setting(1, "passes in which a masked-fill model fills in, in each block", "[1, 1e6]")
    block_length: int | None = setting(
        None, "hidden tokens of a block; blocks are filled one after another. None: one block", "[1, 1e6]")
    unmask_order: str = setting(
        "random", "order within a block: random, left_to_right, or confidence, the likeliest first", UNMASK_ORDERS)
    max_new_tokens: int | None = setting(
        None, "of a completion. None: 128, and a masked-fill model fills in instead", "[1, 1e6]")
    num_samples: int = setting(5, "number of samples to print", "[1, 1e4]")
    temperature: float = setting(0.8, "below 1 prefers likely tokens, above 1 flattens", "[1e-6, 1e3]")
    top_p: float = setting(0.95, "the nucleus; 1.0 for all tokens", "(0, 1]")
    seed: int = setting(1337, "of the noise", "[0, 1e18]")
    device: str = setting("auto", "auto takes cuda, then mps, then cpu")


def hidden_tokens(text, tokenizer):
    """The ids of a text, a list, with the mask token for each HIDDEN."""
    if isinstance(tokenizer, HuggingFaceTokenizer):  # its mask token has a name in texts, and may take the space before
        ids = tokenizer.encode(text.replace(HIDDEN, tokenizer.backend.mask_token))
    else:
        ids = []
        for part in text.split(HIDDEN):
            ids += [*tokenizer.encode(part), tokenizer.mask_token_id]
        ids.pop()
    if not 0 < ids.count(tokenizer.mask_token_id) < len(ids):
        raise ValueError(f"--text={text!r} must have characters to go by and {HIDDEN!r} for a hidden token; or set "
                         "--max_new_tokens")
    return ids


def completions(model, tokenizer, config, device):
    """Yields completions of the text, each up to its stop token, and [[first, end]] of the sampled characters."""
    template = config.template or (MODEL if getattr(tokenizer, "has_chat_template", False) else "plain")
    format = PromptFormat(template)
    format.check(tokenizer)
    _, ids = format.encode(config.text, tokenizer)
    room = min(config.max_new_tokens or NEW_TOKENS, model.longest_input - len(ids))
    if not ids or room < 1:
        raise ValueError(f"--text={config.text!r} must have 1 to {model.longest_input - 1} tokens, not {len(ids)}")
    ends = tokenizer.stop_token_ids
    if model.mode == LANGUAGE_MODEL:
        noise = draw_uniforms(config.seed, 0, [0], (config.num_samples, room))
        prompt = torch.tensor([ids], device=device)
        rows = generate(model, prompt, None, noise, Stop(tokenizer), temperature=config.temperature,
                        top_p=config.top_p).target.tolist()
    else:
        if hasattr(model, "answer_prompts"):  # one of Hugging Face
            model.answer_prompts()
        texts = draw(model, [*ids, *[tokenizer.mask_token_id] * room], tokenizer, config, device, ends)
        rows = [row[len(ids) :] for row in texts]
    text = config.text if template == "plain" else config.text + "\n"
    for row in rows:
        end = next((i for i, token in enumerate(row) if token in ends), None)
        completion = tokenizer.decode(row[:end])
        yield text + completion, [[len(text), len(text) + len(completion)]]


def fills(model, tokenizer, config, device):
    """Yields samples of the text with its hidden tokens filled in, and [[first, end]] of the characters of each."""
    ids = hidden_tokens(config.text, tokenizer)
    by_model = [token == tokenizer.mask_token_id for token in ids]
    for row in draw(model, ids, tokenizer, config, device):
        yield tokenizer.decode(row), filled(tokenizer, row, by_model)


def draw(model, ids, tokenizer, config, device, end_ids=()):
    """num_samples samples of a text (a list of ids) with its hidden tokens filled in, as lists of ids."""
    text = torch.tensor([ids])                                                       # (1, T)
    position, hidden = masked_positions(text == tokenizer.mask_token_id, device)     # (1, M) each
    text = text.to(device)
    by_confidence = config.unmask_order == "confidence"
    draws = count_passes(position.shape[1], config.block_length, config.unmask_steps) if by_confidence else 1
    noise = draw_uniforms(config.seed, 0, [0], (1 + draws, config.num_samples, len(ids)))
    uniform = noise[:, [0, *range(2, 1 + draws)]].transpose(0, 1)                    # (draws, 1, num_samples, T)
    target, *_ = fill_in_passes(
        model, text, position, hidden, uniform, order_of_places(config.unmask_order, noise[:, 1]), config.unmask_steps,
        block_length=config.block_length, by_confidence=by_confidence, end_ids=end_ids, temperature=config.temperature,
        top_p=config.top_p)
    return fill_in(text, position, hidden.to(device), target[None])[0].tolist()


def main(argv):
    """Prints num_samples samples; on a terminal, the sampled characters are highlighted."""
    config, _ = load_config(SampleConfig, argv)
    device = detect_device(config.device)
    model, _ = load_model(config.checkpoint, device)
    tokenizer = load_tokenizer(config.checkpoint)
    if model.mode == SEQUENCE_SCORER:
        raise ValueError(f"checkpoint={config.checkpoint} scores texts and samples none; name a generator")
    sample = fills
    if model.mode == LANGUAGE_MODEL or config.max_new_tokens is not None:
        sample = completions
    for text, sampled in sample(model, tokenizer, config, device):
        print(highlight(text, sampled, sys.stdout.isatty()))


if __name__ == "__main__":
    run_script(main)
