"""A run: what it needs is built, one at a time in its folder, step after step until the last one, and its record.

config.json records every start with its settings and its end.
"""

import contextlib
import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from datetime import UTC, datetime

import torch

from core.checkpoint_manager import no_state, states
from core.config import changed_settings
from core.data import dataset_folder
from core.errors import ROOT, Mistake, described, is_out_of_memory, one_line, shortest
from core.files import (
    BEFORE, CONFIG, CONSOLE, METRICS, RUN_FILES, STATE, VLLM_WEIGHTS, read_object, starts_of, write_json, writing)
from core.optim import not_finite
from core.resume import PREVIOUS, changed_since, earlier_runs, resume_command

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "lock"
OTHERS = r"model(-\d+)?(\.safetensors)?|events\.out\.tfevents\..*"  # models are files or folders; TensorBoard's
SET_ASIDE = re.compile(rf"({'|'.join(map(re.escape, RUN_FILES))}|{OTHERS})(\.tmp)?")
STAYING = (LOCK, PREVIOUS, "wandb", VLLM_WEIGHTS)  # a later run leaves them where they are
BEGUN = f"{CONFIG}.tmp"  # left by a run that was killed at its first file, before console.log was that
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]  # as on Windows
NOTICE = b"\nthe run ends after this step, an evaluation under way and a save; a second signal ends it at once\n"
MODELS = ("data/smollm2/model",)  # models that the prepare.py beside them makes
MEMORY = ("batch_size", "group_size", "max_new_tokens", "block_size", "micro_batch_tokens", "sample_rows",
          "grad_checkpoint", "dtype", "lora_rank", "load_in_4bit")  # settings that change what a run needs


# Before a run: what is missing is built

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


# Its folder

def check_run_folder(out_dir: str, resume: bool | str = False) -> None:
    """Raises Mistake if the folder holds files but no run, or no state although resume is True."""
    if resume is True and not states(out_dir):
        raise no_state(out_dir)
    names = listed(out_dir)
    foreign = [name for name in names if name not in (*STAYING, BEGUN)]
    if foreign and not {STATE, BEFORE, METRICS, CONSOLE, PREVIOUS} & set(names):
        raise Mistake(f"out_dir={out_dir} holds {foreign[0]}, which is of no run; name a new or an empty folder")


@contextlib.contextmanager
def run_folder(config, dist):
    """Keeps other runs out of out_dir during the block. Gives whether the run resumes from a state there.
    config: absolute_out_dir, resume (True, False, or 'auto': if there is a state)"""
    dist.barrier()  # every rank has seen the folder as it was
    with locked(config.absolute_out_dir) if dist.is_main else contextlib.nullcontext():
        found = dist.is_main and bool(states(config.absolute_out_dir))
        yield bool(dist.agree(config.resume is True or (config.resume == "auto" and found)))


