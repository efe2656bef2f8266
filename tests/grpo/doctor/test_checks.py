"""Each sentence about a step, and what breaks it."""

from dataclasses import replace

import pytest
import torch

from grpo.doctor.checks import (
    cut_completions,
    duration,
    ends_of_completions,
    first_kl,
    first_ratio,
    gradient,
    lost_characters,
    order_of_passes,
)
from tests.grpo.evaluation.patients import completing, examined, expect, sums

pytestmark = pytest.mark.slow  # it is the number of them that takes the time
OFTEN = {"max_iters": 100, "eval_interval": 10, "sample_interval": 50}


def test_a_healthy_step_is_called_fine(healthy):
    for check, sentence in ((first_ratio, "so the first ratio is 1"), (first_kl, "is 0: both are the same model"),
                            (gradient, "reaches all parts of the model"), (lost_characters, "can write the prompts"),
                            (ends_of_completions, "fit into max_new_tokens=48"), (cut_completions, "0% of the comp")):
        expect(check(healthy), True, sentence)


def test_prompts_are_not_looked_for_in_fill_in(healthy_fill):
    assert lost_characters(healthy_fill) is ends_of_completions(healthy_fill) is cut_completions(healthy_fill) is None


@pytest.mark.parametrize(("check", "changes", "verdict", "sentence", "remedy"), [
    (first_ratio, {"mismatch_max": 0.01}, False, "is not 1 (largest difference 0.01", "cache"),
    (first_ratio, {"mismatch_max": float("nan")}, False, "is not 1", "cache"),
    (first_ratio, {"mismatch_max": 0.3, "float32": False}, True, "is 1", ""),
    (first_ratio, {"mismatch_kl": 0.1, "float32": False}, False, "is not 1", "dtype='float32'"),
    (first_ratio, {"mismatch_max": 0.3, "fill_estimator": "one_step"}, None, "are estimates", "if you mean that"),
    (order_of_passes, {"unmask_order": "confidence"}, None, "the order depends on the policy", "if you mean that"),
    (first_kl, {"mean_kl": 0.1, "float32": False}, False, "should be the same model", "dtype='float32'"),
    (gradient, {"grad_norm": 0.0}, False, "The gradient is 0, so nothing is learned", "see the checks of rewards"),
    (gradient, {"empty_steps": 1}, False, "The gradient is 0, so nothing is learned", "mask_truncated=True"),
    (gradient, {"skipped_steps": 1}, False, "is not finite", "set dtype='float32'"),
    (duration, OFTEN | {"step_seconds": 1.0, "evaluation_seconds": 5.0}, True,
     "A step takes about 1 s, an evaluation 5 s, the run of 100 steps and 11 evaluations 3 min", ""),
    (duration, OFTEN | {"step_seconds": 1.0, "evaluation_seconds": 20.0}, False, "Most of that are evaluations",
     "raise eval_interval=10"),
    (duration, OFTEN | {"step_seconds": 3600.0, "evaluation_seconds": 1.0}, None, "11 evaluations 100 h", "max_iters")])
def test_what_is_measured_decides_the_verdict(healthy, check, changes, verdict, sentence, remedy):
    fields = {key: value for key, value in changes.items() if hasattr(healthy, key)}
    settings = {key: value for key, value in changes.items() if hasattr(healthy.config, key)}
    measured = {key: value for key, value in changes.items() if key in healthy.metrics}
    x = replace(healthy, config=replace(healthy.config, **settings), metrics=healthy.metrics | measured, **fields)
    expect(check(x), verdict, sentence, remedy)


def wrong_sampler(run):
    sample = run.models.policy.sample

    def sample_and_report_less(*arguments):
        rollouts = sample(*arguments)
        return replace(rollouts, old_logp=rollouts.old_logp - 0.25)
    run.models.policy.sample = sample_and_report_less


def wrong_reference(run):
    with torch.no_grad():
        run.models.reference.model.embed.weight.mul_(1.5)


def frozen_layer(run):
    run.models.policy.model.blocks[2].requires_grad_(False)


@pytest.mark.parametrize(("break_it", "check", "sentence", "remedy"), [
    (wrong_sampler, first_ratio, "the first ratio is not 1 (largest difference 0.25", "cache"),
    (wrong_reference, first_kl, "but both should be the same model", "cache"),
    (frozen_layer, gradient, "The gradient is 0 in layer 2:", "without freezing them")])
def test_what_is_wrong_with_the_models_is_found(tmp_path, break_it, check, sentence, remedy):
    run = completing(tmp_path)
    break_it(run)
    expect(check(examined(run)), False, sentence, remedy)


def test_prompts_that_the_tokenizer_cannot_write_are_found(tmp_path):
    run = completing(tmp_path, [record | {"prompt": record["prompt"] + "\u4eca\u65e5"} for record in sums()])
    expect(lost_characters(run), False, "of the characters in the prompts are lost, such as", "whose tokenizer")


def test_an_end_that_cuts_right_completions_is_found(tmp_path):
    def of(**settings):
        return ends_of_completions(completing(tmp_path, **settings))

    expect(of(stop_sequences=("</SOLUTION>",)), True, "no stop sequence cuts them")
    expect(of(stop_sequences=("</SOLUTION>", "<SOLUTION>")), False, "'<SOLUTION>' is inside 100% of", "leave '<SOLU")
    short = of(max_new_tokens=16)
    expect(short, False, "are longer than max_new_tokens=16", "set max_new_tokens=")
    enough = int(short[2].split("=")[1].split(",")[0])
    assert of(max_new_tokens=enough)[0] is True


def test_completions_of_which_most_are_cut_are_found(tmp_path):
    x = examined(completing(tmp_path, max_new_tokens=3))
    expect(cut_completions(x), False, "100% of the completions are cut at max_new_tokens=3", "raise max_new_tokens=3")
