"""The start and end of a run: builds a missing dataset or checkpoint, and records both in config.json."""

import contextlib
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
from datetime import UTC, datetime

import torch

from core.config import changed_settings
from core.data_folder import dataset_folder
from core.files import CONFIG, CannotWrite, read_object, write_json
from core.run import set_aside
from core.settings.setting import shown
from core.settings.user_code import ROOT, one_line, shortest

RECIPES = {  # {a checkpoint that a shipped config names: the config that trains it, or a prepare.py}
    "data/smollm2/model": "data/smollm2/prepare.py",
    "out-equations/generator.safetensors": "config/pretrain_equations.py",
    "out-trunk/model.safetensors": "config/pretrain_trunk.py",
}
MEMORY = ("batch_size", "group_size", "max_new_tokens", "block_size", "micro_batch_tokens", "sample_rows",
          "grad_checkpoint", "dtype", "lora_rank", "load_in_4bit")  # settings that change what a run needs
NO_MEMORY = "out of memory|can't allocate memory|ALLOC_FAILED"  # of CUDA and MPS, of a CPU, of CUDA's libraries
PACKAGES = ("torch", "numpy", "safetensors", "transformers", "peft", "datasets", "tokenizers", "ray")


def build_missing(config, checkpoints, dist):
    """Builds the dataset and the checkpoints that are missing and have a recipe; a dry run says what it would build.
    Returns whether something is still missing, the same on every rank.

    checkpoints: the names of the settings that name them
    """
    missing = False
    if dist.is_main:
        missing = build_dataset(dataset_folder(config.dataset), config.dry_run)
        for key in checkpoints:
            missing |= build_checkpoint(getattr(config, key), key, config.dataset, config.dry_run)
    dist.barrier()
    return dist.agree(missing)


def build_dataset(folder, dry=False):
    """Runs the prepare.py of a folder that has one, but no meta.json, the file that it writes last."""
    recipe = os.path.join(folder, "prepare.py")
    if not os.path.exists(recipe):
        return False
    return build(os.path.join(folder, "meta.json"), recipe, "dataset", [recipe, f"--out={folder}"], dry)


def build_checkpoint(path, key, dataset, dry=False):
    """Builds the missing checkpoint `path` if RECIPES has it; a config trains it on `dataset`, in a folder beside it,
    where a training that was interrupted resumes."""
    recipe = RECIPES.get(path, "")
    if not os.path.exists(recipe):  # it is not started in the repository's folder
        return False
    command = [recipe]
    if not recipe.endswith("prepare.py"):
        out_dir = os.path.splitext(path)[0] + "-run"
        command = [os.path.join(ROOT, "core", "pretrain.py"), recipe, f"--dataset={dataset}", f"--out_dir={out_dir}",
                   f"--export={path}", "--resume=auto"]
    return build(path, recipe, key, command, dry)


def build(path, recipe, key, command, dry=False):
    """Runs `command`, which follows the file `recipe`, if the file `path`, which `key` names, is missing. With `dry` it
    only says so. Returns whether the file is still missing."""
    if os.path.exists(path):
        return False
    if dry:
        print(f"{key}: {path} is missing; it would be built by {recipe}")
        return True
    print(f"{key}: {path} is missing; building it with {recipe} (after an interrupt the next start goes on from there)")
    # It is no rank of this run
    done = subprocess.run([sys.executable, *command], env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"})
    if done.returncode or not os.path.exists(path):
        raise ValueError(f"{key}: building {path} with {recipe} failed or was stopped, see above; start again to go on")
    return False


@contextlib.contextmanager
def naming_what_lowers_memory(config):
    """Raises ValueError, with the settings that lower what a run needs, when the block is out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or re.search(NO_MEMORY, str(error))):
            raise
        settings = ", ".join(f"{key}={getattr(config, key)}" for key in MEMORY if hasattr(config, key))
        raise ValueError(f"out of memory ({one_line(error, 100)}); change what lowers it: {settings}") from error


class Recorded:
    """Records in config.json how the run of the block starts and ends: settings with their origin, hardware, versions,
    command; without the names of the user and the machine.

    An earlier run in the folder, unless this one resumes it, is set aside when the block begins, so that a start that
    fails leaves it alone.
    origin: {key: the file or argument that set it}; trainer: a Trainer or GRPOTrainer, which has resumed if it does
    write_page: writes the page about the run anew, if there is one
    """

    def __init__(self, config, origin, dist, trainer, resume, write_page=None):
        self.config, self.origin, self.dist, self.trainer = config, origin, dist, trainer
        self.resume, self.write_page, self.starts = resume, write_page, []
        self.path = os.path.join(config.absolute_out_dir, CONFIG)

    def __enter__(self):
        self.dist.barrier()  # every rank has read its checkpoints, which may be about to move
        if not self.dist.is_main:
            return
        say = self.trainer.logger.say
        if self.resume:
            before = read_object(self.path, self.path, "delete it") if os.path.exists(self.path) else {}
            self.starts = before.pop("starts", [])
            say(resumed_from(self.config, self.trainer.checkpoints, before))
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
        write_json(self.path, dataclasses.asdict(self.config) | {"starts": starts})


def resumed_from(config, checkpoints, before):
    """The state and step from which a run resumes, and the settings that have changed. before: those of config.json"""
    path, step = checkpoints.last
    after = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples are lists in a file
    del after["resume"]
    changed = [f"{key} {shown(before[key])} -> {shown(x)}" for key, x in after.items() if before.get(key, x) != x]
    since = f"; changed since: {', '.join(changed)}" if changed else ""
    return f"going on from {shortest(path)}, step {step} of {config.max_iters}{since}"


def start(config, origin, dist, step):
    """The record of a start. step: the steps that are done, above 0 when the run is resumed"""
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
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def without_home(text):
    """A text with ~ for the home folder, which has the user's name; /home/alice is not in /home/al."""
    home = os.path.expanduser("~")
    return text if home == "/" else re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def commit():
    """The commit of this code, with -dirty if files were changed; "" if it is in no repository of its own."""
    if not os.path.exists(os.path.join(ROOT, ".git")) or not shutil.which("git"):
        return ""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
