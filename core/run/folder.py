"""The folder of a run: one run at a time writes to it, and what an earlier run left is moved aside."""

import contextlib
import os
import socket
import time

from core.checkpoint_manager import states
from core.files.whole_files import writing
from core.run.names import HELD, LOCK, PREVIOUS, STARTS, STAYING, is_set_aside, shows_a_run
from core.settings.user_code import one_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def check_run_folder(out_dir):
    """Raises ValueError if a run may not have this folder: it cannot be written, it holds other files and no run, or
    something that is no file has the name of a run's file. Nothing is changed."""
    check_out_dir(out_dir)
    names = folder_list(out_dir)
    for path in (os.path.join(out_dir, name) for name in names if name == LOCK or is_set_aside(name)):
        if not (os.path.isfile(path) or os.path.isdir(path)):  # to open a named pipe would take for ever
            raise ValueError(f"{path} is no file that a run wrote; remove it or choose another out_dir")
    foreign = [name for name in names if name not in STAYING]
    if foreign and not any(map(shows_a_run, names)):
        raise ValueError(f"out_dir={out_dir} holds {foreign[0]}, which is of no run; name a new or an empty folder")


def check_out_dir(path):
    """Raises ValueError if no folder can be made or written at a path."""
    above = os.path.abspath(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not path or not os.path.isdir(above):
        raise ValueError(f"out_dir={path!r} cannot be a folder ({above} is a file, or it has no name); name another")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"out_dir={path} cannot be written: {above} is not yours to write to; name another folder")


@contextlib.contextmanager
def run_folder(config, dist):
    """Keeps other runs out of out_dir during the block. Gives whether the run goes on from a state there.

    config: absolute_out_dir, resume (True, False, or 'auto': if there is a state)
    """
    dist.barrier()  # every rank has seen the folder as it was
    with locked(config.absolute_out_dir) if dist.is_main else contextlib.nullcontext():
        found = dist.is_main and bool(states(config.absolute_out_dir))
        goes_on = config.resume is True or (config.resume == "auto" and found)
        yield bool(dist.agree(goes_on))


@contextlib.contextmanager
def locked(out_dir):
    """Raises ValueError if another run holds the folder; otherwise holds it until the end of the block, or of the
    process, however that ends.

    The system frees a lock when its process ends. Where the file system has no locks, the file HELD counts.
    """
    path, held = os.path.join(out_dir, LOCK), os.path.join(out_dir, HELD)
    with writing(path):
        os.makedirs(out_dir, exist_ok=True)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # the file is emptied
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | no_link, 0o666)
    with open(descriptor, "r+", errors="replace") as file:
        holder = file.read()
        if not is_free(file, held):
            left = held if os.path.exists(held) else path
            raise ValueError(f"out_dir={out_dir} is in use by {one_line(holder) or 'another run'}; choose another "
                             f"out_dir or wait, or if that run has ended, delete {left}")
        note = f"a run with pid {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}"
        try:
            with writing(path):
                rewrite(file, note)
            yield
        finally:
            with contextlib.suppress(OSError):  # a disk that is full or gone has ended the run already
                rewrite(file, "")
                os.remove(held)  # there is none where files can be locked


def is_free(file, held):
    """Locks the open file or, where the file system has no locks, creates the file `held`, which only one process can.
    Returns whether no other run has done so."""
    try:
        if fcntl is None:
            raise OSError("this system has no such locks")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        try:
            os.close(os.open(held, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
    return True


def rewrite(file, text):
    """Replaces the text of the open file."""
    file.seek(0)
    file.truncate(0)
    file.write(text)
    file.flush()
    os.fsync(file.fileno())  # a network file system sends it now


def set_aside(out_dir):
    """Moves what an earlier run wrote in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.

    Returns the folder of the earlier run, or None if there was none.
    """
    names = sorted(filter(is_set_aside, folder_list(out_dir)), key=moving_order)
    if not names:
        return None
    previous = os.path.join(out_dir, PREVIOUS)
    numbers = [int(name) for name in folder_list(previous) if name.isdecimal()]
    folder = os.path.join(previous, str(1 + max(numbers, default=0)))
    with writing(folder):
        os.makedirs(folder)
        for name in names:
            os.replace(os.path.join(out_dir, name), os.path.join(folder, name))
    return folder


def moving_order(name):
    """The states go first, so that no run resumes when half is moved; last the file that shows that a run was here."""
    if name.startswith("state"):
        return 0
    return 2 if name == STARTS else 1


def folder_list(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
