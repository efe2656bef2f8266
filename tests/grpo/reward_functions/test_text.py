"""Every value of the rewards that read a completion as text."""

import random
import re
import time

import pytest

from grpo.reward_functions import text as module
from grpo.reward_functions.registry import REWARDS
from tests.tiny import expect_rewards, rewards_of


def test_matching_rewards():
    capital = {"Paris": 1.0, " Paris\n": 1.0, "paris": 0.0, "Paris.": 0.0, "": 0.0}
    expect_rewards("exact_match", capital, answer="Paris ")
    expect_rewards("contains", {"It is Paris.": 1.0, "Paris": 1.0, "paris": 0.0, "": 0.0}, answer=" Paris")
    assert rewards_of("exact_match", "42", answer=42) == 1.0, "an answer may be a number of JSON"
    expect_rewards("contains", {"": 0.0, "anything": 0.0}, answer=" ")


def test_length_penalty_is_a_triangle_inside_its_bounds():
    expect_rewards("length_penalty", {"": -1.0, "a" * 19: -1.0, "a" * 20: 0.0, "a" * 140: 0.5, "a" * 260: 1.0,
                                      "a" * 380: 0.5, "a" * 500: 0.0, "a" * 501: -1.0})
    short = {"length_min": 0, "length_max": 10}
    assert rewards_of("length_penalty", "", "a" * 5, "a" * 10, "a" * 11, settings=short) == [0.0, 1.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="length_min=10 < length_max=10"):
        rewards_of("length_penalty", "a", settings={"length_min": 10, "length_max": 10})


def test_json_valid():
    expect_rewards("json_valid", {
        '{"a": [1, 2.5, null, "x"]}': 1.0, " [] ": 1.0, "3": 1.0, '```json\n{"a": 1}\n```': 1.0,
        'Here you are:\n```\n[1]\n```\nBye.': 1.0, "9" * 10000: 1.0, '{"a": 1': 0.0, "{'a': 1}": 0.0, "[1,]": 0.0,
        "NaN": 0.0, "[Infinity]": 0.0, "-Infinity": 0.0, "": 0.0, "yes": 0.0, "```\n[1]\n```\n```\n[2]\n```": 0.0,
        "[" * 200000: 0.0, "[" * 200000 + "]" * 200000: 0.0})


def test_xml_valid():
    bomb = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;">]><a>&y;</a>'
    expect_rewards("xml_valid", {
        "<a/>": 1.0, '<a b="c">d<e/></a>': 1.0, '<?xml version="1.0"?>\n<a>&lt;</a>': 1.0, "```xml\n<a/>\n```": 1.0,
        "<a>": 0.0, "<a></b>": 0.0, "<a/><b/>": 0.0, "a": 0.0, "": 0.0, "<a b=c/>": 0.0, "<a>&x;</a>": 0.0,
        "<a>\ud800</a>": 0.0, "<a>\0</a>": 0.0, bomb: 0.0, '<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>': 0.0})


def test_repetition_is_the_share_of_repeated_word_4_grams():
    expect_rewards("repetition", {"": 0.0, "a b c": 0.0, "a b c d": 0.0, "a b c d e f": 0.0, "a a a a": 0.0,
                                  "a a a a a": -0.5, "a b c d a b c d": 4 / 5 - 1, " ".join("a" * 103): 1 / 100 - 1})


def test_diversity_is_the_mean_distance_to_the_rest_of_the_group():
    def bonus(size, *texts):
        return rewards_of("diversity_bonus", *texts, settings={"group_size": size})

    assert bonus(2, "a b c", "a b c", "a b c", "d e f") == [0.0, 0.0, 1.0, 1.0], "groups do not see each other"
    assert bonus(3, "a b c", "a b c", "d e f") == [0.5, 0.5, 1.0]
    assert bonus(2, "a b c d", "a b c e") == pytest.approx([2 / 3, 2 / 3])
    assert bonus(2, "abcd", "abce") == pytest.approx([2 / 3, 2 / 3]), "short texts are compared by characters"
    assert bonus(2, "", "") == [0.0, 0.0]
    assert bonus(2, "a", "b") == [1.0, 1.0]
    assert bonus(1, "a", "a") == 2 * [0.0]
    with pytest.raises(ValueError, match="3 completions are no groups of 2"):
        bonus(2, "a", "b", "c")


# regular expressions

def search(patterns, texts):
    return REWARDS["regex"].fn(["?"] * len(texts), texts, pattern=patterns)


def test_a_search_that_takes_too_long_is_skipped(monkeypatch):
    endless, text = "^(a|aa)+$", "a" * 80 + "b"
    monkeypatch.setattr(module, "SEARCH_SECONDS", 0.1)
    assert search([endless] * 4, ["aaa", text, "b", "aa"]) == [1.0, None, 0.0, 1.0]
    monkeypatch.setattr(module, "CALL_SECONDS", 0.25)
    began = time.process_time()
    assert search([endless] * 22, ["aaa", *[text] * 20, "aaa"]) == [1.0] + [None] * 21
    assert time.process_time() - began < 1.0, "the time of the call is over: the rest is not searched"


def test_a_search_has_the_result_of_re_for_any_text():
    rng = random.Random(3)
    odd = ["", "\0", "a\0b", "\ud800", "\udfff\ud800", "\ud83d\ude00", "\U0001f600", "a\nb\r\n"]
    patterns = ["^$", "^.$", "^..$", "\0", "\ud800", "[\ud800-\udfff]", r"(?i)É", r"\bz{2}", r"b\Z", "(?s)a.b",
                r"\w\W\w", r"\d{3}-\d{4}"]
    pairs = [(pattern, text) for pattern in patterns for text in [*odd, "call 555-1234 now", "555-123"]]
    pairs += [(rng.choice(patterns), "".join(rng.choices("abzé \n\0\ud800", k=9))) for _ in range(500)]
    expected = [float(re.search(pattern, text) is not None) for pattern, text in pairs]
    assert search(*map(list, zip(*pairs))) == expected
    assert 100 < sum(expected) < len(pairs) - 100


@pytest.mark.parametrize(("pattern", "message"), [
    (None, "needs the field 'pattern' in every record"), (5, "pattern 5 of a record must be a text"),
    ("(a", r"pattern '\(a' of a record: missing \)"), (r"\L", "of a record: missing <"),
    ("a{99999999999}", r"pattern 'a\{9+\}' of a record: repeat count too big"),
    ("a{" + "9" * 5000 + "}", "of a record: Exceeds the limit"), ("(" * 5000 + ")" * 5000, "of a record: .*recursion")])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern, message):
    for refuse in (lambda: REWARDS["regex"].check(pattern=pattern, answer="7"), lambda: search([pattern], ["a"])):
        with pytest.raises(ValueError, match=f"^reward regex.*{message}"):
            refuse()
    REWARDS["regex"].check(pattern="^(a+)+$", answer=None)
