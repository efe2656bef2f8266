"""A run: its folder, its steps with evaluations and saves, and its record in config.json.

`job` and `launch` are the beginning and the end of every training script; Run is the base of the trainers.
config.json records every start with its settings and its end.
"""

import contextlib
import copy
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
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import torch

from core.bad_steps import BadSteps
from core.best import Best
from core.checkpoint_manager import CheckpointManager, check_same_step, no_state, states
from core.config import changed_settings
from core.data import dataset_folder
from core.distributed import Distributed
from core.errors import ROOT, Mistake, described, is_out_of_memory, one_line, shortest
from core.files import (
    BEFORE, BEST, CONFIG, CONSOLE, METRICS, RUN_FILES, SAMPLES, STATE, VLLM_WEIGHTS, read_object, replacing, starts_of,
    write_json, writing)
from core.logger import Logger, create_logger, fitted, format_number
from core.models import is_small
from core.optim import CosineLRScheduler, build_optimizers
from core.resume import PREVIOUS, changed_since, earlier_runs, resume_command
from core.settings.setting import Settings

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "lock"
MODEL_OR_EVENTS = r"model(-\d+)?(\.safetensors)?|events\.out\.tfevents\..*"  # models, TensorBoard's files
SET_ASIDE = re.compile(rf"({'|'.join(map(re.escape, RUN_FILES))}|{MODEL_OR_EVENTS})(\.tmp)?")
STAYING = (LOCK, PREVIOUS, "wandb", VLLM_WEIGHTS)  # a later run leaves them where they are
FIRST_FILE = f"{CONFIG}.tmp"  # left by a run of an earlier version that was killed at its start
SIGNALS = [x for x in signal.Signals if x.name in ("SIGTERM", "SIGINT", "SIGHUP")]  # Windows has no SIGHUP
NOTICE = b"\nthe run ends after this step, the evaluation in progress and a save; a second signal ends it at once\n"
BUILT_MODELS = ("data/smollm2/model",)  # built by the prepare.py in their folder
PACKAGES = ("numpy", "safetensors", "transformers", "peft", "ray")  # whose versions a run that loads them records
MEMORY = ("batch_size", "group_size", "max_new_tokens", "block_size", "micro_batch_tokens", "sample_rows",
          "grad_checkpoint", "dtype", "lora_rank", "load_in_4bit")  # settings on which the memory of a run depends


# The beginning and the end of every training script

@contextlib.contextmanager
def job(config: Settings, checkpoint: str | None, check: Callable | None = None):
    """Checks everything that needs no model and no data. Yields the ranks and the device, a Distributed.

    checkpoint: the model that the script starts from, or None; check: config -> None, for further checks
    """
    check_run_folder(config.absolute_out_dir, config.resume)
    if config.trackers:
        from core.trackers import check_trackers
        check_trackers(config)
    if check is not None:
        check(config)
    with Distributed(config.device, config.dtype, is_small(checkpoint)) as dist:
        try:
            yield dist
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            values = vars(config)
            settings = [f"{key}={values[key]}" for key in MEMORY if key in values]
            raise Mistake(f"out of memory ({one_line(error, 100)}); change what lowers it: "
                          f"{', '.join(settings)}") from error


def launch(
        make: Callable,
        config: Settings,
        origin: dict,
        plan: list[str],
        columns: Sequence[str],
        dist: Distributed) -> None:
    """Makes a Run, and runs and records it in out_dir, which is locked for other runs. A dry run only prints the plan.

    make: (logger, dist) -> Run; origin, plan: as in `recorded`; columns: metrics of the console line
    """
    if config.dry_run:
        if dist.is_main:
            print(*map(fitted, plan), "dry run: everything is in place, nothing was trained", sep="\n")
        return
    dist.barrier()  # every rank has seen the folder as it was
    lock = locked(config.absolute_out_dir) if dist.is_main else contextlib.nullcontext()
    with lock:
        resumes = config.resume
        if resumes == "auto":  # rank 0 looks for a state, because a folder may be another one on another machine
            resumes = dist.is_main and states(config.absolute_out_dir) != []
        resumes = bool(dist.agree(resumes))
        logger = create_logger(config, dist, config.max_iters, columns)
        run = make(logger, dist)
        if resumes:
            run.resume()
        record = recorded(run, origin, plan, resumes) if dist.is_main else None
        run.run(record)


