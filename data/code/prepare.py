"""Generates small Python functions with tests: writes prompts.jsonl and meta.json beside this file.

python data/code/prepare.py                          4000 functions from about fifty families, evenly
python data/code/prepare.py --problems=10000 --seed=1
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A prompt is "Write plus(n) that returns n plus 7.", and its completion is the whole function. The tests call the
function with edge cases and random arguments. The expected results come from the family's reference function, which
computes them in another way than the completion.
"""

import bisect
import heapq
import itertools
import math
import operator
import os
import pathlib
import random
import re
import string
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import Mistake, run_script
from core.records import write_prompts
from core.settings.setting import Settings
from core.tokenizer import named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
OPENINGS = ("Write {f} that returns {what}.\n", "Define {f} to return {what}.\n", "{f} returns {what}.\n")
ARGUMENTS = {"number": "n x a b num", "count": "n number count limit", "text": "s text word line phrase",
             "numbers": "xs nums row items data", "words": "words names parts tags",
             "table": "d ages bag box", "key": "key name k"}  # kind of argument: its possible names
WORDS = ["apple", "pear", "noon", "level", "tree", "moon", "banana", "sky", "river", "eye", "sun", "cherry", "kiwi",
         "plum", "otter", "radar"]
LETTERS = string.ascii_lowercase
PIECES = ("re", "un", "pre", "my_", "# ", "> ", "Mr. ", "...", "!", "?", "ing", "ed", "s", "ly", " or so")
SIGNS = ("-", "_", ", ", "; ", " + ", "/", ":", " and ", "|", ".")
BANDS = tuple((low, low + width) for low in (-20, -9, 0, 1, 5, 10) for width in (3, 9, 40))
UNITS = (("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7),
         ("years", "months", 12), ("feet", "inches", 12), ("yards", "feet", 3), ("meters", "centimeters", 100),
         ("kilograms", "grams", 1000), ("dollars", "cents", 100), ("liters", "milliliters", 1000),
         ("hours", "seconds", 3600), ("days", "minutes", 1440))
LABELS = (("yes", "no"), ("hot", "cold"), ("in", "out"), ("a", "b"), ("on", "off"), ("left", "right"), ("up", "down"))


@dataclass(frozen=True)
class CodeConfig(Settings):
    problems: int = 4000  # number of problems; a tenth of them is for validation
    tokenizer: str = "char"  # char, gpt2 or cl100k_base
    seed: int = 0  # seed of the random numbers
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER


@dataclass(frozen=True)
class Family:
    """Functions that differ only in a constant. In `what` and `body`, {x}, {y} are the arguments, {k} the constant."""
    names: str               # the possible names of the function
    arguments: str           # the kind of each argument, a key of ARGUMENTS
    what: str                # what the function returns, in words
    body: str                # the body of the function, in Python
    reference: Callable      # reference(*arguments, k) computes the expected result
    constants: Sequence = (None,)  # the possible constants


FAMILIES = (
    Family("add plus increase", "number", "{x} plus {k}", "return {x} + {k}",
           lambda x, k: sum((x, k)), range(1, 41)),
    Family("subtract minus lower", "number", "{x} minus {k}", "return {x} - {k}",
           lambda x, k: -(k - x), range(1, 41)),
    Family("multiply times scale", "number", "{x} times {k}", "return {x} * {k}",
           lambda x, k: sum([x] * k), range(2, 31)),
    Family("power raised exponent", "number", "{x} to the power of {k}", "return {x} ** {k}",
           lambda x, k: math.prod([x] * k), range(2, 8)),
    Family("remainder modulo rest", "number", "the remainder of {x} divided by {k}", "return {x} % {k}",
           lambda x, k: x - k * math.floor(x / k), range(2, 31)),
    Family("divide quotient share", "number", "{x} divided by {k}, rounded down", "return {x} // {k}",
           lambda x, k: math.floor(x / k), range(2, 31)),
    Family("divisible is_multiple fits", "number", "whether {x} is a multiple of {k}", "return {x} % {k} == 0",
           lambda x, k: math.gcd(x, k) == k, range(2, 31)),
    Family("above exceeds is_big", "number", "whether {x} is greater than {k}", "return {x} > {k}",
           lambda x, k: max(x, k) != k, range(-20, 41)),
    Family("within inside in_range", "number", "whether {x} is from {k[0]} to {k[1]}",
           "return {k[0]} <= {x} <= {k[1]}", lambda x, k: x in range(k[0], k[1] + 1), BANDS),
    Family("clamp limit_to keep", "number", "{x} limited to the range {k[0]} to {k[1]}",
           "return max({k[0]}, min({k[1]}, {x}))", lambda x, k: sorted((*k, x))[1], BANDS),
    Family("distance gap away", "number", "the distance between {x} and {k}", "return abs({x} - {k})",
           lambda x, k: max(x, k) - min(x, k), range(1, 41)),
    Family("line linear formula", "number", "{k[0]} times {x} plus {k[1]}", "return {k[0]} * {x} + {k[1]}",
           lambda x, k: sum([x] * k[0], k[1]), tuple(itertools.product(range(2, 10), range(1, 10)))),
    Family("convert to_units change", "number", "{x} {k[0]} in {k[1]}", "return {x} * {k[2]}",
           lambda x, k: sum([x] * k[2]), UNITS),
    Family("parity even_odd pick", "number", "{k[0]!r} if {x} is even, else {k[1]!r}",
           "if {x} % 2 == 0:\n    return {k[0]!r}\nreturn {k[1]!r}", lambda x, k: k[x & 1], LABELS),
    Family("positive sign choose", "number", "{k[0]!r} if {x} is positive, else {k[1]!r}",
           "return {k[0]!r} if {x} > 0 else {k[1]!r}", lambda x, k: k[max(x, 0) == 0], LABELS),
    Family("digit_sum digits sum_digits", "count", "the sum of the digits of {x}",
           "return sum(int(c) for c in str({x}))", lambda x, k: sum(x // 10**i % 10 for i in range(9))),
    Family("sum_to triangle add_up", "count", "the sum of the numbers from 1 to {x}",
           "return {x} * ({x} + 1) // 2", lambda x, k: sum(range(x + 1))),
    Family("choose pick best", "number number", "the {k[0]} of {x} and {y}", "return {k[1]}({x}, {y})",
           lambda x, y, k: sorted((x, y))[k[1] == "max"], (("larger", "max"), ("smaller", "min"))),
    Family("combine mix weigh", "number number", "{x} plus {k} times {y}", "return {x} + {k} * {y}",
           lambda x, y, k: sum([y] * k, x), range(2, 31)),
    Family("close near alike", "number number", "whether {x} and {y} are at most {k} apart",
           "return abs({x} - {y}) <= {k}", lambda x, y, k: x in range(y - k, y + k + 1), range(1, 31)),
    Family("prefix prepend put_before", "text", "{k!r} followed by {x}", "return {k!r} + {x}",
           lambda x, k: f"{k}{x}", PIECES),
    Family("suffix append put_after", "text", "{x} followed by {k!r}", "return {x} + {k!r}",
           lambda x, k: f"{x}{k}", PIECES),
    Family("repeat copies again", "text", "{x} repeated {k} times", "return {x} * {k}",
           lambda x, k: "".join(x for _ in range(k)), range(2, 10)),
    Family("count count_letter how_often", "text", "how often {k!r} occurs in {x}", "return {x}.count({k!r})",
           lambda x, k: sum(c == k for c in x), LETTERS),
    Family("vowels count_vowels vowel_count", "text", "the number of vowels in {x}",
           "return sum(c in 'aeiou' for c in {x}.lower())", lambda x, k: len(re.findall("[aeiouAEIOU]", x))),
    Family("reverse backwards mirror", "text", "{x} spelled backwards", "return {x}[::-1]",
           lambda x, k: "".join(reversed(x))),
    Family("reverse_words turn last_first", "text", "the words of {x} in reverse order",
           "return ' '.join({x}.split()[::-1])", lambda x, k: " ".join(reversed(re.findall(r"\S+", x)))),
    Family("replace swap exchange", "text", "{x} with each {k[0]!r} replaced by {k[1]!r}",
           "return {x}.replace({k[0]!r}, {k[1]!r})", lambda x, k: k[1].join(x.split(k[0])),
           tuple(itertools.permutations("aeon_ *", 2))),
    Family("starts begins opens", "text", "whether {x} starts with {k!r}", "return {x}.startswith({k!r})",
           lambda x, k: x[: len(k)] == k, PIECES),
    Family("first head take", "text", "the first {k} characters of {x}", "return {x}[:{k}]",
           lambda x, k: "".join(c for i, c in enumerate(x) if i < k), range(2, 16)),
    Family("last tail ending", "text", "the last {k} characters of {x}", "return {x}[-{k}:]",
           lambda x, k: x[max(0, len(x) - k) :], range(2, 16)),
    Family("remove without drop", "text", "{x} without the letter {k!r}", "return {x}.replace({k!r}, '')",
           lambda x, k: "".join(c for c in x if c != k), LETTERS),
    Family("case change_case letters", "text", "{x} in {k} case", "return {x}.{k}()",
           lambda x, k: "".join(getattr(str, k)(c) for c in x), ("upper", "lower")),
    Family("palindrome symmetric same", "text", "whether {x} reads the same backwards", "return {x} == {x}[::-1]",
           lambda x, k: all(x[i] == x[-1 - i] for i in range(len(x)))),
    Family("is_long longer too_long", "text", "whether {x} has more than {k} characters", "return len({x}) > {k}",
           lambda x, k: bool(x[k:]), range(2, 21)),
    Family("word_count count_words how_many", "text", "the number of words in {x}", "return len({x}.split())",
           lambda x, k: len(re.findall(r"\S+", x))),
    Family("pad fill widen", "text", "{x} left-padded with {k[0]!r} to length {k[1]}",
           "return {x}.rjust({k[1]}, {k[0]!r})", lambda x, k: k[0] * (k[1] - len(x)) + x,
           tuple(itertools.product("*.0-", range(4, 16)))),
    Family("multiples select only", "numbers", "the numbers in {x} divisible by {k}",
           "return [v for v in {x} if v % {k} == 0]", lambda x, k: [v for v in x if math.gcd(v, k) == k], range(2, 13)),
    Family("big_ones filter_above over", "numbers", "the numbers in {x} above {k}",
           "return [v for v in {x} if v > {k}]", lambda x, k: [v for v in x if max(v, k) != k], range(-10, 21)),
    Family("sum_above total add_big", "numbers", "the sum of the numbers in {x} above {k}",
           "return sum(v for v in {x} if v > {k})", lambda x, k: sum(sorted(x)[bisect.bisect(sorted(x), k) :]),
           range(-10, 21)),
    Family("count_below low under", "numbers", "how many numbers in {x} are below {k}",
           "return len([v for v in {x} if v < {k}])", lambda x, k: sum(min(v, k) != k for v in x), range(-10, 21)),
    Family("scale_all multiply_all times_each", "numbers", "each number in {x} times {k}",
           "return [v * {k} for v in {x}]", lambda x, k: [sum([v] * k) for v in x], range(2, 21)),
    Family("shift add_each raise_all", "numbers", "each number in {x} plus {k}", "return [v + {k} for v in {x}]",
           lambda x, k: [sum((v, k)) for v in x], range(1, 31)),
    Family("largest maximum top", "numbers", "the largest number in {x}, or {k} if empty",
           "return max({x}, default={k})", lambda x, k: [k, *sorted(x)][-1], range(-5, 11)),
    Family("total add_up sum_all", "numbers", "the sum of the numbers in {x}, plus {k}", "return sum({x}) + {k}",
           lambda x, k: sum([k, *x]), range(1, 31)),
    Family("every step thin_out", "numbers", "every {k}th item of {x}, from the first on", "return {x}[::{k}]",
           lambda x, k: [v for i, v in enumerate(x) if i % k == 0], range(4, 10)),
    Family("skip drop rest", "numbers", "{x} without the first {k} items", "return {x}[{k}:]",
           lambda x, k: [v for i, v in enumerate(x) if i >= k], range(2, 10)),
    Family("contains has includes", "numbers", "whether {k} is in {x}", "return {k} in {x}",
           lambda x, k: x.count(k) > 0, range(-10, 31)),
    Family("all_above every_big high", "numbers", "whether all numbers in {x} exceed {k}",
           "return all(v > {k} for v in {x})", lambda x, k: not [v for v in x if v <= k], range(-10, 21)),
    Family("top best highest", "numbers", "the {k} largest numbers in {x}, largest first",
           "return sorted({x}, reverse=True)[:{k}]", lambda x, k: heapq.nlargest(k, x), range(2, 10)),
    Family("join glue connect", "words", "{x} joined with {k!r}", "return {k!r}.join({x})",
           lambda x, k: "".join(w + k for w in x).removesuffix(k), SIGNS),
    Family("long_words wide longer", "words", "the words in {x} with more than {k} letters",
           "return [w for w in {x} if len(w) > {k}]", lambda x, k: [w for w in x if w[k:]], range(1, 10)),
    Family("starting filter_by pick", "words", "the words in {x} that start with {k!r}",
           "return [w for w in {x} if w.startswith({k!r})]", lambda x, k: [w for w in x if w[:1] == k], LETTERS),
    Family("mark decorate add_to_each", "words", "each word in {x} followed by {k!r}",
           "return [w + {k!r} for w in {x}]", lambda x, k: [f"{w}{k}" for w in x], PIECES),
    Family("lookup get find", "table key", "the value of {y} in {x}, or {k} if absent",
           "return {x}.get({y}, {k})", lambda x, y, k: {y: k, **x}[y], range(-5, 11)),
    Family("keys_above rich top", "table", "the sorted keys of {x} valued above {k}",
           "return sorted(v for v in {x} if {x}[v] > {k})",
           lambda x, k: sorted(key for key, value in x.items() if max(value, k) != k), range(-10, 21)),
    Family("total sum_values amount", "table", "the sum of the values of {x}, plus {k}",
           "return sum({x}.values()) + {k}", lambda x, k: sum([k, *(x[key] for key in x)]), range(1, 31)),
    Family("raise_values multiply_values grow", "table", "{x} with each value times {k}",
           "return {{v: {x}[v] * {k} for v in {x}}}", lambda x, k: {key: sum([n] * k) for key, n in x.items()},
           range(2, 21)),
)


def variants(family):
    """Every variant of a family, as (function name, argument names, opening of the prompt, constant)."""
    choices = itertools.product(*(ARGUMENTS[kind].split() for kind in family.arguments.split()))
    arguments = [names for names in choices if len(set(names)) == len(names)]
    return list(itertools.product(family.names.split(), arguments, OPENINGS, family.constants))


def examples(rng, kind, k):
    """Values for one kind of argument: edge cases, values near the constant k, and random values."""
    constants = k if isinstance(k, tuple) else (k,)
    near = [c + d for c in constants if isinstance(c, int) for d in (-1, 0, 1)]
    pieces = [c for c in constants if isinstance(c, str)]
    spelled = ["".join(rng.choices(LETTERS, k=n)) for n in near if 0 <= n <= 40]

    def numbers(n):
        return [rng.randint(-30, 30) for _ in range(n)]

    if kind == "number":
        return [0, 1, -1, 2, *near, *numbers(2)]
    if kind == "count":
        return [0, 1, 2, 10, *(rng.randint(11, 999) for _ in range(3))]
    if kind == "text":
        return ["", "a", "noon", "Hello World", *pieces, *(f"{p}b{p}" for p in pieces), *spelled,
                *(" ".join(rng.choices(WORDS, k=n)) for n in (2, 4))]
    if kind == "numbers":
        return [[], *([n] for n in near), near, [2 * n for n in near], *map(numbers, (1, 5, 11))]
    if kind == "words":
        apart = [w for p in pieces for w in (p, f"{p}b", f"b{p}")]
        return [[], ["a"], *filter(None, (spelled, apart)), *(rng.sample(WORDS, 4) for _ in range(2))]
    if kind == "table":
        return [{}, *(dict(zip(rng.sample(WORDS, 6), values)) for values in (near, *map(numbers, (1, 4, 6, 6))))]
    assert kind == "key", kind
    return WORDS


def tests_of(rng, family, name, k):
    """Assert statements on distinct arguments, drawn again until no constant function passes all of them."""
    kinds = family.arguments.split()
    while True:
        first, *others = (examples(rng, kind, k) for kind in kinds)
        drawn = [(x, *(pick(column) for column in others)) for pick in (operator.itemgetter(0), rng.choice)
                 for x in first]
        calls = {repr(call): call for call in drawn}
        expected = [repr(family.reference(*call, k)) for call in calls.values()]
        if len(set(expected)) > 1:
            return "\n".join(f"assert {name}({', '.join(map(repr, call))}) == {result}"
                             for call, result in zip(calls.values(), expected, strict=True))


def problem(rng, family, name, arguments, opening, k):
    """The record of a function of the family with these names and this constant."""
    words = dict(zip("xy", arguments)) | {"k": k}
    signature = f"{name}({', '.join(arguments)})"
    code = f"def {signature}:\n" + textwrap.indent(family.body.format(**words), "    ")
    return {"prompt": opening.format(f=signature, what=family.what.format(**words)),
            "tests": tests_of(rng, family, name, k), "completion": code, "answer": code, "entry_point": name}


def problems(count, seed):
    """`count` distinct records, as evenly from the families as their sizes allow."""
    rng = random.Random(seed)
    pools = [[(family, *variant) for variant in variants(family)] for family in FAMILIES]
    most = sum(map(len, pools))
    if not 20 <= count <= most:
        raise Mistake(f"problems={count} must be 20 to {most}, the number of distinct ones")
    rounds = itertools.zip_longest(*(rng.sample(pool, len(pool)) for pool in pools))
    dealt = (variant for deal in rounds for variant in deal if variant)
    return [problem(rng, *variant) for variant in itertools.islice(dealt, count)]


def main(argv):
    config, _ = load_config(CodeConfig, argv)
    records = problems(config.problems, config.seed)
    write_prompts(config.out, records, named_tokenizer(config.tokenizer), families=len(FAMILIES))


if __name__ == "__main__":
    run_script(main)
