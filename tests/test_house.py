"""The rules of the house that a machine can check."""

import ast
import collections
import dataclasses
import functools
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tokenize

import pytest

from tests.tiny import ROOT

MAP = re.findall(r"^\| `((?:core|grpo|bench)/[^`]+\.py)` \|", pathlib.Path(ROOT, "docs/map.md").read_text(), re.M)
LAYERS = ("core", "grpo", "bench")  # a file imports those of its own layer and of the ones before it
TABLES = {"grpo/rewards.py"}  # a script that prints the table it holds
ROOMS = ("policies", "reward_functions", "sandbox", "samplers", "evaluation", "doctor", "report", "tools")
FILES = sorted(p for folder in (*LAYERS, "config", "data") for p in pathlib.Path(ROOT, folder).rglob("*.py"))
SHOWS = {("report", "evaluation"), ("doctor", "evaluation")}  # rooms that show what another room measured
TOKENS_OF_A_LINE = 45  # what is reached; it may only fall
CATCH_ALL = ("user_code.py", "trackers.py")  # nobody knows what other people's code raises
# The files that must not ask for the kind of generator
KINDLESS = ("losses", "reference", "shaping", "metrics",
            "grpo_training_step", "grpo_trainer", "rewards", "rollout")


@functools.cache
def nodes_of(path):
    """All nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(pathlib.Path(ROOT, path).read_text())))


def imports(name):
    """The modules that a file imports, as paths of this repository."""
    for node in nodes_of(pathlib.Path(ROOT, name)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            path = module.replace(".", "/") + ".py"
            if pathlib.Path(ROOT, path).is_file():
                yield path


def test_the_map_lists_every_file_once():
    found = {str(p.relative_to(ROOT)) for folder in LAYERS for p in pathlib.Path(ROOT, folder).rglob("*.py")
             if p.name != "__init__.py"}
    assert sorted(MAP) == sorted(found)


def test_a_file_imports_only_what_stands_above_it_in_its_table_and_no_imports_run_in_a_circle():
    scripts = {name for name in MAP if "__main__" in pathlib.Path(ROOT, name).read_text()} - TABLES
    left = {name: {other for other in imports(name) if other in MAP} for name in MAP}
    for place, name in enumerate(MAP):
        for other in left[name]:
            same_table = pathlib.Path(other).parent == pathlib.Path(name).parent
            assert other in MAP[:place] or not same_table, f"{name} imports {other}, which the map has below it"
            assert other not in scripts, f"{name} imports the script {other}"
            assert LAYERS.index(other.split("/")[0]) <= LAYERS.index(name.split("/")[0]), f"{name} imports {other}"
    while left:
        ready = {name for name, others in left.items() if not others & left.keys()}
        assert ready, f"imports in a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in ready}


def test_rooms_do_not_import_their_neighbours():
    room = lambda name: parts[1] if len(parts := name.split("/")) == 3 and parts[1] in ROOMS else None
    for name in MAP:
        for other in imports(name):
            allowed = (room(other) in (None, "sandbox", room(name)) or room(name) in (None, "tools")
                       or (room(name), room(other)) in SHOWS)
            assert allowed, f"{name} imports {other} of another room"
            assert room(other) != "tools", f"{name} imports {other}: nothing imports a tool"


@pytest.mark.parametrize("name", KINDLESS)
def test_after_the_policies_nothing_asks_for_the_kind_of_generator(name):
    for node in nodes_of(pathlib.Path(ROOT, f"grpo/{name}.py")):
        if isinstance(node, ast.Attribute):
            assert node.attr != "mode" and not (node.attr == "config" and getattr(node.value, "attr", "") == "model")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            assert getattr(node.args[1], "id", "") not in ("FillPolicy", "CausalPolicy", "PromptConsumer",
                                                           "DatasetConsumer", "GPT"), name
        if isinstance(node, ast.ImportFrom):
            assert not node.module.startswith("grpo.policies") and node.module != "core.model", name


def test_files_functions_and_lines_are_short():
    wrong = []
    for path in FILES:
        lines = path.read_text().split("\n")
        if len(lines) > 401:
            wrong.append(f"{path}: {len(lines)} lines")
        wrong += [f"{path}:{i}: {len(line)} columns" for i, line in enumerate(lines, 1) if len(line) > 120]
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 80:
                wrong.append(f"{path}:{node.lineno}: {node.name} is too long")
    assert not wrong, "\n".join(wrong)


def test_a_line_says_one_thing():
    """Files are not made short by packing. Those of config/ and data/ are mostly tables."""
    for path in FILES:
        if {"config", "data"} & set(path.parts):
            continue
        with open(path) as f:
            code = [token.start[0] for token in tokenize.generate_tokens(f.readline) if token.type in (
                tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)]
        for line, tokens in collections.Counter(code).items():
            assert tokens <= TOKENS_OF_A_LINE, f"{path}:{line}"


def test_nothing_evaluates_text_or_catches_every_error():
    wrong = []
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("eval", "exec"):
                wrong.append(f"{path}:{node.lineno}: {node.func.id}")
            if isinstance(node, ast.ExceptHandler) and path.name not in CATCH_ALL:
                caught = {getattr(part, "id", "") for part in ast.walk(node.type)} if node.type else {"Exception"}
                if caught & {"Exception", "BaseException"}:
                    wrong.append(f"{path}:{node.lineno}: {caught}")
    assert not wrong, "\n".join(wrong)


def test_one_guess_finds_the_test_of_a_file():
    missing = []
    for name in (name for name in MAP if not name.startswith("bench/")):  # tests/test_bench.py
        folder, _, file = name.rpartition("/")
        stem = file.removesuffix(".py")
        guesses = [pathlib.Path(ROOT, "tests", folder, f"test_{guess}.py") for guess in (stem, stem.split("_")[0])]
        if stem != "settings" and not any(path.exists() for path in guesses):  # all settings: test_*_config.py
            missing.append(guesses[0])
    assert not missing


def test_only_the_trainer_knows_the_buffer():
    uses = [str(p.relative_to(ROOT)) for p in FILES if "DataBuffer(" in p.read_text()]
    assert uses == ["grpo/grpo_trainer.py"]


@pytest.mark.slow
def test_the_algorithm_loads_no_plotting_and_nothing_optional():
    names = ["core." + p.stem for p in pathlib.Path(ROOT, "core").glob("[a-z]*.py")] + ["grpo.losses", "grpo.build"]
    code = (f"import sys; sys.path.insert(0, {ROOT!r})\n" + "".join(f"import {name}\n" for name in names)
            + "print([m for m in ('matplotlib', 'wandb', 'tensorboard', 'trackio', 'tiktoken', 'trl', 'ray', 'transformers') "
            + "if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_expected_names_are_importable():
    names = {"grpo": ["GRPOTrainer", "grpo_training_step", "GRPOConfig"],
             "core.model": ["GPT", "GPTConfig", "LANGUAGE_MODEL", "MASKED_FILL", "SEQUENCE_SCORER"],
             "core.data": ["DatasetConsumer", "unpack_batch"],
             "core.fill_in": ["predict_and_sample_tokens"], "core.judge": ["calculate_judge_scores"],
             "core.checkpoint_manager": ["CheckpointManager"], "core.optim": ["CosineLRScheduler"],
             "core.logger": ["create_logger"], "core.trainer": ["Trainer"],
             "grpo.rewards": ["reward", "Rewards", "Scored"], "grpo.rollout": ["Rollouts"], "grpo.policies.policy": ["Policy"]}
    for module, members in names.items():
        for member in members:
            assert hasattr(importlib.import_module(module), member), f"{module}.{member}"
    import grpo
    assert inspect.isfunction(grpo.grpo_training_step), "not the module of that name"


def test_rollouts_have_at_most_a_dozen_fields():
    from grpo.rollout import Rollouts
    assert len(dataclasses.fields(Rollouts)) <= 12


def test_every_public_function_says_what_it_does():
    silent = []
    for name in MAP:
        for node in nodes_of(pathlib.Path(ROOT, name))[0].body:  # of the module
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node) and node.end_lineno - node.lineno > 12:
                silent.append(f"{name}:{node.name}")
    assert not silent


def test_a_docstring_begins_with_a_statement():
    """A docstring that begins with What, Whether or How has no main clause, and needs the code to be understood."""
    fragments = []
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (ast.get_docstring(node) or "It").split()[0].rstrip(",:")
                if first in ("What", "Whether", "How", "Of", "As", "Those", "Where", "Which", "Who"):
                    fragments.append(f"{path}:{node.body[0].lineno}")
    assert not fragments
