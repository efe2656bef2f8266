"""The command that resumes a run, the changes since its last start, and the earlier runs of a folder."""

import dataclasses
import json
import os
import shlex
import sys

from core.config import WITH_CODE
from core.data import dataset_folder, is_file_of_records
from core.distributed import variable
from core.errors import is_ours
from core.settings.setting import shown

PREVIOUS = "previous"  # the folder of earlier runs
STARTED_IN = os.getcwd()  # where the user's shell is, even if a reward of the user's calls os.chdir later
OF_A_START = ("resume", "out_dir", "dry_run", "doctor", "starts")  # keys of config.json that may differ in each start


def resume_command(out_dir):
    """Returns the command that resumes the run in a folder, for the shell that started this process; in Python or a
    notebook only the two settings.

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
    kept = [argument for argument in arguments if not argument.startswith(("--resume=", "--out_dir="))]
    starter = ["python"]
    if ranks > 1:
        starter = ["torchrun", f"--nproc_per_node={ranks}", "--shutdown-timeout=900"]
    return shlex.join([*starter, script, *kept, *settings])


def earlier_runs(out_dir):
    """Lists the folders of earlier runs that were set aside in out_dir, newest first."""
    folder = os.path.join(out_dir, PREVIOUS)
    if not os.path.isdir(folder):
        return []
    numbers = [name for name in os.listdir(folder) if name.isdecimal()]
    numbers.sort(key=int, reverse=True)
    return [os.path.join(folder, number) for number in numbers]


def changed_since(saved, config, ranks):
    """Lists in one line the settings, and the number of ranks, that differ from the last start; "" if nothing does.

    saved: the content of config.json, perhaps of a version with other settings
    ranks: the number of ranks of this start
    """
    now = as_json(dataclasses.asdict(config)) | {"ranks": ranks}
    return ", ".join(changes({"ranks": ranks} | completed(saved, config), now))


def completed(saved, config):
    """Returns the content of a config.json with the ranks of its last start, and with the defaults of the settings that
    its version did not have. config: a config or its class"""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    settings = as_json(defaults) | saved
    for start in saved.get("starts", ()):
        if "ranks" in start:
            settings["ranks"] = start["ranks"]
    return settings


def changes(before, now):
    """Lists the settings that differ as texts, "key value -> value". before, now: {setting: plain value}"""
    found = []
    for key in before:
        if key in OF_A_START or is_same(key, before[key], now.get(key)):
            continue
        value = shown(now[key]) if key in now else "-"
        found.append(f"{key} {shown(before[key])} -> {value}")
    return found


def as_json(settings):
    """Converts settings to the values that a JSON file returns, with lists for tuples."""
    return json.loads(json.dumps(settings))


def is_same(key, one, other):
    """True for equal values of a setting, and for two spellings of the path of one file."""
    if isinstance(one, list) and isinstance(other, list):
        same = [is_same(key, a, b) for a, b in zip(one, other)]
        return len(one) == len(other) and all(same)
    if isinstance(one, str) and isinstance(other, str):
        if key == "dataset" and not is_file_of_records(one) and not is_file_of_records(other):
            one = dataset_folder(one)
            other = dataset_folder(other)
        if os.path.exists(one) and os.path.exists(other):
            return os.path.samefile(one, other)
    return one == other
