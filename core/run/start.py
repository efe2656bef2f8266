"""The start and the end of a run: settings with their origin, machine, versions, command; how it ended and why. The
names of the user and the machine are left out."""

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
from core.files.json_lines import read_object, read_records
from core.files.whole_files import CannotWrite, replacing
from core.run.folder import set_aside
from core.run.names import CONFIG, STARTS
from core.settings.ranges import shown
from core.settings.user_code import ROOT, one_line, shortest

PACKAGES = ("torch", "numpy", "safetensors", "transformers", "peft", "datasets", "tokenizers", "ray")


class Recorded:
    """Records in starts.jsonl that the run of the block starts, and how it ends.

    Until the block begins the folder is as it was, so that a start that fails leaves an earlier run where it is; then
    that run is set aside, unless this one goes on from it.
    origin: {key: the file or argument that set it}; trainer: a Trainer or GRPOTrainer, which has resumed if it does
    write_page: writes the page about the run anew, if there is one
    """

    def __init__(self, config, origin, dist, trainer, resume, write_page=None):
        self.config, self.origin, self.dist, self.trainer = config, origin, dist, trainer
        self.resume, self.write_page = resume, write_page

    def __enter__(self):
        self.dist.barrier()  # every rank has read its checkpoints, one of which may be about to move
        if not self.dist.is_main:
            return
        say, out_dir = self.trainer.logger.say, self.config.absolute_out_dir
        if self.resume:
            say("\n".join(how_it_goes_on(self.config, self.trainer)))
        else:
            previous = set_aside(out_dir)
            if previous:
                say(f"{self.config.out_dir} held an earlier run, which is now in {shortest(previous)}")
        record_start(self.config, self.origin, self.dist, self.trainer.step)
        save_config(self.config, os.path.join(out_dir, CONFIG))

    def __exit__(self, kind, error, trace):
        if self.dist.is_main:
            try:
                self.end(error)
            except CannotWrite:
                if error is None:  # of two files that cannot be written, the first one is the error
                    raise

    def end(self, error):
        """Records how the run ended. error: the exception that ended it, or None"""
        step, ended, why = self.trainer.step, "finished", None
        if error is not None:
            ended, why = "failed", f"{type(error).__name__}: {one_line(error)}"
        elif step < self.config.max_iters:
            ended, why = "stopped", self.trainer.stopped_by
        add_record(self.config.absolute_out_dir, step, ended=ended, why=why)
        if error is not None:
            text = without_home("".join(traceback.format_exception(error)))
            self.trainer.logger.write_console(f"failed at step {step}: {why}\n{text}")
        if self.write_page is not None:
            self.write_page()


def how_it_goes_on(config, trainer):
    """Lines that tell the user from where a resumed run goes on, and what is not as it was."""
    path, step = trainer.checkpoints.last
    line = f"going on from {shortest(path)}, step {step} of {config.max_iters}"
    changed = changes(config)
    if changed:
        line += f"; changed since: {', '.join(changed)}"
    yield line
    starts = read_records(os.path.join(config.absolute_out_dir, STARTS))
    if starts and "ended" not in starts[-1]:
        yield "the process before this one did not end properly: it was killed, or the machine stopped"
    if step >= config.max_iters:
        yield f"the run was finished, and there is nothing to do; to train on, set max_iters above {step}"


def changes(config):
    """Settings that are not as config.json has them, in words."""
    path = os.path.join(config.absolute_out_dir, CONFIG)
    if not os.path.exists(path):
        return []
    before = read_object(path, path, "delete it")
    after = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples are lists in a file
    keys = [key for key in after if key != "resume" and before.get(key, after[key]) != after[key]]
    return [f"{key} {shown(before[key])} -> {shown(after[key])}" for key in keys]


def record_start(config, origin, dist, step):
    """Adds a record to <out_dir>/starts.jsonl, which has one for each start of the run.

    origin: {key: the file or argument that set it}; step: the steps that are done; not 0 when the run is resumed
    """
    settings = {}
    for key, (value, default, where) in changed_settings(config, origin).items():
        settings[key] = {"value": value, "default": default, "set in": where}
    add_record(config.absolute_out_dir, step, command=shlex.join(["python", *sys.argv]), commit=commit(),
               **machine(dist), python=platform.python_version(), **versions(), settings=settings)


def add_record(out_dir, step, **facts):
    """Writes starts.jsonl anew, with one record more: the time, the step, and those of the facts that are not None."""
    path = os.path.join(out_dir, STARTS)
    known = {"time": now(), "step": step} | {key: x for key, x in facts.items() if x is not None}
    lines = [json.dumps(x, ensure_ascii=False) + "\n" for x in (*read_records(path), known)]
    with replacing(path) as new, open(new, "w", encoding="utf-8", errors="replace") as f:
        f.write(without_home("".join(lines)))


def now():
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def without_home(text):
    """A text with ~ for the home folder, which has the user's name. A longer name, as /home/al in /home/alice, is
    another folder."""
    home = os.path.expanduser("~")
    if len(home) <= 1:
        return text
    return re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def versions():
    """{package: its version} of those that are loaded."""
    return {name: importlib.metadata.version(name) for name in PACKAGES if name in sys.modules}


def commit():
    """The commit of this code, with -dirty if files were changed; None if it is in no repository of its own."""
    if not os.path.exists(os.path.join(ROOT, ".git")) or not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True,
                          text=True)
    return done.stdout.strip() or None


def machine(dist):
    """The machine and the ranks that the run computes with."""
    found = {"system": platform.platform(), "cores": os.cpu_count(), "torch threads": torch.get_num_threads(),
             "ranks": dist.world, "device": str(dist.device), "precision": str(dist.dtype).removeprefix("torch.")}
    if dist.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(dist.device)
    return found
