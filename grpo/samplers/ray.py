"""The sampler in worker processes of Ray, on this machine or on those of a cluster."""

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from grpo.rollout import Scored, moved
from grpo.samplers.packed_weights import pack
from grpo.samplers.ray_cluster import joined_ray, last_line, worker_options
from grpo.samplers.ray_worker import RayWorker
from grpo.samplers.sampler import SamplerError, SamplerOutput

MOST_TRIES = 5       # of one part of a batch, each with another worker
START_SECONDS = 300  # in which a worker must be ready: it imports, and loads its models
END_SECONDS = 10     # in which an idle worker ends by itself, and removes the folder in which code ran


@dataclass(eq=False)
class Part:
    """Problems that one worker samples completions for."""
    problems: dict
    worker: object = None
    answer: object = None    # Ray's promise of what RayWorker.write returns
    result: tuple | None = None
    tries: int = 0


@dataclass
class Start:
    """A batch of problems whose completions are being sampled."""
    problems: dict
    iteration: int
    version: int
    parts: list = field(default_factory=list)


class RaySampler:
    """Actors that hold a copy of the policy, and of rewards and judge with config.ray_rewards, share the problems.

    A worker that dies, or needs more than config.sampler_timeout seconds, is replaced, and what it had not finished is
    given to others. The completions do not depend on it: the noise is that of each problem, and the weights of a start
    are kept in Ray's object store until it is finished.
    make: config -> (policy, a Rewards or None), called in each worker; a function that can be imported there
    policy: the trainer's
    """

    outside = True

    def __init__(self, make, policy, config, dist):
        self.make, self.policy = make, policy
        self.config = config
        self.starts = deque()
        self.weights = {}    # {version: Ray's promise of packed weights}
        self.version = None  # of the last sync
        self.workers = []
        self.replaced = 0    # workers since the last batch
        size = sum(x.nbytes for x in policy.weights().values())
        self.ray, self.leave = joined_ray(config, dist, size)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            options = worker_options(self.ray, config, dist)
            self.actor = self.ray.remote(**options)(RayWorker)
            self.workers = self._new_workers(config.ray_workers)
            undo.pop_all()

    def sync(self, weights, version):
        needed = {start.version for start in self.starts}
        self.weights = {v: x for v, x in self.weights.items() if v in needed}
        self.weights[version] = self.ray.put(pack(weights))
        self.version = version

    def start(self, problems, iteration, version):
        start = Start(problems, iteration, version)
        shares = np.array_split(np.arange(len(problems["number"])), len(self.workers))
        for worker, share in zip(self.workers, shares, strict=True):
            if len(share):
                part = Part({key: x[share[0] : share[-1] + 1] for key, x in problems.items()})
                start.parts.append(part)
                self._give(start, part, worker)
        self.starts.append(start)

    def finish(self):
        start = self.starts[0]
        until = time.monotonic() + self.config.sampler_timeout
        while missing := [part for part in start.parts if part.result is None]:
            lost = self._receive(missing, max(0.0, until - time.monotonic()))
            if lost:
                self._replace(lost)
                until = time.monotonic() + self.config.sampler_timeout
        self.starts.popleft()
        return self._finished(start)

    def _receive(self, missing, seconds):
        """Waits until one of these parts is ready or so many seconds are over. Returns {lost worker: why}."""
        ready, _ = self.ray.wait([part.answer for part in missing], timeout=seconds)
        if not ready:
            why = f"needed more than sampler_timeout={self.config.sampler_timeout:g} seconds"
            return {part.worker: why for part in missing}
        lost = {}
        for part in missing:
            if part.answer in ready:
                part.result, reason = self._value(part.answer)
                if reason:
                    lost[part.worker] = reason
        return lost

    def score(self, problems, written):
        answers = [worker.score.remote(problems, moved(written, "cpu"), self.version, self.weights[self.version])
                   for worker in self.workers]

        def wait():
            ready, _ = self.ray.wait(answers, num_returns=len(answers), timeout=self.config.sampler_timeout)
            return [self._value(answer)[0] if answer in ready else None for answer in answers]
        return wait

    def close(self):
        with contextlib.suppress(self.ray.exceptions.RayError):  # of an end for which there is another reason
            ending = [worker.__ray_terminate__.remote() for worker in self.workers]
            if ending:
                self.ray.wait(ending, num_returns=len(ending), timeout=END_SECONDS)
            for worker in self.workers:
                self.ray.kill(worker)
        self.workers, self.starts, self.weights = [], deque(), {}
        self.leave()

    def _new_workers(self, number):
        """Starts workers and waits until they are ready. One that dies while it starts is started again."""
        workers = []
        for _ in range(MOST_TRIES):
            new = [self.actor.remote() for _ in range(number - len(workers))]
            built = [worker.build.remote(self.make, self.config) for worker in new]
            ready, late = self.ray.wait(built, num_returns=len(built), timeout=START_SECONDS)
            if late:
                free = {name: x for name, x in self.ray.available_resources().items() if name in ("CPU", "GPU")}
                raise SamplerError(f"ray_workers={self.config.ray_workers}: {len(late)} of them did not start within "
                                   f"{START_SECONDS} seconds; Ray has free: {free}; lower ray_workers, or "
                                   "OMP_NUM_THREADS, of which each takes as many CPUs")
            reasons = [self._value(answer)[1] for answer in built]
            workers += [worker for worker, reason in zip(new, reasons, strict=True) if not reason]
            if len(workers) == number:
                return workers
        raise SamplerError(f"ray_workers={self.config.ray_workers}: workers ended {MOST_TRIES} times while they "
                           f"started; the last one {reasons[-1]}")

    def _value(self, answer):
        """(what a worker returned, ""), or (None, why it is lost). An error of the worker's code ends the run."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(answer, timeout=self.config.sampler_timeout), ""
        except errors.RayTaskError as error:
            raise SamplerError(f"a worker of sampler='ray' failed: {last_line(error)}") from None
        except errors.RayError as error:
            return None, f"ended: {last_line(error)}"

    def _give(self, start, part, worker):
        part.worker, part.tries = worker, part.tries + 1
        part.answer = worker.write.remote(part.problems, start.iteration, start.version, self.weights[start.version])

    def _replace(self, lost):
        """New workers for the lost ones {worker: reason}. Their parts go to other workers, or to the new ones if there
        are no others."""
        self.replaced += len(lost)
        for worker in lost:
            self.ray.kill(worker)
        unfinished = [(start, part) for start in self.starts for part in start.parts
                      if part.result is None and part.worker in lost]
        for _, part in unfinished:
            if part.tries == MOST_TRIES:
                raise SamplerError(f"sampler='ray': {MOST_TRIES} workers were lost with the same problems, the last "
                                   f"because it {lost[part.worker]}")
        self.workers = [worker for worker in self.workers if worker not in lost]
        others = list(self.workers)
        if not others:
            self.workers = self._new_workers(len(lost))
        for i, (start, part) in enumerate(unfinished):
            self._give(start, part, self.workers[i % len(self.workers)])
        if others:
            self.workers = others + self._new_workers(len(lost))

    def _finished(self, start):
        completions, versions, scored = zip(*(part.result for part in start.parts), strict=True)
        device = self.policy.device
        rollouts = self.policy.rollouts(start.problems, moved(self.policy.join(completions), device), self.config)
        sums = {"sampler/replaced_workers": float(self.replaced)}
        self.replaced = 0
        return SamplerOutput(rollouts, min(versions), scored=joined_scores(scored, device), sums=sums)


def joined_scores(parts, device):
    """The Scored of different problems as one, with values and metrics; None if there are none."""
    if parts[0] is None:
        return None
    values = {name: torch.cat([part.values[name] for part in parts]).to(device) for name in parts[0].values}
    metrics = None
    if parts[0].metrics is not None:
        metrics = {}
        for part in parts:
            for name, (total, count) in part.metrics.items():
                total_before, count_before = metrics.get(name, (0.0, 0))
                metrics[name] = (total_before + total, count_before + count)
    return replace(moved(Scored.join(parts), device), values=values, metrics=metrics)
