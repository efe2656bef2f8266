"""Held-out evaluation of a generator that completes prompts."""

import numpy as np

from grpo.evaluation.samples import Evaluation, in_numbers, reward_sums, sum_and_count
from grpo.sampling_settings import SamplingSettings
from grpo.step_settings import StepSettings

NOISE_SEED = 99  # seed of the sampling noise of every evaluation, of runs with any seed


class PromptEvaluation(Evaluation):
    """The first eval_problems validation prompts, completed eval_completions times each.

    A completion is correct if the success reward has its highest value, and does not count if that reward skips it.
    Without a success reward there are no accuracies and no pass@k.
    """

    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "completion_length", "truncated")

    def __init__(self, data, reference, rewards, config, dist):
        """data: a PromptConsumer; config: the run's"""
        config = config.for_evaluation(NOISE_SEED)
        super().__init__(reference, rewards, config, dist)
        self.data = data
        self.records = data.records["val"][: config.eval_problems]

    @property
    def batches(self):
        at_once = self.config.sample_rows  # problems per batch, because each gets one greedy completion
        for start in range(0, len(self.records), at_once):
            records = self.records[start : start + at_once]
            end = start + len(records)
            numbers = np.arange(start, end)
            yield 0, self.data.pack(records, numbers)

    def sums(self, policy, step, batch, rollouts, values, config):
        """{metric: (sum, count)} of accuracy, rewards, length, truncation, entropy and KL."""
        sums = reward_sums(values)
        sums |= rollouts.texts.metrics
        settings = StepSettings.of(config, policy)
        sums |= self.model_sums(policy, rollouts, settings)
        return self._accuracy_sums(policy, batch, values) | in_numbers(sums)

    def _accuracy_sums(self, policy, batch, values):
        """{metric: (sum, count) of each problem, (P,) each} of correct completions: the sampled ones, and a greedy one
        for each prompt."""
        if not self.rewards.success:
            return {}
        correct = self.rewards.correct(values)                                       # (N,) NaN where not scored
        groups = correct.view(-1, self.config.group_size)                            # (P, G)
        solved = groups.amax(1)                                                      # (P,) NaN if one is not scored
        settings = SamplingSettings.of(self.config)
        texts = policy.greedy(batch, settings)
        greedy, _ = self.rewards.score(texts, 1, [self.rewards.success])
        return {
            "greedy_accuracy": sum_and_count(self.rewards.correct(greedy)[:, None]),
            "sampled_accuracy": sum_and_count(groups),
            "pass_at_k": sum_and_count(solved[:, None])}
