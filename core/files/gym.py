"""Problems of the package reasoning-gym: one task, gym:leg_counting, or several, gym:leg_counting+2*chain_sum."""

import dataclasses
import difflib
import multiprocessing
import os
import random
import re
from concurrent.futures import ProcessPoolExecutor

from core.settings.optional import GYM, require
from core.settings.ranges import shown
from core.settings.user_code import guarded

DEFAULTS = {"size": 1000, "seed": 0, "shots": 0}  # of gym_settings; the others are of the tasks
LEAST = {"size": 1, "seed": 0, "shots": 0}
HASH_SEED = "PYTHONHASHSEED"
SPAWN = multiprocessing.get_context("spawn")


def read_gym(dataset, settings=None):
    """The rows of `make_rows`, made in a process of their own. Some tasks depend on the order of sets or on the global
    random state, which are always the same there."""
    before = os.environ.get(HASH_SEED)
    os.environ[HASH_SEED] = "0"
    try:
        with ProcessPoolExecutor(1, SPAWN) as process:
            return process.submit(make_rows, dataset, settings or {}).result()
    except ValueError as error:  # without the traceback of the process
        raise ValueError(str(error)) from None
    finally:
        del os.environ[HASH_SEED]
        if before is not None:
            os.environ[HASH_SEED] = before


def make_rows(dataset, settings):
    """Rows {prompt, answer, task, entry} of the tasks, `size` in all, shared out by their weights, in
    a random order.

    settings: those of DEFAULTS, and parameters of the tasks: NAME for every task that has it, or TASK.NAME
    Raises ValueError for an unknown task or setting, a value that a task refuses, or a missing package.
    """
    package = require("reasoning_gym", f"dataset={dataset}", "reasoning-gym")
    tasks = dict(package.factory.DATASETS)
    tasks.pop("composite", None)  # made of other tasks, as gym:TASK+TASK is
    weights = weights_of(dataset, tasks)
    known = {task: parameters_of(tasks[task]) for task in weights}
    check_settings(settings, known)
    own = DEFAULTS | {key: settings[key] for key in DEFAULTS if key in settings}
    rows = []
    for task, weight in weights.items():
        count = max(1, round(own["size"] * weight / sum(weights.values())))
        given = settings_of(task, tasks[task], settings)
        with guarded(f"dataset={dataset}: {task} with {shown(given)} made no problems", "correct gym_settings"):
            random.seed(own["seed"])
            made = package.create_dataset(task, size=own["shots"] + count, seed=own["seed"], **given)
            entries = [made[i] for i in range(own["shots"] + count)]
        rows += rows_of(task, entries, own["shots"])
    random.Random(own["seed"]).shuffle(rows)  # an evaluation takes the first ones, which are to be of all tasks
    return rows


def weights_of(dataset, tasks):
    """{task: weight} of gym:TASK+2*TASK. Raises ValueError for an unknown task. tasks: the names that exist"""
    weights = {}
    for part in dataset.removeprefix(GYM).split("+"):
        weight, _, task = part.rpartition("*")
        if not re.fullmatch(r"[0-9]*\.?[0-9]*", weight) or task not in tasks:
            near = difflib.get_close_matches(task, tasks, n=1)
            remedy = f"did you mean {near[0]}?" if near else "docs/tasks.md has a command that lists them"
            raise ValueError(f"dataset={dataset}: {part!r} is no task of reasoning-gym, nor a weight and a task as in "
                             f"2*leg_counting; {remedy}")
        weights[task] = float(weight or 1)
        if weights[task] == 0:
            raise ValueError(f"dataset={dataset}: the weight of {task} must be above 0")
    return weights


def parameters_of(kind):
    """The names of a task's own parameters. kind: its entry in the package's table"""
    return {field.name for field in dataclasses.fields(kind[1])} - DEFAULTS.keys()


def settings_of(task, kind, settings):
    """The parameters of a task that settings give: those named NAME or TASK.NAME. kind: its entry in the package's
    table"""
    given, known = {}, parameters_of(kind)
    for key, value in settings.items():
        of, _, name = key.rpartition(".")
        if of in ("", task) and name in known:
            given[name] = value
    return given


def check_settings(settings, known):
    """Raises ValueError for a setting that no task has, or a wrong number. known: {task: names of its parameters}"""
    names = [*DEFAULTS]
    for task, parameters in known.items():
        names += [*parameters, *(f"{task}.{name}" for name in parameters)]
    for key, value in settings.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"they have {', '.join(sorted(set(names)))}"
            raise ValueError(f"gym_settings: {key!r} is no setting of {' or '.join(known)}; {remedy}")
        if key in DEFAULTS and (type(value) is not int or value < LEAST[key]):
            raise ValueError(f"gym_settings: {key}={shown(value)} must be a whole number of at least {LEAST[key]}")


def rows_of(task, entries, shots):
    """The rows of a task. Its first `shots` entries begin every prompt as solved problems, and are not among them."""
    before, solved = [], entries[:shots]
    for entry in solved:
        if entry["answer"] is None:
            raise ValueError(f"gym_settings: shots={shots} is not for {task}, whose problems come without an answer; "
                             "use shots=0")
        before.append({"role": "user", "content": entry["question"]})
        before.append({"role": "assistant", "content": entry["answer"]})
    shown_questions = {entry["question"] for entry in solved}
    rows = []
    for entry in entries[shots:]:
        question = entry["question"]
        prompt = [*before, {"role": "user", "content": question}] if shots else question
        if question not in shown_questions:
            rows.append({"prompt": prompt, "answer": entry["answer"], "task": task, "entry": entry})
    return rows
