"""Every part of a server's answer is checked, and what is wrong with it is one line."""

import pytest

from core.generation import Stop
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm_answers import Expected, read_completions, read_scores
from tests.tiny import CAUSAL

END, A, B = CAUSAL.stop_token_id, *CAUSAL.encode("ab")


def expected(sequences=()):
    return Expected("vllm_url=X", 2, 3, set(range(CAUSAL.base_vocab_size)), Stop(CAUSAL, sequences))


def choice(index, ids, logp=None):
    logp = [-0.5] * len(ids) if logp is None else logp
    return {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": logp}}


def answer(*choices, model="m"):
    return {"model": model, "choices": list(choices)}


@pytest.mark.parametrize("choices, sequences, cut", [
    (([A, B, A], [B, END]), (), [True, False]),
    (([A, A, END], [END]), (), [False, False]),  # an end at the last possible token is an end
    (([A, B], [B, B, B]), ("ab",), [False, True])])
def test_completions_come_in_their_order_with_the_mark_of_those_that_were_cut(choices, sequences, cut):
    given = answer(choice(1, choices[1], [-1.0] * len(choices[1])), choice(0, choices[0]))
    assert read_completions(given, "m", expected(sequences)) == [
        (choices[0], [-0.5] * len(choices[0]), cut[0]), (choices[1], [-1.0] * len(choices[1]), cut[1])]


GOOD = choice(0, [B, END])
SHAPE = "did not answer as a vLLM server does, but with"


@pytest.mark.parametrize("given, line", [
    (answer(GOOD, model="old"), "answered with the model 'old', but 'm' was asked for"),
    (answer(GOOD), "with 1 completions of a prompt, not group_size=2"),
    (answer(GOOD, choice(1, [A, B], [-1.0] * 3)), "reports 2 ids for 3 tokens that it drew: the ids are not those"),
    (answer(GOOD, choice(1, [])), "reports 0 ids for 0 tokens"),
    (answer(GOOD, GOOD | {"token_ids": None}), "without token_ids; it must be vLLM 0.10.2 or later"),
    (answer(GOOD, choice(1, [A, B, A], [3.0, 1.0, 2.0])), "reports 3 as a log-probability; start the server with "
                                                         "--logprobs-mode processed_logprobs"),
    (answer(GOOD, choice(1, [A, B, A], [-1.0, float("-inf"), -1.0])), "as a log-probability"),
    (answer(GOOD, choice(1, [A, B, 10**6])), "drew the id 1000000, which the policy never samples"),
    (answer(GOOD, choice(1, [A, B, CAUSAL.mask_token_id])), "which the policy never samples"),
    (answer(GOOD, choice(1, [A, END, B])), "wrote on behind an end of the completion, with .*does not stop at"),
    (answer(GOOD, choice(1, [A, B])), f"ended a completion of 2 tokens at the id {B}, .* before max_new_tokens=3"),
    (answer(GOOD, GOOD | {"logprobs": None}), SHAPE), (answer(GOOD, choice(1, 7, [])), SHAPE),
    (answer(GOOD, choice(1, [A, B, A], ["a", "b", "c"])), SHAPE), (answer(1, 2), SHAPE),
    ("<html>", SHAPE), (None, SHAPE), ({}, SHAPE), ({"choices": 5, "model": "m"}, SHAPE)])
def test_what_is_wrong_is_one_line(given, line):
    with pytest.raises(SamplerError, match=line) as error:
        read_completions(given, "m", expected())
    assert str(error.value).startswith("vllm_url=X ") and "\n" not in str(error.value)


def scores_of(*scores):
    return answer({"index": 0, "prompt_logprobs": list(scores)})


def test_scores_are_those_of_the_tokens_that_were_sent():
    given = scores_of(None, {str(B): {"logprob": -0.1}, str(A): {"logprob": -2.0}}, {str(END): {"logprob": -3.0}})
    assert read_scores(given, [A, END], "m", expected()) == [-2.0, -3.0]


@pytest.mark.parametrize("given", [
    answer(), scores_of(), scores_of(None, {str(A): {"logprob": -1}}, {str(B): {"logprob": -1}}),
    scores_of(None, None, None), scores_of(None, 7, 8),
    scores_of(None, *({str(i): {"logprob": "x"}} for i in (A, END))),
    answer({"prompt_logprobs": "abc"}), "<html>", None])
def test_scores_of_another_shape_or_of_other_tokens_are_one_line(given):
    with pytest.raises(SamplerError, match=f"^vllm_url=X {SHAPE}"):
        read_scores(given, [A, END], "m", expected())
