"""Supervised training: the optimizer step and the run."""

import time

import torch

from core.checkpoint_manager import CheckpointManager
from core.models import save_model
from core.run.bad_steps import BadSteps
from core.run.loop import run_loop
from core.run.stop_signal import StopSignal
from core.scheduler import CosineLRScheduler
from core.supervised.loss import supervised_sums
from core.training_step import apply_gradients, build_optimizers, set_learning_rate, total_over_ranks

COLUMNS = ("loss", "accuracy", "grad_norm", "lr", "tokens_per_second", "skipped_steps")


def training_step(model, batches, optimizers, grad_clip, dist):
    """One optimizer step on micro-batches [(input, target, mask)]: the mean loss over all of them on all ranks.

    Returns {"loss", "accuracy", "grad_norm", "skipped_steps"}
    """
    sums = {"loss": 0.0, "correct": 0.0, "count": 0.0}
    for input, target, mask in batches:
        with dist.autocast():
            part = supervised_sums(model, input, target, mask)
        part["loss"].backward()
        sums = {name: sums[name] + part[name].detach() for name in sums}
    totals = total_over_ranks(sums, dist)
    dist.sum_gradients(model.parameters())
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    torch._foreach_div_(gradients, totals["count"].clamp(min=1))  # from the sum of the losses to their mean
    out = apply_gradients(model.parameters(), optimizers, grad_clip, totals, "count")
    count = max(1.0, out["count"])
    return {"loss": out["loss"] / count, "accuracy": out["correct"] / count,
            "grad_norm": out["grad_norm"], "skipped_steps": out["skipped_steps"]}


class Trainer:
    """Trains any model on batches(split, step, micro) -> (input, target, mask).

    evaluate: model -> {metric: number}, called every eval_interval steps and at the end, on rank 0
    """

    def __init__(self, model, config, batches, evaluate, tokenizer, logger, dist):
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.batches, self.evaluate = batches, evaluate
        self.logger, self.dist = logger, dist
        self.optimizers = build_optimizers(model, config, dist.device.type)
        self.schedule = CosineLRScheduler(config.learning_rate, config.min_lr, config.warmup_iters,
                                          config.lr_decay_iters or config.max_iters)
        self.checkpoints = CheckpointManager(config.absolute_out_dir, self.write_model, config.keep_checkpoints,
                                             model.suffix, getattr(model, "identity", dict)())
        self.bad = BadSteps(config.max_bad_steps, self.checkpoints, logger)
        self.step = self.skipped_steps = 0
        self.facts = {}         # metrics of the last evaluation
        self.stopped_by = None  # the signal that ended the run early
        self.evaluated = True   # whether the evaluation of this step, if it has one, is done

    def write_model(self, path, **facts):
        save_model(path, self.model, self.tokenizer, **facts)

    def resume(self):
        state = self.checkpoints.load(self.model.weights(), self.optimizers, self.logger.say)
        self.dist.check_same_step(state["step"], self.config.out_dir)
        self.model.load_weights(state["model"])
        self.step, self.facts = state["step"], state["facts"]
        self.skipped_steps, self.evaluated = state["skipped_steps"], state.get("evaluated", True)

    def save(self):
        if self.dist.is_main:
            self.checkpoints.save(self.step, self.model.weights(), self.optimizers, self.facts,
                                  skipped_steps=self.skipped_steps, evaluated=self.evaluated)
        self.dist.barrier()  # it may take longer than rank_timeout

    def run(self):
        """Trains to max_iters optimizer steps, or to the step in which a signal came, and saves."""
        with self.checkpoints.keeping(), StopSignal(self.dist) as stop:
            self.dist.broadcast(self.model.parameters())
            self.logger.start(self.step)
            self.since, self.tokens = time.monotonic(), 0  # the time and the tokens since the last record
            stopped = run_loop(self, stop)
            self.logger.close()
            if self.config.export and self.dist.is_main and not stopped:
                save_model(self.config.export, self.model, self.tokenizer, torch.float16, step=self.step, **self.facts)
            self.dist.barrier()

    def train_step(self):
        c = self.config
        self.model.train(c.dropout > 0)
        if c.dropout > 0:  # a resumed run draws the same dropout masks
            torch.manual_seed(hash((c.seed, self.dist.rank, self.step)))
        batches = [self.batches("train", self.step, micro) for micro in range(c.gradient_accumulation_steps)]
        lr = self.schedule.lr(self.step)
        set_learning_rate(self.optimizers, lr)
        metrics = training_step(self.model, batches, self.optimizers, c.grad_clip, self.dist)
        self.step += 1
        if metrics["skipped_steps"]:
            self.bad.add(self.step, metrics)
        else:
            self.bad.in_a_row = 0
        self.skipped_steps += metrics["skipped_steps"]
        self.tokens += sum(input.numel() for input, _, _ in batches) * self.dist.world
        return metrics | {"lr": lr}

    def log_step(self, metrics):
        if self.step % self.config.log_interval == 0 or self.step == self.config.max_iters:
            speed = self.tokens / (time.monotonic() - self.since)
            self.logger.log(self.step, metrics | {"tokens_per_second": speed, "skipped_steps": self.skipped_steps})
            self.since, self.tokens = time.monotonic(), 0

    def evaluation_is_due(self):
        return self.step % self.config.eval_interval == 0

    @torch.no_grad()
    def run_evaluation(self):
        """Held-out metrics, on rank 0."""
        self.facts = {}
        if not self.dist.is_main:
            return
        self.model.eval()
        with self.dist.autocast():
            self.facts = self.evaluate(self.model)
        self.logger.log(self.step, self.facts, show=False)
        self.logger.say("  validation: " + ", ".join(f"{name} {value:.4f}" for name, value in self.facts.items()))

    def report(self):
        """Nothing: the console and the records show the run."""
