"""Every part of a server's answer is checked, and what is wrong with it is one line."""

import copy

import pytest
import torch

from core.generation import Stop
from grpo.samplers.sampler import SamplerError
from grpo.samplers.vllm_answers import Expected, read_completions, read_scores
from tests.tiny import CAUSAL

END, A, B = CAUSAL.stop_token_id, *CAUSAL.encode("ab")


def expected(sequences=(), **settings):
    able = torch.ones(CAUSAL.vocab_size, dtype=torch.bool)
    able[CAUSAL.base_vocab_size:] = False
    return Expected("vllm_url=X", 2, 3, able, Stop(CAUSAL, sequences), f"stop_token_ids [{END}]", **settings)


def choice(index, ids, logp=None):
    logp = [-0.5] * len(ids) if logp is None else logp
    return {"index": index, "token_ids": ids, "prompt_token_ids": [A], "logprobs": {"token_logprobs": logp}}


def answer(*choices):
    choices = choices or (choice(1, [A, B, A]), choice(0, [B, END], [-1.0, -2.0]))
    return {"model": "m", "choices": list(choices),
            "usage": {"completion_tokens": sum(len(c["token_ids"]) for c in choices)}}


def test_completions_come_in_their_order_with_the_mark_of_those_that_were_cut():
    assert read_completions(answer(), [A], "m", expected()) == [([B, END], [-1.0, -2.0], False),
                                                                ([A, B, A], [-0.5] * 3, True)]


def test_what_a_server_may_leave_out_is_not_asked_for():
    given = answer()
    del given["usage"]
    for c in given["choices"]:
        del c["prompt_token_ids"]
    assert len(read_completions(given, [A], "m", expected())) == 2


def test_an_end_at_the_last_possible_token_is_an_end():
    given = answer(choice(0, [A, A, END]), choice(1, [END]))
    assert [cut for _, _, cut in read_completions(given, [A], "m", expected())] == [False, False]


def test_a_stop_sequence_is_an_end():
    given = answer(choice(0, [A, B]), choice(1, [B, B, B]))
    assert [cut for _, _, cut in read_completions(given, [A], "m", expected(("ab",)))] == [False, True]


def change(**fields):
    def act(given):
        given["choices"][0] |= fields
    return act


WRONG = {
    "another model": (lambda given: given.update(model="old"), "answered with the model 'old', but 'm' was asked for"),
    "a page": (lambda given: given.clear(), "did not answer as a vLLM server does, but with"),
    "one completion": (lambda given: given["choices"].pop(), "with 1 completions of a prompt, not group_size=2"),
    "equal numbers": (change(index=0), "2 completions of a prompt, not group_size=2"),
    "no ids": (change(token_ids=None), "without token_ids; it must be vLLM 0.10.2 or later"),
    "another prompt": (change(prompt_token_ids=[B, A]), "read other ids than those of the prompt"),
    "no log-probabilities": (change(logprobs=None), "without the log-probabilities of the tokens that it drew"),
    "a missing one": (change(logprobs={"token_logprobs": [-1, None, -1]}), "without the log-probabilities"),
    "fewer ids": (change(token_ids=[A, B]), "reports 2 ids for 3 tokens that it drew: the ids are not those drawn"),
    "no ids at all": (change(token_ids=[], logprobs={"token_logprobs": []}), "reports 0 ids for 0 tokens"),
    "logits": (change(logprobs={"token_logprobs": [3.0, 1.0, 2.0]}), "reports 3 as a log-probability; start the server "
                                                                     "with --logprobs-mode processed_logprobs"),
    "infinity": (change(logprobs={"token_logprobs": [-1.0, float("-inf"), -1.0]}), "as a log-probability"),
    "an id of no token": (change(token_ids=[A, B, 10**6]), "drew the id 1000000, which the policy never samples"),
    "a negative id": (change(token_ids=[A, B, -1]), "drew the id -1, which the policy never samples"),
    "an excluded id": (change(token_ids=[A, B, CAUSAL.mask_token_id]), "which the policy never samples"),
    "no stop": (change(token_ids=[A, END, B]), "wrote on behind an end of the completion .*does not stop there"),
    "another end": (change(token_ids=[A, B], logprobs={"token_logprobs": [-1, -1]}),
                    rf"ended a completion of 2 tokens at the id {B}, which is no end of the run's .*max_new_tokens=3"),
    "ids that are texts": (change(token_ids=["1", "2", "3"]), "did not answer as a vLLM server does, but with"),
    "one id": (change(token_ids=7), "did not answer as a vLLM server does, but with"),
    "log-probabilities that are texts": (change(logprobs={"token_logprobs": ["a", "b", "c"]}), "did not answer as"),
    "a list of them": (change(logprobs=[1, 2, 3]), "did not answer as a vLLM server does, but with"),
    "another count": (lambda given: given.update(usage={"completion_tokens": 9}), "drew 9 tokens but reports 5 ids")}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(name):
    act, line = WRONG[name]
    given = copy.deepcopy(answer())
    act(given)
    with pytest.raises(SamplerError, match=line) as error:
        read_completions(given, [A], "m", expected())
    assert str(error.value).startswith("vllm_url=X ") and "\n" not in str(error.value)


@pytest.mark.parametrize("given", [None, "<html>", [], 3, {"choices": "x", "model": "m"}, {"choices": 5, "model": "m"},
                                   {"choices": [1], "model": "m"}, {"choices": [[]], "model": "m"}])
def test_what_no_server_of_this_kind_answers_is_refused(given):
    for read in (lambda: read_completions(given, [A], "m", expected()),
                 lambda: read_scores(given, [A], 1, "m", expected())):
        with pytest.raises(SamplerError, match="^vllm_url=X did not answer as a vLLM server does"):
            read()


def scores_of(*scores):
    return {"model": "m", "choices": [{"index": 0, "prompt_logprobs": list(scores)}]}


def test_scores_are_those_of_the_tokens_that_were_sent():
    given = scores_of(None, {str(B): {"logprob": -0.1}, str(A): {"logprob": -2.0}}, {str(END): {"logprob": -3.0}})
    assert read_scores(given, [A, A, END], 2, "m", expected()) == [-2.0, -3.0]


@pytest.mark.parametrize("scores", [5, [None, 7, 8], [None, {str(A): 5}, {str(END): 6}], "abc",
                                    [None, {str(A): {"logprob": "x"}}, {str(END): {"logprob": "y"}}]])
def test_scores_of_another_shape_are_one_line(scores):
    given = {"model": "m", "choices": [{"index": 0, "prompt_logprobs": scores}]}
    with pytest.raises(SamplerError, match="^vllm_url=X did not answer as a vLLM server does, but with"):
        read_scores(given, [A, A, END], 2, "m", expected())


@pytest.mark.parametrize("given", [
    {"model": "m", "choices": []}, scores_of(), scores_of(None, {str(A): {"logprob": -1}}),
    scores_of(None, {str(A): {"logprob": -1}}, {str(B): {"logprob": -1}}), scores_of(None, None, None)])
def test_scores_that_are_missing_are_named(given):
    with pytest.raises(SamplerError, match="prompt_logprobs"):
        read_scores(given, [A, A, END], 2, "m", expected())
