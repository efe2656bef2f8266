"""Rollouts between sampling and training, and the results of evaluations. Only the trainer touches it."""

from collections import deque

import numpy as np
import torch

from core.checkpoint_manager import as_plain
from core.device import moved
from grpo.rollout import Rollouts

SHUFFLE = 3  # keeps this noise apart from that of problems and samples
MOST_EVALUATIONS = 1000


class DataBuffer:
    """Holds the rollouts of one iteration and hands out their minibatches, whose order depends on
    (seed, rank, id of the rollout, epoch) alone: a resumed run goes on where it stopped."""

    def __init__(self, seed=0, rank=0):
        self.seed, self.rank = seed, rank
        self.rollouts, self.queue, self.stored = {}, [], 0          # {id: (rollouts, sums)}, [(id, epoch, part, parts)]
        self.evaluations = deque(maxlen=MOST_EVALUATIONS)

    def store_rollout_data(self, rollouts, sums):
        """Takes rollouts with their advantage and the sums of their metrics. Returns their id."""
        assert not self.rollouts and rollouts.advantage is not None
        self.stored += 1
        self.rollouts[self.stored] = rollouts, sums
        return self.stored

    def prepare_training_batch(self, id, epochs=1, minibatches=1):
        """Queues `epochs` passes over a rollout, each in `minibatches` parts of its problems, shuffled anew."""
        assert id in self.rollouts and epochs > 0 and minibatches > 0, (id, epochs, minibatches)
        self.queue += [(id, epoch, part, minibatches) for epoch in range(epochs) for part in range(minibatches)]

    def __iter__(self):
        """Minibatches (rollouts, sums) until the queue is empty; a rollout is let go with its last one."""
        while self.queue:
            yield self.next_minibatch()

    def next_minibatch(self):
        id, epoch, part, parts = self.queue.pop(0)
        rollouts, sums = self.rollouts[id]
        if not self.queue:
            self.skip_rest()
        if parts > 1:  # groups stay whole, so that they go on sharing a forward
            rng = np.random.default_rng([SHUFFLE, self.seed, self.rank, id, epoch])
            order = rng.permutation(rollouts.problems)
            problems = np.sort(np.array_split(order, parts)[part])
            rollouts, _ = rollouts.select(torch.from_numpy(problems))
        return rollouts, sums

    def skip_rest(self):
        """Lets go of what is queued: its policy has moved too far from the one that sampled it."""
        self.rollouts, self.queue = {}, []

    def store_evaluation_data(self, step, metrics):
        """Keeps the metrics {name: number} of an evaluation."""
        self.evaluations.append({"step": step, **metrics})

    def get_buffer_statistics(self):
        return {"rollouts": len(self.rollouts), "minibatches": len(self.queue), "stored": self.stored,
                "evaluations": len(self.evaluations)}

    def state_dict(self):
        """Plain tensors and values."""
        return {"rollouts": as_plain(self.rollouts), "queue": list(self.queue), "stored": self.stored,
                "evaluations": list(self.evaluations)}

    def load_state_dict(self, state, device="cpu"):
        for id, (saved, sums) in state["rollouts"].items():
            inputs = dict(saved["inputs"])
            if "kept" in inputs:
                from core.truncation import KeptTokens
                inputs["kept"] = [KeptTokens(**kept) for kept in inputs["kept"]]
            self.rollouts[id] = moved(Rollouts(**saved | {"inputs": inputs}), device), sums
        self.queue, self.stored = [tuple(entry) for entry in state["queue"]], state["stored"]
        self.evaluations.extend(state["evaluations"])
