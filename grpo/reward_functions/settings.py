"""The settings of rewards, and the presets of rewards for kinds of tasks."""

import math
from dataclasses import dataclass

from core.settings.ranges import check_choices, check_ranges

PRESETS = {"fill_in": ("judge",), "math": ("math_format", "math_answer", "math_number"),
           "code": ("code_correctness", "length_penalty"), "general": ("length_penalty",),
           "reasoning": ("math_format", "length_penalty")}
PRESET_SUCCESS = {"math": "math_answer", "reasoning": "math_format"}  # the reward that decides what is correct
CHOICES = {"task_type": PRESETS, "reward_normalisation": ("none", "group")}
RANGES = {"reward_workers": "[0, 1e3]", "reward_timeout": "(0, 1e6]", "train_pass_k": "[1, 1e5]",
          "length_min": "[0, 1e9]", "length_max": "[1, 1e9]"}


@dataclass(frozen=True)
class RewardConfig:
    """The settings that say which rewards completions get."""

    # rewards: python grpo/rewards.py lists them
    task_type: str = "fill_in"                # a preset of rewards: fill_in (the judge), math, code, general, reasoning
    reward_functions: tuple[str, ...] = ()    # names of rewards; (): the preset's
    reward_weights: tuple[float, ...] = ()    # one for each reward; (): all 1.0
    reward_normalisation: str = "none"        # group: each reward is normalised within its group before they are added
    reward_file: str | None = None            # a Python file of yours with more, as TRL calls them
    reward_settings: dict | None = None       # {keyword-only parameter of a function of reward_file: value}
    reward_workers: int = 2                   # processes for slow rewards, such as those that run code; 0: they
                                              # run in the training process, without a deadline
    reward_timeout: float = 30.0              # seconds for a step's slow rewards in workers, of which late ones are
                                              # skipped, and for each method of an environment
    success_reward: str | None = None         # a completion is correct if this reward is at its maximum; None: the
                                              # preset's, or the first
    train_pass_k: int = 1                     # 1: maximize the mean reward; k: pass@k, so hard problems count more
    length_min: int = 20                      # length_penalty: characters below which a completion is too short
    length_max: int = 500                     # length_penalty: characters above which it is too long

    def __post_init__(self):
        check_ranges(self, RANGES)
        check_choices(self, CHOICES)
        if self.length_min >= self.length_max:
            raise ValueError(f"length_min={self.length_min} must be below length_max={self.length_max}")
        if self.train_pass_k > 1 and self.reward_normalisation != "none":
            raise ValueError(f"reward_normalisation={self.reward_normalisation!r} changes the rewards that "
                             f"train_pass_k={self.train_pass_k} is made for; set one of them alone")
        if not all(map(math.isfinite, self.reward_weights)):
            raise ValueError(f"reward_weights={self.reward_weights} must be finite numbers")
