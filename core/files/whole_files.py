"""Files that are whole or not there; a file that cannot be written is one line."""

import contextlib
import os

import safetensors

UMASK = os.umask(0)
os.umask(UMASK)


class CannotWrite(ValueError):
    """A file could not be written."""


@contextlib.contextmanager
def writing(path):
    """Raises CannotWrite, with the reason in one line, if the block cannot write to `path`."""
    try:
        yield
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        if isinstance(error.__context__, OSError):  # torch.save ends a file with an error of its own
            error = error.__context__
        if isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno is None):  # of something else
            raise
        raise CannotWrite(f"{path} could not be written ({getattr(error, 'strerror', error)})") from None


@contextlib.contextmanager
def replacing(path):
    """Gives the name of a new file beside `path`, which takes its place after the block. If the block fails, `path`
    stays as it was. Raises CannotWrite."""
    new = f"{path}.tmp"
    with writing(path):
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            yield new
            put(new, path)
        finally:
            if os.path.exists(new):
                os.remove(new)


def put(new, path):
    """Puts the file `new` in the place of `path`, once it is on the disk."""
    as_usual(new)
    with open(new, "r+b") as f:
        os.fsync(f.fileno())
    os.replace(new, path)


def as_usual(path):
    """Gives a file the mode that open() gives; those of safetensors are for the user alone. A file system without modes
    has its own."""
    with contextlib.suppress(PermissionError):
        os.chmod(path, 0o666 & ~UMASK)
