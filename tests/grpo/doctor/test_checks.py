"""Each sentence about a step, and what breaks it."""

from dataclasses import replace

import pytest
import torch

from grpo.doctor.checks import (
    duration,
    ends_of_completions,
    first_kl,
    first_ratio,
    gradient,
    in_words,
    left_out_prompts,
    memory,
    prompt,
    stop_token,
)
from grpo.doctor.step import Memory
from tests.grpo.evaluation.patients import completing, examined, expect, filling, solved, sums, unexamined

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return examined(completing(tmp_path_factory.mktemp("healthy")))


@pytest.fixture(scope="module")
def healthy_fill(tmp_path_factory):
    return examined(filling(tmp_path_factory.mktemp("fill")))


def sampling(run, change):
    """The run, with a sampler that changes its rollouts."""
    sample = run.models.policy.sample
    run.models.policy.sample = lambda *arguments: change(sample(*arguments))
    return run


def test_a_sampler_that_reports_other_log_probabilities_is_found(tmp_path, healthy):
    expect(first_ratio(healthy), True, "so the first ratio is 1")
    wrong = sampling(completing(tmp_path), lambda rollouts: replace(rollouts, old_logp=rollouts.old_logp - 0.25))
    x = examined(wrong)
    expect(first_ratio(x), False, "the first ratio is not 1 (largest difference 0.25", "check_model.py")
    expect(first_ratio(replace(x, float32=False)), False, "is not 1", "dtype='float32'")


@pytest.mark.parametrize(("float32", "most", "kl", "fine"), [
    (True, 0.01, 0.0, False), (True, float("nan"), 0.0, False), (False, 0.3, 3e-4, True), (True, 0.3, 3e-4, False)])
def test_bfloat16_may_differ_a_little_and_float32_in_no_token(healthy, float32, most, kl, fine):
    x = replace(healthy, float32=float32, metrics=healthy.metrics | {"mismatch_max": most, "mismatch_kl": kl})
    expect(first_ratio(x), fine, "the first ratio is 1" if fine else "is not 1")


def test_a_reference_that_is_not_the_policy_is_found(tmp_path, healthy):
    expect(first_kl(healthy), True, "the KL to the reference is 0: both are the same model")
    run = completing(tmp_path)
    with torch.no_grad():
        run.models.reference.model.embed.weight.mul_(1.5)
    x = examined(run)
    expect(first_kl(x), False, "but both should be the same model", "check_model.py")
    expect(first_kl(replace(x, float32=False)), False, "the same model", "dtype='float32'")


def test_a_reference_of_your_own_may_differ_but_not_far(healthy):
    own = replace(healthy, config=replace(healthy.config, reference_checkpoint="other"))
    of = lambda kl: first_kl(replace(own, metrics=own.metrics | {"mean_kl": kl}))
    expect(of(0.4), True, "reference_checkpoint=other is 0.4 nats")
    expect(of(3.0), None, "reference_checkpoint=other is 3 nats", "is this the reference that you mean?")


def test_a_run_without_a_reference_says_so(healthy):
    x = replace(healthy, config=replace(healthy.config, kl_beta=0.0))
    expect(first_kl(x), True, "There is no reference (kl_beta=0.0)")


@pytest.mark.parametrize(("metrics", "sentence", "remedy"), [
    ({"grad_norm": 0.0}, "The gradient is 0, so nothing is learned", "see the checks of rewards"),
    ({"empty_steps": 1}, "The gradient is 0, so nothing is learned", "see the checks of rewards"),
    ({"skipped_steps": 1}, "is not finite", "set dtype='float32'")])
def test_a_gradient_that_teaches_nothing_is_found(healthy, metrics, sentence, remedy):
    expect(gradient(healthy), True, "The gradient is not 0: its norm is")
    expect(gradient(replace(healthy, metrics=healthy.metrics | metrics)), False, sentence, remedy)


def test_a_frozen_part_of_the_model_and_a_loss_without_a_token_are_found(tmp_path, healthy):
    run = completing(tmp_path)
    run.models.policy.model.blocks[2].requires_grad_(False)
    expect(gradient(examined(run)), False, "The gradient is 0 in layer 2:", "without freezing them")
    nothing = replace(healthy.trained, train_mask=torch.zeros_like(healthy.trained.train_mask))
    expect(gradient(replace(healthy, trained=nothing)), False, "No token is in the loss", "mask_truncated=True")


def test_where_the_gradient_is_largest_and_smallest_is_told(healthy):
    sizes = {"the embedding": 0.5, "layer 0": 2.5, "layer 1": 0.125}
    norm = {"grad_norm": 2.5625}
    told = gradient(replace(healthy, gradient=sizes, metrics=healthy.metrics | norm))
    expect(told, True, "norm is 2.6, which grad_clip=1 cuts. It is largest in layer 0 (2.5) and smallest in layer 1 (0")
    unclipped = replace(healthy.config, grad_clip=0.0)
    assert "cuts" not in gradient(replace(healthy, gradient=sizes, metrics=healthy.metrics | norm, config=unclipped))[1]


