"""Rewards that read a completion as Python code. Only code_execution runs it, in a sandbox.

`cut` splits asserts into expressions, which the sandbox evaluates, and claims, which are checked here: of
`assert f(2) == 4` the code is asked for f(2) and never sees the 4 (docs/rewards.md).
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
# Applied to an answer in this process. None takes long or makes a value much larger
OPERATORS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
             ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.In: lambda x, values: x in values,
             ast.NotIn: lambda x, values: x not in values, ast.Add: operator.add, ast.Sub: operator.sub,
             ast.Div: operator.truediv}
FUNCTIONS = {function.__name__: function for function in (abs, bool, float, list, set, sorted, tuple)}
FUNCTIONS |= {"<math>.fabs": math.fabs, "<math>.isclose": math.isclose}
ERRORS = (KeyError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError)  # of other forms, and answers


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
    """The tests of a record as Claims, a text, or a list of inputs and outputs. Raises Mistake for another form."""
    match tests:
        case [*_] if all(isinstance(x, dict) for x in tests):
            texts = [x.get(key) for x in tests for key in ("input", "output")]
            if all(isinstance(text, str) for text in texts) and "".join(texts[1::2]).strip():
                return tests
        case [*_] if all(isinstance(x, str) for x in tests):
            tests = "\n".join(tests)
    if isinstance(tests, str) and tests.strip() and syntax_tree(tests.encode(errors="surrogatepass"), "exec"):
        return cut(tests) or tests
    raise Mistake(f"reward code_execution: tests={tests!r:.200} of a record must be Python code, as a text or a "
                  "list of texts, or a list of {'input': text, 'output': text}, and not blank")


@reward(0, 1, slow=True, check=read_tests)
def code_execution(prompts, completions, tests, preamble=None, *, sandbox_seconds=5.0, sandbox_megabytes=256,
                   sandbox="auto", log_metric, **columns):
    """1 if the code passes the record's `tests` in a limited child process, else 0; None if the machine is full.

    tests: Python code, as a text or a list of texts, which is split by `cut` if possible; or a list of {"input": text,
    "output": text}, for each of which the code runs as a program that must print that output
    preamble: code before the completion's, such as imports; None for a record without
    """
    scores = []
    for text, given, before in zip(completions, tests, preamble or [None] * len(tests), strict=True):
        code, judged = extract_code(text), read_tests(given)
        if before and code.strip():
            code = f"{before}\n{code}"
        verdict = run_tests(code, judged, sandbox_seconds, sandbox_megabytes, sandbox) if code.strip() else "failed"
        scores.append(None if verdict == "skipped" else float(verdict == "passed"))
        for name in ("killed", "failed", "skipped"):
            log_metric(f"code_{name}", verdict == name)
        log_metric("unsafe_tests", isinstance(judged, str))  # the code can forge the result
    return scores


def extract_code(text):
    """The last fenced block, usually the final answer, or the whole text if there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


class Claims(NamedTuple):
    """Asserts, split into questions to the process that runs the code, and claims on its answers."""
    questions: tuple  # expressions that call the code
    claims: tuple     # for each a function: its value -> whether the test holds

    def hold(self, answers):
        """True if all claims hold for the answers, Python literals as texts; False if one cannot be read."""
        try:
            return all(claim(ast.literal_eval(syntax_tree(text, "eval")))
                       for claim, text in zip(self.claims, answers, strict=True))
        except ERRORS:
            return False


@functools.lru_cache(maxsize=1000)
def cut(tests):
    """The Claims of tests in Python, or None if they have more than: asserts with one call of the code's functions,
    imports, names for literals, `def check(candidate):` with such a body, and `check(f)`."""
    tree = syntax_tree(tests.encode(), "exec")
    if tree is None:
        return None
    found = []
    try:
        collect(tree.body, {}, {}, found)
    except ERRORS:
        return None
    return Claims(*zip(*found, strict=True)) if found else None


def collect(statements, names, functions, found):
    """Appends a (question, claim) for each assert. Raises one of ERRORS for a statement of another form.
    names: {name: its node}, for an import a name in <>; functions: {name: (its parameter, its body)}"""
    for statement in statements:
        match statement:
            case ast.Assert(test=ast.Constant(value=True)) | ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Assert(test=test):
                asked = []
                claim = reader(truth(Named(names).visit(copy.deepcopy(test))), asked)
                question, = asked
                found.append((question, claim))
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                ast.literal_eval(value)
                names[name] = value
            case ast.Import(names=modules):
                for part in modules:
                    name = part.asname or part.name
                    names[name.split(".")[0]] = ast.Name(f"<{part.name}>")
            case ast.FunctionDef(name, ast.arguments(args=[ast.arg(parameter)]), body, decorator_list=[]):
                names[name] = ast.Name("<function>")
                functions[name] = parameter, body
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Name() as given], keywords=[])):
                parameter, body = functions[name]
                collect(body, names | {parameter: given}, {}, found)
            case _:
                raise ValueError


class Named(ast.NodeTransformer):
    """Replaces names by their nodes."""

    def __init__(self, names):
        self.visit_Name = lambda node: names.get(node.id, node)


def truth(node):
    """The node of bool(...)."""
    return ast.Call(ast.Name("bool"), [node], [])


def reader(node, asked):
    """A function: answer -> value of a part of a test. Appends the part's questions to `asked`."""
    if is_question(node):
        asked.append(ast.unparse(node))
        return lambda answer: answer
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=part):
            function, parts = operator.not_, [truth(part)]
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            function, parts = OPERATORS[type(op)], [left, right]
        case ast.Call(func=called, args=parts, keywords=keywords):
            named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
            function = functools.partial(FUNCTIONS[ast.unparse(called)], **named)
        case _:
            value = ast.literal_eval(node)
            return lambda answer: value
    readers = [reader(part, asked) for part in parts]
    return lambda answer: function(*(read(answer) for read in readers))


def is_question(node):
    """True if a node calls a function of the code, perhaps inside a builtin, as list(f(2))."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    variables = ast.Lambda, ast.comprehension, ast.NamedExpr
    if any(isinstance(part, variables) or getattr(part, "id", "").startswith("<") for part in ast.walk(node)):
        return False
    if hasattr(builtins, node.func.id):
        return bool(node.args) and is_question(node.args[0])
    return True
