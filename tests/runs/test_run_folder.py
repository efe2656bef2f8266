"""The folder of a run: one run at a time, an earlier run is set aside, nothing of the user's is touched."""

import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from core import run
from core.run import SET_ASIDE, STAYING, check_run_folder, locked, run_folder, set_aside
from tests.tiny import ROOT, Cut, contents, cut_after, one_process

EARLIER = {"config.json": "A", "metrics.jsonl": "A", "model.safetensors": "A", "state.pt": "A"}
MINE = {"thesis.tex": "a", ".bashrc": "b", "data.parquet": "c"}


def write(folder, files):
    for name, text in files.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_earlier_runs_are_set_aside_one_by_one_and_other_files_stay(tmp_path):
    mine = MINE | {"notes/x.txt": "y", "model-notes/config.json": "y", "wandb/log": "x", "previous/8/log": "y"}
    earlier = EARLIER | {"model-000002/config.json": "A"}
    write(tmp_path, earlier | mine)
    check_run_folder(str(tmp_path))
    for number, failed in enumerate(("B", "C"), 9):  # no number is used again
        assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", str(number))
        write(tmp_path, {"config.json": failed})
    moved = {os.path.join("previous/9", name): text for name, text in earlier.items()}
    assert contents(tmp_path) == moved | mine | {"config.json": "C", "previous/10/config.json": "B"}
    os.remove(tmp_path / "config.json")
    assert set_aside(str(tmp_path)) is None and set_aside(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("count", range(len(EARLIER)))  # files that were moved
def test_a_move_that_was_interrupted_loses_nothing_and_leaves_no_half_of_a_run_to_resume(tmp_path, monkeypatch, count):
    write(tmp_path, EARLIER | {"lock": ""})
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_after(patch, count)
        set_aside(str(tmp_path))
    assert count < 1 or not (tmp_path / "state.pt").exists()
    check_run_folder(str(tmp_path))
    set_aside(str(tmp_path))
    assert sorted(map(os.path.basename, contents(tmp_path))) == sorted([*EARLIER, "lock"])
    assert sorted(os.listdir(tmp_path)) == ["lock", "previous"]


HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from core.run import locked
with locked({folder!r}):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended_however_it_ends(tmp_path):
    out = str(tmp_path / "out")
    with subprocess.Popen([sys.executable, "-c", HOLDER.format(root=ROOT, folder=out)], stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="out_dir="), locked(out):
            pytest.fail("two runs hold the folder")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked(out):
            assert os.listdir(out) == ["lock"]


@pytest.mark.parametrize("resume, state, goes_on", [(False, True, False), ("auto", True, True), ("auto", False, False)])
def test_auto_goes_on_if_there_is_a_state(tmp_path, monkeypatch, resume, state, goes_on):
    monkeypatch.setattr(run, "fcntl", None)  # a system without locks
    write(tmp_path, {"metrics.jsonl": "A"} | ({"state.pt": "A"} if state else {}))
    with run_folder(SimpleNamespace(absolute_out_dir=str(tmp_path), resume=resume), one_process()) as found:
        assert found is goes_on and (tmp_path / "metrics.jsonl").exists(), "nothing is moved yet"


@pytest.mark.parametrize("files", [MINE, {"config.json": "{}", "model.safetensors": "mine"}, {"train.bin": "x"}],
                         ids=["a home folder", "a Hugging Face model", "a data set"])
def test_a_folder_with_other_files_and_no_run_is_refused_by_name_and_unchanged(tmp_path, files):
    write(tmp_path, files)
    with pytest.raises(ValueError, match=f"out_dir=.* holds {sorted(files)[0]}"):
        check_run_folder(str(tmp_path))
    assert contents(tmp_path) == files


OF_A_RUN = """state.pt state.pt.tmp model.safetensors model model-000040 model.tmp model-1234567.safetensors
    samples.jsonl report.html events.out.tfevents.1700000000.host.0""".split()
OF_OTHERS = """.bashrc thesis.tex state.pt.old my-state.pt model-best.safetensors model.bin metrics.jsonl~
    tokenizer.json train.bin events previous lock wandb vllm-weights notes.tmp""".split()


@pytest.mark.parametrize("name", OF_A_RUN + OF_OTHERS)
def test_what_a_run_writes_is_set_aside_and_nothing_else(name):
    assert bool(SET_ASIDE.fullmatch(name)) == (name in OF_A_RUN) and not (name in OF_A_RUN and name in STAYING)
