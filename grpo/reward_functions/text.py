"""Rewards that read a completion as text: length, form, match with an answer, distance to its group."""

import json
import re
from collections import defaultdict
from xml.etree import ElementTree

import numpy as np
import regex as timed_re  # as re, with a timeout: a pattern such as ^(a|aa)+$ can take years

from core.errors import Mistake
from core.records import answer_texts
from grpo.reward_functions.registry import check_answer, reward

FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)  # the last block may lack its end
SEARCH_SECONDS = 1.0  # CPU time of one search
STRICT_JSON = json.JSONDecoder(parse_constant=int)  # int refuses NaN and Infinity


@reward(-1, 1)
def length_penalty(prompts, completions, *, length_min=20, length_max=500, **columns):
    """-1 outside [length_min, length_max] characters; inside, a triangle: 0 at the ends, 1 at the middle."""
    if length_min >= length_max:
        raise Mistake(f"length_min={length_min} must be below length_max={length_max}; set reward_settings")
    middle = (length_min + length_max) / 2
    scores = []
    for text in completions:
        share = abs(len(text) - middle) / (length_max - middle)  # of the way from the middle to an end
        scores.append(1 - share if share <= 1 else -1.0)
    return scores


@reward(0, 1, check=check_answer)
def exact_match(prompts, completions, answer, **columns):
    """1 if the completion is the record's `answer`, or one of a list, apart from outer white space; else 0."""
    scores = []
    for text, correct in zip(completions, answer, strict=True):
        scores.append(float(text.strip() in stripped_texts(correct)))
    return scores


@reward(0, 1, check=check_answer)
def contains(prompts, completions, answer, **columns):
    """1 if the completion contains the record's `answer`, or one of a list; else 0.

    No completion contains an empty answer.
    """
    scores = []
    for text, correct in zip(completions, answer, strict=True):
        found = any(truth and truth in text for truth in stripped_texts(correct))
        scores.append(float(found))
    return scores


def stripped_texts(answer):
    """The texts of a record's answer without white space around them."""
    return [truth.strip() for truth in answer_texts(answer)]


def check_pattern(pattern, **columns):
    """Raises Mistake unless a record's `pattern` is a valid regular expression."""
    try:
        timed_re.compile(pattern)
    except (timed_re.error, TypeError, ValueError, RecursionError) as error:
        raise Mistake(f"reward regex: pattern {pattern!r} of a record: {error}") from None


@reward(0, 1, check=check_pattern)
def regex(prompts, completions, pattern, **columns):
    """1 if the record's `pattern` is found anywhere in the completion, else 0; None if the search takes too long."""
    scores = []
    for text, expression in zip(completions, pattern, strict=True):
        try:
            found = timed_re.search(expression, text, timeout=SEARCH_SECONDS)
            scores.append(float(found is not None))
        except (TimeoutError, MemoryError):
            scores.append(None)
    return scores


@reward(0, 1)
def json_valid(prompts, completions, **columns):
    """1 if the completion, or its only fenced block, is JSON (NaN and Infinity are not); else 0."""
    return [parses(text, STRICT_JSON.decode) for text in completions]


@reward(0, 1)
def xml_valid(prompts, completions, **columns):
    """1 if the completion, or its only fenced block, is well-formed XML without a DTD; else 0."""
    return [parses(text, read_xml) for text in completions]


@reward(-1, 0)
def repetition(prompts, completions, **columns):
    """Minus the share of word 4-grams that repeat an earlier one: 0 without repeats, towards -1 in a loop."""
    scores = []
    for text in completions:
        found = word_grams(text, 4)
        distinct = set(found)
        scores.append(len(distinct) / len(found) - 1 if found else 0.0)
    return scores


@reward(0, 1)
def diversity_bonus(prompts, completions, *, group_size, **columns):
    """Mean distance (1 - Jaccard of 3-grams) to the rest of the group: 0 if all are alike, 1 if nothing is shared.

    The 3-grams are of words, or of characters if a text has fewer than 3 words. A group of one gets 0.
    """
    scores = []
    for start in range(0, len(completions), group_size):
        rows = distances(completions[start : start + group_size])
        rest = max(len(rows) - 1, 1)
        scores += [sum(row) / rest for row in rows]
    return scores


def distances(texts):
    """1 - Jaccard of the 3-grams of each pair of texts, as rows; 0 for a text and itself. The 3-grams that a pair
    shares are counted for all pairs at once, because a set for each pair takes seconds in a group of hundreds."""
    texts_with = defaultdict(list)  # {3-gram: the texts that have it}
    for i, text in enumerate(texts):
        for gram in three_grams(text):
            texts_with[gram].append(i)
    shared = np.zeros((len(texts), len(texts)))
    for i in texts_with.values():
        shared[np.ix_(i, i)] += 1
    count = shared.diagonal()  # of each text's own 3-grams
    union = count[:, None] + count - shared
    return (1 - shared / union).tolist()


@reward(0, 1)
def environment(completions, environment_reward=None, **columns):
    """The sum of the environment's rewards for the turns; 1 is a success."""
    return environment_reward or [0.0] * len(completions)


def parses(text, parse):
    """1.0 if `parse` accepts the only fenced block of a text, or the text if it has no such block; else 0.0."""
    blocks = FENCE.findall(text)
    if len(blocks) == 1:
        text, = blocks
    try:
        parse(text.strip())
    except (ValueError, RecursionError, ElementTree.ParseError):
        return 0.0
    return 1.0


def read_xml(text):
    """Reads a text as XML. Raises ValueError for a DTD: a few nested entities expand to gigabytes."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("a DTD")
    ElementTree.fromstring(text)


def three_grams(text):
    """The set of the word 3-grams; of the character 3-grams if there are none; else of only the text itself."""
    found = word_grams(text, 3)
    if not found:
        found = [text[i : i + 3] for i in range(len(text) - 2)]
    return set(found) or {text}


def word_grams(text, n):
    """The n-grams of words, in order."""
    words = text.split()
    begins = range(len(words) - n + 1)
    return [tuple(words[i : i + n]) for i in begins]
