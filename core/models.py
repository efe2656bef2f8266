"""Models and tokenizers of every kind: a model file of ours, a folder in Hugging Face format, or hf:owner/name.

The only place that asks whose model it is. What Hugging Face models need is imported where one is used.
"""

import os

import torch

from core.files.json_lines import read_object
from core.files.model_file import read_model_file, read_tokenizer, write_model_file
from core.model import GPT
from core.settings.optional import on_hub


def is_huggingface(path, key="checkpoint"):
    """Tells whether the path names a Hugging Face model: hf:owner/name, or a folder that holds one. Raises ValueError
    for another folder."""
    if on_hub(path):
        return True
    if not os.path.isdir(path):
        return False
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        return True
    file = os.path.join(path, "config.json")  # the folder of a run has one too, with the run's settings
    if os.path.isfile(file) and "model_type" in read_object(file, f"{key}={path}: config.json", "copy it again"):
        return True
    raise ValueError(f"{key}={path} is a folder without a Hugging Face config.json; correct the path or, of a run, "
                     f"name the model in it: {path}/model or {path}/model.safetensors")


def load_model(path, device="cpu", mode=None, tokenizer=None, key="checkpoint", adapter=None, dtype=torch.float32):
    """A model in eval mode, and facts about its training.

    mode: the mode that it must have; tokenizer: the one whose vocabulary it must have
    adapter: a LoraConfig: whether an adapter of a Hugging Face model is trained; dtype: of the weights beside it
    Raises FileNotFoundError or ValueError naming `key`, the path and what was found there.
    """
    if is_huggingface(path, key):
        from core.huggingface.load import FULL, load_huggingface
        return load_huggingface(path, device, mode, tokenizer, key, adapter or FULL, dtype), {}
    if adapter is not None and adapter.has_adapter and os.path.exists(path):
        raise ValueError(f"{adapter.asked_for} is for Hugging Face models, which {key}={path} is not; leave it out")
    return read_model_file(path, device, mode, tokenizer, key)


def load_tokenizer(path, key="checkpoint"):
    """The tokenizer of a model."""
    if not is_huggingface(path, key):
        return read_tokenizer(path, key)
    from core.huggingface.tokenizer import load_huggingface_tokenizer
    return load_huggingface_tokenizer(path, key)


def save_model(path, model, tokenizer, dtype=torch.float32, weights=None, **facts):
    """Writes the model with its tokenizer: a file of ours, or a folder in Hugging Face format, which holds the adapter
    alone if there is one.

    facts: plain values for a file of ours (step, metrics)
    weights: what model.weights() gives, whole, if the model has only parts of them; in float32
    """
    if isinstance(model, GPT):
        write_model_file(path, model, tokenizer, dtype, weights, **facts)
        return
    from core.huggingface.load import save_huggingface
    save_huggingface(path, model, tokenizer, dtype, weights)
