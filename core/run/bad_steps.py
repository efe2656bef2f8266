"""Steps that are skipped because a number in them is not finite: each is named, and too many end a run."""

import math

from core.training_step import NONFINITE


def not_finite(metrics):
    """The names of the metrics {name: number} that are not finite, or that count such numbers and are not 0."""
    return [name for name, x in metrics.items() if not math.isfinite(x) or (x and name.startswith(NONFINITE))]


class BadSteps:
    """Counts the steps that were skipped in a row, and stops a run that no longer trains."""

    def __init__(self, limit, checkpoints, logger):
        self.limit, self.checkpoints, self.logger = limit, checkpoints, logger
        self.in_a_row = 0

    def add(self, step, metrics):
        """Counts a step that was skipped, alike on all ranks; after another one the caller sets in_a_row to 0."""
        self.in_a_row += 1
        names = ", ".join(not_finite(metrics))
        self.logger.say(f"step {step} is skipped, because these are not finite: {names}")
        if self.in_a_row >= self.limit:
            raise ValueError(f"{self.in_a_row} steps in a row were skipped (max_bad_steps={self.limit}), the last one "
                             f"for {names}; lower learning_rate and {self.checkpoints.how_to_go_on()}")
