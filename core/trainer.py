"""Supervised training: the loss of each mode, the optimizer step, the run."""

import math
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from core.checkpoint_manager import CheckpointManager, check_same_step
from core.data import masked_positions
from core.distributions import in_parts, token_logp
from core.model import SEQUENCE_SCORER
from core.models import save_model
from core.optim import CosineLRScheduler, build_optimizers, clip_gradients, set_learning_rate, step_optimizers
from core.run import BadSteps, StopSignal, run_loop

COLUMNS = ("loss", "accuracy", "grad_norm", "lr", "tokens_per_second", "skipped_steps")


def supervised_sums(model, input: Tensor, target: Tensor, mask: Tensor) -> dict:
    """Sums over the batch; divide by 'count' for means.

    input, target: (B, T), for a cls judge input (B, 1 + T)
    mask: (B, T) True where the loss counts, or its weights
    Returns {"loss", "correct", "count"}
    """
    if model.mode != SEQUENCE_SCORER:
        return token_sums(model, input, target, mask)
    if model.judge_head == "cls":
        return replaced_share_sums(model, input, target)
    return realness_sums(model, input, target)


def token_sums(model, input: Tensor, target: Tensor, mask: Tensor) -> dict:
    """Cross-entropy of the masked tokens, the logits in bounded memory."""
    position, _ = masked_positions(mask > 0, input.device)                           # (B, M)
    h = model.states(input, position)                                                # (B, M, C)
    target = target.gather(1, position)                                              # (B, M)

    def predicted(h, target):
        """Log-probability of each true token, and whether it is the likeliest one."""
        logp = model.project(h).log_softmax(-1)                                      # (K, V)
        return token_logp(logp, target), logp.argmax(-1) == target                   # (K,), (K,)

    logp, correct = in_parts(predicted, model.vocabulary, h.flatten(0, 1), target.flatten())
    weight = mask.float().to(input.device, non_blocking=True).gather(1, position)    # (B, M) 0 on padding
    weight = weight.flatten()                                                        # (B * M,)
    return {"loss": -(logp * weight).sum(),
            "correct": (correct * weight).sum(),
            "count": weight.sum()}


def realness_sums(model, input: Tensor, target: Tensor) -> dict:
    """Binary cross-entropy of 'this token is the true one' at every position (ELECTRA, arXiv 2003.10555)."""
    real = input == target                                                           # (B, T)
    logits = model(input)                                                            # (B, T)
    loss = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="sum")
    return {"loss": loss,
            "correct": ((logits > 0) == real).sum(),
            "count": loss.new_full((), real.numel())}


def replaced_share_sums(model, input: Tensor, target: Tensor) -> dict:
    """Squared error of a cls judge's estimate, whose target is y = x^4 - 2x^3 + 2x of the replaced share x of a text.
    input: (B, 1 + T), CLS and the filled text"""
    x = (input[:, 1:] != target).float().mean(1)                                     # (B,)
    y = x**4 - 2 * x**3 + 2 * x                                                      # (B,)
    error = model(input).sigmoid() - y                                               # (B,)
    return {"loss": error.square().sum(),
            "correct": (error.abs() < 0.1).sum(),
            "count": error.new_full((), len(input))}


def training_step(model, batches: list, optimizers: list, grad_clip: float, dist) -> dict:
    """One optimizer step on micro-batches [(input, target, mask)]: the mean loss over all of them on all ranks.
    Returns {"loss", "accuracy", "grad_norm", "skipped_steps"}"""
    sums = {"loss": 0.0, "correct": 0.0, "count": 0.0}
    for input, target, mask in batches:
        with dist.autocast():
            part = supervised_sums(model, input, target, mask)
        part["loss"].backward()
        sums = {name: sums[name] + part[name].detach() for name in sums}
    totals = dist.total(torch.stack([sums["loss"], sums["correct"], sums["count"]]).float())
    dist.sum_gradients(model.parameters())
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    torch._foreach_div_(gradients, totals[2].clamp(min=1))  # from the sum of the losses to their mean
    norm = clip_gradients(model.parameters(), grad_clip)
    loss, correct, count, norm = torch.stack((*totals, norm.float())).tolist()  # the one wait of the step
    good = math.isfinite(loss) and math.isfinite(norm)
    out = step_optimizers(optimizers, good, count)
    return {
        "loss": loss / max(1.0, count),
        "accuracy": correct / max(1.0, count),
        "grad_norm": norm,
        "skipped_steps": out["skipped_steps"]}


class Trainer:
    """Trains any model on batches(split, step, micro) -> (input, target, mask).
    evaluate: model -> {metric: number}, called every eval_interval steps and at the end, on rank 0"""

    holds = ""  # it has no buffer of rollouts

    def __init__(self, model, config, batches, evaluate, tokenizer, logger, dist):
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.batches, self.evaluate = batches, evaluate
        self.logger, self.dist = logger, dist
        self.optimizers = build_optimizers(model, config, dist.device.type)
        self.schedule = CosineLRScheduler(config.learning_rate, config.min_lr, config.warmup_iters,
                                          config.lr_decay_iters or config.max_iters)
        self.checkpoints = CheckpointManager(config.absolute_out_dir, self.write_model, model.suffix,
                                             getattr(model, "identity", dict)())
        self.bad = BadSteps(config.max_bad_steps, self.checkpoints, logger)
        self.step = self.skipped_steps = 0
        self.facts = {}         # metrics of the last evaluation
        self.stopped_by = None  # the signal that ended the run early
        self.evaluated = True   # whether the evaluation that this step may have is done

    def write_model(self, path, **facts):
        save_model(path, self.model, self.tokenizer, **facts)

    def resume(self):
        state = self.checkpoints.load(self.model.weights(), self.optimizers, self.logger.say)
        check_same_step(self.dist, state["step"], self.config.out_dir)
        self.model.load_weights(state["model"])
        self.step, self.facts = state["step"], state["facts"]
        self.skipped_steps, self.evaluated = state["skipped_steps"], state.get("evaluated", True)

    def save(self):
        if self.dist.is_main:
            self.checkpoints.save(self.step, self.model.weights(), self.optimizers, self.facts,
                                  skipped_steps=self.skipped_steps, evaluated=self.evaluated)
        self.dist.barrier()  # it may take longer than an exchange

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
            self.bad.add_not_finite(self.step, metrics)
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