@contextlib.contextmanager
def locked(out_dir):
    """Locks the folder until the end of the block or of the process. Raises Mistake if another run has the lock.
    Without locks (Windows, some file systems) nothing keeps two runs apart."""
    with writing(f"out_dir={out_dir}"):
        os.makedirs(out_dir, exist_ok=True)
        file = open(os.path.join(out_dir, LOCK), "a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"out_dir={out_dir} is in use by another run; choose another out_dir or wait") from None
        except (AttributeError, OSError):
            pass
        yield


def set_aside(out_dir: str) -> str | None:
    """Moves what an earlier run wrote in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.
    Returns the folder of the earlier run, or None if there was none."""
    names = [name for name in listed(out_dir) if SET_ASIDE.fullmatch(name)]
    if not names:
        return None
    numbers = [int(os.path.basename(folder)) for folder in earlier_runs(out_dir)]
    folder = os.path.join(out_dir, PREVIOUS, str(1 + max(numbers, default=0)))
    with writing(folder):
        os.makedirs(folder)
        for name in reversed(names):  # the states early, so that no run resumes half of another
            os.replace(os.path.join(out_dir, name), os.path.join(folder, name))
    return folder


def listed(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


class StopSignal:
    """Notes a signal during the block: SIGTERM, of a machine that is taken away, SIGINT (Ctrl-C), or SIGHUP, of a
    terminal that is closed. A second one ends the process at once, without saving."""

    def __init__(self, dist):
        self.dist, self.number, self.before = dist, 0, {}
        self.process = os.getpid()

    def __enter__(self):
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and shells ask for that
                self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, kind, *_):
        if kind is not None and self.dist.world > 1:
            return  # a rank has failed: the SIGTERM of torchrun must not end this one before it has told why
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        """The handler. A second signal has its default action, also in a process that waits for other ranks."""
        if os.getpid() != self.process:  # a fork of a reward's, which would outlive the end of its Pool
            signal.signal(number, self.before[number])
            os.kill(os.getpid(), number)
            return
        self.number = number
        for each in self.before:
            signal.signal(each, signal.SIG_DFL)
        if self.dist.is_main:
            with contextlib.suppress(OSError):  # of a terminal that was closed
                os.write(2, NOTICE)  # print is not safe in a handler

    def came(self) -> str | None:
        """The name of the signal that any rank has received, or None. Every rank must call it."""
        number = self.dist.agree(self.number)
        return signal.Signals(number).name if number else None


class BadSteps:
    """Counts the steps in a row that taught nothing, alike on all ranks, and ends a run that no longer trains. After
    another step the caller sets in_a_row to 0."""

    def __init__(self, limit, checkpoints, logger):
        self.limit, self.checkpoints, self.logger = limit, checkpoints, logger
        self.in_a_row = 0

    def add_not_finite(self, step: int, metrics: dict) -> None:
        """Counts a step that was skipped."""
        names = not_finite(metrics)
        of_rewards = any(name.startswith("reward/") for name in names)
        remedy = "let rewards return finite numbers" if of_rewards else "lower learning_rate"
        self.add(f"step {step} is skipped, because these are not finite: {', '.join(names)}", remedy)

    def add(self, what: str, remedy: str) -> None:
        """Counts a step. what: happened, in words; remedy: the end of the error, if this was one too many"""
        self.in_a_row += 1
        self.logger.say(what)
        if self.in_a_row >= self.limit:
            raise Mistake(f"{what}, as in {self.in_a_row} steps in a row (max_bad_steps={self.limit}); {remedy}; "
                          f"{self.checkpoints.how_to_resume()}")


def run_loop(trainer, stop) -> bool:
    """Takes the steps of a trainer, evaluating and saving on the way. Returns whether a signal ended it early.

    trainer: has config, dist, logger, step, evaluated (whether the evaluation of this step, if it has one, is done),
             stopped_by, bad (a BadSteps), and the methods
        train_step()         takes one optimizer step and counts it; returns its metrics
        log_step(metrics)    logs them
        evaluation_is_due()  tells whether an evaluation follows this step; one always follows the last
        run_evaluation()     evaluates on held-out data and logs the metrics
        save()               writes the model and the state to resume from
    stop: a StopSignal
    """
    c, save_is_due = trainer.config, False
    if not trainer.evaluated:  # a new run, or one that a signal stopped before the evaluation of its step
        evaluate(trainer)
    while trainer.step < c.max_iters:
        trainer.log_step(trainer.train_step())
        last = trainer.step == c.max_iters
        came = stop.came()
        trainer.evaluated = not (last or trainer.evaluation_is_due())
        # Whoever sends a signal does not wait for an evaluation: the resumed run makes it up
        if not trainer.evaluated and (last or not came):
            evaluate(trainer)
            came = stop.came()
        save_is_due = save_is_due or trainer.step % c.save_interval == 0
        in_good_state = not trainer.bad.in_a_row  # a good state is not replaced by one from the middle of bad steps
        if last or came or (save_is_due and in_good_state):
            trainer.save()
            save_is_due = False
        trainer.logger.tick()
        if came and not last:
            trainer.stopped_by = came
            command = resume_command(c.absolute_out_dir)
            trainer.logger.say(f"stopped by {came} after step {trainer.step}; resume with {command}")
            return True
    return False


def evaluate(trainer):
    """The evaluation of a step, for which the other ranks wait."""
    trainer.run_evaluation()
    trainer.dist.barrier()
    trainer.evaluated = True


# Its record

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
