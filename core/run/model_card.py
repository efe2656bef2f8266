"""README.md in the folder of a saved model: what it is and how it was trained."""

import os

from core.files.whole_files import replacing
from core.huggingface.files import is_adapter
from core.settings.optional import HUB, on_hub

MARK = "nano-GRPO writes this file at each save of the model; without this line it leaves the file as it is."


def write_card(config, folder, step):
    """Writes README.md into a model's folder, unless one is there that this function has not written."""
    path = os.path.join(folder, "README.md")
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            if MARK not in f.read():
                return
    start = getattr(config, "generator_checkpoint", None) or config.init_from
    named, dataset = name_of(start), name_of(config.dataset)
    library, what = ("peft", "A LoRA adapter") if is_adapter(folder) else ("transformers", "A model")
    base = f"base_model: {named}\n" if on_hub(start) else ""
    objective = f" with the objective `{config.objective}`" if hasattr(config, "objective") else ""
    with replacing(path) as new, open(new, "w", encoding="utf-8") as f:
        f.write(f"---\nlibrary_name: {library}\n{base}tags: [nano-grpo]\n---\n"
                f"{what} of {named}, trained for {step} steps on `{dataset}`{objective}.\n\n{MARK}\n")


def name_of(path):
    """The last part of an absolute path, which tells about the machine; the name of hf:owner/name."""
    path = path.removeprefix(HUB)
    return os.path.basename(os.path.normpath(path)) if os.path.isabs(path) else path