# Before a run: missing datasets and models are built

def build_missing(config, checkpoints, dist, plan=()):
    """Builds a missing dataset, if its folder has a prepare.py, and missing BUILT_MODELS. A dry run only reports what
    is missing, with the plan. Returns True on every rank if something is still missing: the dry run must end.

    checkpoints: the names of the settings that name models; plan: the lines of the plan that need neither
    """
    is_missing = False
    if dist.is_main:
        folder = dataset_folder(config.dataset)
        paths = {"dataset": os.path.join(folder, "meta.json")}  # prepare.py writes it last
        for key in checkpoints:
            path = getattr(config, key)
            if path in BUILT_MODELS:
                paths[key] = path
        for key, path in paths.items():
            recipe = os.path.join(os.path.dirname(path), "prepare.py")
            if os.path.exists(path) or not os.path.exists(recipe):
                continue
            if config.dry_run:
                print(f"{key}: {path} is missing; it would be built by {recipe}")
                is_missing = True
            else:
                build(key, path, recipe)
    dist.barrier()
    is_missing = bool(dist.agree(is_missing))
    if is_missing and dist.is_main:
        end = "dry run: nothing was built or trained, and existing files were not checked"
        print(*map(fitted, plan), end, sep="\n")
    return is_missing


def build(key, path, recipe):
    """Runs a prepare.py, which makes the file `path` beside it. key: the setting that names it"""
    print(fitted(f"{key}: {path} is missing; building it with {recipe}"))
    command = [sys.executable, recipe, f"--out={os.path.dirname(path)}"]
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}  # prepare.py is not one of the ranks
    result = subprocess.run(command, env=environment)
    if result.returncode or not os.path.exists(path):
        raise Mistake(f"{key}: building {path} with {recipe} failed, see above; start again")


# The folder of a run

def check_run_folder(out_dir: str, resume: bool | str = False) -> None:
    """Raises Mistake if the folder holds files but no run, or no state although resume is True."""
    if resume is True and not states(out_dir):
        raise no_state(out_dir)
    names = listed(out_dir)
    foreign = [name for name in names if name not in (*STAYING, FIRST_FILE)]
    of_a_run = {STATE, BEFORE, METRICS, CONSOLE, PREVIOUS}.intersection(names)
    if foreign and not of_a_run:
        raise Mistake(f"out_dir={out_dir} contains {foreign[0]}, which no run has written; name a new or empty folder")


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
        except (AttributeError, OSError):  # fcntl is None, or the file system has no locks
            pass
        yield


def set_aside(out_dir: str) -> str | None:
    """Moves the files of an earlier run in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.
    Returns their new folder, or None if there was no earlier run."""
    names = [name for name in listed(out_dir) if SET_ASIDE.fullmatch(name)]
    if METRICS in listed(os.path.join(out_dir, BEST)):
        names.append(BEST)
    if not names:
        return None
    return move_aside(out_dir, names)


def move_aside(out_dir, names):
    """Moves files to a new folder <out_dir>/previous/<n>, whose path it returns. names: states before models"""
    number = 1
    earlier = earlier_runs(out_dir)  # the newest first
    if earlier:
        number += int(os.path.basename(earlier[0]))
    folder = os.path.join(out_dir, PREVIOUS, str(number))
    with writing(folder):
        os.makedirs(folder)
        for name in reversed(names):  # states before models: if this is cut short, no run finds another run's model
            old = os.path.join(out_dir, name)
            new = os.path.join(folder, name)
            os.replace(old, new)
    return folder


