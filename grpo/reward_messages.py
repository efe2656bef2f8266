"""Messages about rewards that skip completions, or that teach a run nothing."""

from collections.abc import Callable, Iterable

from core.settings.setting import Settings
from grpo.reward_functions.registry import REWARDS
from grpo.rewards import Rewards
from grpo.rollout import Facts

FIRST_STEPS = 3  # this many steps after a start, a message names the rewards that did not vary
REMEDY = ("raise temperature or group_size, use easier problems (harder ones if all are solved), or use a reward with "
          "partial credit")


class RewardMessages:
    """Tells the user when rewards skip completions, and when they teach nothing.

    rewards: a Rewards, or any function rollouts -> Scored; say: prints a line
    """

    def __init__(self, rewards: Callable, config: Settings, say: Callable):
        self.say = say
        self.max_iters = config.max_iters
        self.rewarded = config.rewarded
        self.weights = {}            # {reward: its weight}; empty for a plain function
        if isinstance(rewards, Rewards):
            self.weights = dict(zip(rewards.names, rewards.weights, strict=True))
        self.taught = False          # True once a reward has taught anything in this run; a saved state keeps it
        self.have_skipped = set()    # rewards already reported as skipping completions
        self.first_metrics = []      # metrics of the first FIRST_STEPS steps after the start
        self.first_facts = []        # Facts of the same steps
        self.step_of_message = 0  # the step after which a message said that no reward taught anything

    def add(self, step: int, metrics: dict, facts: Facts) -> None:
        """Records a step. step: its number, from 1"""
        self.taught = self.taught or facts.taught
        for name, completions in facts.skipped.items():
            if completions and name not in self.have_skipped:
                self.have_skipped.add(name)
                self.say(f"step {step}: the reward {name} skipped {completions:.0f} completions; metrics.jsonl counts "
                         f"them as skipped/{name}, and this line is printed only once")
        if not self.rewarded or len(self.first_facts) == FIRST_STEPS:
            return
        self.first_metrics.append(metrics)
        self.first_facts.append(facts)
        if len(self.first_facts) == FIRST_STEPS or step == self.max_iters:
            self.tell_equal_rewards(step)

    def tell_equal_rewards(self, step: int) -> None:
        """Reports if no group of the first steps had different rewards; else names the rewards that were equal within
        every group and not always at their highest value."""
        steps = f"step {step}"
        if len(self.first_facts) > 1:
            steps = f"steps {step - len(self.first_facts) + 1} to {step}"
        means = {}
        for name, weight in self.weights.items():
            values = values_of(self.first_metrics, f"reward/{name}")
            if weight and values:
                means[name] = values
        total = values_of(self.first_metrics, "mean_reward")
        was_useful = any(facts.differed or facts.taught for facts in self.first_facts)
        if total and not was_useful:
            shown = [f"{name} {in_words(values)}" for name, values in means.items()]
            mean = ", ".join(shown) or in_words(total)
            self.say(f"{steps}: within every group all rewards were equal (mean: {mean}), so nothing was learned from "
                     f"them: {REMEDY}")
            self.step_of_message = step
            return
        equal = []
        for name, values in means.items():
            # There is no count if rewards are compared over the whole step, or in rollouts of an older state
            varied = any(facts.varied.get(name, 1) for facts in self.first_facts)
            if not varied and min(values) < REWARDS[name].high:
                equal.append(f"{name} (mean: {in_words(values)})")
        if equal:
            self.say(f"{steps}: within every group these rewards were equal, so they compared no completions: "
                     f"{', '.join(equal)}; {REMEDY}")

    def end(self, step: int, metrics: Iterable[dict]) -> None:
        """Reports at the end of a run if no completion had an advantage, because all groups had equal rewards.
        metrics: the records of the whole run"""
        if self.taught or step == self.step_of_message or not self.rewarded:
            return
        found = "no completion was scored"
        means = values_of(metrics, "mean_reward")
        if means:
            found = f"their mean was {in_words(means)}"
        self.say(f"nothing was learned from the rewards: in all {step} steps the completions of a problem had equal "
                 f"rewards ({found}); read the samples, and run --doctor=True")


def values_of(records: Iterable[dict], key: str) -> list[float]:
    """The values of a metric in the records that have it."""
    return [record[key] for record in records if record.get(key) is not None]


def in_words(values: list[float]) -> str:
    """The range of some values."""
    least = f"{min(values):g}"
    most = f"{max(values):g}"
    if least == most:
        return least
    return f"{least} to {most}"
