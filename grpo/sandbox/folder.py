"""The folders in which untrusted code runs: where they are, whether they hold too much, and how they are removed."""

import atexit
import contextlib
import errno
import os
import shutil
import subprocess
import tempfile

# Errors of a machine that has too little of something: the code is not to blame
FULL = frozenset([errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EUSERS])
PLACE = []  # the folder of this run that holds all others, once there is one; workers get the main process's


def place():
    """The folder of this run, which is removed when the process ends that made it. Raises OSError without room."""
    if not PLACE:
        PLACE.append(tempfile.mkdtemp(prefix="sandbox-"))
        atexit.register(remove, PLACE[0])
    return PLACE[0]


def empty_place():
    """Removes what processes that were ended left in the run's folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(PLACE[0]) if PLACE else ():
            remove(os.path.join(PLACE[0], name))


@contextlib.contextmanager
def new_folder():
    """A folder in the run's folder, for as long as the with block runs."""
    folder = tempfile.mkdtemp(dir=place())
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder):
    """Removes a folder with all that it holds. It stays if the system refuses."""
    with contextlib.suppress(RecursionError):  # a very deep one
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder) and not os.path.islink(folder):  # code that nothing holds may have put a link in its place
        # It is too deep for Python, or the code took rights from itself
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
            with contextlib.suppress(OSError):
                subprocess.run(command, stderr=subprocess.DEVNULL)


def holds_more(folder, size, files):
    """True if a folder holds more than `size` bytes on the disk, or more than `files` files and folders, or cannot be
    measured: its rights refuse it, or a path is too long."""
    total, count = 0, 0
    folders = [folder]
    try:
        while folders:
            with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # the code may remove what is listed
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                    count += 1
                    if total > size or count > files:
                        return True
    except OSError:
        return True
    return False