def listed(folder: str) -> list[str]:
    if not os.path.isdir(folder):
        return []
    return sorted(os.listdir(folder))


class StopSignal:
    """Notes a signal during the block: SIGTERM (the machine is taken away), SIGINT (Ctrl-C) or SIGHUP (the terminal is
    closed). A second signal ends the process at once, without saving."""

    def __init__(self, dist):
        self.dist = dist
        self.number = 0  # of the signal received
        self.before = {}  # {signal: its handler outside the block}
        self.process = os.getpid()

    def __enter__(self):
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup and shells set this
                self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, kind, *_):
        if kind is not None and self.dist.world > 1:
            return  # a rank has failed: the SIGTERM of torchrun must not end this rank before it has reported why
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        """Handles a signal. A second signal has its default action, even while this process waits for other ranks."""
        if os.getpid() != self.process:  # a fork, made by a reward's Pool, which ends its processes by SIGTERM
            signal.signal(number, self.before[number])
            os.kill(os.getpid(), number)
            return
        self.number = number
        for each in self.before:
            signal.signal(each, signal.SIG_DFL)
        if self.dist.is_main:
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(2, NOTICE)  # print is not safe in a handler

    def received(self) -> str | None:
        """Returns the name of the signal that any rank has received, or None. Every rank must call it."""
        number = self.dist.agree(self.number)
        return signal.Signals(number).name if number else None


