"""Folders in Hugging Face format: what is known and refused before a model is loaded, and files that change whole."""

import json
import os

import pytest

pytest.importorskip("transformers")

from core.huggingface.files import ADAPTER, base_of, check_target, writing_folder
from tests.tiny import Cut, contents, cut_after


def test_the_base_of_an_adapter_is_a_folder_or_a_name_of_the_hub(tmp_path):
    path, base = str(tmp_path / "adapter"), str(tmp_path / "base")
    os.mkdir(base)
    os.mkdir(path)

    def named(name):
        (tmp_path / "adapter" / ADAPTER).write_text(json.dumps({"base_model_name_or_path": name}))
        return base_of(path, "key")

    assert named(base) == base and named("owner/name") == "hf:owner/name"
    for gone in (str(tmp_path / "gone"), "gone", None, path):
        with pytest.raises(ValueError, match=f"^key={path} is an adapter whose base model .*is not there; put it"):
            named(gone)
    (tmp_path / "adapter" / ADAPTER).write_text("[]")
    with pytest.raises(ValueError, match=f"^key={path}: {ADAPTER} [^\n]*; copy its files again$"):
        base_of(path, "key")


def test_a_model_and_an_adapter_do_not_share_a_folder(tmp_path):
    for adapter, name in ((True, "model.safetensors"), (False, "adapter_model.safetensors")):
        folder = tmp_path / name.split(".")[0]
        check_target(str(folder), adapter)
        fill(folder, "1", name, "notes.txt")
        check_target(str(folder), not adapter)
        with pytest.raises(ValueError, match=f"^export={folder} holds {name}; .* could not be told apart"):
            check_target(str(folder), adapter)


def fill(folder, text, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(text)


@pytest.mark.parametrize("count", range(7))
def test_weights_change_last_so_that_an_interrupted_change_leaves_the_old_ones_whole(tmp_path, monkeypatch, count):
    names = ("tokenizer.json", "config.json", "model.safetensors")
    fill(tmp_path / "old", "1", *names, "notes.txt")
    cut_after(monkeypatch, count)
    for _ in range(2):
        try:
            with writing_folder(str(tmp_path / "old")):
                fill(tmp_path / "old.tmp", "2", *names)
        except Cut:
            assert contents(tmp_path / "old")["model.safetensors"] == "1" and count < 6
        monkeypatch.undo()
    assert contents(tmp_path / "old") == dict.fromkeys(names, "2") | {"notes.txt": "1"}


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cut_after(monkeypatch, 0)
    with pytest.raises(Cut):
        with writing_folder(str(tmp_path / "a" / "b")):
            (tmp_path / "a" / "b.tmp" / "a.json").write_text("")
            assert not (tmp_path / "a" / "b").exists()
    monkeypatch.undo()
    assert not os.listdir(tmp_path / "a")
    with writing_folder(str(tmp_path / "c") + "/"):
        (tmp_path / "c.tmp" / "file").write_text("new")
    assert (tmp_path / "c" / "file").read_text() == "new"
    with pytest.raises(ValueError, match="file/new could not be written"):
        with writing_folder(f"{tmp_path}/file/new"):
            raise AssertionError("not entered")
