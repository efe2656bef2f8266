"""Supervised training: the loss of each mode, the optimizer step, the run."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from core.data import masked_positions
from core.distributions import in_parts, token_logp
from core.model import SEQUENCE_SCORER, try_compiled
from core.models import save_model
from core.optim import clip_gradients, set_learning_rate, step_optimizers
from core.run import Run

SQUARED_UP_TO = 2.0  # distance of log-odds up to which the loss of a judge with a teacher is quadratic
COLUMNS = ("loss", "accuracy", "grad_norm", "lr", "tokens_per_second", "skipped_steps")


# The loss of each mode is a sum. Micro-batches and ranks have different numbers of masked tokens, so the mean over all
# tokens is the sum of all losses divided by the sum of all counts; a mean of means would differ.

def supervised_sums(model, input: Tensor, target: Tensor, mask: Tensor) -> tuple:
    """Returns sums over a batch, three scalar tensors: the loss, the correct predictions, and the number of
    predictions.

    input, target: (B, T), for a cls judge input (B, 1 + T); for a judge with a teacher target holds log-odds
    mask: (B, T) True where the loss counts, or the weight of each token
    """
    if model.mode != SEQUENCE_SCORER:
        return token_sums(model, input, target, mask)
    if model.judge_head == "cls":
        return replaced_share_sums(model, input, target)
    return realness_sums(model, input, target)


def token_sums(model, input, target, mask):
    """Computes the cross-entropy of the masked tokens. The logits are computed in parts, to bound memory."""
    position, _ = masked_positions(mask > 0, input.device)                           # (B, M)
    h = model.states(input, position)                                                # (B, M, C)
    target = target.gather(1, position)                                              # (B, M)

    def predicted(h, target):
        """Returns the log-probability of each true token, and True where it is the most likely token."""
        logp = model.project(h).log_softmax(-1)                                      # (K, V)
        is_correct = logp.argmax(-1) == target                                       # (K,)
        return token_logp(logp, target), is_correct

    h = h.flatten(0, 1)                                                              # (B * M, C)
    target = target.flatten()
    logp, is_correct = in_parts(predicted, model.vocabulary, h, target)              # (B * M,) each
    weight = mask.float().to(input.device, non_blocking=True)                        # (B, T)
    weight = weight.gather(1, position).flatten()                                    # (B * M,) 0 on padding
    loss = -(logp * weight).sum()
    correct = (is_correct * weight).sum()
    return loss, correct, weight.sum()


def realness_sums(model, input, target):
    """Computes the binary cross-entropy of 'this is the true token' at every position (ELECTRA, arXiv 2003.10555). With
    a teacher, computes the smooth L1 distance of the log-odds: with a credit_window, a policy's reward is their mean.

    target: the true tokens (B, T), or the teacher's log-odds that the tokens of `input` are true
    """
    logits = model(input)                                                            # (B, T)
    if target.is_floating_point():
        loss = F.smooth_l1_loss(logits, target, reduction="sum", beta=SQUARED_UP_TO)
        is_true = target > 0
    else:
        is_true = input == target
        loss = F.binary_cross_entropy_with_logits(logits, is_true.float(), reduction="sum")
    is_correct = (logits > 0) == is_true
    predictions = loss.new_full((), is_true.numel())
    return loss, is_correct.sum(), predictions


def replaced_share_sums(model, input, target):
    """Computes the squared error of a cls judge, which learns y = x^4 - 2x^3 + 2x, where x is the replaced share of a
    text. An error below 0.1 counts as correct. input: (B, 1 + T), CLS and the filled text"""
    is_replaced = input[:, 1:] != target                                             # (B, T)
    x = is_replaced.float().mean(1)                                                  # (B,)
    y = x**4 - 2 * x**3 + 2 * x  # rises with x, steepest where few tokens are replaced
    error = model(input).sigmoid() - y                                               # (B,)
    loss = error.square().sum()
    is_correct = error.abs() < 0.1
    predictions = loss.new_full((), len(error))
    return loss, is_correct.sum(), predictions


def training_step(
        model,
        batches: list,
        optimizers: list,
        grad_clip: float,
        dist) -> dict:
    """Takes one optimizer step on micro-batches [(input, target, mask)], for the mean loss over all predictions of all
    ranks. Returns {"loss", "accuracy", "grad_norm", "skipped_steps"}"""
    sums = torch.zeros(3, device=dist.device)
    for input, target, mask in batches:
        with dist.autocast():
            loss, correct, predictions = supervised_sums(model, input, target, mask)
        loss.backward()
        sums += torch.stack((loss.detach(), correct, predictions))
    sums = dist.total(sums)
    dist.sum_gradients(model.parameters())
    # So far this is the gradient of a sum. The number of predictions on all ranks, which turns it into the gradient of
    # the mean, is known only now
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    torch._foreach_div_(gradients, sums[2].clamp(min=1))
    norm = clip_gradients(model.parameters(), grad_clip)
    numbers = torch.stack((*sums, norm.float()))
    loss, correct, predictions, norm = numbers.tolist()  # the only wait for the device in a step
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    outcome = step_optimizers(optimizers, is_finite, predictions)
    predictions = max(1.0, predictions)
    return {
        "loss": loss / predictions,
        "accuracy": correct / predictions,
        "grad_norm": norm,
        "skipped_steps": outcome["skipped_steps"]}


class Trainer(Run):
    """Trains any model on batches(split, step, micro) -> (input, target, mask).
    evaluation: model -> {metric: number}, called every eval_interval steps and at the end, on every rank"""

    def __init__(
            self,
            model,
            config,
            batches: Callable,
            evaluation: Callable,
            tokenizer,
            logger,
            dist):
        identity = model.identity()
        super().__init__(model, self.write_model, identity, config, logger, dist)
        self.model = model
        self.tokenizer = tokenizer
        self.batches = batches
        self.evaluation = evaluation
        if config.compile:
            model.states = torch.compile(model.states)
            try_compiled(torch.compile(torch.neg), torch.zeros(2, device=dist.device))

    def write_model(self, path: str, **facts) -> None:
        save_model(path, self.model, self.tokenizer, **facts)

    def begin(self) -> None:
        """Starts the clock of tokens_per_second."""
        self.since = time.monotonic()  # when the last record was logged
        self.tokens = 0                # trained on since then

    def finish(self) -> None:
        export = self.config.export
        if export and self.dist.is_main and self.stopped_by is None:
            facts = {"step": self.step} | self.last_evaluation
            save_model(export, self.model, self.tokenizer, torch.float16, **facts)

    def train_step(self) -> dict:
        c = self.config
        has_dropout = c.dropout > 0
        self.model.train(has_dropout)
        if has_dropout:  # seeded by the step, so that a resumed run draws the same masks
            seed = hash((c.seed, self.dist.rank, self.step))
            torch.manual_seed(seed)
        batches = []
        for micro in range(c.gradient_accumulation_steps):
            batch = self.batches("train", self.step, micro)
            batches.append(batch)
        lr = self.schedule.lr(self.step)
        set_learning_rate(self.optimizers, lr)
        metrics = training_step(self.model, batches, self.optimizers, c.grad_clip, self.dist)
        self.step += 1
        if metrics["skipped_steps"]:
            self.bad.add_not_finite(self.step, metrics)
        else:
            self.bad.reset()
        self.skipped_steps += metrics["skipped_steps"]
        for input, _, _ in batches:
            self.tokens += input.numel() * self.dist.world
        return metrics | {"lr": lr}

    def log_step(self, metrics: dict) -> None:
        c = self.config
        if self.step % c.log_interval == 0 or self.step == c.max_iters:
            seconds = time.monotonic() - self.since
            metrics["tokens_per_second"] = self.tokens / seconds
            metrics["skipped_steps"] = self.skipped_steps
            self.logger.log(self.step, metrics)
            self.begin()

    @torch.no_grad()
    def evaluate(self) -> dict:
        self.model.eval()
        with self.dist.autocast():
            metrics = self.evaluation(self.model)
        self.last_evaluation = metrics
        self.logger.log(self.step, metrics, show=False)
        shown = [f"{name} {value:.4f}" for name, value in metrics.items()]
        self.logger.say("  validation: " + ", ".join(shown))
        return metrics
