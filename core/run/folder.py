"""The folder of a run: one run at a time writes to it, and what an earlier run left is moved aside."""

import contextlib
import json
import os
import socket
import time

from core.checkpoint_manager import states
from core.config import check_out_dir
from core.files.whole_files import writing
from core.run.names import (
    DOOR,
    FILES,
    FOLDERS,
    LOCK,
    MODELS,
    OLDER,
    PREVIOUS,
    STATE,
    STAYING,
    is_set_aside,
    shows_a_run,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PARTIAL = "partial"  # <out_dir>/previous/1, 2, ... are earlier runs; partial is being moved


def check_run_folder(out_dir):
    """Raises ValueError if a run may not have this folder: it cannot be written, it holds other files and no run, or
    something that is no file stands where a run has one. Nothing is changed."""
    check_out_dir(out_dir)
    names = folder_list(out_dir)
    for name in names:
        check_kind(out_dir, name)
    interrupted = os.path.isdir(os.path.join(out_dir, PREVIOUS, PARTIAL))
    if interrupted or any(map(shows_a_run, names)):
        return
    foreign = [name for name in names if name not in STAYING]
    if foreign:
        raise ValueError(f"out_dir={out_dir} holds {foreign[0]}, which is of no run; name a new or an empty folder")


def check_kind(out_dir, name):
    """Raises ValueError if what has the name of a run's file is none: to open a named pipe would take for ever, and the
    lock is emptied, so that it must not be a link to something else."""
    path = os.path.join(out_dir, name)
    model = bool(MODELS.fullmatch(name))
    file = name in (LOCK, DOOR) or bool(FILES.fullmatch(name))
    folder = name in FOLDERS
    if not (model or file or folder):
        return
    is_file = os.path.isfile(path) and not (name == LOCK and os.path.islink(path))
    if not ((is_file and (file or model)) or (os.path.isdir(path) and (folder or model))):
        raise ValueError(f"{path} is no {'file' if file else 'folder'} that a run wrote; remove it or choose another "
                         "out_dir")


@contextlib.contextmanager
def run_folder(config, dist):
    """Keeps other runs out of out_dir during the block. Gives whether the run goes on from a state there.

    config: out_dir, resume (True, False, or 'auto': if there is a state)
    """
    dist.barrier()  # every rank has seen the folder as it was
    with locked(config.out_dir) if dist.is_main else contextlib.nullcontext():
        found = dist.is_main and bool(states(config.out_dir))
        goes_on = config.resume is True or (config.resume == "auto" and found)
        yield bool(dist.agree(goes_on))


@contextlib.contextmanager
def locked(out_dir):
    """Raises ValueError if another run holds the folder; otherwise holds it until the end of the block, or of the
    process, however that ends."""
    path = os.path.join(out_dir, LOCK)
    with writing(path):
        os.makedirs(out_dir, exist_ok=True)
    with writing(path):
        file = open(path, "a+", errors="replace")
    with file:
        take(file, out_dir)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a disk that is full or gone has ended the run already
                file.truncate(0)


def take(file, out_dir):
    """Locks the open file and notes in it who has the folder. Raises ValueError if another run has it.

    The system frees a lock when its process ends. Where the file system has no locks, the note alone tells who has it;
    a second file, which only one process can create, keeps others from reading it while it changes.
    """
    holder = read_holder(file)
    try:
        if fcntl is None:
            raise OSError("this system has no such locks")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(in_use(out_dir, holder, LOCK)) from None
    except OSError:
        pass
    else:
        note(file)
        return
    door = os.path.join(out_dir, DOOR)
    try:
        os.close(os.open(door, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        raise ValueError(in_use(out_dir, holder, DOOR)) from None
    try:
        holder = read_holder(file)
        if holder is not None and not has_ended(holder):
            raise ValueError(in_use(out_dir, holder, LOCK))
        note(file)
    finally:
        os.remove(door)


def in_use(out_dir, holder, name):
    """The error about a folder that another run has. name: of the file that says so"""
    who, since = "another run", ""
    if holder is not None:
        who = f"a run with pid {holder['pid']} on {holder['host']}"
        since = f", started {holder['started']}"
    return (f"out_dir={out_dir} is in use by {who}{since}; choose another out_dir or wait, or if that run has ended, "
            f"delete {os.path.join(out_dir, name)}")


def note(file):
    """Writes into the open lock who has it."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    with writing(file.name):
        file.seek(0)
        file.truncate(0)
        file.write(json.dumps(holder))
        file.flush()
        os.fsync(file.fileno())  # a network file system sends it now


def read_holder(file):
    """{pid, host, started} as a run wrote it into the open lock, or None."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
    except (ValueError, RecursionError):
        return None
    known = isinstance(holder, dict) and {"host", "started"} <= set(holder) and isinstance(holder.get("pid"), int)
    return holder if known else None


def has_ended(holder):
    """Whether the process of a note was one of this machine and is no more."""
    if fcntl is None or holder["host"] != socket.gethostname():
        return False
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's process
        pass
    return False


def set_aside(out_dir):
    """Moves what an earlier run wrote in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.

    The files are collected in previous/partial, which gets its number at the end: a move that was interrupted goes on
    at the next call, and an earlier run stays in one folder.
    Returns the folder of the earlier run, or None if there was none.
    """
    previous = os.path.join(out_dir, PREVIOUS)
    partial = os.path.join(previous, PARTIAL)
    names = [name for name in folder_list(out_dir) if is_set_aside(name)]
    if set(names) & set(folder_list(partial)):  # another run has written here since the interrupted move
        os.replace(partial, next_number(previous))
    if not names and not folder_list(partial):
        return None
    with writing(partial):
        os.makedirs(partial, exist_ok=True)
        for name in sorted(names, key=moving_order):
            os.replace(os.path.join(out_dir, name), os.path.join(partial, name))
        folder = next_number(previous)
        os.replace(partial, folder)
    return folder


def moving_order(name):
    """The states go first, the newest last of them: no run resumes when half is moved."""
    if OLDER.fullmatch(name):
        return 0
    return 1 if name == STATE else 2


def folder_list(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def next_number(folder):
    """The path of the first number above those that the folder holds."""
    numbers = [int(name) for name in folder_list(folder) if name.isdecimal()]
    return os.path.join(folder, str(1 + max(numbers, default=0)))
