"""Cuts tests in Python into calls, whose values another process computes, and claims on these values, judged here.

Of `assert f(2) == 4` the process that runs a model's code is asked for f(2). It never sees the 4 (docs/security.md).
"""

import ast
import builtins
import copy
import functools
import math
import operator
from typing import NamedTuple

from grpo.reward_functions.verify_math import syntax_tree

# This process applies them to an answer itself. None takes long or makes a value much larger
OPERATORS = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
             ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.In: lambda x, values: x in values,
             ast.NotIn: lambda x, values: x not in values, ast.Add: operator.add, ast.Sub: operator.sub,
             ast.Div: operator.truediv}
FUNCTIONS = {function.__name__: function for function in (abs, bool, float, list, set, sorted, tuple)}
FUNCTIONS |= {"<math>.fabs": math.fabs, "<math>.isclose": math.isclose}
ERRORS = (KeyError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError)  # of other forms, and answers


class Claims(NamedTuple):
    """Questions to the process that runs the code, and claims on its answers."""
    questions: tuple  # expressions that call the code
    claims: tuple     # for each a function from its value to whether the test holds

    def hold(self, answers):
        """True if all claims hold for answers, Python literals as texts; False if one cannot be read or compared."""
        try:
            return all(claim(ast.literal_eval(syntax_tree(text, "eval")))
                       for claim, text in zip(self.claims, answers, strict=True))
        except ERRORS:
            return False


@functools.lru_cache(maxsize=1000)
def cut(tests):
    """The Claims of tests in Python, or None if a part of them is not one of these: asserts with one call of the code's
    functions, imports, names for literals, `def check(candidate):` with such a body, and `check(f)`."""
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

    names: {name: the node that it stands for}, for an import one in <>; functions: {name: (its parameter, its body)}
    """
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
            case ast.ImportFrom(module=module, names=parts) if parts[0].name != "*":
                for part in parts:
                    names[part.asname or part.name] = ast.Attribute(ast.Name(f"<{module}>"), part.name)
            case ast.FunctionDef(name, ast.arguments(args=[ast.arg(parameter)]), body, decorator_list=[]):
                names[name] = ast.Name("<function>")
                functions[name] = parameter, body
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Name() as given], keywords=[])):
                parameter, body = functions[name]
                collect(body, names | {parameter: given}, {}, found)
            case _:
                raise ValueError


class Named(ast.NodeTransformer):
    """Replaces names by the nodes that they stand for."""

    def __init__(self, names):
        self.visit_Name = lambda node: names.get(node.id, node)


def truth(node):
    """The node of bool(...)."""
    return ast.Call(ast.Name("bool"), [node], [])


def reader(node, asked):
    """A function from the answer to the value of a part of a test. Appends the questions in it to `asked`."""
    if is_question(node):
        asked.append(ast.unparse(node))
        return lambda answer: answer
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=part):
            function, parts = operator.not_, [truth(part)]
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None | True | False) as right]):
            function, parts = operator.is_, [left, right]
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
    """True if a node calls a function of the code, perhaps within one of Python, as list(f(2)) does."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    variables = ast.Lambda, ast.comprehension, ast.NamedExpr
    if any(isinstance(part, variables) or getattr(part, "id", "").startswith("<") for part in ast.walk(node)):
        return False
    if hasattr(builtins, node.func.id):
        return bool(node.args) and is_question(node.args[0])
    return True
