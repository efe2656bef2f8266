"""The training loop: GRPO steps, evaluation, logging, checkpoints."""

import math
import os
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from core.checkpoint_manager import shapes
from core.distributed import Distributed
from core.errors import Mistake
from core.files import CURVES, REPORT, SAMPLES, STATE, each_metrics, keep_records
from core.logger import Logger, console_width, format_number
from core.optim import set_learning_rate
from core.run import Run
from core.settings.setting import Settings
from grpo.build import make_prefetcher
from grpo.evaluation.samples import append_samples, comparison_table, format_samples, held_out, sample_of
from grpo.grpo_training_step import grpo_training_step
from grpo.metrics import Timer
from grpo.reference import adapted, move_reference
from grpo.reward_messages import RewardMessages
from grpo.rollout import DataBuffer, Facts, Rollouts, Scored
from grpo.sampling_settings import SamplingSettings
from grpo.step_settings import StepSettings

if TYPE_CHECKING:
    from grpo.policies.policy import Policy

PAGE_GROWTH = 1.1  # an evaluation writes report.html if the run has this many times the steps of the last page


class GRPOTrainer(Run):
    """Trains `policy` for `rewards`, near `reference`, on the problems of `data`.

    policy, reference (or None): policies (grpo/policies/policy.py)
    rewards: a Rewards, or any function rollouts -> Scored
    data: problems(split, iteration, micro) -> a batch that the policy can sample for, as numpy arrays
    evaluation: (policy, temperature) -> (metrics, samples), called on every rank
    a sample: {"problem": text, "group": [{"text", "reward"}, ...] from the best to the worst}
    """

    def __init__(
            self,
            policy: "Policy",
            reference: "Policy | None",
            rewards: Callable,
            data: Any,
            evaluation: Callable,
            config: Settings,
            logger: Logger,
            dist: Distributed):
        identity = {"kind": type(policy).__name__} | policy.identity()
        self.saved_reference = None
        if reference is not None and config.teacher_checkpoint is None:  # a teacher never moves
            self.saved_reference = reference
            identity["reference"] = shapes(reference.weights())
        super().__init__(policy, policy.save, identity, config, logger, dist)
        self.policy = policy
        self.reference = reference
        self.rewards = rewards
        self.data = data
        self.evaluation = evaluation
        self.evaluated = False    # a run begins with an evaluation
        self.reward_messages = RewardMessages(rewards, config, logger.say)
        # Rewards may depend on how far the run is; a function without a state does not read it
        self.progress = getattr(rewards, "state", SimpleNamespace())
        self.settings = StepSettings.of(config, policy)
        self.sampling = SamplingSettings.of(config)
        self.buffer = DataBuffer(config.seed, dist.rank)
        self.prefetcher = None    # for a sampler elsewhere or ahead of training; None: the policy samples in the step
        self.kl_beta = config.kl_beta  # kl_target moves it
        self.iteration = 0
        self.seconds = 0.0        # of this iteration so far
        self.empty_steps = 0
        self.step_of_page = 0

    def train_step(self) -> dict:
        """Takes one optimizer step. The first step of an iteration begins with its rollouts."""
        settings = self.settings
        if self.kl_beta != self.config.kl_beta:  # kl_target has moved it
            changed = self.config.varied(kl_beta=self.kl_beta)
            settings = StepSettings.of(changed, self.policy)
        lr = self.schedule.lr(self.step)
        set_learning_rate(self.optimizers, lr)
        self.progress.global_step = self.step
        timer = Timer(self.show)
        metrics = grpo_training_step(
            self.policy,
            self.reference,
            self.rewards,
            partial(self.problems_of, self.iteration),
            self.optimizers,
            self.iteration,
            self.config,
            self.dist,
            self.buffer,
            self.sample,
            settings,
            timer,
            self.note)
        self.step += 1
        self.seconds += sum(timer.times.values())
        tokens = metrics.pop("text_tokens")
        metrics["lr"] = lr
        metrics["kl_beta"] = self.kl_beta
        metrics["tokens_per_second"] = tokens / self.seconds
        self.end_step(metrics, self.buffer.facts)
        return metrics

    def problems_of(self, iteration: int, again: int = 0) -> dict:
        """This rank's problems of an iteration. again: 0, or the round of other problems for zero_std='resample'"""
        n = self.config.gradient_accumulation_steps
        first = again * n
        batches = []
        for micro in range(first, first + n):
            batch = self.data.problems("train", iteration, micro)
            batches.append(batch)
        problems = {}
        for key in batches[0]:
            columns = [batch[key] for batch in batches]
            problems[key] = np.concatenate(columns)
        return problems

    def sample(self, problems: dict, again: int) -> tuple[Rollouts, dict]:
        """Samples completions of this iteration's problems. Returns Rollouts and {metric: (sum, count)}.
        again: as in problems_of"""
        c = self.config
        completions = len(problems["number"]) * c.group_size
        self.logger.doing(f"generating {completions} completions")
        if self.prefetcher is None:
            rollouts = self.policy.sample(problems, self.iteration, self.sampling)
            return rollouts, {}
        steps_left = c.max_iters - self.step
        iterations_left = math.ceil(steps_left / c.steps_of_an_iteration)
        last = self.iteration + iterations_left - 1
        return self.prefetcher.get(problems, self.iteration, again, last)

    def note(self, rollouts: Rollouts, scored: Scored) -> None:
        """Adds the first groups of an iteration to samples.jsonl, under the iteration's first step, if a set of samples
        precedes one of its steps."""
        c = self.config
        is_due = -self.step % c.sample_interval < self.settings.steps
        if not (c.train_samples and is_due and self.dist.is_main):
            return
        total = scored.reward.flatten()                                              # (N,)
        samples = []
        for i in range(rollouts.problems)[: c.train_samples]:
            sample = sample_of(self.rewards, rollouts, i, total, scored.values)
            samples.append({"split": "train", **sample})
        append_samples(self.checkpoints.out_dir, self.step + 1, samples)

    def show(self, phase: str) -> None:
        """Shows the phase of a step that begins; `sample` shows "collect" itself, with the number of completions."""
        if phase == "reference":
            self.logger.doing("scoring")
        elif phase == "train":
            self.logger.doing("training")

    def end_step(self, metrics: dict, facts: Facts) -> None:
        """Counts a step that was skipped or empty. The last step of an iteration moves the reference and kl_beta."""
        self.reward_messages.add(self.step, metrics, facts)
        if metrics["skipped_steps"]:
            self.bad.add_not_finite(self.step, metrics)
        elif not facts.scored:
            self.bad.add(f"step {self.step} teaches nothing, because the rewards skipped all its completions",
                         "see why they return None or NaN")
        else:
            self.bad.reset()
        self.skipped_steps += metrics["skipped_steps"]
        self.empty_steps += metrics["empty_steps"]
        metrics["skipped_steps"] = self.skipped_steps
        metrics["empty_steps"] = self.empty_steps
        if self.buffer.queue:
            return  # more steps on these rollouts follow
        self.iteration += 1
        self.seconds = 0.0
        if self.reference is not None:
            move_reference(self.reference, self.policy, self.iteration, self.config)
            mean_kl = metrics.get("mean_kl", math.nan)
            self.kl_beta = adapted(self.kl_beta, mean_kl, self.config)

    def open(self) -> None:
        """Starts the sampler, if it is not the policy."""
        self.prefetcher = make_prefetcher(self.policy, self.problems_of, self.config, self.dist)

    def close(self) -> None:
        if self.prefetcher is not None:
            self.prefetcher.sampler.close()

    def begin(self) -> None:
        if self.dist.is_main:
            path = self.checkpoints.path(SAMPLES)
            keep_records(path, self.step, self.logger.say)

    def log_step(self, metrics: dict) -> None:
        c = self.config
        is_first_or_last = self.step in (1, c.max_iters)
        is_shown = is_first_or_last or self.step % c.log_interval == 0
        self.logger.log(self.step, metrics, show=is_shown)

    def state(self) -> dict:
        state = {
            "empty_steps": self.empty_steps,
            "kl_beta": self.kl_beta,
            "iteration": self.iteration,
            "taught": self.reward_messages.taught,
            "buffers": self.dist.gather(self.buffer.state_dict())}
        if self.saved_reference is not None:
            state["reference"] = self.saved_reference.weights()
        return state

    def load_state(self, state: dict) -> None:
        """Restores what `state` returned. Between iterations all buffers are alike, so another number of ranks can
        resume; within an iteration each rank has its own rollouts."""
        if self.saved_reference is not None:
            self.saved_reference.load_weights(state["reference"])
        self.empty_steps = state["empty_steps"]
        self.iteration = state["iteration"]
        self.reward_messages.taught = state.get("taught", True)  # states of version 1.0.0 do not have it
        buffers = state["buffers"]
        mine = buffers[0]
        if len(buffers) == self.dist.world:
            mine = buffers[self.dist.rank]
        elif mine["queue"]:
            raise Mistake(f"{STATE} was saved within an iteration on {len(buffers)} ranks; resume on the same number")
        self.buffer.load_state_dict(mine, self.dist.device, self.policy.inputs_type)
        if self.config.kl_target is not None:
            self.kl_beta = state["kl_beta"]

    def evaluate(self) -> dict:
        """Logs held-out metrics, a few samples every sample_interval, and writes report.html. Returns the metrics."""
        c = self.config
        self.logger.say("  evaluating ...")
        self.progress.global_step = self.step
        found, samples = self.evaluation(self.policy, c.temperature)
        metrics = {f"eval/{name}": x for name, x in found.items()}
        if not self.dist.is_main:
            return metrics
        shown = [f"{name} {format_number(x)}" for name, x in found.items()]
        beside = console_width() // 33  # metrics of a line
        for first in range(0, len(shown), beside):
            line = " | ".join(shown[first : first + beside])
            self.logger.say(f"  held out | {line}")
        self.buffer.store_evaluation_data(self.step, metrics)
        self.logger.log(self.step, metrics, show=False)
        if self.step % c.sample_interval == 0 or self.step == c.max_iters:
            append_samples(self.checkpoints.out_dir, self.step, samples)
            text = format_samples(samples, sys.stdout.isatty(), c.eval_completions)
            self.logger.say(text)
        if self.step > 0:
            self.last_evaluation = metrics
        # Each page reads all metrics of the run so far. A page at every evaluation would take time quadratic in the
        # number of steps; a page whenever the run has grown by a tenth takes linear time
        if self.step >= PAGE_GROWTH * self.step_of_page:
            self.write_page()
        return metrics

    def write_page(self) -> None:
        """Writes the page about the run, once there are metrics."""
        self.step_of_page = self.step
        if os.path.exists(self.logger.path):
            from grpo.report.page import write_report
            write_report(self.checkpoints.out_dir, self.buffer.evaluations)

    @property
    def holds(self) -> str:
        """The content of the buffer, in words."""
        held = self.buffer.get_buffer_statistics()
        return (f"{held['stored']} rollouts so far, {held['minibatches']} minibatches of the last one left to train "
                f"on, {held['evaluations']} evaluations")

    def finish(self) -> None:
        """Stops the reward workers. If training is complete, draws the curves and prints the table of changes."""
        if hasattr(self.rewards, "close"):
            self.rewards.close()
        if not self.dist.is_main:
            return
        self.reward_messages.end(self.step, each_metrics(self.logger.path))
        if self.stopped_by is None:
            from grpo.report.page import draw_curves
            before = held_out(self.buffer.evaluations[0])
            if before:
                draw_curves([self.buffer.evaluations], self.checkpoints.path(CURVES))
            self.logger.say(comparison_table(before, self.last_evaluation))
            if self.best.step not in (None, self.step):  # else its save has said so
                self.say_best()
            self.logger.say(f"the files of the run, including {REPORT}, are in {self.config.out_dir}")
