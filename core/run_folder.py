"""The folder of a run: one run at a time writes to it, and what an earlier run left is moved aside."""

import contextlib
import json
import os
import re
import socket
import time

from core.checkpoint_manager import OLDER, STATE, states
from core.whole_files import writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "lock"
MODELS = re.compile(r"model(-\d+)?(\.safetensors)?")  # the latest model and the numbered ones: files, or folders
BAD_STEPS = "bad_steps"  # the folder that core/bad_steps.py writes to
PREVIOUS, PARTIAL = "previous", "partial"  # <out_dir>/previous/1, 2, ... are earlier runs; partial is being moved


@contextlib.contextmanager
def run_folder(config, dist):
    """Keeps other runs out of out_dir during the block. Gives whether the run goes on from a state there.

    config: out_dir, resume (True, False, or 'auto': if there is a state). A run that begins anew finds an empty folder:
    the files of an earlier one are set aside.
    """
    dist.barrier()  # every rank has read its checkpoints, one of which may be about to move
    with locked(config.out_dir) if dist.is_main else contextlib.nullcontext():
        resume = bool(dist.agree(dist.is_main and (config.resume is True
                                                   or config.resume == "auto" and bool(states(config.out_dir)))))
        if dist.is_main and not resume and (previous := set_aside(config.out_dir)):
            print(f"{config.out_dir} held an earlier run, which is now in {previous}")
        yield resume


@contextlib.contextmanager
def locked(out_dir):
    """Raises ValueError if another run holds the folder; otherwise holds it until the end of the block, or of the
    process, however that ends."""
    path = os.path.join(out_dir, LOCK)
    with writing(path):
        os.makedirs(out_dir, exist_ok=True)
        file = open(path, "a+")
    with file:
        file.seek(0)
        holder = read_holder(file.read())
        if not take(file, holder):
            who = "another run" if holder is None else f"a run with pid {holder['pid']} on {holder['host']}"
            since = "" if holder is None else f", started {holder['started']}"
            raise ValueError(f"out_dir={out_dir} is in use by {who}{since}; choose another out_dir or wait, or if that "
                             f"run has ended, delete {path}")
        note(file, path, json.dumps({"pid": os.getpid(), "host": socket.gethostname(),
                                     "started": time.strftime("%Y-%m-%d %H:%M:%S")}))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a disk that is full or gone has ended the run already
                file.truncate(0)


def note(file, path, text):
    """Makes `text` the content of the open file."""
    with writing(path):
        file.seek(0)
        file.truncate(0)
        file.write(text)
        file.flush()


def read_holder(text):
    """{pid, host, started} as a run wrote it, or None."""
    try:
        holder = json.loads(text)
    except ValueError:
        return None
    known = isinstance(holder, dict) and {"host", "started"} <= set(holder) and isinstance(holder.get("pid"), int)
    return holder if known else None


def take(file, holder):
    """Whether the lock is ours now. The system frees it when a process ends; where the file system has no locks, the
    holder's process is looked up, if it was one of this machine."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:
            pass
    return holder is None or fcntl is not None and holder["host"] == socket.gethostname() and ended(holder["pid"])


def ended(pid):
    """Whether there is no process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        return False
    return False


def set_aside(out_dir):
    """Moves the files of an earlier run in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.

    The files are collected in previous/partial, which gets its number at the end: a move that was interrupted goes on
    at the next call, and an earlier run stays in one folder.
    Returns the folder of the earlier run, or None if there was none.
    """
    previous, partial = os.path.join(out_dir, PREVIOUS), os.path.join(out_dir, PREVIOUS, PARTIAL)
    files = [name for name in folder_list(out_dir) if MODELS.fullmatch(name) or name == BAD_STEPS
             or name != LOCK and os.path.isfile(os.path.join(out_dir, name))]
    if set(files) & set(folder_list(partial)):  # another run has written here since the interrupted move
        os.replace(partial, next_number(previous))
    if not files and not folder_list(partial):
        return None
    with writing(partial):
        os.makedirs(partial, exist_ok=True)
        for name in sorted(files, key=moving_order):
            os.replace(os.path.join(out_dir, name), os.path.join(partial, name))
        folder = next_number(previous)
        os.replace(partial, folder)
    return folder


def moving_order(name):
    """The states go first, the newest last of them: no run resumes when half is moved."""
    return 0 if OLDER.fullmatch(name) else 1 if name == STATE else 2


def folder_list(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def next_number(folder):
    """The path of the first number above those that the folder holds."""
    numbers = [int(name) for name in folder_list(folder) if name.isdecimal()]
    return os.path.join(folder, str(1 + max(numbers, default=0)))
