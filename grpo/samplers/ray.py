"""The sampler in worker processes of Ray, on this machine or on those of a cluster."""

import contextlib
from collections import deque
from functools import partial

import numpy as np

from grpo.rollout import join, moved
from grpo.samplers.ray_cluster import joined_ray, last_line, worker_options
from grpo.samplers.ray_worker import RayWorker, pack
from grpo.samplers.sampler import SamplerError

START_SECONDS = 300  # in which a worker must be ready: it imports, and loads its model
FEWER = "lower ray_workers, or OMP_NUM_THREADS, of which each takes as many CPUs"
LATER = "raise sampler_timeout, or go on with --resume=auto"


class RaySampler:
    """Actors that hold a copy of the policy share the problems.

    Ray starts a worker that died again and repeats what it had not finished. The completions do not depend on it: the
    noise is that of each problem, and each call brings its weights, which Ray's object store keeps until it is done.
    make: config -> policy, called in each worker; a function that can be imported there
    policy: the trainer's
    """

    outside = True

    def __init__(self, make, policy, config, dist):
        self.policy, self.config = policy, config
        self.starts = deque()  # Ray's promises of what RayWorker.sample returns, in a list for each start
        self.weights = None    # (version, Ray's promise of packed weights) of the last sync
        self.workers = []
        size = sum(x.nbytes for x in policy.weights().values())
        self.ray, self.leave = joined_ray(config, dist, size)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            options = worker_options(self.ray, config, dist)
            actor = self.ray.remote(**options)(RayWorker)
            self.workers = [actor.remote(make, config) for _ in range(config.ray_workers)]
            ready = [worker.ready.remote() for worker in self.workers]
            self.names = set(self._values(ready, START_SECONDS, FEWER))  # of all processes that have been workers
            undo.pop_all()

    def sync(self, weights, version):
        self.weights = version, self.ray.put(pack(weights))

    def start(self, problems, iteration):
        numbers = np.arange(len(problems["number"]))
        shares = np.array_split(numbers, len(self.workers))
        answers = []
        for worker, share in zip(self.workers, shares, strict=True):
            if len(share):
                part = {key: x[share[0] : share[-1] + 1] for key, x in problems.items()}
                answers.append(worker.sample.remote(part, iteration, *self.weights))
        self.starts.append(answers)

    def finish(self):
        values = self._values(self.starts.popleft(), self.config.sampler_timeout, LATER)
        parts, names = zip(*values, strict=True)
        replaced = set(names) - self.names
        self.names |= replaced
        rollouts = moved(join(parts), self.policy.device)
        return rollouts, {"sampler/replaced_workers": (float(len(replaced)), None)}

    def score(self, problems, rollouts):
        rollouts = moved(rollouts, "cpu")
        answers = [worker.score.remote(rollouts, *self.weights) for worker in self.workers]
        return partial(self._values, answers, self.config.sampler_timeout, LATER)

    def close(self):
        with contextlib.suppress(self.ray.exceptions.RayError):  # of an end for which there is another reason
            for worker in self.workers:
                self.ray.kill(worker)
        self.workers = []
        self.leave()

    def _values(self, answers, seconds, remedy):
        """The values that workers return. Raises SamplerError if they are late, raise an error, or die too often."""
        try:
            return self.ray.get(answers, timeout=seconds)
        except self.ray.exceptions.GetTimeoutError:
            line = f"needed more than {seconds:g} seconds; {remedy}"
        except self.ray.exceptions.RayError as error:
            line = f"failed: {last_line(error)}"
        raise SamplerError(f"a worker of sampler='ray' {line}")
