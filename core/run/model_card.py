"""README.md in the folder of a saved model: what it is, how it was trained and measured."""

import json
import os

from core.files.whole_files import replacing
from core.huggingface.files import is_adapter
from core.logger import format_number
from core.run.start import versions
from core.run.trackers import settings_to_send
from core.settings.optional import HUB, on_hub

MARK = "nano-GRPO writes this file at each save of the model; without this line it leaves the file as it is."
NOT_OF_THE_MODEL = ("out_dir", "resume")
CARD = """---
library_name: {library}
{base_model}tags: [nano-grpo]
---

# {what}

{mark}

Trained for {step} steps on `{dataset}`{objective}.

## Held out

{figures}

nano-GRPO takes the folder wherever a setting names a model, as in `python core/sample.py --checkpoint=FOLDER`.

## Settings that differ from the defaults

```json
{settings}
```

{versions}
"""


def write_card(config, folder, step, before, after):
    """Writes README.md into a model's folder, unless one is there that this function has not written.

    config: the settings of the run; before, after: {metric: number} held out, at step 0 and at the last evaluation
    """
    path = os.path.join(folder, "README.md")
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            if MARK not in f.read():
                return
    text = card(config, folder, step, before, after)
    with replacing(path) as new, open(new, "w", encoding="utf-8") as f:
        f.write(text)


def card(config, folder, step, before, after):
    """The text of the card; arguments as of write_card."""
    adapter = is_adapter(folder)
    start = getattr(config, "generator_checkpoint", None) or getattr(config, "init_from", None) or "new weights"
    base = without_folders(start)
    return CARD.format(
        library="peft" if adapter else "transformers",
        base_model=f"base_model: {base}\n" if on_hub(start) else "", mark=MARK, step=step,
        what=f"A LoRA adapter of {base}" if adapter else f"A model trained from {base}",
        dataset=without_folders(config.dataset), objective=objective(config), figures=figures(before, after),
        settings=json.dumps(changed(config), indent=1), versions=", ".join(map(" ".join, versions().items())))


def changed(config):
    """{setting: value} of what differs from the defaults and says something about the model."""
    return {key: without_folders(value) for key, value in settings_to_send(config).items()
            if value != getattr(type(config), key) and key not in NOT_OF_THE_MODEL}


def objective(config):
    """The objective and the rewards of the training, in words."""
    if not hasattr(config, "objective"):
        return " (supervised)"
    words = f" with the objective `{config.objective}`"
    if config.reward_functions:
        words += f" for the rewards {', '.join(config.reward_functions)}"
    if config.teacher_checkpoint is not None:
        words += f", taught by {without_folders(config.teacher_checkpoint)}"
    return words


def figures(before, after):
    """A table of the held-out metrics."""
    names = dict.fromkeys((*before, *after))
    if not names:
        return "Not measured."
    rows = ["| metric | before | at the last evaluation |", "|---|---|---|"]
    for name in names:
        pair = before.get(name), after.get(name)
        rows.append(f"| {name.removeprefix('eval/')} | {' | '.join(map(format_number, pair))} |")
    return "\n".join(rows)


def without_folders(value):
    """A setting; of an absolute path, which tells about the machine, its last part, and of hf:owner/name the name."""
    if isinstance(value, list | tuple):
        return [without_folders(x) for x in value]
    if isinstance(value, dict):
        return {key: without_folders(x) for key, x in value.items()}
    if not isinstance(value, str):
        return value
    path = value.removeprefix(HUB)
    return os.path.basename(os.path.normpath(path)) if os.path.isabs(path) else path
