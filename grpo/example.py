"""The config of a command that names none: config/grpo_example.py, the main job."""

import contextlib
import os
import re

from core.config import run_config_file
from core.data_folder import dataset_folder
from core.errors import ROOT, Mistake, UsageError, shortest

EXAMPLE = os.path.join(ROOT, "config", "grpo_example.py")
INSTEAD = ("generator_checkpoint", "dataset")  # settings of a command with a model or data of its own


def example_for(argv):
    """The path of the config file that a command takes because it names no config file, no model, no data and no run
    to resume; else None. argv: its arguments"""
    values = values_of(argv)
    has_file = not all(argument.startswith("--") for argument in argv)
    resumes = values.get("resume", "False") != "False"
    if has_file or resumes or values.keys() & set(INSTEAD):
        return None
    return shortest(EXAMPLE)


def values_of(argv):
    """{key: the text of its value} of the arguments --key=value."""
    return dict(argument.removeprefix("--").partition("=")[::2] for argument in argv)


def describe_example(path):
    """A line for the start of a run."""
    return (f"no config file, {', '.join(INSTEAD)} or resume is named, so that {path} sets what the command line does "
            "not")


@contextlib.contextmanager
def naming_example(path, argv):
    """Adds to a Mistake of the block which of the settings that it names are those of the file."""
    try:
        yield
    except UsageError:
        raise
    except Mistake as mistake:
        words = re.findall(r"\w+", str(mistake))
        keys = [key for key in run_config_file(path) if key in words and key not in values_of(argv)]
        if not keys:
            raise
        raise Mistake(f"{mistake} ({path}, taken because no config file, {' or '.join(INSTEAD)} is named, sets "
                      f"{', '.join(keys)})") from mistake


def beside_the_code(config, origin, path):
    """The config with the absolute paths of what the file names, where the working directory does not have it."""
    changes = {}
    for key, where in origin.items():
        value = getattr(config, key)
        if where == path and isinstance(value, str):
            place = dataset_folder(value) if key == "dataset" else value
            there = os.path.join(ROOT, place)
            if os.path.exists(there) and not os.path.exists(place):
                changes[key] = there
    return config.varied(**changes)
