"""The reward math_verify: answers in LaTeX, and what takes for ever."""

from types import SimpleNamespace

import pytest

from grpo.reward_functions.verify_latex import math_verify
from grpo.rewards import Rewards
from tests.tiny import config

pytest.importorskip("math_verify")


def scored(text, answer):
    """(score, metrics) of one completion."""
    metrics = {}
    score, = math_verify([""], [text], [answer], log_metric=metrics.__setitem__)
    return score, metrics


@pytest.mark.parametrize("answer, text, score", [
    (r"\frac{1}{2}", "so $0.5$", 1), (r"\frac12", r"\boxed{1/2}", 1), (r"\frac12", r"\boxed{2}", 0),
    (r"50\%", r"$\frac{1}{2}$", 1), (r"2\sqrt{3}", r"$\sqrt{12}$", 1), (r"2\sqrt{3}", r"$\sqrt{13}$", 0),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1), ("x^2+2x+1", r"\boxed{(x-1)^2}", 0), (r"\{1,2\}", r"$\{2,1\}$", 1),
    ("[0,1)", "$[0,1)$", 1), ("[0,1)", "$[0,1]$", 0), ("(1,2)", "the point $(1, 2)$.", 1), (r"\pi", r"$\pi$", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}1\\2\end{pmatrix}$", 1), (r"x \in [2,3]", "$[2,3]$", 1),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1), ("42", "It is 42.", 1), ("42", "1,042", 0), ("42", "", 0),
    ("42", r"42, no: \boxed{41}", 0), ("42", r"\boxed{41}, no: \boxed{42}", 0), ("42", "$42$ or $41$", 0),
    ("So it is $\\frac34$.", "0.75", 1), (r"Adding gives \boxed{7}.", "$7$", 1),
    ("42", r"\boxed{__import__('os')}", 0)])
def test_an_answer_in_latex_is_compared_by_its_value(answer, text, score):
    assert scored(text, answer) == (score, {"unread_answers": False})


@pytest.mark.parametrize("answer", ["", " "])
def test_an_answer_of_the_record_that_cannot_be_read_skips_the_completion(answer):
    assert scored("$3$", answer) == (None, {"unread_answers": True})


@pytest.mark.slow
def test_a_completion_that_would_take_for_ever_is_wrong_after_seconds_or_late_and_the_others_are_scored():
    completions = ["$42$", "$9^{9^{9^{9}}}$", r"\boxed{99999999!}", "$41$"]
    for seconds, hanging in ((25.0, 0), (3.0, None)):
        rewards = Rewards(config(reward_functions=("math_verify",), reward_workers=2, reward_timeout=seconds))
        texts = SimpleNamespace(prompts=[""] * 4, completions=completions, completion_ids=None,
                                columns={"answer": ["42"] * 4})
        try:
            rewards.score(SimpleNamespace(prompts=[""], completions=["1"], completion_ids=None, columns={"answer": ["1"]}), 1)
            values, _ = rewards.score(texts, 4)
        finally:
            rewards.close()
        values = [None if x != x else x for x in values["math_verify"].tolist()]
        if hanging is None:
            assert values[0] == 1 and None in values[1:3]
        else:
            assert values == [1, 0, 0, 0]
