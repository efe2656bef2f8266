"""The folders in which untrusted code runs: where they are, whether they hold too much, and how they are removed."""

import atexit
import contextlib
import errno
import os
import secrets
import stat
import tempfile

# What the machine has too little of, for which the code is not to blame
FULL = frozenset([errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EUSERS])
PLACE = []  # the folder of this run that holds all others, once there is one; workers get the main process's


def place():
    """The folder of this run, which is removed when the process ends that made it. Raises OSError without room."""
    if not PLACE:
        PLACE.append(tempfile.mkdtemp(prefix="sandbox-"))
        atexit.register(remove_of, os.getpid(), PLACE[0])
    return PLACE[0]


def remove_of(process, folder):
    """Removes a folder, unless this is a fork of the process that made it."""
    if os.getpid() == process:
        remove(folder)


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
    """Removes a folder of any depth, also if the code took rights from itself. It stays if the system refuses."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(folder).st_mode):  # code that nothing holds may have put a link in its place
            os.chmod(folder, 0o700)
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            while names := os.listdir(top):
                for name in names:
                    remove_entry(top, name)
        finally:
            os.close(top)
        os.rmdir(folder)


def remove_entry(top, name):
    """Removes a file, or a folder whose own folders are moved to `top` before: by descriptor, because a path may be
    longer than the system allows."""
    if not is_folder(name, top):
        return os.unlink(name, dir_fd=top)
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for below in os.listdir(inner):
            if is_folder(below, inner):
                os.chmod(below, 0o700, dir_fd=inner)  # to move a folder one must be able to write to it
                os.rename(below, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(below, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def is_folder(name, top):
    return stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode)


def holds_more(folder, size, files):
    """Whether a folder holds more than `size` bytes on the disk, or more than so many files and folders, or does not
    show what it holds: its rights refuse it, or a path is too long. Raises OSError if the machine is full."""
    total, count, folders = 0, 0, [folder]
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
    except OSError as error:
        if error.errno in FULL:
            raise
        return True
    return False
