"""The folder of a run: one run at a time writes to it, and what an earlier run left is moved aside."""

import contextlib
import os

from core.checkpoint_manager import states
from core.files.whole_files import writing
from core.run.names import BEFORE, CONSOLE, LOCK, METRICS, PREVIOUS, STATE, STAYING, is_set_aside

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def check_run_folder(out_dir):
    """Raises ValueError if a run may not have this folder, because it holds other files and no run."""
    names = folder_list(out_dir)
    foreign = [name for name in names if name not in STAYING]
    if foreign and not {STATE, BEFORE, METRICS, CONSOLE, PREVIOUS} & set(names):
        raise ValueError(f"out_dir={out_dir} holds {foreign[0]}, which is of no run; name a new or an empty folder")


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
    process, however that ends. Where there are no locks nothing keeps two runs apart."""
    with writing(f"out_dir={out_dir}"):
        os.makedirs(out_dir, exist_ok=True)
        file = open(os.path.join(out_dir, LOCK), "a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"out_dir={out_dir} is in use by another run; choose another out_dir or wait") from None
        except (AttributeError, OSError):
            pass
        yield


def set_aside(out_dir):
    """Moves what an earlier run wrote in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.

    Returns the folder of the earlier run, or None if there was none.
    """
    names = [name for name in folder_list(out_dir) if is_set_aside(name)]
    if not names:
        return None
    previous = os.path.join(out_dir, PREVIOUS)
    numbers = [int(name) for name in folder_list(previous) if name.isdecimal()]
    folder = os.path.join(previous, str(1 + max(numbers, default=0)))
    with writing(folder):
        os.makedirs(folder)
        for name in reversed(names):  # the states early, so that no run resumes half of another
            os.replace(os.path.join(out_dir, name), os.path.join(folder, name))
    return folder


def folder_list(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
