"""Steps that are skipped because a number in them is not finite: each is written down, and too many end a run."""

import math
import os

import torch

from core.files.whole_files import replacing
from core.run.names import BAD_STEPS
from core.training_step import NONFINITE

MOST_FILES = 20  # of a rank


def not_finite(metrics):
    """The names of the metrics {name: number} that are not finite, or that count such numbers and are not 0."""
    return [name for name, x in metrics.items() if not math.isfinite(x) or (x and name.startswith(NONFINITE))]


class BadSteps:
    """Counts the steps that were skipped in a row, keeps their batches, and stops a run that no longer trains.

    The batch of a step is <out_dir>/bad_steps/step-000012-rank-0.pt: plain tensors and values, to be read with
    torch.load(path, weights_only=True). Each rank keeps its last `limit` files, at most 20, so that they cannot fill a
    disk.
    """

    def __init__(self, limit, checkpoints, logger, rank=0):
        self.limit, self.checkpoints, self.logger, self.rank = limit, checkpoints, logger, rank
        self.in_a_row = 0

    def add(self, step, metrics, batch):
        """Counts a step that was skipped, alike on all ranks. Raises ValueError if it is one too many.

        metrics: {name: number} of this step; batch: {name: plain tensor or value}, what the step was made of on this
        rank. After a step that was not skipped, the caller sets in_a_row to 0.
        """
        self.in_a_row += 1
        names = not_finite(metrics)
        path = self.write(step, {"step": step, "rank": self.rank, "not_finite": names} | batch)
        self.logger.say(f"step {step} is skipped, because these are not finite: {', '.join(names)}; its batch is in "
                        f"{path}")
        if self.in_a_row >= self.limit:
            raise ValueError(f"{self.in_a_row} steps in a row had a loss, gradient or reward that is not finite "
                             f"(max_bad_steps={self.limit}), the last one {', '.join(names)}; lower learning_rate or "
                             f"correct the reward, see {path}, and {self.checkpoints.how_to_go_on()}")

    def write(self, step, batch):
        """Writes the batch of a step and deletes the oldest that this rank need not keep. Returns its path."""
        folder, end = self.checkpoints.path(BAD_STEPS), f"-rank-{self.rank}.pt"
        path = os.path.join(folder, f"step-{step:06d}{end}")
        with replacing(path) as new, open(new, "wb") as f:
            torch.save(batch, f)
        files = sorted((name for name in os.listdir(folder) if name.endswith(end)), key=lambda name: (len(name), name))
        for name in files[: -min(self.limit, MOST_FILES)]:
            os.remove(os.path.join(folder, name))
        return path
