"""Ends a run in which too many steps in a row taught nothing."""

import math
from dataclasses import dataclass

from core.checkpoint_manager import CheckpointManager
from core.errors import Mistake
from core.logger import Logger


@dataclass(eq=False)
class BadSteps:
    """Counts the steps in a row that taught nothing, alike on all ranks, and ends a run that no longer trains."""

    limit: int
    checkpoints: CheckpointManager
    logger: Logger
    in_a_row: int = 0

    def reset(self) -> None:
        """Starts counting again, after a step that taught something."""
        self.in_a_row = 0

    def add_not_finite(self, step: int, metrics: dict) -> None:
        """Counts a step that was skipped because some of its metrics {name: number} are not finite."""
        names = [name for name, x in metrics.items() if not math.isfinite(x)]
        remedy = "lower learning_rate"
        if any(name.startswith("reward/") for name in names):
            remedy = "let rewards return finite numbers"
        self.add(f"step {step} is skipped, because these are not finite: {', '.join(names)}", remedy)

    def add(self, what: str, remedy: str) -> None:
        """Counts a step; raises Mistake at the limit. what: a sentence about the step; remedy: advice for the error"""
        self.in_a_row += 1
        self.logger.say(what)
        if self.in_a_row >= self.limit:
            raise Mistake(f"{what}, as in {self.in_a_row} steps in a row (max_bad_steps={self.limit}); {remedy}; "
                          f"{self.checkpoints.how_to_resume()}")
