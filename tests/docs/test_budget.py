"""How much there is to read, and how densely it is written. Lines, files, docstrings and comments are never limited.

MEASURED and STEP say what is there; what is found may be ROOM times as much. A feature that passes a ceiling raises it
in the commit that adds it, by what it says that it costs.
"""

import ast
import os
import pathlib
import statistics
import subprocess
import sys
import tokenize

import pytest

from grpo.train_grpo import main
from tests.docs.test_house import TYPED
from tests.tiny import ROOT, all_settings

ROOM = 1.02  # for fixes and small features of others
MEASURED = {  # after unpacking; dev/LOG.md says what stands against fewer tokens. A raise gets its reason here
    # Since then 2,200: drawing from and scoring large vocabularies 1,000, compiled layers 500, evaluation on all ranks
    # 320, weights for samplers 160, a check of vLLM's log-probabilities 85. Then 5,800 for what people see: time,
    # memory and width 960, turns and slow rewards 930, the page and its errors 1,300, two sets of seeds 700, the best
    # model 670, objects from Python 600, model cards 340
    "tokens": 120150,
    "tokens a line": 8.3,
    "tokens a line, median": 7,
    "% of lines with 25 tokens or more": 0.6,
    "tokens of the fullest line": 32,
    "tokens a statement": 9.25,
    "% of statements with 40 tokens or more": 0.3,
    "getattr, hasattr and setattr": 32,
    "settings": 107,  # keep_best; train_samples and slow_rewards
    "requirements files": 3,
    "words of docs": 18600,
}
STEP = {  # of the files that a step of the main job runs through
    "tokens": 31450,  # drawing from large vocabularies 400, compiled layers, top_k=1 200, evaluation on all ranks 110
    "tokens a line": 8.5,
    "tokens a statement": 9.85,
}
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_docstrings(tree):
    """The numbers of the lines that docstrings take."""
    found = set()
    for node in ast.walk(tree):
        can_have_one = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if can_have_one and ast.get_docstring(node, clean=False) is not None:
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def tokens_of(path):
    """Yields the tokens of a file that are code, and the NEWLINE that ends each statement.

    A formatted string is one token, as up to Python 3.11, however many later versions make of it.
    """
    docstrings = lines_of_docstrings(ast.parse(path.read_text()))
    depth = 0  # of formatted strings
    with open(path) as f:
        for token in tokenize.generate_tokens(f.readline):
            name = tokenize.tok_name[token.type]
            if name == "FSTRING_END":
                depth -= 1
            elif depth == 0 and token.type not in LAYOUT and token.start[0] not in docstrings:
                yield token
            if name == "FSTRING_START":
                depth += 1


def density(paths):
    """How much code there is, and how much of it a line and a statement hold. A statement may have several lines: one
    that is only wrapped is as hard to read as before."""
    lines, statements = [], []
    for path in paths:
        in_line, in_statement = {}, 0
        for token in tokens_of(path):
            if token.type == tokenize.NEWLINE:
                statements.append(in_statement)
                in_statement = 0
            else:
                in_line[token.start[0]] = in_line.get(token.start[0], 0) + 1
                in_statement += 1
        lines += in_line.values()
    return {
        "tokens": sum(lines),
        "tokens a line": statistics.fmean(lines),
        "tokens a line, median": statistics.median_low(lines),
        "% of lines with 25 tokens or more": 100 * statistics.fmean(count >= 25 for count in lines),
        "tokens of the fullest line": max(lines),
        "tokens a statement": statistics.fmean(statements),
        "% of statements with 40 tokens or more": 100 * statistics.fmean(count >= 40 for count in statements),
    }


def python_files():
    return [path for folder in ("core", "grpo") for path in sorted(pathlib.Path(ROOT, folder).rglob("*.py"))]


def dynamic(paths):
    """The number of calls that look up an attribute by a name in a string."""
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    names = [getattr(node.func, "id", "") for node in nodes if isinstance(node, ast.Call)]
    return sum(name in ("getattr", "hasattr", "setattr") for name in names)


def words_of_docs():
    """The words of all documents but those of dev/."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [pathlib.Path(ROOT, name) for name in listed.stdout.split() if not name.startswith("dev/")]
    return sum(len(path.read_text().split()) for path in paths if path.exists())


def above(found, measured):
    """What is more than its ceiling: {name: (found, ceiling)}."""
    ceilings = {name: ROOM * count for name, count in measured.items()}
    return {name: (found[name], ceiling) for name, ceiling in ceilings.items() if found[name] > ceiling}


def test_there_is_no_more_to_read_than_the_ceilings_say():
    from grpo.grpo_config import GRPOConfig
    found = density(python_files())
    found["getattr, hasattr and setattr"] = dynamic(python_files())
    found["settings"] = len(all_settings(GRPOConfig))
    found["requirements files"] = len(list(pathlib.Path(ROOT).glob("requirements*.txt")))
    found["words of docs"] = words_of_docs()
    assert found.keys() == MEASURED.keys()
    assert not above(found, MEASURED), "more than the ceilings: unpack, or say in MEASURED what the feature costs"


PACKED = "x = f([g(a, b) for a, b in zip(c, d) if a], {e: h for e in i}, j[k : l + m], f'{n} {o}')  # a comment\n"
WRAPPED = PACKED.replace(", ", ",\n      ")
UNPACKED = "found = []\nfor a, b in zip(c, d):\n    if a:\n        found.append(g(a, b))\nlengths = {}\n"


def test_a_statement_that_is_wrapped_is_as_dense_as_before(tmp_path):
    found = []
    for number, text in enumerate((PACKED, WRAPPED, UNPACKED)):
        path = tmp_path / f"{number}.py"
        path.write_text(f'"""Words that do not count."""\n{text}')
        found.append(density([path]))
    packed, wrapped, unpacked = found
    assert wrapped["tokens a line"] < packed["tokens a line"] == packed["tokens a statement"] == 47
    assert wrapped["tokens a statement"] == packed["tokens a statement"] > 4 * unpacked["tokens a statement"]
    assert wrapped["% of statements with 40 tokens or more"] == 100 and unpacked["tokens"] == 34


@pytest.fixture(scope="module")
def files_of_a_step(tmp_path_factory):
    """The files of core/ and grpo/ in which a function runs during one step of the main job."""
    files, in_step = set(), False

    def note(frame, event, arg):
        nonlocal in_step
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith((f"{ROOT}{os.sep}core", f"{ROOT}{os.sep}grpo")):
            if code.co_name == "train_step":
                in_step = event == "call"
            if in_step:
                files.add(pathlib.Path(code.co_filename))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        sys.setprofile(note)
        try:
            main(["config/grpo_example.py", "--max_iters=1", "--batch_size=2", "--group_size=4", "--eval_problems=2",
                  "--eval_interval=9", "--sample_interval=9", "--dtype=float32",
                  f"--out_dir={tmp_path_factory.mktemp('path')}"])
        finally:
            sys.setprofile(None)
    return sorted(files)


@pytest.mark.slow
def test_a_step_of_the_main_job_runs_through_no_more_than_the_ceilings_say(files_of_a_step):
    assert pathlib.Path(ROOT, "grpo/grpo_training_step.py") in files_of_a_step
    assert {str(path.relative_to(ROOT)) for path in files_of_a_step} <= set(TYPED)
    assert not above(density(files_of_a_step), STEP), files_of_a_step
