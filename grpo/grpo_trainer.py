"""The loop: a GRPO step after the other, with evaluation, logging and checkpoints."""

import math
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from core.checkpoint_manager import shapes
from core.distributed import Distributed
from core.errors import Mistake
from core.files import CURVES, REPORT, SAMPLES, STATE, each_metrics, keep_records
from core.logger import Logger, format_number
from core.optim import set_learning_rate
from core.run import Run
from core.settings.setting import Settings
from grpo.build import make_sampler
from grpo.evaluation.samples import append_samples, comparison_table, format_samples, held_out
from grpo.grpo_training_step import grpo_training_step
from grpo.metrics import Timer
from grpo.reference import adapted, move_reference
from grpo.reward_functions.registry import REWARDS
from grpo.rollout import DataBuffer, Facts, Rollouts
from grpo.sampling_settings import SamplingSettings
from grpo.step_settings import StepSettings

if TYPE_CHECKING:
    from grpo.policies.policy import Policy

FIRST_STEPS = 3    # after so many steps of a start it says which rewards did not vary
PAGE_GROWTH = 1.1  # report.html is written at an evaluation after so many times the steps of the page before


class GRPOTrainer(Run):
    """Trains `policy` for `rewards`, near `reference`, on the problems of `data`.

    policy, reference (or None): policies (grpo/policies/policy.py); rewards: a Rewards, or rollouts -> Scored
    data: problems(split, iteration, micro) -> a batch that the policy can sample for, as numpy arrays
    evaluation: (policy, temperature) -> (metrics, samples), run on rank 0
    a sample: {"problem": text, "group": [{"text", "reward"}, ...] from the best to the worst}
    """

    def __init__(self, policy: "Policy", reference: "Policy | None", rewards: Callable, data: Any, evaluation: Callable,
                 config: Settings, logger: Logger, dist: Distributed):
        self.saved_reference = None if config.teacher_checkpoint else reference  # a teacher stays what its path names
        identity = {"kind": type(policy).__name__} | policy.identity()
        if self.saved_reference is not None:
            identity["reference"] = shapes(reference.weights())
        super().__init__(policy, policy.save, identity, config, logger, dist)
        self.policy, self.reference, self.rewards, self.data = policy, reference, rewards, data
        self.evaluation = evaluation
        self.evaluated = False  # a run begins with an evaluation
        self.progress = getattr(rewards, "state", SimpleNamespace())  # what rewards may know of the run
        self.settings = StepSettings.of(config, policy)
        self.sampling = SamplingSettings.of(config)
        self.buffer = DataBuffer(config.seed, dist.rank)
        self.prefetcher = None  # of a sampler elsewhere, or ahead of training; None: the policy samples at once
        self.kl_beta, self.iteration, self.spent = config.kl_beta, 0, 0.0
        self.empty_steps = 0
        self.taught = False  # whether a reward has taught anything
        self.step_of_page = 0
        self.told = set()  # names of rewards that skipped completions, which was said once
        self.first_steps = [] if config.rewarded else None  # (metrics, Facts) of the first FIRST_STEPS of this start
        self.said_at = 0  # the step after which it said that nothing was learned

    def train_step(self) -> dict:
        """One optimizer step. The first step of an iteration begins with its rollouts."""
        c, settings = self.config, self.settings
        if self.kl_beta != c.kl_beta:  # kl_target has moved it
            settings = StepSettings.of(c.varied(kl_beta=self.kl_beta), self.policy)
        lr = self.schedule.lr(self.step)
        set_learning_rate(self.optimizers, lr)
        self.progress.global_step = self.step
        problems, timer = partial(self.problems_of, self.iteration), Timer(self.show)
        metrics = grpo_training_step(
            self.policy, self.reference, self.rewards, problems, self.optimizers, self.iteration, c, self.dist,
            self.buffer, self.sample, settings, timer)
        self.step += 1
        self.spent += sum(timer.times.values())
        metrics |= {"lr": lr, "kl_beta": self.kl_beta}
        metrics["tokens_per_second"] = metrics.pop("text_tokens") / self.spent
        self.end_step(metrics, self.buffer.facts)
        return metrics

    def sample(self, problems: dict, again: int) -> tuple[Rollouts, dict]:
        """Completions of problems of this iteration, of a round as grpo_training_step has them, and {metric: (sum,
        count)}."""
        c = self.config
        self.logger.doing(f"generating {len(problems['number']) * c.group_size} completions")
        if self.prefetcher is None:
            return self.policy.sample(problems, self.iteration, self.sampling), {}
        iterations_left = math.ceil((c.max_iters - self.step) / (c.ppo_epochs * c.minibatches))
        last = self.iteration + iterations_left - 1
        return self.prefetcher.get(problems, self.iteration, again, last)

    def problems_of(self, iteration: int, again: int = 0) -> dict:
        """This rank's problems of an iteration; again: the round of other problems for zero_std='resample'."""
        n = self.config.gradient_accumulation_steps
        batches = [self.data.problems("train", iteration, again * n + i) for i in range(n)]
        return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}

    def show(self, phase: str) -> None:
        """Shows the phase of a step that begins; `sample` shows how many completions are generated."""
        if phase == "reference":
            self.logger.doing("scoring")
        elif phase == "train":
            self.logger.doing("training")

    def end_step(self, metrics: dict, facts: Facts) -> None:
        """Counts the step; the last step of an iteration moves the reference and kl_beta."""
        c = self.config
        self.taught = self.taught or facts.taught
        self.tell_first_skips(facts)
        self.tell_equal_rewards(metrics, facts)
        if metrics["skipped_steps"]:
            self.bad.add_not_finite(self.step, metrics)
        elif not facts.scored:
            self.bad.add(f"step {self.step} teaches nothing, because the rewards skipped all its completions",
                         "see why they return None or NaN")
        else:
            self.bad.reset()
        self.skipped_steps += metrics["skipped_steps"]
        self.empty_steps += metrics["empty_steps"]
        metrics |= {"skipped_steps": self.skipped_steps, "empty_steps": self.empty_steps}
        if not self.buffer.queue:
            self.iteration += 1
            self.spent = 0.0
            if self.reference is not None:
                move_reference(self.reference, self.policy, self.iteration, c)
                self.kl_beta = adapted(self.kl_beta, metrics.get("mean_kl", math.nan), c)

    def open(self) -> None:
        """Starts the sampler, if it is not the policy."""
        sampler = make_sampler(self.policy, self.config, self.dist)
        if sampler is not None:
            from grpo.samplers.sampler import Prefetcher
            self.prefetcher = Prefetcher(sampler, self.policy, self.problems_of, self.config)

    def close(self) -> None:
        if self.prefetcher is not None:
            self.prefetcher.close()

    def begin(self) -> None:
        if self.dist.is_main:
            keep_records(self.checkpoints.path(SAMPLES), self.step, self.logger.say)

    def log_step(self, metrics: dict) -> None:
        shown = self.step % self.config.log_interval == 0 or self.step in (1, self.config.max_iters)
        self.logger.log(self.step, metrics, show=shown)

    def evaluation_is_due(self) -> bool:
        c = self.config
        return self.step % c.eval_interval == 0 or self.step % c.sample_interval == 0

    def state(self) -> dict:
        state = {"empty_steps": self.empty_steps, "kl_beta": self.kl_beta, "iteration": self.iteration,
                 "taught": self.taught, "buffers": self.dist.gather(self.buffer.state_dict())}
        if self.saved_reference is not None:
            state["reference"] = self.saved_reference.weights()
        return state

    def load_state(self, state: dict) -> None:
        """Between iterations a buffer holds nothing of its rank alone, so another number of ranks can resume."""
        if self.saved_reference is not None:
            self.saved_reference.load_weights(state["reference"])
        self.empty_steps, self.iteration = state["empty_steps"], state["iteration"]
        self.taught = state.get("taught", True)  # it is not in states of version 1.0.0
        buffers = state["buffers"]
        same_ranks = len(buffers) == self.dist.world
        if buffers[0]["queue"] and not same_ranks:
            raise Mistake(f"{STATE} was saved within an iteration on {len(buffers)} ranks; resume it on as many")
        mine = buffers[self.dist.rank if same_ranks else 0]
        self.buffer.load_state_dict(mine, self.dist.device, self.policy.inputs_type)
        if self.config.kl_target is not None:
            self.kl_beta = state["kl_beta"]

    def evaluate(self) -> None:
        """Logs held-out metrics, a few samples every sample_interval, and writes report.html."""
        self.logger.say("  evaluating ...")
        self.progress.global_step = self.step
        metrics, samples = self.evaluation(self.policy, self.config.temperature)
        shown = [f"{name} {format_number(x)}" for name, x in metrics.items()]
        for first in range(0, len(shown), 3):
            self.logger.say("  held out | " + " | ".join(shown[first : first + 3]))
        metrics = {f"eval/{name}": x for name, x in metrics.items()}
        self.buffer.store_evaluation_data(self.step, metrics)
        self.logger.log(self.step, metrics, show=False)
        if self.step % self.config.sample_interval == 0 or self.step == self.config.max_iters:
            append_samples(self.checkpoints.out_dir, self.step, samples)
            self.logger.say(format_samples(samples, sys.stdout.isatty(), self.config.eval_completions))
        if self.step > 0:
            self.last_evaluation = metrics
        if self.step >= PAGE_GROWTH * self.step_of_page:
            self.write_page()

    @property
    def holds(self) -> str:
        """The content of the buffer, in words."""
        held = self.buffer.get_buffer_statistics()
        return (f"{held['stored']} rollouts so far, {held['minibatches']} minibatches of the last one to train on, "
                f"{held['evaluations']} evaluations")

    def write_page(self) -> None:
        """Writes the page about the run, once there are metrics. It reads all of them, so that an evaluation only
        calls it when the run has grown by a share: the pages of a whole run then take a time linear in its steps."""
        self.step_of_page = self.step
        if os.path.exists(self.logger.path):
            from grpo.report.page import write_report
            write_report(self.checkpoints.out_dir, self.buffer.evaluations)

    def tell_first_skips(self, facts: Facts) -> None:
        """Says when a reward skips completions for the first time."""
        for name, completions in facts.skipped.items():
            if completions and name not in self.told:
                self.told.add(name)
                self.logger.say(f"step {self.step}: the reward {name} skipped {completions:.0f} completions; "
                                f"metrics.jsonl counts them as skipped/{name}, and this line comes once")

    def tell_equal_rewards(self, metrics: dict, facts: Facts) -> None:
        """Says after the first steps of a start that no group of them had different rewards, or which of several
        rewards, below their highest value, differed in none."""
        first = self.first_steps
        if first is None:
            return
        first.append((metrics, facts))
        if len(first) < FIRST_STEPS and self.step < self.config.max_iters:
            return
        self.first_steps = None
        pairs = zip(getattr(self.rewards, "names", ()), getattr(self.rewards, "weights", ()), strict=True)
        weighted = [name for name, weight in pairs if weight]
        logged = [metrics for metrics, _ in first]
        means = {name: mean for name in weighted if (mean := range_of(logged, f"reward/{name}"))}
        mean = range_of(logged, "mean_reward")
        steps = f"steps {self.step - len(first) + 1} to {self.step}" if len(first) > 1 else f"step {self.step}"
        where = f"{steps}: no group had different"
        remedy = ("raise temperature or group_size, take easier problems (harder ones if all are solved), or a reward "
                  "with partial credit")
        if mean and not any(facts.differed or facts.taught for _, facts in first):
            self.said_at = self.step
            shown = ", ".join(f"{name} {x}" for name, x in means.items()) or mean
            self.logger.say(f"{where} rewards (mean: {shown}), so nothing was learned from them: {remedy}")
            return
        equal = []
        for name in means:
            differed = any(facts.varied.get(name, 1) for _, facts in first)  # an older state did not count them
            is_below = any(metrics.get(f"reward/{name}", math.inf) < REWARDS[name].high for metrics, _ in first)
            if is_below and not differed:
                equal.append(name)
        if equal:
            shown = ", ".join(f"{name} (mean: {means[name]})" for name in equal)
            self.logger.say(f"{where} values of {shown}, so they compared no completions: {remedy}")

    def say_if_nothing_was_learned(self) -> None:
        """Says so of a run in which no completion had an advantage, because all groups had equal rewards."""
        if self.taught or self.step == self.said_at or not self.config.rewarded:
            return
        mean = range_of(each_metrics(self.logger.path), "mean_reward")
        found = f"their mean was {mean}" if mean else "no completion was scored"
        self.logger.say(f"nothing was learned from the rewards: in all {self.step} steps the completions of a problem "
                        f"had equal rewards ({found}); look at the samples, and start with --doctor=True")

    def finish(self) -> None:
        """Ends the workers of rewards; at the end of the training draws the curves and prints what changed."""
        if hasattr(self.rewards, "close"):
            self.rewards.close()
        if self.dist.is_main:
            self.say_if_nothing_was_learned()
        if self.dist.is_main and self.stopped_by is None:
            from grpo.report.page import draw_curves
            before = held_out(self.buffer.evaluations[0])
            if before:
                draw_curves([self.buffer.evaluations], self.checkpoints.path(CURVES))
            self.logger.say(comparison_table(before, self.last_evaluation))
            self.logger.say(f"what the run wrote, {REPORT} too, is in {self.config.out_dir}")


def range_of(records: Iterable[dict], key: str) -> str:
    """The least and the largest value of a metric in words; "" where it was not measured."""
    values = [record[key] for record in records if record.get(key) is not None]
    if not values:
        return ""
    least, most = f"{min(values):g}", f"{max(values):g}"
    return least if least == most else f"{least} to {most}"