class Run:
    """A run of optimizer steps, with evaluations and saves on the way. It ends at max_iters or after a signal.

    A subclass defines train_step, log_step and evaluate. `state` and `load_state` add its own values to a checkpoint.
    learner: the model or policy that is trained; write_model, identity: as in CheckpointManager
    """

    holds = ""  # the content of the run's buffer, in words

    def __init__(
            self,
            learner: Any,
            write_model: Callable,
            identity: dict,
            config: Settings,
            logger: Logger,
            dist: Distributed):
        self.learner = learner
        self.config = config
        self.logger = logger
        self.dist = dist
        self.optimizers = build_optimizers(learner, config, dist.device.type)
        decay_iters = config.lr_decay_iters or config.max_iters
        self.schedule = CosineLRScheduler(
            config.learning_rate,
            config.min_lr,
            config.warmup_iters,
            decay_iters)
        self.checkpoints = CheckpointManager(
            config.absolute_out_dir,
            write_model,
            learner.suffix,
            identity,
            dist.is_main)
        self.bad = BadSteps(config.max_bad_steps, self.checkpoints, logger)
        self.timed = -config.steps_of_an_iteration  # steps in step_seconds; the first iteration is slower than others
        self.step_seconds = 0.0
        self.evaluation_seconds = 0.0  # of the last one
        self.has_evaluated = False  # in this start
        self.step = 0  # optimizer steps taken
        self.skipped_steps = 0
        self.last_evaluation = {}
        self.best = Best(config.keep_best)
        self.has_kept = False  # the model in best/ is this run's
        # False: the evaluation of this step has not been made yet. The model before training may be the best
        self.evaluated = config.keep_best is None
        self.stopped_by = None  # the signal that ended the run early

    # Defined by each trainer

    def train_step(self) -> dict:
        """Takes one optimizer step and counts it. Returns its metrics."""
        raise NotImplementedError

    def log_step(self, metrics: dict) -> None:
        """Logs the metrics of the step that was taken."""
        raise NotImplementedError

    def evaluate(self) -> dict:
        """Evaluates on held-out data, logs the metrics, keeps them and returns them. Every rank calls it."""
        raise NotImplementedError

    def state(self) -> dict:
        """Returns the values that this trainer adds to a saved state. Every rank calls it."""
        return {}

    def load_state(self, state: dict) -> None:
        """Restores what `state` returned."""

    def open(self) -> None:
        """Starts helper processes. An earlier run in out_dir is not set aside yet."""

    def close(self) -> None:
        """Ends the helper processes, also after an error in the steps."""

    def begin(self) -> None:
        """Prepares for the first step of this start."""

    def finish(self) -> None:
        """Completes the run after the last step; stopped_by names the signal that stopped the run, if any."""

    def write_page(self) -> None:
        """Rewrites the page about the run, if it has one."""

    # Shared by all trainers

    def run(self, record: AbstractContextManager | None = None) -> None:
        """Trains to max_iters optimizer steps, or to the step in which a signal came, and saves.
        record: the block around it (`recorded`), which begins once everything that the run needs works"""
        self.open()
        self.dist.barrier()  # every rank has read its checkpoints, which may be about to move, and can start
        if record is None:
            record = contextlib.nullcontext()
        with (record,
              self.checkpoints.keeping(),
              StopSignal(self.dist) as stop,
              contextlib.closing(self)):
            self.dist.broadcast(self.learner.parameters())
            self.logger.start(self.step)
            self.begin()
            self.take_steps(stop)
            self.logger.close()
            self.finish()
            self.dist.barrier()

    def take_steps(self, stop: StopSignal) -> None:
        """Takes steps up to the last one, or to a signal, evaluating and saving on the way."""
        c = self.config
        began = time.monotonic()
        first = self.step
        save_is_due = False
        if not self.evaluated:  # a new run, or one that a signal stopped before the evaluation of its step
            self.run_evaluation()
        if self.best.step == self.step:  # also after a kill between the state and its copy
            self.save()
        while self.step < c.max_iters:
            since = time.monotonic()
            metrics = self.train_step()
            self.look_ahead(time.monotonic() - since)
            if self.dist.device.type == "cuda":
                metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            self.log_step(metrics)
            is_last = self.step == c.max_iters
            signal_name = stop.received()
            evaluation_is_due = is_last or c.evaluations(self.step) > c.evaluations(self.step - 1)
            self.evaluated = not evaluation_is_due
            # After a signal there may be no time for an evaluation: the resumed run makes up for it
            if evaluation_is_due and (is_last or not signal_name):
                self.run_evaluation()
                signal_name = stop.received()
            if self.step % c.save_interval == 0 or self.best.step == self.step:
                save_is_due = True
            # Amid bad steps nothing is saved: if they end the run, it resumes from the last good state
            in_good_state = not self.bad.in_a_row
            if is_last or signal_name or (save_is_due and in_good_state):
                self.save()
                save_is_due = False
            self.logger.tick()
            if signal_name and not is_last:
                self.stopped_by = signal_name
                command = resume_command(c.absolute_out_dir)
                self.logger.say(f"stopped by {signal_name} after step {self.step}; resume with {command}")
                return
        minutes = (time.monotonic() - began) / 60
        self.logger.say(f"training took {minutes:.1f} min (steps: {self.step - first}, with their evaluations)")

    def look_ahead(self, seconds: float) -> None:
        """Estimates the time that is left, after a step of these seconds. Prints it once, after the first steps.

        A step takes the mean of those since this start, without its first iteration; an evaluation as long as the last.
        """
        c = self.config
        self.timed += 1
        if self.timed > 0:
            self.step_seconds += seconds
        if self.timed <= 0 or self.timed % c.steps_of_an_iteration:  # only the first step of an iteration samples
            return
        mean = self.step_seconds / self.timed
        steps = c.max_iters - self.step
        made = c.evaluations(self.step - 1)  # this step's own comes after it
        evaluations = c.evaluations(c.max_iters - 1) - made + 1
        left = mean * steps + self.evaluation_seconds * evaluations
        self.logger.eta = self.logger.bar.format_interval(left)
        if self.timed == 3 * c.steps_of_an_iteration and steps:
            of_evaluations = f"evaluations ({evaluations}) not counted"
            if self.has_evaluated:
                of_evaluations = f"evaluations: {evaluations}, {self.evaluation_seconds:.3g} s each"
            self.logger.say(f"a step takes {mean:.3g} s: about {left / 60:.1f} min are left (steps: {steps}; "
                            f"{of_evaluations})")

    def run_evaluation(self) -> None:
        """Evaluates on all ranks, which then wait until rank 0 has written the results. Notes if it is the best."""
        since = time.monotonic()
        with self.dist.gathered():
            found = self.evaluate()
        self.dist.barrier()
        self.evaluation_seconds = time.monotonic() - since
        self.evaluated = True
        if not self.has_evaluated:
            self.best.check(found)
        self.has_evaluated = True
        # Amid bad steps nothing is saved, so the best model could not be kept
        is_best = not self.bad.in_a_row and self.best.loses_to(found)
        if self.dist.agree(is_best and self.dist.is_main):
            self.best = Best(self.best.metric, found[self.best.metric], self.step)

    def save(self) -> None:
        """Writes the model, and the state to resume from; the best ones also to <out_dir>/best."""
        weights = self.learner.weights()
        more = self.state() | {
            "evaluated": self.evaluated and self.step > 0,  # a run that resumes at step 0 has no records yet
            "best": vars(self.best),
            "skipped_steps": self.skipped_steps}
        saved = self.step, weights, self.optimizers, self.last_evaluation
        self.checkpoints.save(*saved, **more)
        self.dist.barrier()  # it may take longer than an exchange between ranks
        if self.best.step == self.step:
            kept = copy.copy(self.checkpoints)
            kept.out_dir = kept.path(BEST)
            if self.dist.is_main:
                self.copy_records(kept.out_dir)
            kept.save(*saved, **more)
            self.say_best()
            self.dist.barrier()

    def copy_records(self, target):
        """Copies the records so far to <out_dir>/best. They precede its state: a run that resumes drops later ones.
        What another run has written there is set aside. Raises Mistake for files that no run has written."""
        names = listed(target)
        if names and METRICS not in names:
            raise Mistake(f"keep_best needs the folder {shortest(target)}, but it holds {names[0]}, which no run has "
                          "written; move it")
        if names and (CONSOLE in names or not self.has_kept):
            with locked(target):  # another run may be training there
                folder = move_aside(self.checkpoints.out_dir, [BEST])
            self.logger.say(f"{shortest(target)} held another run, which is now in {shortest(folder)}")
        self.has_kept = True
        for name in (METRICS, SAMPLES, CONFIG):
            path = self.checkpoints.path(name)
            if os.path.exists(path):
                with replacing(os.path.join(target, name)) as new:
                    shutil.copyfile(path, new)

    def say_best(self) -> None:
        """Prints which model is the best so far."""
        best = self.best
        folder = os.path.join(self.config.out_dir, BEST)
        value = format_number(best.value)
        self.logger.say(fitted(f"{best.direction} {best.metric}: {value} at step {best.step}, kept in {folder}"))

    def resume(self) -> None:
        """Resumes from the state in out_dir."""
        weights = self.learner.weights()
        state = self.checkpoints.load(weights, self.optimizers, self.logger.say)
        self.step = state["step"]
        self.last_evaluation = state["facts"]
        check_same_step(self.dist, self.step, self.config.out_dir)
        self.learner.load_weights(state["model"])
        self.skipped_steps = state["skipped_steps"]
        self.evaluated = state.get("evaluated", True)  # states of version 1.0.0 lack it
        best = Best(**state.get("best", {}))
        if best.metric == self.best.metric:
            self.best = best
            self.has_kept = best.step is not None
        elif self.best.metric is not None:  # chosen anew: this model may be the best
            self.evaluated = False
        self.load_state(state)