def test_prompts_that_the_tokenizer_cannot_write_are_found(tmp_path, healthy):
    expect(prompt(healthy), True, "The first prompt ends in '7+19='")
    records = [record | {"prompt": record["prompt"] + "\u4eca\u65e5"} for record in sums()]
    run = completing(tmp_path, records)
    expect(prompt(unexamined(run)), False, "of the characters in the prompts are lost, such as", "whose tokenizer")


def test_the_tail_of_a_prompt_has_its_template_and_prefix_escaped(tmp_path):
    run = completing(tmp_path, template="chat", response_prefix="<start_working_out>", max_new_tokens=40)
    expect(prompt(unexamined(run)), True, r"'User: 7+19=\n\nAssistant: <start_working_out>'")


def test_a_chat_template_that_is_not_used_is_worth_a_look(healthy, monkeypatch):
    monkeypatch.setattr(healthy.data.tokenizer, "has_chat_template", True, raising=False)
    expect(prompt(healthy), None, "a chat template that template='plain' does not use", "set template='model'")


def test_fill_in_shows_a_text_with_its_masks(healthy_fill):
    expect(prompt(healthy_fill), True, "where _ is to be filled in")
    assert left_out_prompts(healthy_fill) is None and stop_token(healthy_fill) is None
    assert ends_of_completions(healthy_fill) is None


def test_too_many_long_prompts_are_found(tmp_path, healthy):
    expect(left_out_prompts(healthy), True, "0% of the training prompts are left out because they are longer than 512")
    records = [solved(a, 7) | {"split": "val" if a < 5 else "train"} for a in range(12)]
    x = unexamined(completing(tmp_path, records, max_prompt_length=4))
    expect(left_out_prompts(x), False, "29% of the training prompts", "raise max_prompt_length=4")


def test_an_end_that_cuts_right_completions_is_found(tmp_path, healthy):
    expect(ends_of_completions(healthy), True, "with the token STOP (100), or is cut after max_new_tokens=48")
    x = unexamined(completing(tmp_path, stop_sequences=("</SOLUTION>",)))
    expect(ends_of_completions(x), True, "or the text '</SOLUTION>', or is cut")
    x = unexamined(completing(tmp_path, stop_sequences=("</SOLUTION>", "<SOLUTION>")))
    expect(ends_of_completions(x), False, "The text '<SOLUTION>' is inside 100% of the records' completions", "leave")
    x = unexamined(completing(tmp_path, max_new_tokens=16))
    expect(ends_of_completions(x), False, "are longer", "set max_new_tokens=")
    enough = int(ends_of_completions(x)[2].split("=")[1].split(",")[0])
    assert ends_of_completions(unexamined(completing(tmp_path, max_new_tokens=enough)))[0] is True


def test_completions_that_never_end_are_found(tmp_path, healthy):
    expect(stop_token(healthy), True, "end with a stop token, which the loss sees, and 0 (0%) are cut")
    expect(stop_token(examined(completing(tmp_path, max_new_tokens=3))), False,
           "All 32 completions are cut at max_new_tokens=3", "raise max_new_tokens=3")


def test_completions_of_which_most_are_cut_are_found(healthy):
    rollouts, scored = healthy.sampled[0]
    cut = torch.arange(len(rollouts.target)) % 4 > 0
    x = replace(healthy, sampled=[(replace(rollouts, truncated=cut), scored)])
    expect(stop_token(x), False, "and 24 (75%) are cut", "stop_sequences")


def test_a_stop_token_that_the_loss_does_not_see_is_found(tmp_path):
    def without_last(rollouts):
        last = torch.arange(rollouts.mask.shape[1]) == rollouts.mask.sum(1, keepdim=True) - 1
        return replace(rollouts, train_mask=rollouts.mask * ~last)

    x = examined(sampling(completing(tmp_path), without_last))
    expect(stop_token(x), False, "The loss does not see the stop token", "train_mask")


def test_a_step_that_does_not_fit_into_memory_is_found(healthy):
    of = lambda *megabytes: memory(replace(healthy, memory=Memory(*megabytes)))
    expect(of(300, 900, 1000), True, "300 MB of memory now, and about 900 MB with texts of full length, of the 1000 MB")
    expect(of(300, 960, 1000), False, "about 960 MB", "halve batch_size")
    expect(of(None, 960, None), None, "not measured here", "compare it")


def test_a_run_that_mostly_evaluates_is_found(healthy):
    of = lambda step, evaluation, **settings: duration(replace(
        healthy, step_seconds=step, evaluation_seconds=evaluation, config=replace(healthy.config, **settings)))
    often = {"max_iters": 100, "eval_interval": 10, "sample_interval": 50}
    expect(of(1.0, 5.0, **often), True, "A step takes about 1 s, an evaluation 5 s, the run of 100 steps and 11 evalua")
    expect(of(1.0, 20.0, **often), False, "Most of that are evaluations", "raise eval_interval=10")
    assert "and 14 evaluations" in of(1.0, 1.0, max_iters=101, eval_interval=10, sample_interval=25)[1]
    expect(of(3600.0, 1.0, **often), None, "of 100 steps and 11 evaluations 4 days", "Fewer max_iters")


def test_times_are_told_in_words():
    assert [in_words(x) for x in (0.1234, 12.3, 99, 600, 7300, 90000, 200000)] == [
        "0.12 s", "12 s", "99 s", "10 min", "2 h", "25 h", "2 days"]
