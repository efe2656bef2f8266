"""Rewards that read a completion as Python code. Only code_execution runs it, in a sandbox.

`cut` splits asserts into expressions, which the sandbox evaluates, and claims, which are checked here: for
`assert f(2) == 4` the sandbox evaluates f(2), and the code never sees the 4 (docs/rewards.md).
"""

import ast
import builtins
import copy
import functools
import math
import operator
import re
from typing import NamedTuple

from core.errors import Mistake
from grpo.reward_functions.registry import reward
from grpo.reward_functions.text import FENCE
from grpo.reward_functions.verify_math import syntax_tree
from grpo.sandbox.run import run_tests

MAX_CODE = 100_000  # characters; longer code is not parsed
# The operators and functions that this process applies to an answer. None takes long or makes a value much larger, so
# ** and * are missing
OPERATORS = {
    "Eq": operator.eq, "NotEq": operator.ne, "Is": operator.is_,
    "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge,
    "In": lambda x, values: x in values, "NotIn": lambda x, values: x not in values,
    "Add": operator.add, "Sub": operator.sub, "Div": operator.truediv}
FUNCTIONS = {function.__name__: function for function in (abs, bool, float, list, set, sorted, tuple)}
FUNCTIONS["<math>.fabs"] = math.fabs
FUNCTIONS["<math>.isclose"] = math.isclose
# Raised for tests of other forms, and by answers that do not fit a claim
ERRORS = (KeyError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError)


@reward(0, 2)
def code_correctness(prompts, completions, **columns):
    """+1 if the code parses, +0.5 if it is indented by 4s, +0.5 if it says def, class, import or return; 0 if empty."""
    scores = []
    for code in map(extract_code, completions):
        score = 0.0
        if code.strip() and len(code) <= MAX_CODE and syntax_tree(code, "exec"):
            score += 1
        lines = filter(str.strip, code.splitlines())
        indents = [re.match(r"[ \t]*", line)[0] for line in lines]
        if any(indents) and all(re.fullmatch("(    )*", indent) for indent in indents):
            score += 0.5
        if re.search(r"\b(def|class|import|return)\b", code):
            score += 0.5
        scores.append(score)
    return scores


def read_tests(tests, **columns):
    """Reads the tests of a record: Claims, a text, or a list of inputs and outputs. Raises Mistake for another form."""
    is_list = isinstance(tests, (list, tuple)) and len(tests) > 0
    if is_list and all(isinstance(test, dict) for test in tests):
        inputs = [test.get("input") for test in tests]
        outputs = [test.get("output") for test in tests]
        are_texts = all(isinstance(text, str) for text in inputs + outputs)
        if are_texts and "".join(outputs).strip():
            return tests
    if is_list and all(isinstance(test, str) for test in tests):
        tests = "\n".join(tests)
    if isinstance(tests, str) and tests.strip():
        data = tests.encode(errors="surrogatepass")  # half a surrogate pair is no Python
        if syntax_tree(data, "exec"):
            return cut(tests) or tests
    raise Mistake(f"reward code_execution: tests={tests!r:.200} of a record must be Python code, as a text or a "
                  "list of texts, or a list of {'input': text, 'output': text}, and not blank")


@reward(0, 1, slow=True, check=read_tests)
def code_execution(
        prompts,
        completions,
        tests,
        preamble=None,
        *,
        sandbox_seconds=5.0,
        sandbox_megabytes=256,
        sandbox="auto",
        log_metric,
        **columns):
    """1 if the code passes the record's `tests` in a limited child process, else 0; None if the machine is full.

    tests: Python code, as a text or a list of texts, which `cut` splits if it can; or a list of {"input": text,
    "output": text}: for each the code runs as a program, which must print the output
    preamble: code before the completion's, such as imports; None for a record without it
    """
    scores = []
    preambles = preamble or [None] * len(tests)
    for text, given, before in zip(completions, tests, preambles, strict=True):
        code = extract_code(text)
        readable = read_tests(given)
        is_empty = not code.strip()
        if before:
            code = f"{before}\n{code}"
        if is_empty:
            verdict = "failed"
        else:
            verdict = run_tests(code, readable, sandbox_seconds, sandbox_megabytes, sandbox)
        scores.append(None if verdict == "skipped" else float(verdict == "passed"))
        for name in ("killed", "failed", "skipped"):
            log_metric(f"code_{name}", verdict == name)
        log_metric("unsafe_tests", isinstance(readable, str))  # the code can forge the result
    return scores


