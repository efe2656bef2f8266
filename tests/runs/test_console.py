"""The console of a run: it fits the terminal, and says how much is to be done and how long that takes."""

import random
import re
import shutil
import sys
import time
from os import terminal_size

import pytest
import torch

from core.logger import NARROWEST, Logger, fitted
from grpo.plan import size_of_evaluation, sizes
from tests.trainers import prompt_trainer, trainer

METRICS = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "mean_token_accuracy", "grad_norm")
FIRST, STEP, EVALUATION = 100, 3, 20  # seconds


def pretend(monkeypatch, columns):
    """Lets standard output be a terminal of this width; None: a pipe."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: terminal_size((columns, 24)))


def shown(tmp_path, capsys, *steps):
    """The lines of these steps, each {metric: number}, as lists of words."""
    capsys.readouterr()
    logger = Logger(str(tmp_path), 10, METRICS)
    for number, metrics in enumerate(steps, 1):
        logger.log(number, metrics)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("columns", [40, NARROWEST, 80, 95, 120, None])
def test_the_line_of_a_step_fits_and_leaves_out_only_what_does_not(columns, monkeypatch, tmp_path, capsys):
    pretend(monkeypatch, columns)
    width = max(NARROWEST, columns or 100)
    *said, names, cells, again = shown(tmp_path, capsys, *[dict.fromkeys(METRICS, 0.12345)] * 2)
    assert len(again) == len(names) == len(cells) <= width
    step, *found, last = names.split()
    assert (step, last) == ("step", "eta") and found == [name for name in METRICS if name in found]
    assert len(cells.split()) == len(found) + 2
    told = [name for name in METRICS if re.search(rf"\b{name}\b", " ".join(said))]
    assert told == [name for name in METRICS if name not in found] and max(map(len, said), default=0) <= width
    for name in told:
        before = [other for other in found if METRICS.index(other) < METRICS.index(name)]
        assert sum(1 + max(8, len(other)) for other in (*before, name)) > width - len("  step") - len("      eta")
    assert (columns or 100) < 95 or len(found) == len(METRICS)


def test_a_column_comes_with_its_metric_and_stays_and_the_names_come_with_it(monkeypatch, tmp_path, capsys):
    pretend(monkeypatch, 120)
    some, more = {"loss": 1.0, "other": 2.0}, {"loss": 1.0, "mean_kl": 0.5}
    lines = [line.split() for line in shown(tmp_path, capsys, some, some, more, *[some] * 10)]
    few, all_of_them = ["step", "loss", "eta"], ["step", "loss", "mean_kl", "eta"]
    assert [i for i, line in enumerate(lines) if line[0] == "step"] == [0, 3, 14]
    assert lines[0] == few and lines[3] == lines[14] == all_of_them
    assert lines[1] == ["1", "1.0000", "-"] and lines[4] == ["3", "1.0000", "0.5000", "-"]
    assert all(line[2] == "-" for line in lines[5:14]), "a metric that a later step lacks"


def test_a_wide_line_continues_below_it_and_stays_whole_in_a_pipe(monkeypatch):
    random.seed(3)
    for _ in range(30):
        words = ["".join(random.choices("ab-_=", k=random.randint(1, 60))) for _ in range(random.randint(1, 40))]
        line, columns = " ".join(words), random.choice((72, 80, 120))
        pretend(monkeypatch, columns)
        first, *rest = lines = fitted(line).split("\n")
        assert " ".join(lines).split() == words and max(map(len, lines)) <= columns
        assert not first.startswith(" ") and all(part.startswith(" ") for part in rest)
        assert (rest == []) == (len(line) <= columns)
        pretend(monkeypatch, None)
        assert fitted(line) == line


def timed(dataset, out_dir, monkeypatch, device="cpu", **settings):
    """A run in which every step and evaluation takes its seconds, on a clock of its own. Returns the trainer, the
    seconds that were left at each step, those that the console said, and {step: the lines that were said there}."""
    now, left, told, said = [0.0], [], [], {}
    t = trainer(dataset, out_dir, **settings)
    c, start = t.config, t.step
    cycle = c.ppo_epochs * c.minibatches
    t.dist.device = torch.device(device)

    def train_step():
        # The first iteration is slow. Each begins with sampling
        now[0] += (FIRST if t.step < start + cycle else STEP) + 2 * (t.step % cycle == 0)
        t.step += 1
        return {"loss": 0.5}

    def log_step(metrics):
        left.append(now[0])
        told.append(t.logger.eta)
        t.logged = metrics

    def evaluate():
        now[0] += EVALUATION
        return {}

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for name in ("train_step", "log_step", "evaluate"):
        setattr(t, name, locals()[name])
    t.save = t.finish = lambda: None
    t.logger.say = lambda text: said.setdefault(t.step, []).append(text)
    t.run()
    return t, [now[0] - moment for moment in left], told, said


def seconds(text):
    """The seconds of hours:minutes:seconds."""
    total = 0
    for part in text.split(":"):
        total = 60 * total + int(part)
    return total


@pytest.mark.parametrize("settings", [
    {"eval_interval": 50, "sample_interval": 50}, {"eval_interval": 4, "sample_interval": 6},
    {"eval_interval": 7, "sample_interval": 7, "ppo_epochs": 2, "minibatches": 2}], ids=str)
def test_the_time_that_is_left_is_that_of_the_steps_and_evaluations_to_come(settings, dataset, tmp_path, monkeypatch):
    t, left, told, said = timed(dataset, tmp_path, monkeypatch, max_iters=28, **settings)
    cycle = t.config.steps_of_an_iteration
    assert told[:cycle] == ["-"] * cycle, "the first iteration is slower"
    for number in range(2 * cycle, 29, cycle):  # whole iterations
        assert seconds(told[number - 1]) == pytest.approx(left[number - 1], abs=1), number
    for number in range(2 * cycle, 28):  # within an iteration it is that of its beginning
        over = seconds(told[number - 1]) - left[number - 1]
        assert -1 <= over <= cycle * STEP + 2 * (EVALUATION + 1)
    assert left[4 * cycle - 1] > 60 and [step for step, lines in said.items() if step < 28] == [4 * cycle]
    minutes = [float(x) for x in re.findall(r"([\d.]+) min", said[4 * cycle][0])]
    assert minutes == [pytest.approx(left[4 * cycle - 1] / 60, abs=0.051)]
    minutes = [float(x) for x in re.findall(r"([\d.]+) min", said[28][0])]
    assert minutes == [pytest.approx(time.monotonic() / 60, abs=0.051)]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_peak_of_gpu_memory_is_a_metric_where_torch_knows_it(device, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    t, *_ = timed(dataset, tmp_path, monkeypatch, device, max_iters=2)
    assert t.logged == {"loss": 0.5} | ({"memory_gib": 1.5} if device == "cuda" else {})


@pytest.mark.parametrize("settings", [
    {"max_iters": 7, "eval_interval": 3, "sample_interval": 2}, {"max_iters": 0}, {"max_iters": 1},
    {"max_iters": 6, "ppo_epochs": 2, "eval_interval": 3, "sample_interval": 6, "gradient_accumulation_steps": 2},
    {"max_iters": 2, "eval_problems": 1000}], ids=str)
@pytest.mark.parametrize("kind", [trainer, prompt_trainer])
def test_the_plan_counts_what_the_run_samples(kind, settings, dataset, prompts, tmp_path):
    folder = dataset if kind is trainer else prompts
    if kind is trainer and "eval_problems" in settings:
        settings = settings | {"eval_problems": 20}
    t = kind(folder, tmp_path, evaluates=True, **settings)
    drawn = [0]  # completions of the part of the run that is under way
    of_steps, of_evaluations, evaluate = [], [], t.evaluate

    def counted(function):
        def call(problems, *more):
            found = function(problems, *more)
            drawn[-1] += len(problems["number"]) if function == greedy else len(found.target)
            return found
        return call

    def evaluated():
        of_steps.append(drawn.pop())
        drawn.append(0)
        found = evaluate()
        of_evaluations.append(drawn.pop())
        drawn.append(0)
        return found

    greedy = t.policy.greedy if kind is prompt_trainer else None
    if greedy is not None:
        t.policy.greedy = counted(greedy)
    t.policy.sample, t.evaluate = counted(t.policy.sample), evaluated
    t.run()
    completions, evaluations = sizes(t.config, 1)
    problems, each = size_of_evaluation(t.config, t.data, t.rewards)
    assert sum(of_steps) == completions and of_evaluations == [problems * each] * evaluations
