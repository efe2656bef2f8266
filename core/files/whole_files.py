"""Files that are whole or not there, also after a power cut; a full disk or a read-only folder is one line."""

import contextlib
import errno
import os
import re

import safetensors

REFUSALS = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "EFBIG",
                                           "ESTALE", "ETIMEDOUT", "ENOTCONN")
            if hasattr(errno, name)}  # what a disk that is full, read-only, not ours, broken or out of reach answers


UMASK = os.umask(0)
os.umask(UMASK)


class CannotWrite(ValueError):
    """A file could not be written."""


@contextlib.contextmanager
def writing(path):
    """Raises CannotWrite, with a reason in one line, for whatever keeps the block from writing to `path`."""
    try:
        yield
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        code = error_number(error)
        if code not in REFUSALS:
            raise
        raise CannotWrite(f"{path} could not be written ({os.strerror(code)})") from None


def error_number(error):
    """The number that the operating system gave to a failed write, as Python, safetensors and torch report it."""
    if isinstance(error, OSError):
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):
        return int(found[1])
    while error is not None:  # torch.save ends a file that it could not write with an error of its own
        if isinstance(error, OSError):
            return error.errno
        error = error.__context__
    return None


@contextlib.contextmanager
def replacing(path):
    """Gives the name of a new file beside `path`. After the block the file is on the disk and takes the place of
    `path`; if the block fails, it is removed. Raises CannotWrite."""
    new, folder = f"{path}.tmp", os.path.dirname(path) or "."
    with writing(path):
        try:
            os.makedirs(folder, exist_ok=True)
            if os.path.lexists(new):  # a killed process left it; or it is a link, behind which nothing may change
                os.remove(new)
            yield new
            as_usual(new)
            flush(new)
            os.replace(new, path)
            flush(folder)
        finally:
            if os.path.exists(new):
                os.remove(new)


def as_usual(path):
    """Gives a file the mode that open() gives; those of safetensors are for the user alone. A file system without modes
    has its own."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, 0o666 & ~UMASK)


def flush(path):
    """Returns when a file, or the list of names in a folder, is on the disk."""
    folder = os.path.isdir(path)
    if folder and os.name == "nt":  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (folder and error.errno == errno.EINVAL):  # a file system that has no such call for folders
            raise
    finally:
        os.close(descriptor)
