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

from core.config import changed_settings, save_config
from core.files.json_lines import read_object
from core.files.whole_files import CannotWrite
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
            before = {}
            if os.path.exists(self.path):
                before = read_object(self.path, self.path, "delete it")
            self.starts = before.pop("starts", [])
            say("\n".join(how_it_goes_on(self.config, self.trainer, before, self.starts)))
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
        step, ended, why = self.trainer.step, "finished", None
        if error is not None:
            ended, why = "failed", f"{type(error).__name__}: {one_line(error)}"
        elif step < self.config.max_iters:
            ended, why = "stopped", self.trainer.stopped_by
        self.starts[-1]["end"] = {"time": now(), "step": step, "ended": ended, "why": why}
        self.write()
        if error is not None:
            text = without_home("".join(traceback.format_exception(error)))
            self.trainer.logger.write_console(f"failed at step {step}: {why}\n{text}")
        if self.write_page is not None:
            self.write_page()

    def write(self):
        save_config(self.config, self.path, starts=json.loads(without_home(json.dumps(self.starts))))


def how_it_goes_on(config, trainer, before, starts):
    """Lines that tell the user from where a resumed run goes on, and what is not as it was.

    before: the settings of config.json; starts: the starts before this one
    """
    path, step = trainer.checkpoints.last
    after = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples are lists in a file
    changed = []
    for key, x in before.items():
        if key != "resume" and after.get(key, x) != x:
            changed.append(f"{key} {shown(x)} -> {shown(after[key])}")
    line = f"going on from {shortest(path)}, step {step} of {config.max_iters}"
    if changed:
        line += f"; changed since: {', '.join(changed)}"
    yield line
    if starts and "end" not in starts[-1]:
        yield "the process before this one did not end properly: it was killed, or the machine stopped"
    if step >= config.max_iters:
        yield f"the run was finished, and there is nothing to do; to train on, set max_iters above {step}"


def start(config, origin, dist, step):
    """The record of a start: the time, the command, and the code, machine, packages and settings that differ.

    origin: {key: the file or argument that set it}; step: the steps that are done; not 0 when the run is resumed
    """
    settings = {}
    for key, (value, default, where) in changed_settings(config, origin).items():
        settings[key] = {"value": value, "default": default, "set in": where}
    record = {
        "time": now(),
        "step": step,
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
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
    return record | {"settings": settings}


def now():
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def without_home(text):
    """A text with ~ for the home folder, which has the user's name. A longer name, as /home/al in /home/alice, is
    another folder."""
    home = os.path.expanduser("~")
    if len(home) <= 1:
        return text
    return re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def commit():
    """The commit of this code, with -dirty if files were changed; "" if it is in no repository of its own."""
    if not os.path.exists(os.path.join(ROOT, ".git")) or not shutil.which("git"):
        return ""
    done = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True,
                          text=True)
    return done.stdout.strip()
