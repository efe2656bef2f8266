"""The folder of a run: who holds it, and what happens to an earlier run."""

import contextlib
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from core.config import RunConfig, load_config
from core.run import folder as run_folder
from core.run.folder import check_run_folder, locked, set_aside
from tests.tiny import ROOT, Cut, contents, cut_after, one_process


def write(folder, **files):
    os.makedirs(folder, exist_ok=True)
    for name, text in files.items():
        (pathlib.Path(folder) / name).write_text(text)


A = {"config.json": "A", "metrics.jsonl": "A", "model.safetensors": "A", "state.pt": "A"}


def in_folder(folder, files):
    return {os.path.join(folder, name): text for name, text in files.items()}


def test_earlier_runs_are_set_aside_one_by_one(tmp_path):
    write(tmp_path, **A)
    for number, failed in enumerate(("B", "C", "D"), 1):
        assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", str(number))
        write(tmp_path, **{"config.json": failed})
    assert contents(tmp_path) == {"config.json": "D", **in_folder("previous/1", A), "previous/2/config.json": "B",
                                  "previous/3/config.json": "C"}
    os.remove(tmp_path / "config.json")
    assert set_aside(str(tmp_path)) is None and set_aside(str(tmp_path / "nowhere")) is None
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("count", [0, 1, 3, 4])  # files that were moved
def test_a_move_that_was_interrupted_goes_on_at_the_next_start(tmp_path, monkeypatch, count):
    write(tmp_path, **A)
    with monkeypatch.context() as patch:
        cut_after(patch, count)
        with pytest.raises(Cut):
            set_aside(str(tmp_path))
    assert sorted(contents(tmp_path).values()) == ["A"] * len(A)
    assert count == 0 or not (tmp_path / "state.pt").exists(), "half a run is not resumed"
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "1")
    assert contents(tmp_path) == in_folder("previous/1", A)


def test_a_run_after_an_interrupted_move_overwrites_nothing_of_it(tmp_path, monkeypatch):
    write(tmp_path, **A)
    with monkeypatch.context() as patch:
        cut_after(patch, 2)
        with pytest.raises(Cut):
            set_aside(str(tmp_path))
    moved = {name for name in os.listdir(tmp_path / "previous" / "partial")}
    write(tmp_path, **{name: "B" for name in moved})
    set_aside(str(tmp_path))
    texts = list(contents(tmp_path).values())
    assert texts.count("A") == len(A) and texts.count("B") == len(moved) == 2


HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from core.run.folder import locked
with locked({folder!r}):
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def held_by_another_process(folder):
    code = HOLDER.format(root=ROOT, folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended_however_it_ends(tmp_path):
    with held_by_another_process(tmp_path / "out") as process:
        with pytest.raises(ValueError, match=f"is in use by a run with pid {process.pid} on .*, started 20") as error:
            with locked(str(tmp_path / "out")):
                pytest.fail("two runs hold the folder")
        assert "\n" not in str(error.value) and f"delete {tmp_path}/out/lock" in str(error.value)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert json.loads((tmp_path / "out" / "lock").read_text())["pid"] == process.pid
        with locked(str(tmp_path / "out")):
            assert json.loads((tmp_path / "out" / "lock").read_text())["pid"] == os.getpid()


def test_a_folder_is_free_again_after_the_block_also_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), locked(str(tmp_path)):
            assert set_aside(str(tmp_path)) is None, "the lock stays where it is"
            raise KeyboardInterrupt
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize("system", ["no locks on this system", "no locks on this file system"])
def test_without_locks_a_run_that_may_go_on_is_respected_and_one_that_has_ended_here_is_not(tmp_path, system, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    here, none_at_all = run_folder.socket.gethostname(), system == "no locks on this system"
    if none_at_all:
        monkeypatch.setattr(run_folder, "fcntl", None)
    else:
        monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid, host, free in ((os.getpid(), here, False), (ended.pid, "elsewhere", False), (ended.pid, here, not none_at_all)):
        (tmp_path / "lock").write_text(json.dumps({"pid": pid, "host": host, "started": "then"}))
        with contextlib.nullcontext() if free else pytest.raises(ValueError, match=f"pid {pid} on {host}, started the"):
            with locked(str(tmp_path)):
                assert free
    for text in (b"", b"{", b"[1]", b'{"pid": "x", "host": 1, "started": 2}', b"\xff\xfe{\x80"):
        (tmp_path / "lock").write_bytes(text)
        with locked(str(tmp_path)):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "lock").read_text() == ""


