"""Fills in a text, where each _ is one hidden token, or completes it from left to right.

python core/sample.py --checkpoint=data/char_diffusion/pretrained/generator.safetensors --text='The ____ of the ____'
python core/sample.py --checkpoint=data/arithmetic/pretrained/generator.safetensors --text='347+85='
python core/sample.py --checkpoint=data/countdown/pretrained/any_order.safetensors --text='6 6 21:33=____________' \
    --unmask_steps=8 --unmask_order=confidence
python core/sample.py --checkpoint=hf:Qwen/Qwen3-0.6B --text='What is 347 + 85?'
"""

import os
import pathlib
import sys
from dataclasses import dataclass
from itertools import takewhile
from types import SimpleNamespace
from typing import Annotated

root = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root))

import torch

from core.config import PROMPT_TEMPLATES, load_config
from core.data import masked_positions
from core.device import detect_device
from core.distributions import draw_uniforms
from core.errors import Mistake, run_script
from core.fill_in import UNMASK_ORDERS, check_order, depends_on_policy, fill_in
from core.files import CONFIG, read_object
from core.fill_in_passes import fill_in_passes
from core.generation import Stop, generate
from core.huggingface.tokenizer import HuggingFaceTokenizer
from core.logger import visible_lines
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER
from core.models import is_small, load_model, load_tokenizer, model_of_run
from core.prompts import PromptFormat
from core.settings.setting import Count, Name, Settings, Share, Temperature, check_value

HIDDEN = "_"  # stands for a hidden token


@dataclass(frozen=True)
class SampleConfig(Settings):
    """The settings of core/sample.py and their defaults."""

    checkpoint: Name = "out-grpo/model.safetensors"
        # a model file, a Hugging Face folder, the folder of a run, or hf:owner/name
    text: str = ""  # the text to complete, or to fill in, where each _ is one hidden token
    template: Annotated[str | None, PROMPT_TEMPLATES] = None
        # template of the prompt, as in training; None: from its run, else model (its chat template), or plain
    unmask_steps: Count = 1  # passes in which a masked-fill model fills in
    unmask_order: Annotated[str, UNMASK_ORDERS] = "random"
        # order of the passes: random, left_to_right, or confidence, the most likely first
    max_new_tokens: Count = 128  # of a completion
    num_samples: Annotated[int, "[1, 1e4]"] = 5  # number of samples to print
    temperature: Temperature = 0.8  # below 1 prefers likely tokens, above 1 flattens
    top_p: Share = 0.95  # nucleus sampling; 1.0 turns it off
    seed: Annotated[int, "[0, 1e18]"] = 1337  # of the noise
    device: str = "auto"  # auto (cuda, else mps for Hugging Face models, else cpu), cpu, cuda, cuda:1, mps


def hidden_tokens(text, tokenizer):
    """Encodes a text, with the mask token for each HIDDEN."""
    mask = tokenizer.mask_token_id
    if isinstance(tokenizer, HuggingFaceTokenizer):
        # In one piece, as in training: the mask token may absorb the space before it
        ids = tokenizer.encode(text.replace(HIDDEN, tokenizer.backend.mask_token))
    else:
        ids = []
        for part in text.split(HIDDEN):
            ids += [*tokenizer.encode(part), mask]
        ids.pop()  # no mask follows the last part
    if not 0 < ids.count(mask) < len(ids):
        raise Mistake(f"--text={text!r} must have characters to go by and {HIDDEN!r} for a hidden token")
    return ids


def format_of_prompt(config, tokenizer):
    """Returns the PromptFormat of the command, else of the run that wrote the checkpoint, else the default. Prints a
    line on stderr if it comes from the run."""
    if config.template:
        return PromptFormat(config.template)
    folder = os.path.dirname(config.checkpoint.rstrip("/"))
    path = os.path.join(folder, CONFIG)
    saved = {}
    if os.path.isfile(path):
        saved = read_object(path, path, "set template")
    template = saved.get("template")
    if template is not None:
        check_value("template", template, PROMPT_TEMPLATES)
        print(f"the prompt is rendered as in training: template={template!r}, the rest from {path}", file=sys.stderr)
        return PromptFormat.of(SimpleNamespace(**saved))
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.has_chat_template:
        return PromptFormat("model")
    return PromptFormat("plain")


def completions(model, tokenizer, config, device):
    """Yields the text with each completion, up to its stop token."""
    format = format_of_prompt(config, tokenizer)
    _, ids = format.encode(config.text, tokenizer)
    longest = model.longest_input - 1
    if not 1 <= len(ids) <= longest:
        raise Mistake(f"--text={config.text!r} must have 1 to {longest} tokens, not {len(ids)}")
    room = min(config.max_new_tokens, model.longest_input - len(ids))
    shape = (config.num_samples, room)
    noise = draw_uniforms(config.seed, 0, [0], shape)
    prompt = torch.tensor([ids], device=device)
    drawn = generate(
        model,
        prompt,
        None,
        noise,
        Stop(tokenizer),
        temperature=config.temperature,
        top_p=config.top_p)
    separator = "" if format.template == "plain" else "\n"
    for row in drawn.target.tolist():
        completion = list(takewhile(lambda token: token not in tokenizer.stop_token_ids, row))
        yield config.text + separator + tokenizer.decode(completion)


def fills(model, tokenizer, config, device):
    """Yields the text with its hidden tokens filled in, num_samples times."""
    ids = hidden_tokens(config.text, tokenizer)
    text = torch.tensor([ids])                                                       # (1, T)
    mask = text == tokenizer.mask_token_id
    position, hidden = masked_positions(mask, device)                                # (1, M) each
    text = text.to(device)
    # An order that depends on the policy redraws every hidden token in each pass, with new noise
    passes = 1
    if depends_on_policy(config.unmask_order):
        passes = config.unmask_steps
    shape = (1 + passes, config.num_samples, len(ids))
    noise = draw_uniforms(config.seed, 0, [0], shape)
    first, order, *later = noise.unbind(1)                                           # (1, num_samples, T) each
    uniform = torch.stack((first, *later))                                           # (passes, 1, num_samples, T)
    target, *_ = fill_in_passes(
        model,
        text,
        position,
        hidden,
        uniform,
        order,
        passes=config.unmask_steps,
        unmask_order=config.unmask_order,
        temperature=config.temperature,
        top_p=config.top_p)
    hidden = hidden.to(device)
    texts = fill_in(text, position, hidden, target[None])                            # (1, num_samples, T)
    for filled in texts[0].tolist():
        yield tokenizer.decode(filled)


def main(argv):
    """Prints num_samples samples."""
    config, _ = load_config(SampleConfig, argv)
    config = config.varied(checkpoint=model_of_run(config.checkpoint))
    check_order(config.unmask_order)
    device = detect_device(config.device, small=is_small(config.checkpoint))
    model, _ = load_model(config.checkpoint, device)
    if model.mode == SEQUENCE_SCORER:
        raise Mistake(f"checkpoint={config.checkpoint} scores texts and samples none; name a generator")
    tokenizer = load_tokenizer(config.checkpoint)
    sample = completions if model.mode == LANGUAGE_MODEL else fills
    for text in sample(model, tokenizer, config, device):
        print(visible_lines(text))


if __name__ == "__main__":
    run_script(main)
