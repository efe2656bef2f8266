"""The folder of a run: one run at a time, an earlier run is set aside, nothing of the user's is touched."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from core.errors import Mistake
from core.run import check_run_folder, locked, set_aside
from tests.tiny import ROOT, Cut, contents, cut_after

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


def test_a_folder_in_which_a_run_was_killed_at_its_first_file_is_used_again(tmp_path):
    write(tmp_path, {"lock": "", "config.json.tmp": ""})
    check_run_folder(str(tmp_path), "auto")
    set_aside(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["lock", "previous"]
    write(tmp_path / "mine", {"lock": "", "config.json.tmp": "", "thesis.tex": ""})
    with pytest.raises(Mistake, match="thesis.tex"):
        check_run_folder(str(tmp_path / "mine"))


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
        with pytest.raises(Mistake, match="out_dir="), locked(out):
            pytest.fail("two runs hold the folder")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked(out):
            assert os.listdir(out) == ["lock"]