BOTH = """
import errno, os, sys, time
sys.path.insert(0, {root!r})
from core.run import folder as run_folder
def refuse(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
run_folder.fcntl.flock = refuse
print("ready", flush=True)
for folder in sys.stdin.read().split():
    try:
        with run_folder.locked(folder):
            inside = folder + "/inside"
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if the other one is inside as well
            time.sleep(0.05)
            os.remove(inside)
    except ValueError:
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_of_two_runs_that_start_together_without_locks_one_holds_the_folder(tmp_path):
    folders = " ".join(str(tmp_path / str(i)) for i in range(30))
    both = [subprocess.Popen([sys.executable, "-c", BOTH.format(root=ROOT)], stdin=subprocess.PIPE, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write(folders)
        process.stdin.flush()
    for process in both:
        process.stdin.close()
    assert [process.stderr.read() for process in both] == ["", ""]
    assert [process.wait() for process in both] == [0, 0]
    assert {(path / "lock").read_text() for path in tmp_path.iterdir()} == {""}


@pytest.mark.parametrize("resume, state, goes_on", [(False, True, False), (True, True, True), (True, False, True),
                                                    ("auto", True, True), ("auto", False, False)])
def test_auto_goes_on_if_there_is_a_state(tmp_path, resume, state, goes_on):
    write(tmp_path, **{"metrics.jsonl": "A"} | ({"state-000002.pt": "A"} if state else {}))
    with run_folder.run_folder(SimpleNamespace(out_dir=str(tmp_path), resume=resume), one_process()) as found:
        assert found is goes_on and (tmp_path / "metrics.jsonl").exists(), "nothing is moved yet"


MINE = {"thesis.tex": "a", ".bashrc": "b", "data.parquet": "c"}


@pytest.mark.parametrize("files", [MINE, {"config.json": "{}", "model.safetensors": "mine"}, {"train.bin": "x"}],
                         ids=["a home folder", "a Hugging Face model", "a data set"])
def test_a_folder_with_other_files_and_no_run_is_refused_by_name_and_unchanged(tmp_path, files):
    write(tmp_path, **files)
    with pytest.raises(ValueError, match=f"out_dir=.* holds {sorted(files)[0]}, which is of no run; name a new") as error:
        check_run_folder(str(tmp_path))
    assert "\n" not in str(error.value) and contents(tmp_path) == files and sorted(os.listdir(tmp_path)) == sorted(files)


def test_other_files_beside_a_run_stay_where_they_are(tmp_path):
    run = A | {"model-000002/config.json": "A", "state-000002.pt": "A"}
    mine = MINE | {"notes/x.txt": "y", "model-notes/config.json": "y", "wandb/log": "x", "previous/9/log": "y"}
    for path, text in (run | mine).items():
        write(tmp_path / os.path.dirname(path), **{os.path.basename(path): text})
    check_run_folder(str(tmp_path))
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "10"), "no number is used again"
    assert contents(tmp_path) == in_folder("previous/10", run) | mine


def test_a_new_folder_and_one_whose_run_was_set_aside_may_be_used(tmp_path):
    check_run_folder(str(tmp_path / "new" / "folder"))
    write(tmp_path / "used", lock="")
    write(tmp_path / "used" / "previous" / "1", **A)
    check_run_folder(str(tmp_path / "used"))


def test_a_folder_from_which_a_run_was_being_moved_may_be_used(tmp_path):
    write(tmp_path / "previous" / "partial", **{"state.pt": "A", "metrics.jsonl": "A"})
    write(tmp_path, **{"trackers.json": "A"})
    check_run_folder(str(tmp_path))


@pytest.mark.parametrize("name", ["state.pt", "lock", "state.pt.tmp"])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused_before_it_is_opened(tmp_path, name):
    write(tmp_path, **{"starts.jsonl": ""})
    for make, remove in ((os.mkfifo, os.remove), (os.mkdir, os.rmdir)):
        make(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name} is no file that a run wrote; remove it or choose another out_dir"):
            check_run_folder(str(tmp_path))
        remove(tmp_path / name)


def test_a_link_in_the_place_of_the_lock_is_refused(tmp_path):
    (tmp_path / "precious").write_text("mine")
    os.makedirs(tmp_path / "out")
    for target in ("precious", "nowhere"):
        os.symlink(tmp_path / target, tmp_path / "out" / "lock")
        with pytest.raises(ValueError, match="lock is no file that a run wrote"):
            check_run_folder(str(tmp_path / "out"))
        os.remove(tmp_path / "out" / "lock")


@pytest.mark.parametrize("text, value", [("True", True), ("False", False), ("auto", "auto")])
def test_resume_is_true_false_or_auto(text, value):
    assert load_config(RunConfig, [f"--resume={text}"])[0].resume == value


@pytest.mark.parametrize("text", ["true", "1", "None", "out/state.pt", ""])
def test_other_values_of_resume_are_refused(text):
    with pytest.raises(ValueError, match="resume=.*(is not one of True, False, auto|must be bool or str)"):
        load_config(RunConfig, [f"--resume={text}"])
