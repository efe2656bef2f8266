"""Every value of the rewards that read a completion as text."""

import pytest

from core.errors import Mistake
from grpo.reward_functions import text as module
from grpo.reward_functions.registry import REWARDS, check_records
from tests.tiny import expect_rewards, rewards_of

BOMB = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;">]><a>&y;</a>'
VALUES = [
    ("exact_match", {"answer": "Paris "}, {"Paris": 1, " Paris\n": 1, "paris": 0, "Paris.": 0, "": 0}),
    ("exact_match", {"answer": 42}, {"42": 1}),  # a number of JSON
    ("contains", {"answer": " Paris"}, {"It is Paris.": 1, "Paris": 1, "paris": 0, "": 0}),
    ("contains", {"answer": " "}, {"": 0, "anything": 0}),
    ("length_penalty", {}, {"": -1, "a" * 19: -1, "a" * 20: 0, "a" * 140: 0.5, "a" * 260: 1, "a" * 380: 0.5,
                            "a" * 500: 0, "a" * 501: -1}),
    ("json_valid", {}, {'{"a": [1, 2.5, null, "x"]}': 1, " [] ": 1, "3": 1, '```json\n{"a": 1}\n```': 1,
                        '{"a": 1': 0, "{'a': 1}": 0, "[1,]": 0, "NaN": 0,
                        "[Infinity]": 0, "": 0, "yes": 0, "```\n[1]\n```\n```\n[2]\n```": 0, "[" * 200000: 0}),
    ("xml_valid", {}, {"<a/>": 1, '<a b="c">d<e/></a>': 1, '<?xml version="1.0"?>\n<a>&lt;</a>': 1,
                       "```xml\n<a/>\n```": 1, "<a>": 0, "<a></b>": 0, "<a/><b/>": 0, "a": 0, "": 0, "<a b=c/>": 0,
                       "<a>\ud800</a>": 0, BOMB: 0, '<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>': 0}),
    ("repetition", {}, {"": 0, "a b c": 0, "a b c d e f": 0, "a a a a": 0, "a a a a a": -0.5,
                        "a b c d a b c d": 4 / 5 - 1, " ".join("a" * 103): 1 / 100 - 1})]


@pytest.mark.parametrize(("name", "record", "values"), VALUES)
def test_every_value(name, record, values):
    expect_rewards(name, values, **record)


@pytest.mark.parametrize(("size", "texts", "expected"), [
    (2, ["a b c", "a b c", "a b c", "d e f"], [0, 0, 1, 1]),  # groups do not see each other
    (3, ["a b c", "a b c", "d e f"], [0.5, 0.5, 1]), (2, ["a b c d", "a b c e", "", ""], [2 / 3, 2 / 3, 0, 0]),
    (2, ["1 2 3", "123"], [1, 1]),  # of words and of characters
    (2, ["abcd", "abce"], [2 / 3, 2 / 3]), (1, ["a", "a"], [0, 0])])  # short texts are compared by characters
def test_diversity_is_the_mean_distance_to_the_rest_of_the_group(size, texts, expected):
    assert rewards_of("diversity_bonus", *texts, settings={"group_size": size}) == pytest.approx(expected)


@pytest.mark.parametrize(("answer", "right", "wrong"), [
    (["6", "six"], ["6", " six"], ["7", "[]"]), (33.0, ["33", "33.0"], ["3", "3.0"]), (2.5, ["2.5"], ["2"]),
    ("33.0", ["33", "33.0"], ["3"]), ([7.0, "x"], ["7", "x"], ["8"]), (6, ["6"], ["7"]), (True, ["True"], ["1"]),
    (-4.0, ["-4"], ["4"])], ids=str)
def test_any_of_a_list_of_answers_is_right_and_whole_numbers_need_no_point(answer, right, wrong):
    for text, value in [(text, 1) for text in right] + [(text, 0) for text in wrong]:
        assert REWARDS["exact_match"].fn(["?"], [text], answer=[answer]) == [value]
        assert REWARDS["exact_match"].fn(["?"], [str(answer)], answer=[answer]) == [not isinstance(answer, list)]
        assert REWARDS["contains"].fn(["?"], [f"so {text}!"], answer=[answer]) == [value]
        marked = f"<SOLUTION>{text.strip()}</SOLUTION>"
        assert REWARDS["math_answer"].fn(["?"], [marked], answer=[answer])[0] == 5 or not value


@pytest.mark.parametrize("name", ["exact_match", "contains", "math_answer", "math_number", "math_verify"])
@pytest.mark.parametrize("answer", [{"value": 1}, [], [["a"]], [{"a": 1}], [None]], ids=str)
def test_an_answer_that_no_completion_can_be_is_refused_at_the_start(name, answer):
    with pytest.raises(Mistake, match="a.jsonl, line 7: .*answer="):
        check_records(name, [{"prompt": "?", "answer": answer, "where": "a.jsonl, line 7"}])


def test_a_search_that_takes_too_long_is_skipped(monkeypatch):
    monkeypatch.setattr(module, "SEARCH_SECONDS", 0.05)
    texts = ["aaa", "a" * 80 + "b", "b", "aa"]
    assert REWARDS["regex"].fn(["?"] * 4, texts, pattern=["^(a|aa)+$"] * 4) == [1.0, None, 0.0, 1.0]
