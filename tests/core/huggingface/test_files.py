"""Folders in Hugging Face format: what is known and refused before a model is loaded, and files that change whole."""

import json
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from core.huggingface import files as huggingface_files
from core.huggingface.files import ADAPTER, base_of, check_weights, is_adapter, replace_files


@pytest.mark.parametrize("name", ["weights.pt", "flax_model.msgpack", "tf_model.h5", "last.ckpt", "pytorch_model.bin"])
def test_no_format_that_runs_code_is_read(name, tmp_path):
    for first in ("config.json", name):
        (tmp_path / first).write_text("{}")
    with pytest.raises(ValueError, match=f"^key={tmp_path} holds pickled weights .{name}.*convert them to safetensors"):
        check_weights(str(tmp_path), "key", SimpleNamespace())
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert check_weights(str(tmp_path), "key", SimpleNamespace()) is None, "the safetensors beside it are what is read"


def test_the_base_of_an_adapter_is_a_folder_or_a_name_of_the_hub(tmp_path):
    path, base = str(tmp_path / "adapter"), str(tmp_path / "base")
    os.mkdir(base)
    assert not is_adapter(path)
    os.mkdir(path)

    def named(name):
        (tmp_path / "adapter" / ADAPTER).write_text(json.dumps({"base_model_name_or_path": name}))
        assert is_adapter(path)
        return base_of(path, "key")

    assert named(base) == base and named("owner/name") == "hf:owner/name"
    for gone in (str(tmp_path / "gone"), "gone", None, 3):
        with pytest.raises(ValueError, match=f"^key={path} is an adapter whose base model .*is not there; put it"):
            named(gone)
    with pytest.raises(ValueError, match=f"^key={path} is an adapter that names itself as its base model; correct"):
        named(path)
    for content in ("{", "[]"):
        (tmp_path / "adapter" / ADAPTER).write_text(content)
        with pytest.raises(ValueError, match=f"^key={path}: {ADAPTER} [^\n]*; copy its files again$"):
            base_of(path, "key")


def fill(folder, text, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(text)


def texts(folder):
    return {name: (folder / name).read_text() for name in os.listdir(folder)}


def test_files_take_the_place_of_older_ones_and_others_stay(tmp_path):
    names = ("config.json", "model.safetensors")
    fill(tmp_path / "new", "2", *names)
    fill(tmp_path / "old", "1", *names, "notes.txt")
    replace_files(str(tmp_path / "new"), str(tmp_path / "old"))
    assert texts(tmp_path / "old") == {"config.json": "2", "model.safetensors": "2", "notes.txt": "1"}
    assert os.listdir(tmp_path) == ["old"], "nothing is left over"
    fill(tmp_path / "new", "3", *names)
    replace_files(str(tmp_path / "new"), str(tmp_path / "deep" / "folder"))
    assert texts(tmp_path / "deep" / "folder") == dict.fromkeys(names, "3")


@pytest.mark.parametrize("count", range(3))
def test_weights_change_last_so_that_an_interrupted_change_leaves_the_old_ones_whole(tmp_path, monkeypatch, count):
    names = ("tokenizer.json", "config.json", "model.safetensors")
    fill(tmp_path / "new", "2", *names)
    fill(tmp_path / "old", "1", *names)
    real, done = os.replace, []

    def limited(*paths):
        if len(done) == count:
            raise KeyboardInterrupt
        done.append(paths)
        real(*paths)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(huggingface_files.os, "replace", limited)
        replace_files(str(tmp_path / "new"), str(tmp_path / "old"))
    assert texts(tmp_path / "old")["model.safetensors"] == "1"
    replace_files(str(tmp_path / "new"), str(tmp_path / "old"))
    assert set(texts(tmp_path / "old").values()) == {"2"}
