"""The loop: collect, reward, advantage, step, evaluate, save."""

import sys
import time

from core.checkpoint_manager import CheckpointManager
from core.logger import keep_records, read_records
from core.scheduler import CosineLRScheduler
from core.trainer import BadSteps
from core.training_step import build_optimizers
from grpo.grpo_training_step import grpo_training_step
from grpo.plots import draw_curves
from grpo.rollout import join
from grpo.samples import append_samples, comparison_table, format_samples


class GRPOTrainer:
    """Trains `policy` for `rewards`, near `reference`, on the problems of `data`.

    evaluation: (policy, temperature) -> (metrics, samples), run on rank 0
    """

    def __init__(self, policy, reference, rewards, data, evaluation, config, logger, dist, dtype):
        self.policy, self.reference, self.rewards, self.data = policy.eval(), reference, rewards, data
        self.evaluation, self.config, self.logger, self.dist, self.dtype = evaluation, config, logger, dist, dtype
        self.optimizers = build_optimizers(policy, config, dist.device.type)
        self.schedule = CosineLRScheduler(config.learning_rate, config.min_lr, config.warmup_iters,
                                          config.lr_decay_iters or config.max_iters)
        self.checkpoints = CheckpointManager(config.out_dir, config.keep_checkpoints)
        self.step, self.skipped_steps, self.before, self.after = 0, 0, {}, {}

    def resume(self):
        state = self.checkpoints.load(self.policy, self.optimizers)
        self.step, self.skipped_steps = state["step"], state["skipped_steps"]
        self.before, self.after = state["before"], state["facts"]
        if self.reference is not None:
            if "reference" not in state:
                raise ValueError(f"{self.checkpoints.path('state.pt')} is of a run without a reference; resume it with "
                                 "kl_beta=0.0")
            self.reference.load_state_dict(state["reference"])

    def save(self):
        if self.dist.is_main:
            reference = {} if self.reference is None else {"reference": self.reference.state_dict()}
            self.checkpoints.save(self.step, self.policy, self.optimizers, self.data.tokenizer, self.after,
                                  before=self.before, skipped_steps=self.skipped_steps, **reference)

    def run(self):
        """Trains to max_iters optimizer steps, evaluating, logging and saving on the way."""
        c = self.config
        bad = BadSteps(c.max_bad_steps, self.checkpoints)
        self.dist.broadcast(self.policy)
        self.logger.start(self.step)
        if self.dist.is_main:
            keep_records(self.checkpoints.path("samples.jsonl"), self.step)
        if self.step == 0:
            self.before = self.evaluate()
            self.logger.restart_clock()
        while self.step < c.max_iters:
            started = time.perf_counter()
            batch = join([self.data.problems("train", self.step, i) for i in range(c.gradient_accumulation_steps)])
            metrics = grpo_training_step(self.policy, self.reference, self.rewards, batch, self.optimizers,
                                         self.schedule.lr(self.step), self.step, c, self.data.tokenizer, self.dist,
                                         self.dtype, self.logger.doing)
            self.step += 1
            self.skipped_steps += metrics["skipped_steps"]
            bad.check(metrics["skipped_steps"])
            metrics["skipped_steps"] = self.skipped_steps
            metrics["tokens_per_second"] = metrics.pop("text_tokens") / (time.perf_counter() - started)
            last = self.step == c.max_iters
            self.logger.log(self.step, metrics, show=self.step % c.log_interval == 0 or self.step == 1 or last)
            if self.step % c.eval_interval == 0 or self.step % c.sample_interval == 0 or last:
                self.after = self.evaluate()
            if self.step % c.save_interval == 0 or last:
                self.save()
            self.logger.tick()
        self.finish()

    def evaluate(self):
        """Held-out metrics on rank 0; a few samples every sample_interval."""
        if not self.dist.is_main:
            return {}
        self.logger.doing("evaluating")
        metrics, samples = self.evaluation(self.policy, self.config.temperature)
        metrics = {f"eval/{name}": value for name, value in metrics.items()}
        self.logger.log(self.step, metrics, show=False)
        self.logger.say("  held out | " + " | ".join(f"{k.removeprefix('eval/')} {v:.4f}" for k, v in metrics.items()))
        if self.step % self.config.sample_interval == 0 or self.step == self.config.max_iters:
            append_samples(self.config.out_dir, self.step, samples)
            self.logger.say(format_samples(samples, sys.stdout.isatty()))
        return metrics

    def finish(self):
        self.logger.close()
        self.rewards.close()
        if self.dist.is_main:
            draw_curves({"": read_records(self.logger.path)}, self.checkpoints.path("curves.png"))
            self.logger.say(comparison_table(self.before, self.after))
            self.logger.say(f"{self.config.out_dir}: model.safetensors, state.pt, metrics.jsonl, samples.jsonl, "
                            "curves.png")
        self.dist.barrier()