def extract_code(text):
    """The last fenced block, usually the final answer, or the whole text if there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


class Claims(NamedTuple):
    """Asserts, split into questions to the process that runs the code, and claims about its answers."""
    questions: tuple  # expressions that call the code
    claims: tuple     # a function for each: answer -> True if the assert holds

    def hold(self, answers):
        """True if all claims hold for the answers, Python literals as texts; False if an answer cannot be read."""
        try:
            for claim, text in zip(self.claims, answers, strict=True):
                if not claim(ast.literal_eval(syntax_tree(text, "eval"))):
                    return False
        except ERRORS:
            return False
        return True


@functools.lru_cache(maxsize=1000)
def cut(tests):
    """The Claims of tests in Python, or None if the tests contain more than: asserts with one call of the code's
    functions, imports, names for literals, `def check(candidate):` with such a body, and `check(f)`."""
    tree = syntax_tree(tests.encode(), "exec")
    if tree is None:
        return None
    try:
        found = split(tree.body, {})
    except ERRORS:
        return None
    if not found:
        return None
    questions, claims = zip(*found, strict=True)
    return Claims(questions, claims)


def split(statements, names):
    """The (question, claim) of each assert. Raises one of ERRORS for a statement of another form.
    names: {name: the node that replaces it}; a module is replaced by its name in <>, which no code can contain"""
    found = []
    functions = {}  # {name: (its parameter, its body)}
    for statement in statements:
        match statement:
            case ast.Assert(ast.Constant(True)) | ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case ast.Assert(test):
                test = Named(names).visit(copy.deepcopy(test))  # a copy: `check` is read again for its next call
                questions = []
                claim = compiled(truth(test), questions)
                question, = questions  # ValueError unless there is exactly one
                found.append((question, claim))
            case ast.Assign([ast.Name(name)], value):
                ast.literal_eval(value)
                names[name] = value
            case ast.Import(modules):
                for module in modules:
                    name = module.asname or module.name.partition(".")[0]
                    names[name] = ast.Name(f"<{module.name}>")
            case ast.FunctionDef(name, ast.arguments(args=[ast.arg(parameter)]), body, []):
                names[name] = ast.Name("<function>")
                functions[name] = parameter, body
            case ast.Expr(ast.Call(ast.Name(name), [ast.Name() as candidate], [])):
                parameter, body = functions[name]
                found += split(body, names | {parameter: candidate})
            case _:
                raise ValueError
    return found


class Named(ast.NodeTransformer):
    """Replaces names by their nodes."""

    def __init__(self, names):
        self.names = names

    def visit_Name(self, node):
        return self.names.get(node.id, node)


def truth(node):
    """The node of bool(...). In `assert f(2)` the child is asked for bool(f(2)): the value may have no literal."""
    return ast.Call(ast.Name("bool"), [node], [])


def compiled(node, questions):
    """Compiles a part of a test into a function answer -> value. Appends the part's questions to `questions`.

    For `abs(f(2) - 4) < 1e-6` the question is f(2), and the function computes abs(answer - 4) < 1e-6 without eval.
    """
    if is_question(node):
        questions.append(ast.unparse(node))
        return lambda answer: answer
    match node:
        case ast.UnaryOp(ast.Not(), part):
            function = operator.not_
            parts = [truth(part)]
        case ast.BinOp(left, operation, right) | ast.Compare(left, [operation], [right]):
            function = OPERATORS[type(operation).__name__]
            parts = [left, right]
        case ast.Call(called, parts, keywords):
            named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
            function = FUNCTIONS[ast.unparse(called)]
            function = functools.partial(function, **named)
        case _:
            value = ast.literal_eval(node)
            return lambda answer: value
    functions = [compiled(part, questions) for part in parts]
    return lambda answer: function(*(part(answer) for part in functions))


def is_question(node):
    """True if a node calls a function of the code, perhaps inside a builtin, such as list(f(2))."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    for part in ast.walk(node):
        if isinstance(part, (ast.Lambda, ast.comprehension, ast.NamedExpr)):
            return False  # its variable may have the name of a replaced one
        if isinstance(part, ast.Name) and part.id.startswith("<"):
            return False  # the child lacks the imports of the tests
    if node.func.id in vars(builtins):
        return bool(node.args) and is_question(node.args[0])
    return True
