"""The supervised loop: schedule, step, evaluate, log, save."""

import functools
import os
import time
from dataclasses import asdict

import torch

from core.checkpoint_manager import CheckpointManager
from core.models import save_model
from core.run.bad_steps import BadSteps
from core.run.model_card import write_card
from core.run.stop_signal import StopSignal
from core.scheduler import CosineLRScheduler
from core.training_step import build_optimizers, set_learning_rate, training_step

COLUMNS = ("loss", "accuracy", "grad_norm", "lr", "tokens_per_second", "skipped_steps")


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
                                             getattr(model, "identity", dict)(),
                                             write_card=functools.partial(write_card, config))
        self.step, self.skipped_steps, self.facts = 0, 0, {}
        self.stopped_by = None  # the signal that ended the run early
        self.evaluated = True  # whether the evaluation of this step, if it has one, is done

    def write_model(self, path, **facts):
        save_model(path, self.model, self.tokenizer, **facts)

    def resume(self):
        state = self.checkpoints.load(self.model.weights(), self.optimizers, self.logger.say)
        self.dist.check_same_step(state["step"], self.config.out_dir)
        skipped = state.get("skipped_steps")
        if not isinstance(skipped, int) or skipped < 0:
            raise ValueError(f"{self.checkpoints.last[0]} was not saved by supervised training, or has changed; start "
                             "without resume")
        self.model.load_weights(state["model"])
        self.step, self.skipped_steps, self.facts = state["step"], skipped, state["facts"]
        self.evaluated = bool(state.get("evaluated", True))

    def save(self):
        if self.dist.is_main:
            self.checkpoints.save(self.step, self.model.weights(), self.optimizers, self.facts,
                                  skipped_steps=self.skipped_steps, evaluated=self.evaluated)
        self.dist.barrier()  # it may take longer than rank_timeout

    def run(self):
        """Trains to max_iters optimizer steps, or to the step in which a signal came, and saves."""
        with self.checkpoints.keeping(), StopSignal(self.dist) as stop:
            stopped = self.train(stop)
            self.logger.close()
            if self.config.export and self.dist.is_main and not stopped:
                save_model(self.config.export, self.model, self.tokenizer, torch.float16, step=self.step, **self.facts)
                if os.path.isdir(self.config.export):
                    write_card(self.config, self.config.export, self.step, {}, self.facts)
            self.dist.barrier()

    def train(self, stop):
        """The loop: steps, evaluating, logging and saving on the way. Returns whether a signal ended it early."""
        c, bad = self.config, BadSteps(self.config.max_bad_steps, self.checkpoints, self.logger, self.dist.rank)
        self.dist.broadcast(self.model.parameters())
        self.logger.start(self.step)
        if not self.evaluated:  # a signal came before it
            self.facts, self.evaluated = self.evaluation(), True
            self.dist.barrier()
        since, tokens, due = time.monotonic(), 0, False
        while self.step < c.max_iters:
            self.model.train(c.dropout > 0)
            if c.dropout > 0:  # a resumed run draws the same dropout masks
                torch.manual_seed(hash((c.seed, self.dist.rank, self.step)))
            batches = [self.batches("train", self.step, micro) for micro in range(c.gradient_accumulation_steps)]
            lr = self.schedule.lr(self.step)
            set_learning_rate(self.optimizers, lr)
            metrics = training_step(self.model, batches, self.optimizers, c.grad_clip, self.dist)
            self.step += 1
            bad.check(self.step, metrics, lambda: plain_batch(batches, lr, c))
            self.skipped_steps += metrics["skipped_steps"]
            tokens += sum(input.numel() for input, _, _ in batches) * self.dist.world
            last = self.step == c.max_iters
            if self.step % c.log_interval == 0 or last:
                metrics |= {"lr": lr, "tokens_per_second": tokens / (time.monotonic() - since),
                            "skipped_steps": self.skipped_steps}
                self.logger.log(self.step, metrics)
                since, tokens = time.monotonic(), 0
            signal, evaluates = stop.came(), self.step % c.eval_interval == 0 or last
            self.evaluated = last or not (signal and evaluates)  # who sends a signal does not wait for an evaluation
            if evaluates and self.evaluated:
                self.facts = self.evaluation()
                self.dist.barrier()
                signal = stop.came()
            due = due or self.step % c.save_interval == 0
            if due and not bad.in_a_row or last or signal:  # the last state stays good
                self.save()
                due = False
            self.logger.tick()
            if signal and not last:
                self.stopped_by = signal
                self.logger.say(f"stopped by {signal} after step {self.step}; go on with --resume=True")
                return True
        return False

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


def plain_batch(batches, lr, config):
    """The micro-batches [(input, target, mask)] of a step as plain tensors and values."""
    parts = {name: [x.cpu() for x in tensors]
             for name, tensors in zip(("input", "target", "mask"), zip(*batches), strict=True)}
    return parts | {"lr": lr, "config": asdict(config)}
