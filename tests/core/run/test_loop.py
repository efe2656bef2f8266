"""The loop of both trainers: when it evaluates, saves and ends."""

from types import SimpleNamespace

import pytest

from core.run.loop import run_loop


class Calls:
    """A trainer that notes the calls of the loop. A signal comes in a step, or in the evaluation after it."""

    def __init__(self, bad=(), signal=None, in_evaluation=False, evaluated=True):
        self.config = SimpleNamespace(max_iters=6, save_interval=2)
        self.bad_steps, self.signal_at, self.in_evaluation, self.evaluated = bad, signal, in_evaluation, evaluated
        self.step, self.calls, self.signal, self.stopped_by = 0, [], None, None
        self.bad = SimpleNamespace(in_a_row=0)
        self.dist = SimpleNamespace(barrier=lambda: None)
        self.logger = SimpleNamespace(tick=lambda: None, say=lambda text: None, restart_clock=lambda: None)

    def came(self):
        return self.signal

    def evaluation_is_due(self):
        return self.step % 3 == 0

    def save(self):
        self.calls.append("save")

    def report(self):
        self.calls.append("report")

    def train_step(self):
        self.step += 1
        self.bad.in_a_row = int(self.step in self.bad_steps)
        if self.step == self.signal_at and not self.in_evaluation:
            self.signal = "SIGTERM"

    def log_step(self, metrics):
        self.calls.append(self.step)

    def run_evaluation(self):
        self.calls.append("evaluation")
        if self.step == self.signal_at:
            self.signal = "SIGTERM"


LAST = [4, "save", 5, 6, "evaluation", "save", "report"]


@pytest.mark.parametrize("settings, calls", [
    ({"evaluated": False}, ["evaluation", "report", 1, 2, "save", 3, "evaluation", "report", *LAST]),
    ({"bad": (2, 3)}, [1, 2, 3, "evaluation", "report", *LAST]),
    ({"signal": 3}, [1, 2, "save", 3, "save"]),
    ({"signal": 3, "in_evaluation": True}, [1, 2, "save", 3, "evaluation", "save", "report"]),
    ({"signal": 6}, [1, 2, "save", 3, "evaluation", "report", *LAST])], ids=str)
def test_the_loop_evaluates_saves_and_ends(settings, calls):
    trainer = Calls(**settings)
    stopped = run_loop(trainer, trainer)
    assert trainer.calls == calls and stopped == (settings.get("signal") == 3)
    assert trainer.stopped_by == ("SIGTERM" if stopped else None)
    assert trainer.evaluated == (settings != {"signal": 3}), "a resumed run makes the evaluation up"
