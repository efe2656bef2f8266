"""The loop: collect, reward, advantage, buffer, steps, evaluate, save."""

import sys
import time

from core.checkpoint_manager import CheckpointManager
from core.logger import keep_records, read_records
from core.scheduler import CosineLRScheduler
from core.trainer import BadSteps
from core.training_step import build_optimizers
from grpo.data_buffer import DataBuffer
from grpo.grpo_training_step import gather_experience, train_on_rollouts
from grpo.plots import draw_curves
from grpo.reference import REFERENCES, adapted
from grpo.rollout import join
from grpo.samples import append_samples, comparison_table, format_samples


class GRPOTrainer:
    """Trains `policy` for `rewards`, near `reference`, on the problems of `data`.

    evaluation: (policy, temperature) -> (metrics, samples), run on rank 0
    """

    def __init__(self, policy, reference, rewards, data, evaluation, config, logger, dist, dtype):
        self.policy, self.reference, self.rewards, self.data = policy.eval(), reference, rewards, data
        self.evaluation, self.config, self.logger, self.dist, self.dtype = evaluation, config, logger, dist, dtype
        policy.grad_checkpoint = config.grad_checkpoint
        self.optimizers = build_optimizers(policy, config, dist.device.type)
        self.schedule = CosineLRScheduler(config.learning_rate, config.min_lr, config.warmup_iters,
                                          config.lr_decay_iters or config.max_iters)
        self.checkpoints = CheckpointManager(config.out_dir, config.keep_checkpoints)
        self.buffer = DataBuffer(config.seed, dist.rank)
        self.kl_beta, self.iteration, self.times, self.spent = config.kl_beta, 0, {}, 0.0
        self.step, self.skipped_steps, self.before, self.after = 0, 0, {}, {}

    def resume(self):
        state = self.checkpoints.load(self.policy, self.optimizers)
        if "buffers" not in state:
            raise ValueError(f"{self.checkpoints.path('state.pt')} was not saved by this version of GRPO training; "
                             "start without resume")
        self.step, self.skipped_steps = state["step"], state["skipped_steps"]
        self.before, self.after = state["before"], state["facts"]
        self.iteration = state["iteration"]
        if self.config.kl_target is not None:
            self.kl_beta = state["kl_beta"]
        if len(state["buffers"]) == self.dist.world:
            self.buffer.load_state_dict(state["buffers"][self.dist.rank], self.dist.device)
        elif state["buffers"][0]["queue"]:
            raise ValueError(f"{self.checkpoints.path('state.pt')} was saved within an iteration on "
                             f"{len(state['buffers'])} ranks; resume it on as many")
        if self.reference is not None:
            if "reference" not in state:
                raise ValueError(f"{self.checkpoints.path('state.pt')} is of a run without a reference; resume it with "
                                 "kl_beta=0.0")
            self.reference.load_state_dict(state["reference"])

    def save(self):
        buffers = self.dist.gather(self.buffer.state_dict())
        if self.dist.is_main:
            reference = {} if self.reference is None else {"reference": self.reference.state_dict()}
            self.checkpoints.save(self.step, self.policy, self.optimizers, self.data.tokenizer, self.after,
                                  before=self.before, skipped_steps=self.skipped_steps, kl_beta=self.kl_beta,
                                  iteration=self.iteration, buffers=buffers, **reference)

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
            fresh = not self.buffer.queue
            if fresh:
                self.collect()
            metrics = self.train(fresh)
            bad.check(metrics.pop("bad_step"))
            last = self.step == c.max_iters
            self.logger.log(self.step, metrics, show=self.step % c.log_interval == 0 or self.step == 1 or last)
            if self.step % c.eval_interval == 0 or self.step % c.sample_interval == 0 or last:
                self.after = self.evaluate()
            if self.step % c.save_interval == 0 or last:
                self.save()
            self.logger.tick()
        self.finish()

    def problems(self, again=0):
        """This rank's problems of an iteration; again: as many others."""
        n = self.config.gradient_accumulation_steps
        return join([self.data.problems("train", self.iteration, again * n + i) for i in range(n)])

    def collect(self):
        """Begins an iteration: rollouts with their advantages into the buffer."""
        c = self.config
        rollouts, sums, self.times = gather_experience(
            self.policy, self.reference, self.rewards, self.problems(), self.iteration, c, self.data.tokenizer,
            self.dist, self.dtype, self.kl_beta, lambda again: self.problems(1 + again), self.logger.doing)
        id = self.buffer.store_rollout_data(rollouts, sums)
        self.buffer.prepare_training_batch(id, c.ppo_epochs, c.minibatches)
        self.spent = sum(self.times.values())

    def train(self, fresh):
        """One optimizer step on the next minibatch, the first of its rollouts if fresh; the last of an iteration moves
        the reference and kl_beta."""
        c = self.config
        self.logger.doing("training")
        rollouts, sums = self.buffer.next_minibatch()
        begun = time.perf_counter()
        metrics = train_on_rollouts(self.policy, rollouts, sums, self.optimizers, self.schedule.lr(self.step), c,
                                    self.dist, self.dtype, self.kl_beta, on_policy=fresh)
        took = time.perf_counter() - begun
        self.step, self.spent = self.step + 1, self.spent + took
        self.skipped_steps += metrics["skipped_steps"]
        metrics |= {f"time/{name}": seconds for name, seconds in (self.times | {"train": took}).items()}
        metrics |= {"bad_step": metrics["skipped_steps"], "skipped_steps": self.skipped_steps, "kl_beta": self.kl_beta}
        metrics["tokens_per_second"] = metrics.pop("text_tokens") / self.spent
        self.times = {}
        if c.max_kl_to_old is not None and metrics["kl_to_old"] > c.max_kl_to_old:
            self.buffer.skip_rest()
        if not self.buffer.queue:
            self.iteration += 1
            if self.reference is not None:
                REFERENCES[c.reference_mode](self.reference, self.policy, self.iteration, c)
                self.kl_beta = adapted(self.kl_beta, metrics["mean_kl"], c)
        return metrics

    def evaluate(self):
        """Held-out metrics on rank 0; a few samples every sample_interval."""
        if not self.dist.is_main:
            return {}
        self.logger.doing("evaluating")
        metrics, samples = self.evaluation(self.policy, self.config.temperature)
        metrics = {f"eval/{name}": value for name, value in metrics.items()}
        self.buffer.store_evaluation_data(self.step, metrics)
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
