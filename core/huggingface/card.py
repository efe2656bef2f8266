"""Model cards: the README.md of a folder in Hugging Face format."""

import re
from contextlib import suppress
from pathlib import Path

from core.errors import Mistake
from core.files import CONFIG, HUB, on_hub, read_object
from core.huggingface.files import is_adapter
from core.logger import format_number

CARD = "README.md"
SETTINGS = ("dataset", "objective", "reward_functions", "environment", "teacher_checkpoint")
PEFT = "library_name: peft"
TRANSFORMERS = "library_name: transformers"


def write_card(folder, path, base, facts):
    """Writes the card of the model in `folder`, which will be moved to `path`, with the settings of the run whose files
    are beside it.

    base: folder or hub name of the model that was trained; facts: the step and the last evaluation
    """
    settings = {}
    with suppress(Mistake, OSError):  # a config.json that is missing or damaged must not cost the model
        config = Path(path).parent / CONFIG
        settings = read_object(config, config, "delete it")
    lines = [f"- {key}: {settings[key]}\n" for key in SETTINGS if settings.get(key)]
    numbers = {key: format_number(value) for key, value in facts.items() if isinstance(value, (int, float))}
    step = numbers.pop("step", "unknown")
    measured = [f"{key} {value}" for key, value in numbers.items()]
    lines.append(f"- steps: {step}; last evaluation: {', '.join(measured) or 'none'}\n")
    match settings:
        case {"starts": [*_, {"commit": commit}]} if commit:
            lines.append(f"- commit of nano-GRPO: {commit}\n")
    library = PEFT if is_adapter(folder) else TRANSFORMERS
    name = base.removeprefix(HUB) or "unknown"
    base_model = f"base_model: {name}\n" if on_hub(base) else ""
    text = f"""---
{base_model}{library}
tags:
- nano-grpo
---

# Written by nano-GRPO

- base model: {name}
{''.join(lines)}- open it with from_pretrained of transformers, which needs the package peft for an adapter
- licence: not set; those of the base model and of the data apply
"""
    text = re.sub("(?<= )(hf:)?/.*/(?=.)", "", text)  # the folders of an absolute path may hold the name of the user
    Path(folder, CARD).write_text(text, "utf-8", "replace")


def copy_card(folder, path, facts):
    """Copies the card of the model at `path`, of which `folder` is an export without an adapter. If it has none, writes
    one."""
    write_card(folder, path, path, facts)
    card = Path(path, CARD)
    if card.exists():
        text = card.read_text("utf-8", "replace").replace(PEFT, TRANSFORMERS)
        Path(folder, CARD).write_text(text, "utf-8")
