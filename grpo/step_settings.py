"""The settings of a step: only the parts of a config that the phases of grpo/grpo_training_step.py need."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from core.settings.setting import Settings
from grpo.losses import Objective
from grpo.shaping import gdpo, kl_in_reward, mask_truncated, overlong_buffer, train_pass_k

if TYPE_CHECKING:
    from grpo.policies.policy import Policy


@dataclass(frozen=True)
class StepSettings:
    """The settings of one step with one policy."""
    objective: Objective           # the row of OBJECTIVES, with the overrides of settings
    temperature: float             # of the distribution that tokens are drawn from and scored under
    kl_estimator: str              # a name in KL_ESTIMATORS: how the KL to the reference is measured
    kl_beta: float                 # weight of the KL in the loss; 0 where the reward has it
    shapes: tuple[Callable, ...]   # functions of grpo/shaping.py that change rewards, in this order
    zero_std: str                  # treatment of groups of equal rewards: keep, drop, resample
    ratio_to: str                  # the denominator of the ratio: policy or sampler
    epochs: int                    # passes over the rollouts of an iteration
    minibatches: int               # optimizer steps in one pass
    batch_size: int                # problems per micro-batch, ...
    micro_batch_tokens: int | None  # ... or tokens per micro-batch
    grad_clip: float               # largest norm of the gradient; 0: no clipping
    sampler: str | None            # a sampler in other processes, if its probabilities must match the policy's

    @classmethod
    def of(cls, config: Settings, policy: "Policy") -> Self:
        """Makes the settings from a GRPOConfig."""
        objective = config.objective_row
        elsewhere = config.sampler != "local" and config.fill_estimator == "trajectory"
        return cls(
            objective=objective,
            temperature=config.temperature,
            kl_estimator=config.kl_estimator_of(policy),
            kl_beta=0.0 if config.kl_in_reward else config.kl_weight,
            shapes=shapes_of(config),
            zero_std=config.zero_std,
            ratio_to=config.ratio_to,
            epochs=config.ppo_epochs,
            minibatches=config.minibatches,
            batch_size=config.batch_size,
            micro_batch_tokens=config.micro_batch_tokens,
            grad_clip=config.grad_clip,
            sampler=config.sampler if elsewhere else None)

    @property
    def steps(self) -> int:
        """The optimizer steps of an iteration."""
        return self.epochs * self.minibatches


def shapes_of(config: Settings) -> tuple[Callable, ...]:
    """The functions of grpo/shaping.py that the settings turn on, in order: (rollouts, scored, rewards) ->
    (rollouts, scored)."""
    shapes = []
    if config.baseline == "gdpo":
        shapes.append(gdpo)
    if config.train_pass_k > 1:
        shapes.append(partial(train_pass_k, k=config.train_pass_k))
    if config.overlong_buffer > 0:
        shapes.append(partial(overlong_buffer, buffer=config.overlong_buffer))
    if config.kl_in_reward:
        shapes.append(partial(kl_in_reward, beta=config.kl_weight))
    if config.mask_truncated:
        shapes.append(mask_truncated)
    return tuple(shapes)
