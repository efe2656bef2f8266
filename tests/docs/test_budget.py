"""How much there is to read. A ceiling may fall and never rise: what comes in takes the place of something."""

import ast
import dataclasses
import io
import pathlib
import subprocess
import sys
import tokenize

from core.model import SEQUENCE_SCORER
from tests.tiny import ROOT, model, save

CEILINGS = {"files": 94, "lines": 12579, "tokens": 92127, "tests' tokens": 121105, "docs' words": 17702,
            "settings": 64, "raises": 155, "requirements files": 3, "configs": 20, "files of the main job": 43,
            "lines of the main job": 5848}
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def python_files(*folders):
    return [path for folder in folders for path in sorted(pathlib.Path(ROOT, folder).rglob("*.py"))]


def count_lines(paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def count_tokens(path):
    """Python's tokens without comments, docstrings and layout. A formatted string is one, as up to Python 3.11."""
    text, docstrings = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        can_have_one = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if can_have_one and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        depth -= name == "FSTRING_END"
        count += depth == 0 and token.type not in LAYOUT and token.start[0] not in docstrings and name != "FSTRING_END"
        depth += name == "FSTRING_START"
    return count


def loaded_by_the_main_job(dataset, folder):
    """The files of core/ and grpo/ that a run of the main job imports, here with a small dataset and small models."""
    judge = save(folder / "judge.safetensors", model(SEQUENCE_SCORER))
    generator = save(folder / "generator.safetensors", model())
    argv = ["config/grpo_example.py", f"--dataset={dataset}", f"--generator_checkpoint={generator}",
            f"--judge_checkpoint={judge}", f"--gold_judge_checkpoint={judge}", f"--out_dir={folder}/out",
            "--block_size=16", "--max_iters=1", "--batch_size=2", "--eval_problems=2"]
    code = (f"import os, runpy, sys; sys.path.insert(0, os.getcwd()); sys.argv = ['', *{argv}]; "
            "runpy.run_path('grpo/train_grpo.py', run_name='__main__'); "
            "print(*{getattr(x, '__file__', None) or '' for x in list(sys.modules.values())}, sep='\\n')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = set(python_files("core", "grpo"))
    return [path for line in done.stdout.split("\n") if (path := pathlib.Path(line)) in ours]


def test_nothing_has_grown(dataset, tmp_path):
    from grpo.grpo_config import GRPOConfig
    code, loaded = python_files("core", "grpo"), loaded_by_the_main_job(dataset, tmp_path)
    raises = [node for path in code for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    documents = [pathlib.Path(ROOT, name) for name in listed.stdout.split()]
    found = {
        "files": len(code),
        "lines": count_lines(code),
        "tokens": sum(map(count_tokens, code)),
        "tests' tokens": sum(map(count_tokens, python_files("tests"))),
        "docs' words": sum(len(path.read_text().split()) for path in documents if path.exists()),
        "settings": len(dataclasses.fields(GRPOConfig)),
        "raises": len(raises),
        "requirements files": len(list(pathlib.Path(ROOT).glob("requirements*.txt"))),
        "configs": len(python_files("config")),
        "files of the main job": len(loaded),
        "lines of the main job": count_lines(loaded),
    }
    assert found.keys() == CEILINGS.keys()
    grown = {name: (count, CEILINGS[name]) for name, count in found.items() if count > CEILINGS[name]}
    assert not grown, "more than the ceilings: take something away"
