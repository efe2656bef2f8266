"""The supervised loop: schedule, step, evaluate, log, save."""

import time

import torch

from core.checkpoint_manager import STATE, CheckpointManager
from core.models import save_model
from core.scheduler import CosineLRScheduler
from core.training_step import build_optimizers, training_step

COLUMNS = ("loss", "accuracy", "grad_norm", "lr", "tokens_per_second", "skipped_steps")


class BadSteps:
    """Counts optimizer steps skipped in a row and stops a run that no longer trains."""

    def __init__(self, limit, checkpoints):
        self.limit, self.checkpoints, self.in_a_row = limit, checkpoints, 0

    def check(self, skipped):
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.limit:
            last_good = self.checkpoints.path(STATE)
            way_on = f"go on with resume=True from {last_good}" if self.checkpoints.exists() else "start again"
            raise ValueError(f"{self.in_a_row} steps in a row had a loss or gradient that is not finite (max_bad_steps="
                             f"{self.limit}); lower learning_rate and {way_on}")


class Trainer:
    """Trains any model on batches(split, step, micro) -> (input, target, mask).

    evaluate: model -> {metric: number}, called every eval_interval steps and at the end, on rank 0
    """

    def __init__(self, model, config, batches, evaluate, tokenizer, logger, dist):
        self.model, self.config, self.batches, self.evaluate = model, config, batches, evaluate
        self.tokenizer, self.logger, self.dist = tokenizer, logger, dist
        self.optimizers = build_optimizers(model, config, dist.device.type)
        self.schedule = CosineLRScheduler(config.learning_rate, config.min_lr, config.warmup_iters,
                                          config.lr_decay_iters or config.max_iters)
        self.checkpoints = CheckpointManager(config.out_dir, self.write_model, config.keep_checkpoints, model.suffix,
                                             getattr(model, "identity", dict)())
        self.step, self.skipped_steps, self.facts = 0, 0, {}

    def write_model(self, path, **facts):
        save_model(path, self.model, self.tokenizer, **facts)

    def resume(self):
        state = self.checkpoints.load(self.model.weights(), self.optimizers)
        self.model.load_weights(state["model"])
        self.step, self.skipped_steps, self.facts = state["step"], state["skipped_steps"], state["facts"]

    def save(self):
        if self.dist.is_main:
            self.checkpoints.save(self.step, self.model.weights(), self.optimizers, self.facts,
                                  skipped_steps=self.skipped_steps)

    def run(self):
        """Trains to max_iters optimizer steps, evaluating, logging and saving on the way."""
        c, bad = self.config, BadSteps(self.config.max_bad_steps, self.checkpoints)
        self.dist.broadcast(self.model.parameters())
        self.logger.start(self.step)
        since, tokens = time.time(), 0
        while self.step < c.max_iters:
            self.model.train(c.dropout > 0)
            if c.dropout > 0:  # a resumed run draws the same dropout masks
                torch.manual_seed(hash((c.seed, self.dist.rank, self.step)))
            batches = [self.batches("train", self.step, micro) for micro in range(c.gradient_accumulation_steps)]
            lr = self.schedule.lr(self.step)
            metrics = training_step(self.model, batches, self.optimizers, lr, c.grad_clip, self.dist)
            self.step += 1
            bad.check(metrics["skipped_steps"])
            self.skipped_steps += metrics["skipped_steps"]
            tokens += sum(input.numel() for input, _, _ in batches) * self.dist.world
            last = self.step == c.max_iters
            if self.step % c.log_interval == 0 or last:
                metrics |= {"lr": lr, "tokens_per_second": tokens / (time.time() - since),
                            "skipped_steps": self.skipped_steps}
                self.logger.log(self.step, metrics)
                since, tokens = time.time(), 0
            if self.step % c.eval_interval == 0 or last:
                self.facts = self.evaluation()
            if self.step % c.save_interval == 0 or last:
                self.save()
            self.logger.tick()
        self.logger.close()
        if c.export and self.dist.is_main:
            save_model(c.export, self.model, self.tokenizer, torch.float16, step=self.step, **self.facts)
        self.dist.barrier()

    @torch.no_grad()
    def evaluation(self):
        if not self.dist.is_main:
            return {}
        self.model.eval()
        with self.dist.autocast():
            facts = self.evaluate(self.model)
        self.logger.log(self.step, facts, show=False)
        self.logger.say("  validation: " + ", ".join(f"{name} {value:.4f}" for name, value in facts.items()))
        return facts
