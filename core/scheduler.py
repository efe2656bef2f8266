"""The learning rate: linear warmup, then cosine decay, then constant."""

import math


class CosineLRScheduler:
    """lr(step) is the learning rate of an optimizer step, counted from 0.

    It rises linearly to learning_rate in warmup_iters steps, falls along a half cosine to min_lr (None: a tenth
    of learning_rate) at step lr_decay_iters, and stays there.
    """

    def __init__(self, learning_rate, min_lr, warmup_iters, lr_decay_iters):
        self.learning_rate = learning_rate
        self.min_lr = learning_rate / 10 if min_lr is None else min_lr
        self.warmup_iters, self.lr_decay_iters = warmup_iters, lr_decay_iters

    def lr(self, step):
        if step < self.warmup_iters:
            return self.learning_rate * (step + 1) / self.warmup_iters
        length = max(1, self.lr_decay_iters - self.warmup_iters)
        share = min(1.0, (step - self.warmup_iters) / length)
        height = 0.5 * (1 + math.cos(math.pi * share))
        return self.min_lr + height * (self.learning_rate - self.min_lr)