# The record of a run

@contextlib.contextmanager
def recorded(run: Run, origin: dict, plan: list[str], resumes: bool):
    """Records in config.json how the run of the block starts and ends: settings with their origin, hardware, command;
    without the name of the user. Only rank 0 calls it.

    An earlier run in the folder, unless this one resumes it, is set aside only when the block begins: a start that
    fails earlier does not touch it.
    resumes: the run has resumed; origin: {key: the file or argument that set it}; plan: lines for the user
    """
    config = run.config
    logger = run.logger
    path = os.path.join(config.absolute_out_dir, CONFIG)
    if resumes:
        starts = starts_before(run, path)
    else:
        starts = []
        previous = set_aside(config.absolute_out_dir)
        if previous is not None:
            logger.say(f"{config.out_dir} held an earlier run, which is now in {shortest(previous)}")
        else:  # the first file: it tells check_run_folder that a run began here, even if it is killed right after
            logger.write_console(f"{now()}: a run begins")
    starts.append(start(config, origin, run))
    began = time.perf_counter()
    record = dataclasses.asdict(config) | {"starts": starts}
    write_json(path, record)

    def end(ended, why):
        this_start = starts[-1]
        seconds = round(time.perf_counter() - began, 1)
        this_start["end"] = {"time": now(), "step": run.step, "ended": ended, "why": why, "seconds": seconds}
        write_json(path, record)
        run.write_page()

    try:
        logger.say("\n".join(map(fitted, plan)))
        yield
    finally:
        error = sys.exception()
        if error:
            why = described(error)
            trace = "".join(traceback.format_exception(error))
            with contextlib.suppress(Mistake, FileNotFoundError):  # the user sees the first error, none that follows
                logger.write_console(f"failed at step {run.step}: {why}\n{trace}")
                end("failed", why)
    end("stopped" if run.stopped_by else "finished", run.stopped_by)


