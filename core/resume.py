"""The command that resumes a run, and the earlier runs of a folder."""

import os
import shlex
import sys

from core.config import WITH_CODE
from core.distributed import variable
from core.errors import is_ours

PREVIOUS = "previous"  # the folder of earlier runs
STARTED_IN = os.getcwd()  # a user's class or reward may call os.chdir, the shell that gets the command does not


def resume_command(out_dir):
    """The command that resumes the run in a folder, to be copied into the shell that started this process. From Python
    or a notebook: the two settings.

    out_dir: an absolute path
    """
    script, *arguments = sys.argv
    if not script.endswith(".py") or not is_ours(os.path.join(STARTED_IN, script)):
        return f"resume=True, out_dir={out_dir!r}"
    settings = ["--resume=True", f"--out_dir={out_dir.removeprefix(STARTED_IN + os.sep)}"]
    ranks = variable("LOCAL_WORLD_SIZE", 1)
    if ranks != variable("WORLD_SIZE", 1):  # only the user knows how the machines find each other
        return f"{shlex.join(settings)} on every machine"
    if WITH_CODE.isdisjoint(arguments):
        arguments = []  # config.json has the settings
    kept = [argument for argument in arguments if argument.partition("=")[0] not in ("--resume", "--out_dir")]
    starter = ["python"]
    if ranks > 1:
        starter = ["torchrun", f"--nproc_per_node={ranks}", "--shutdown-timeout=900"]
    return shlex.join([*starter, script, *kept, *settings])


def earlier_runs(out_dir):
    """The folders of the runs that were set aside in this one, the newest first."""
    folder = os.path.join(out_dir, PREVIOUS)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    numbers = [name for name in names if name.isdecimal()]
    return [os.path.join(folder, name) for name in sorted(numbers, key=int, reverse=True)]
