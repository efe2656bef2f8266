"""README.md in the folder of a saved model: what it is and how it was trained."""

import os

from core.files.whole_files import replacing
from core.huggingface.files import is_adapter
from core.settings.optional import HUB, on_hub

MARK = "nano-GRPO writes this file at each save of the model; without this line it leaves the file as it is."
CARD = """---
library_name: {library}
{base}tags: [nano-grpo]
---
{what} of {start}, trained for {step} steps on `{dataset}`{objective}.

{mark}
"""


def write_card(config, folder, step):
    """Writes README.md into a model's folder, unless one is there that this function has not written."""
    path = os.path.join(folder, "README.md")
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            if MARK not in f.read():
                return
    with replacing(path) as new, open(new, "w", encoding="utf-8") as f:
        f.write(card(config, folder, step))


def card(config, folder, step):
    start = getattr(config, "generator_checkpoint", None) or getattr(config, "init_from", None) or "new weights"
    objective = f" with the objective `{config.objective}`" if hasattr(config, "objective") else ""
    kind, what = ("peft", "A LoRA adapter") if is_adapter(folder) else ("transformers", "A model")
    base = f"base_model: {without_folders(start)}\n" if on_hub(start) else ""
    return CARD.format(library=kind, base=base, what=what, start=without_folders(start), step=step,
                       dataset=without_folders(config.dataset), objective=objective, mark=MARK)


def without_folders(path):
    """The last part of an absolute path, which tells about the machine; the name of hf:owner/name."""
    path = path.removeprefix(HUB)
    return os.path.basename(os.path.normpath(path)) if os.path.isabs(path) else path