def starts_before(run, path):
    """Reads the starts of a run that resumes from its config.json at `path`. Prints the step where it resumes, and the
    settings that have changed."""
    config = run.config
    say = run.logger.say
    message = f"resuming from {shortest(run.checkpoints.last)}, step {run.step} of {config.max_iters}"
    if run.holds:
        message += f"; its buffer: {run.holds}"
    say(message)
    if not os.path.exists(path):
        return []
    from core.settings.other_names import with_settings_of_today
    saved = read_object(path, path, "delete it")
    starts = starts_of(saved, path)
    with contextlib.suppress(Mistake):  # its settings no longer go together: they are compared as they were
        saved = with_settings_of_today(saved, shortest(path), say)
    changes = changed_since(saved, config, run.dist.world)
    if changes:
        say(f"changed since the last start: {changes}")
    return starts


def start(config, origin, run):
    """Makes the record of a start. Its step is the number of steps before it, above 0 in a run that resumes."""
    dist = run.dist
    parameters = sum(p.numel() for p in run.learner.parameters())
    versions = {name: sys.modules[name].__version__ for name in PACKAGES if sys.modules.get(name)}
    record = {
        "time": now(),
        "step": run.step,
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "system": platform.platform(),
        "torch threads": torch.get_num_threads(),
        "ranks": dist.world,
        "device": str(dist.device),
        "precision": str(dist.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
        "parameters": f"{parameters / 1e6:.4g} M",
        "settings": changed_settings(config, origin),
    }
    if dist.device.type == "cuda":
        record["gpu"] = torch.cuda.get_device_name(dist.device)
    text = without_home(json.dumps(record))
    return json.loads(text)


def now():
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def without_home(text):
    """Replaces the home folder, which holds the user's name, by ~; /home/al does not match in /home/alice."""
    home = os.path.expanduser("~")
    if home == "/":
        return text
    return re.sub(re.escape(home) + r"(?![\w.-])", "~", text)


def commit():
    """Returns the commit of this code, with -dirty if files were changed, or "" outside its own repository."""
    repository = os.path.join(ROOT, ".git")
    if not os.path.exists(repository) or not shutil.which("git"):
        return ""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip()
