"""Files of others that do the worst: each ends in one line that a terminal shows as it is."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.models import load_model
from tests.families import model_folder


def one_line(function, *arguments):
    """The ValueError that a call ends in, which is one printable line."""
    with pytest.raises(ValueError) as found:
        function(*arguments)
    text = str(found.value)
    assert text.isprintable() and len(text) < 2000, text
    return text


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a small random model."""
    pytest.importorskip("transformers")
    return model_folder(tmp_path_factory.mktemp("hostile") / "llama", "llama")


def rewritten(folder, name, change):
    """change(values) of a JSON file; what it returns, if anything, takes their place."""
    path = os.path.join(folder, name)
    with open(path) as f:
        values = json.load(f)
    values = change(values) or values
    with open(path, "w") as f:
        json.dump(values, f)


def config(**values):
    return lambda folder: rewritten(folder, "config.json", lambda old: old | values)


def weights_from(name):
    """A model whose index says that its weights are in a file of this name."""
    def spoil(folder):
        weights = load_file(os.path.join(folder, "model.safetensors"))
        os.remove(os.path.join(folder, "model.safetensors"))
        save_file({"other": torch.zeros(1)}, os.path.join(folder, "other.safetensors"))
        if "/" in name:
            save_file(weights, os.path.join(folder, name), metadata={"format": "pt"})
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": dict.fromkeys(weights, name)}, f)
    return spoil


def weights(change):
    """A model whose weights are changed by change(weights)."""
    def spoil(folder):
        path = os.path.join(folder, "model.safetensors")
        values = load_file(path)
        change(values)
        save_file(values, path, metadata={"format": "pt"})
    return spoil


def with_nan(values):
    values["model.norm.weight"][3] = torch.nan


NORM = "model.norm.weight"
FOLDERS = {
    "index names a pickle": (weights_from("weights.bin"), "weights.bin"),
    "index names a file outside": (weights_from("../outside.safetensors"), "outside.safetensors"),
    "index names no file": (weights_from("gone.safetensors"), "gone.safetensors"),
    "config names another file": (config(transformers_weights="adapter_model.bin"), "adapter_model.bin"),
    "dtype": (config(dtype="save"), "could not be read"),
    "NaN in weights": (weights(with_nan), f"{NORM} holds numbers that are not finite"),
    "other shape": (config(hidden_size=64), "shape"), "eps is a text": (config(rms_norm_eps="x"), "rms_norm_eps"),
    "unknown model": (config(model_type="\x1b[2J\n"), "could not be read")}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_model_s_folder_ends_in_one_line(kind, llama, tmp_path):
    spoil, words = FOLDERS[kind]
    folder = str(tmp_path / "model")
    shutil.copytree(llama, folder)
    spoil(folder)
    text = one_line(lambda: load_model(folder, key="generator_checkpoint"))
    assert text.startswith(f"generator_checkpoint={folder}") and words in text, text
