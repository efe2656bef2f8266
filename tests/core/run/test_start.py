"""What is recorded when a run starts."""

import importlib.metadata
import os
import socket
import sys
from types import SimpleNamespace

from core.files.json_lines import read_records
from core.run.start import Recorded, record_start, without_home
from tests.tiny import config, one_process


def start(tmp_path, monkeypatch, argv, origin=(), step=0, **settings):
    """The records of <tmp_path>/starts.jsonl after one more start, and the file's text."""
    monkeypatch.setattr(sys, "argv", argv)
    record_start(config(out_dir=str(tmp_path), **settings), dict(origin), one_process(), step)
    path = tmp_path / "starts.jsonl"
    return read_records(path), path.read_text()


def test_settings_are_those_that_were_set_to_another_value_than_the_default(tmp_path, monkeypatch):
    origin = {"seed": "command line", "learning_rate": "config/a.py", "top_k": "config/a.py", "stop_sequences": "b.py"}
    (record,), _ = start(tmp_path, monkeypatch, ["x.py"], origin, seed=7, learning_rate=0.5, min_lr=0.1,
                         stop_sequences=("a", "b"))
    assert record["settings"] == {"seed": {"value": 7, "default": 1337, "set in": "command line"},
                                  "learning_rate": {"value": 0.5, "default": 1e-5, "set in": "config/a.py"},
                                  "stop_sequences": {"value": ["a", "b"], "default": [], "set in": "b.py"}}


def test_a_resumed_run_has_a_record_of_each_start(tmp_path, monkeypatch):
    script = "grpo/train_grpo.py"
    start(tmp_path, monkeypatch, [script, "config/a.py"])
    records, text = start(tmp_path, monkeypatch, [script, "config/a.py", "--resume=True", "--dataset=my data"], step=40)
    assert text.count("\n") == 2
    assert [record["step"] for record in records] == [0, 40]
    assert [record["command"] for record in records] == [
        "python grpo/train_grpo.py config/a.py",
        "python grpo/train_grpo.py config/a.py --resume=True '--dataset=my data'"]


def test_the_record_names_neither_the_user_nor_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "alice"))
    monkeypatch.setenv("USER", "alice")
    inside = str(tmp_path / "home" / "alice" / "data" / "x.jsonl")
    (record,), text = start(tmp_path, monkeypatch, ["train.py", f"--dataset={inside}"], {"dataset": inside},
                            dataset=inside)
    assert record["command"].endswith("--dataset=~/data/x.jsonl")
    assert record["settings"]["dataset"]["value"] == record["settings"]["dataset"]["set in"] == "~/data/x.jsonl"
    assert "alice" not in text and socket.gethostname() not in text


def test_only_the_home_folder_itself_is_shortened(monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    assert without_home("--out_dir=/home/al/out --a=/home/al '/home/al'") == "--out_dir=~/out --a=~ '~'"
    for other in ("/home/alice/out", "/home/al-2", "/home/al.old/x", "/home/al_1"):
        assert without_home(other) == other
    monkeypatch.setenv("HOME", "/")
    assert without_home("/tmp/out") == "/tmp/out"


def test_machine_and_versions_are_those_of_this_process(tmp_path, monkeypatch):
    (record,), _ = start(tmp_path, monkeypatch, ["x.py"])
    assert record["torch"] == importlib.metadata.version("torch")
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (record["device"], record["precision"], record["ranks"]) == ("cpu", "float32", 1)


def test_an_earlier_run_is_not_moved_before_every_rank_has_read_its_checkpoints(tmp_path):
    """The generator of a run may be the model of an earlier run in out_dir."""
    class Waiting(type(one_process())):
        barrier = lambda self: seen.append(os.listdir(tmp_path))

    seen, said = [], []
    (tmp_path / "model.safetensors").touch()
    trainer = SimpleNamespace(step=1, logger=SimpleNamespace(say=said.append))
    with Recorded(config(out_dir=str(tmp_path), max_iters=1), {}, Waiting("cpu", "float32"), trainer, resume=False):
        assert sorted(os.listdir(tmp_path)) == ["config.json", "previous", "starts.jsonl"]
    assert seen == [["model.safetensors"]] and f"which is now in {tmp_path}/previous/1" in said[0]
