"""What rewards log: means of metrics, columns of the samples."""

import math

import numpy as np
import torch

from grpo.reward_functions.reward_log import Log


def test_a_logged_metric_is_a_mean_over_calls_and_leaves_out_what_is_not_finite():
    log = Log()
    for value in (1.0, torch.tensor(4.0), np.float32(1.0), math.nan, math.inf):
        log.log_metric("x", value)
    assert log.metrics == {"x": (6.0, 3)}


def test_logs_of_calls_with_different_completions_join_in_their_order():
    first, second = Log({"x": (1.0, 1)}, {"a": [1]}), Log({"x": (3.0, 2), "y": (5.0, 1)}, {"b": [2, 3]})
    joined = Log.join([(1, first), (2, second), (1, Log())])
    assert joined == Log({"x": (4.0, 3), "y": (5.0, 1)}, {"a": [1, None, None, None], "b": [None, 2, 3, None]})
    assert first == Log({"x": (1.0, 1)}, {"a": [1]}), "its parts stay as they are"


def test_logs_of_two_rewards_add_up_and_the_same_column_of_the_second_has_its_name():
    log = Log({"x": (1.0, 1)}, {"a": [1, 2]})
    log.add(Log({"x": (2.0, 1)}, {"b": [3, 4], "a": [5, 6]}), "second")
    assert log == Log({"x": (3.0, 2)}, {"a": [1, 2], "b": [3, 4], "second/a": [5, 6]})
