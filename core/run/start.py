"""The start and the end of a run, in config.json: settings with their origin, machine, versions, command; how it ended
and why. The names of the user and the machine are left out."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from datetime import datetime, timezone

import torch

from core.config import changed_settings
from core.files.json_lines import read_object
from core.files.whole_files import CannotWrite, replacing
from core.run.folder import set_aside
from core.run.names import CONFIG
from core.settings.ranges import shown
from core.settings.user_code import ROOT, one_line, shortest

PACKAGES = ("torch", "numpy", "safetensors", "transformers", "peft", "datasets", "tokenizers", "ray")


class Recorded:
    """Records in config.json that the run of the block starts, and how it ends.

    Until the block begins the folder is as it was, so that a start that fails leaves an earlier run where it is; then
    that run is set aside, unless this one goes on from it.
    origin: {key: the file or argument that set it}; trainer: a Trainer or GRPOTrainer, which has resumed if it does
    write_page: writes the page about the run anew, if there is one
    """

    def __init__(self, config, origin, dist, trainer, resume, write_page=None):
        self.config, self.origin, self.dist, self.trainer = config, origin, dist, trainer
        self.resume, self.write_page = resume, write_page
        self.path = os.path.join(config.absolute_out_dir, CONFIG)
        self.starts = []

    def __enter__(self):
        self.dist.barrier()  # every rank has read its checkpoints, one of which may be about to move
        if not self.dist.is_main:
            return
        say = self.trainer.logger.say
        if self.resume:
            before = read_object(self.path, self.path, "delete it") if os.path.exists(self.path) else {}
            self.starts = before.pop("starts", [])
            say(how_it_goes_on(self.config, self.trainer.checkpoints, before))
        elif previous := set_aside(self.config.absolute_out_dir):
            say(f"{self.config.out_dir} held an earlier run, which is now in {shortest(previous)}")
        self.starts.append(start(self.config, self.origin, self.dist, self.trainer.step))
        self.write()

    def __exit__(self, kind, error, trace):
        if self.dist.is_main:
            try:
                self.end(error)
            except (CannotWrite, FileNotFoundError):
                if error is None:  # what ended the run is told, not what followed from it
                    raise

    def end(self, error):
        """Records how the run ended. error: the exception that ended it, or None"""
        step, why = self.trainer.step, self.trainer.stopped_by
        ended = "finished" if step >= self.config.max_iters else "stopped"
        if error is not None:
            ended, why = "failed", f"{type(error).__name__}: {one_line(error)}"
            text = without_home("".join(traceback.format_exception(error)))
            self.trainer.logger.write_console(f"failed at step {step}: {why}\n{text}")
        self.starts[-1]["end"] = {"time": now(), "step": step, "ended": ended, "why": why}
        self.write()
        if self.write_page is not None:
            self.write_page()

    def write(self):
        starts = json.loads(without_home(json.dumps(self.starts)))
        with replacing(self.path) as new, open(new, "w") as f:
            json.dump(dataclasses.asdict(self.config) | {"starts": starts}, f, indent=1)


def how_it_goes_on(config, checkpoints, before):
    """From where a resumed run goes on, and which settings are not as they were. before: those of config.json"""
    path, step = checkpoints.last
    after = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples are lists in a file
    del after["resume"]
    changed = [f"{key} {shown(before[key])} -> {shown(x)}" for key, x in after.items() if before.get(key, x) != x]
    since = f"; changed since: {', '.join(changed)}" if changed else ""
    return f"going on from {shortest(path)}, step {step} of {config.max_iters}{since}"


def start(config, origin, dist, step):
    """The record of a start: the time, the command, and the code, machine, packages and settings that differ.

    origin: {key: the file or argument that set it}; step: the steps that are done; not 0 when the run is resumed
    """
    record = {
        "time": now(),
        "step": step,
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "system": platform.platform(),
        "torch threads": torch.get_num_threads(),
        "ranks": dist.world,
        "device": str(dist.device),
        "precision": str(dist.dtype).removeprefix("torch."),
        "python": platform.python_version(),
    }
    if dist.device.type == "cuda":
        record["gpu"] = torch.cuda.get_device_name(dist.device)
    for name in PACKAGES:
        if name in sys.modules:
            record[name] = importlib.metadata.version(name)
    return record | {"settings": changed_settings(config, origin)}


def now():
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def without_home(text):
    """A text with ~ for the home folder, which has the user's name; /home/alice is not in /home/al."""
    home = os.path.expanduser("~")
    return text if home == "/" else re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def commit():
    """The commit of this code, with -dirty if files were changed; "" if it is in no repository of its own."""
    if not os.path.exists(os.path.join(ROOT, ".git")) or not shutil.which("git"):
        return ""
    done = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True,
                          text=True)
    return done.stdout.strip()
