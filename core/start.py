"""The start and end of a run: builds a missing dataset or checkpoint, and records both in config.json."""

import contextlib
import dataclasses
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
from core.errors import ROOT, Mistake, described, is_out_of_memory, one_line, shortest
from core.files import CONFIG, read_object, starts_of, write_json
from core.resume import changed_since
from core.run import set_aside

MODELS = ("data/smollm2/model",)  # models that the prepare.py beside them makes
MEMORY = ("batch_size", "group_size", "max_new_tokens", "block_size", "micro_batch_tokens", "sample_rows",
          "grad_checkpoint", "dtype", "lora_rank", "load_in_4bit")  # settings that change what a run needs


def build_missing(config, checkpoints, dist):
    """Builds what is missing of the dataset, if its folder has a prepare.py, and of MODELS; a dry run only says so.
    Returns whether something is still missing, the same on every rank.

    checkpoints: the names of the settings that name models
    """
    missing = False
    if dist.is_main:
        meta = os.path.join(dataset_folder(config.dataset), "meta.json")  # what prepare.py writes last
        missing = build("dataset", meta, config.dry_run)
        for key in checkpoints:
            if getattr(config, key) in MODELS:
                missing |= build(key, getattr(config, key), config.dry_run)
    dist.barrier()
    return dist.agree(missing)


def build(key, path, dry=False):
    """Runs the prepare.py of a folder if its file `path`, which the setting `key` names, is missing. With `dry` it only
    says so. Returns whether the file is still missing."""
    folder = os.path.dirname(path)
    recipe = os.path.join(folder, "prepare.py")
    if os.path.exists(path) or not os.path.exists(recipe):
        return False
    if dry:
        print(f"{key}: {path} is missing; it would be built by {recipe}")
        return True
    print(f"{key}: {path} is missing; building it with {recipe}")
    alone = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}  # it is no rank of this run
    done = subprocess.run([sys.executable, recipe, f"--out={folder}"], env=alone)
    if done.returncode or not os.path.exists(path):
        raise Mistake(f"{key}: building {path} with {recipe} failed, see above; start again")
    return False


@contextlib.contextmanager
def naming_what_lowers_memory(config):
    """Raises Mistake, with the settings that lower what a run needs, when the block is out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        settings = ", ".join(f"{key}={getattr(config, key)}" for key in MEMORY if hasattr(config, key))
        raise Mistake(f"out of memory ({one_line(error, 100)}); change what lowers it: {settings}") from error


@contextlib.contextmanager
def recorded(config, origin, dist, trainer, resume, write_page=None):
    """Records in config.json how the run of the block starts and ends: settings with their origin, hardware, command;
    without the name of the user.

    An earlier run in the folder, unless this one resumes it, is set aside when the block begins, so that a start that
    fails leaves it alone.
    origin: {key: the file or argument that set it}; trainer: a Trainer or GRPOTrainer, which has resumed if it does
    write_page: writes the page about the run anew, if there is one
    """
    dist.barrier()  # every rank has read its checkpoints, which may be about to move
    if not dist.is_main:
        yield
        return
    path, starts, logger = os.path.join(config.absolute_out_dir, CONFIG), [], trainer.logger
    if resume:
        where = f"resuming from {shortest(trainer.checkpoints.last)}, step {trainer.step} of {config.max_iters}"
        logger.say(f"{where}; its buffer: {trainer.holds}" if trainer.holds else where)
        if os.path.exists(path):
            from core.settings.other_names import with_settings_of_today
            saved = read_object(path, path, "delete it")
            starts = starts_of(saved, path)
            with contextlib.suppress(Mistake):  # no longer possible together: they are compared as they were
                saved = with_settings_of_today(saved, shortest(path), logger.say)
            if changes := changed_since(saved, config, dist.world):
                logger.say(f"changed since the last start: {changes}")
    elif previous := set_aside(config.absolute_out_dir):
        logger.say(f"{config.out_dir} held an earlier run, which is now in {shortest(previous)}")
    else:  # the first file: by it check_run_folder knows the folder of a run that is killed before the next one
        logger.write_console(f"{now()}: a run begins")
    starts.append(json.loads(without_home(json.dumps(start(config, origin, dist, trainer.step)))))
    record = dataclasses.asdict(config) | {"starts": starts}
    write_json(path, record)

    def end(ended, why):
        starts[-1]["end"] = {"time": now(), "step": trainer.step, "ended": ended, "why": why}
        write_json(path, record)
        if write_page is not None:
            write_page()

    try:
        yield
    finally:
        if error := sys.exception():
            why = described(error)
            trace = "".join(traceback.format_exception(error))
            with contextlib.suppress(Mistake, FileNotFoundError):  # the error is told, not what follows from it
                logger.write_console(f"failed at step {trainer.step}: {why}\n{trace}")
                end("failed", why)
    end("stopped" if trainer.stopped_by else "finished", trainer.stopped_by)


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
        "torch": torch.__version__,
        "settings": changed_settings(config, origin),
    }
    if dist.device.type == "cuda":
        record["gpu"] = torch.cuda.get_device_name(dist.device)
    return record


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
