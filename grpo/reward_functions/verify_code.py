"""Rewards that read a completion as Python code. Only code_execution runs it, and only in a sandbox."""

import re

from grpo.reward_functions.asserts import cut
from grpo.reward_functions.registry import reward
from grpo.reward_functions.text import FENCE
from grpo.reward_functions.verify_math import syntax_tree
from grpo.sandbox.run import run_tests

MAX_CODE = 100_000  # characters; longer code is not parsed


@reward(0, 2)
def code_correctness(prompts, completions, **columns):
    """+1 if the code parses, +0.5 if it is indented by 4s, +0.5 if it says def, class, import or return; 0 if empty."""
    scores = []
    for code in map(extract_code, completions):
        indents = [re.match(r"[ \t]*", line).group() for line in code.splitlines() if line.strip()]
        by_four = any(indents) and all("\t" not in indent and len(indent) % 4 == 0 for indent in indents)
        has_keyword = re.search(r"\b(def|class|import|return)\b", code) is not None
        parses = code.strip() != "" and len(code) <= MAX_CODE and syntax_tree(code, "exec") is not None
        scores.append(1.0 * parses + 0.5 * by_four + 0.5 * has_keyword)
    return scores


def read_tests(tests, **columns):
    """The tests of a record as one text, or as a list of inputs and outputs. Raises ValueError for another form."""
    match tests:
        case [*_] if all(isinstance(x, dict) for x in tests):
            texts = [x.get(key) for x in tests for key in ("input", "output")]
            if all(isinstance(text, str) for text in texts) and "".join(texts[1::2]).strip():
                return tests
        case [*_] if all(isinstance(x, str) for x in tests):
            tests = "\n".join(tests)
    if isinstance(tests, str) and tests.strip() and syntax_tree(tests.encode(errors="surrogatepass"), "exec"):
        return tests
    raise ValueError(f"reward code_execution: tests={tests!r:.200} of a record must be Python code, as a text or a "
                     "list of texts, or a list of {'input': text, 'output': text}, and not blank")


@reward(0, 1, slow=True, check=read_tests)
def code_execution(prompts, completions, tests, preamble=None, *, sandbox_seconds=5.0, sandbox_megabytes=256,
                   sandbox="auto", log_metric, **columns):
    """1 if the code passes the record's `tests` in a limited child process, else 0; None if the machine is full.

    tests: Python code, a text or a list of texts, of which `cut` makes questions if it can; or a list of {"input":
    text, "output": text}, for each of which the code runs as a program that must print that output
    preamble: code that the completion continues, such as imports; None for a record without
    """
    scores = []
    for text, given, before in zip(completions, tests, preamble or [None] * len(tests), strict=True):
        code, judged = extract_code(text), read_tests(given)
        if before and code.strip():
            code = f"{before}\n{code}"
        if isinstance(judged, str):
            judged = cut(judged) or judged
        verdict = run_tests(code, judged, sandbox_seconds, sandbox_megabytes, sandbox) if code.strip() else "failed"
        scores.append(None if verdict == "skipped" else float(verdict == "passed"))
        for name in ("killed", "failed", "skipped"):
            log_metric(f"code_{name}", verdict == name)
        log_metric("unsafe_tests", isinstance(judged, str))  # the code can forge their result
    return scores


def extract_code(text):
    """The last fenced block, as the final answer usually is, or the whole text if there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text
