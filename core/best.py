"""The best model so far by a held-out metric, keep_best."""

import math
import re
from dataclasses import dataclass

from core.errors import Mistake
from core.settings.setting import shown

# Of all other metrics more is better, also of what a user's reward logs and environment measures
LESS_IS_BETTER = re.compile(
    r"eval/(truncated|code_(failed|killed|skipped)|unsafe_tests|gym_unread|unread_answers|environment/failed)|val_loss")
NEITHER_IS_BETTER = re.compile(
    r"eval/(entropy|kl|completion_length|std_reward|unique_completions|distinct_words|environment/turns)|mean_score/.*")


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    metric: the setting keep_best; step: None before the first evaluation
    """
    metric: str | None = None
    value: float | None = None
    step: int | None = None

    @property
    def direction(self):
        """The best value of the metric is the highest or the lowest."""
        return "lowest" if LESS_IS_BETTER.fullmatch(self.metric) else "highest"

    def check(self, found):
        """Raises Mistake if an evaluation, which found {metric: number}, lacks the metric."""
        if self.metric not in (None, *found):
            raise Mistake(f"keep_best={shown(self.metric)} must be one of the metrics of an evaluation: "
                          f"{', '.join(found)}")

    def loses_to(self, found):
        """True if an evaluation is better. A tie is not, nor what was not measured or is not finite."""
        value = found.get(self.metric, math.nan)
        if not math.isfinite(value):
            return False
        if self.step is None:
            return True
        if self.direction == "lowest":
            return value < self.value
        return value > self.value
