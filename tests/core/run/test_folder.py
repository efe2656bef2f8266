"""The folder of a run: who holds it, and what happens to an earlier run."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from core.run import folder as run_folder
from core.run.folder import check_run_folder, locked, rewrite, set_aside
from tests.tiny import ROOT, Cut, contents, cut_after, one_process

A = {"config.json": "A", "metrics.jsonl": "A", "model.safetensors": "A", "starts.jsonl": "A", "state.pt": "A",
     "trackers.json": "A"}
MINE = {"thesis.tex": "a", ".bashrc": "b", "data.parquet": "c"}


def write(folder, files):
    for name, text in files.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def in_folder(folder, files):
    return {os.path.join(folder, name): text for name, text in files.items()}


def test_earlier_runs_are_set_aside_one_by_one(tmp_path):
    write(tmp_path, A)
    for number, failed in enumerate(("B", "C", "D"), 1):
        assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", str(number))
        write(tmp_path, {"config.json": failed})
    assert contents(tmp_path) == {"config.json": "D", **in_folder("previous/1", A), "previous/2/config.json": "B",
                                  "previous/3/config.json": "C"}
    os.remove(tmp_path / "config.json")
    assert set_aside(str(tmp_path)) is None and set_aside(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("count", range(len(A)))  # files that were moved
def test_a_move_that_was_interrupted_loses_nothing_and_goes_on_at_the_next_start(tmp_path, monkeypatch, count):
    write(tmp_path, A)
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_after(patch, count)
        set_aside(str(tmp_path))
    assert count == 0 or not (tmp_path / "state.pt").exists(), "half a run is not resumed"
    check_run_folder(str(tmp_path))
    set_aside(str(tmp_path))
    assert sorted(map(os.path.basename, contents(tmp_path))) == sorted(A) and os.listdir(tmp_path) == ["previous"]


HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from core.run.folder import locked
with locked({folder!r}):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended_however_it_ends(tmp_path):
    out, lock = str(tmp_path / "out"), tmp_path / "out" / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER.format(root=ROOT, folder=out)], stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"is in use by a run with pid {process.pid} on .*, started 20") as error:
            with locked(out):
                pytest.fail("two runs hold the folder")
        assert "\n" not in str(error.value) and f"delete {lock}" in str(error.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert f"pid {process.pid} " in lock.read_text()
        with locked(out):
            assert f"pid {os.getpid()} " in lock.read_text()


def test_a_folder_is_free_again_after_the_block_also_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), locked(str(tmp_path)):
            assert set_aside(str(tmp_path)) is None, "the lock stays where it is"
            raise KeyboardInterrupt
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize("system", ["no locks on this system", "no locks on this file system"])
def test_without_locks_one_of_two_runs_that_start_together_holds_the_folder(tmp_path, system, monkeypatch):
    """The second starts when the first has not written its note yet."""
    noted = []

    def note(file, text):
        if text:
            with pytest.raises(ValueError, match="in use by another run; .* delete .*lock.held$"):
                with locked(str(tmp_path)):
                    pytest.fail("two runs hold the folder")
        noted.append(text)
        rewrite(file, text)

    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    if system == "no locks on this system":
        monkeypatch.setattr(run_folder, "fcntl", None)
    else:
        monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    monkeypatch.setattr(run_folder, "rewrite", note)
    with locked(str(tmp_path)):
        with pytest.raises(ValueError, match=f"in use by a run with pid {os.getpid()} on .* delete .*lock.held$"):
            with locked(str(tmp_path)):
                pytest.fail("two runs hold the folder")
    assert len(noted) == 2 and os.listdir(tmp_path) == ["lock"] and (tmp_path / "lock").read_text() == ""


def test_a_lock_of_bytes_that_are_no_text_is_an_empty_note(tmp_path):
    (tmp_path / "lock").write_bytes(b"\xff\xfe{\x80")
    with locked(str(tmp_path)):
        assert (tmp_path / "lock").read_text().startswith(f"a run with pid {os.getpid()} ")


@pytest.mark.parametrize("name", ["state.pt", "metrics.jsonl", "starts.jsonl", "lock"])
def test_a_pipe_in_the_place_of_a_file_is_refused_before_it_is_opened(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is no file that a run wrote; remove it or choose another out_dir"):
        check_run_folder(str(tmp_path))


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path):
    write(tmp_path, {"precious": "mine", "out/x": ""})
    os.symlink(tmp_path / "precious", tmp_path / "out" / "lock")
    with pytest.raises(ValueError, match="symbolic link"), locked(str(tmp_path / "out")):
        pytest.fail("it is locked")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("resume, state, goes_on", [(False, True, False), (True, True, True), (True, False, True),
                                                    ("auto", True, True), ("auto", False, False)])
def test_auto_goes_on_if_there_is_a_state(tmp_path, resume, state, goes_on):
    write(tmp_path, {"metrics.jsonl": "A"} | ({"state-before.pt": "A"} if state else {}))
    with run_folder.run_folder(SimpleNamespace(absolute_out_dir=str(tmp_path), resume=resume), one_process()) as found:
        assert found is goes_on and (tmp_path / "metrics.jsonl").exists(), "nothing is moved yet"


@pytest.mark.parametrize("files", [MINE, {"config.json": "{}", "model.safetensors": "mine"}, {"train.bin": "x"}],
                         ids=["a home folder", "a Hugging Face model", "a data set"])
def test_a_folder_with_other_files_and_no_run_is_refused_by_name_and_unchanged(tmp_path, files):
    write(tmp_path, files)
    with pytest.raises(ValueError, match=f"out_dir=.* holds {sorted(files)[0]}, which is of no run; name a new") as error:
        check_run_folder(str(tmp_path))
    assert "\n" not in str(error.value) and contents(tmp_path) == files and sorted(os.listdir(tmp_path)) == sorted(files)


def test_other_files_beside_a_run_stay_where_they_are(tmp_path):
    run = A | {"model-000002/config.json": "A", "state-before.pt": "A"}
    mine = MINE | {"notes/x.txt": "y", "model-notes/config.json": "y", "wandb/log": "x", "previous/9/log": "y"}
    write(tmp_path, run | mine)
    check_run_folder(str(tmp_path))
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "10"), "no number is used again"
    assert contents(tmp_path) == in_folder("previous/10", run) | mine


def test_a_new_folder_and_one_whose_run_was_set_aside_may_be_used(tmp_path):
    check_run_folder(str(tmp_path / "new" / "folder"))
    write(tmp_path / "used", {"lock": "", "previous/1/state.pt": ""})
    check_run_folder(str(tmp_path / "used"))


def test_a_folder_that_cannot_be_made_or_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (f"{tmp_path}/file", f"{tmp_path}/file/deep", ""):
        with pytest.raises(ValueError, match=f"out_dir='{path}' cannot be a folder .*; name another$"):
            check_run_folder(path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    with pytest.raises(ValueError, match=f"out_dir=.*new cannot be written: {tmp_path} is not yours to write to"):
        check_run_folder(str(tmp_path / "new"))
