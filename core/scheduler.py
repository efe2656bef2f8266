"""Learning rate: linear warm-up, cosine decay, floor."""

import math


class CosineLRScheduler:
    """lr(step) from step 0: up to learning_rate over warmup_iters, then a half cosine to min_lr at lr_decay_iters."""

    def __init__(self, learning_rate, min_lr, warmup_iters, lr_decay_iters):
        self.learning_rate, self.min_lr = learning_rate, min_lr
        self.warmup_iters, self.lr_decay_iters = warmup_iters, lr_decay_iters

    def lr(self, step):
        if step < self.warmup_iters:
            return self.learning_rate * (step + 1) / self.warmup_iters
        share = min(1.0, (step - self.warmup_iters) / max(1, self.lr_decay_iters - self.warmup_iters))
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * share)) * (self.learning_rate - self.min_lr)
