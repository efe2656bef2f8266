"""The rules of the house that a machine can check."""

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

from core.config import checked
from core.model import SEQUENCE_SCORER
from core.settings.other_names import names_elsewhere
from core.settings.setting import settings_of
from core.supervised.config import PretrainConfig
from grpo.build import OWN
from grpo.grpo_config import GRPOConfig
from tests.claims import CLAIMS
from tests.mutations import FAULTS
from tests.tiny import ROOT, all_settings, model, save

LAYERS = ("core", "grpo", "bench")  # a file imports those of its own layer and of the ones before it
OURS = [str(p.relative_to(ROOT)) for folder in LAYERS for p in sorted(pathlib.Path(ROOT, folder).rglob("*.py"))]
FILES = [pathlib.Path(ROOT, name) for name in OURS] + sorted(
    p for folder in ("config", "data") for p in pathlib.Path(ROOT, folder).rglob("*.py"))
TABLES = {"grpo/rewards.py"}  # a script that prints the table it holds
FEATURES = ("policies", "reward_functions", "sandbox", "samplers", "evaluation", "doctor", "report", "tools")
SHOWS = {("report", "evaluation"), ("doctor", "evaluation")}  # features that show what another measured
CATCH_ALL = ("errors.py", "trackers.py")  # nobody knows what other people's code raises
# What the main job loads from folders of features: fill-in, its judge and its evaluation, the page of a run
USED_BY_THE_MAIN_JOB = {
    "core/performance/prepacked.py", "core/settings/setting.py", "grpo/evaluation/fill_in.py",
    "grpo/evaluation/samples.py", "grpo/policies/fill.py", "grpo/policies/policy.py", "grpo/report/page.py",
    "grpo/reward_functions/judge.py", "grpo/reward_functions/registry.py", "grpo/reward_functions/presets.py"}
# The files that must not ask for the kind of generator
KINDLESS = ("losses", "reference", "shaping", "metrics",
            "grpo_training_step", "grpo_trainer", "rewards", "rollout", "sampling_settings", "step_settings", "sums")


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


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_imports_run_in_a_circle_and_a_layer_imports_only_those_before_it():
    scripts = {name for name in OURS if "__main__" in pathlib.Path(ROOT, name).read_text()} - TABLES
    left = {name: set(imports(name)) & set(OURS) for name in OURS}
    for name, others in left.items():
        assert not others & scripts, f"{name} imports a script"
        assert all(LAYERS.index(other.split("/")[0]) <= LAYERS.index(name.split("/")[0]) for other in others), name
    while left:
        ready = {name for name, others in left.items() if not others & left.keys()}
        assert ready, f"imports in a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in ready}


# Files whose public functions have type hints: the path of a step for each kind of generator, and prompts
TYPED = (
    *(f"core/{name}.py" for name in (
        "bad_steps", "cache", "data", "device", "distributed", "distributions", "errors", "fill_in", "fill_in_passes",
        "generation", "judge", "model", "optim", "prompts", "tokenizer", "user_files")),
    *(f"grpo/{name}.py" for name in (
        "grpo_trainer", "grpo_training_step", "losses", "metrics", "policies/causal", "policies/fill",
        "policies/policy", "policies/prompt_fill", "reference", "reward_functions/judge", "reward_messages", "rewards",
        "rollout", "sampling_settings", "shaping", "step_settings", "sums")))


def public_functions(body):
    """Yields the functions of a module, and the methods of its classes, that others call."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not node.name.startswith("_") or node.name in ("__init__", "__call__"):
                yield node


@pytest.mark.parametrize("path", TYPED)
def test_public_functions_have_type_hints_on_parameters_and_result(path):
    functions = list(public_functions(ast.parse(pathlib.Path(ROOT, path).read_text()).body))
    lacking = []
    for function in functions:
        parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        lacking += [f"{function.name}: {x.arg}" for x in parameters
                    if x.annotation is None and x.arg not in ("self", "cls")]
        if function.returns is None and function.name != "__init__":
            lacking.append(f"{function.name}: result")
    assert functions and not lacking


def feature(name):
    """The folder of a feature that a file is in, or None."""
    parts = name.split("/")
    return parts[1] if len(parts) == 3 and parts[1] in FEATURES else None


def test_features_do_not_import_their_neighbours():
    for name in OURS:
        for other in imports(name):
            allowed = (feature(other) in (None, "sandbox", feature(name)) or feature(name) in (None, "tools")
                       or (feature(name), feature(other)) in SHOWS)
            assert allowed, f"{name} imports {other} of another feature"
            assert feature(other) != "tools", f"{name} imports {other}: nothing imports a tool"


@pytest.mark.parametrize("name", KINDLESS)
def test_after_the_policies_nothing_asks_for_the_kind_of_generator(name):
    for node in nodes_of(pathlib.Path(ROOT, f"grpo/{name}.py")):
        if isinstance(node, ast.Attribute):
            assert node.attr != "mode" and not (node.attr == "config" and getattr(node.value, "attr", "") == "model")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            assert getattr(node.args[1], "id", "") not in ("FillPolicy", "CausalPolicy", "PromptConsumer",
                                                           "DatasetConsumer", "GPT"), name
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            is_interface = node.module == "grpo.policies.policy" and names == {"Policy"}  # for hints
            assert is_interface or not node.module.startswith("grpo.policies"), name
            assert node.module != "core.model", name


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


def test_only_the_trainer_and_the_step_know_the_buffer_and_every_step_is_grpo_training_step():
    uses = [str(p.relative_to(ROOT)) for p in FILES if "DataBuffer(" in p.read_text()]
    assert uses == ["grpo/grpo_trainer.py", "grpo/grpo_training_step.py"]
    phases = {"collect_rollouts", "train_on_rollouts", "end_step"}
    for name in set(OURS) - {"grpo/grpo_training_step.py"}:
        assert not phases & {getattr(node, "id", "") for node in nodes_of(name)}, name


@pytest.mark.parametrize("name", ["losses", "metrics", "rollout", "shaping", "sums"])
def test_functions_of_the_algorithm_take_no_config(name):
    for node in nodes_of(f"grpo/{name}.py"):
        if isinstance(node, ast.arg):
            assert node.arg not in ("config", "c"), f"line {node.lineno}"
            assert "Settings" not in ast.unparse(node.annotation or node), f"line {node.lineno}"


@pytest.mark.slow
def test_the_algorithm_loads_no_plotting_and_nothing_optional():
    names = ["core." + p.stem for p in pathlib.Path(ROOT, "core").glob("[a-z]*.py")] + ["grpo.losses", "grpo.build"]
    code = (f"import sys; sys.path.insert(0, {ROOT!r})\n" + "".join(f"import {name}\n" for name in names)
            + "print({*'matplotlib wandb tensorboard trackio tiktoken trl ray transformers'.split()} & {*sys.modules})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@pytest.mark.slow
def test_the_main_job_loads_no_feature_that_is_off(dataset, tmp_path):
    """Features are in folders; the main job asks for a judge and an evaluation of fill-in."""
    judge = save(tmp_path / "judge.safetensors", model(SEQUENCE_SCORER))
    generator = save(tmp_path / "generator.safetensors", model())
    argv = ["config/grpo_example.py", f"--dataset={dataset}", f"--generator_checkpoint={generator}",
            f"--judge_checkpoint={judge}", f"--gold_judge_checkpoint={judge}", f"--out_dir={tmp_path}/out",
            "--block_size=16", "--max_iters=1", "--batch_size=2", "--eval_problems=2"]
    code = (f"import os, runpy, sys; sys.path.insert(0, os.getcwd()); sys.argv = ['', *{argv}]; "
            "runpy.run_path('grpo/train_grpo.py', run_name='__main__'); "
            "print(*{getattr(x, '__file__', None) or '' for x in list(sys.modules.values())}, *sys.modules, sep='\\n')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = set(done.stdout.split("\n"))
    assert not lines & {"wandb", "tiktoken", "regex", "transformers", "peft"} and "torch" in lines
    loaded = lines & {str(path) for path in FILES}
    assert f"{ROOT}/grpo/grpo_training_step.py" in loaded
    names = {os.path.relpath(path, ROOT) for path in loaded}
    assert {name for name in names if name.count(os.sep) == 2} == USED_BY_THE_MAIN_JOB


def test_expected_names_are_importable():
    names = {"grpo": ["GRPOTrainer", "grpo_training_step", "GRPOConfig"],
             "core.model": ["GPT", "GPTConfig", "LANGUAGE_MODEL", "MASKED_FILL", "SEQUENCE_SCORER"],
             "core.data": ["DatasetConsumer", "unpack_batch"],
             "core.fill_in": ["predict_and_sample_tokens"], "core.judge": ["calculate_judge_scores"],
             "core.checkpoint_manager": ["CheckpointManager"], "core.optim": ["CosineLRScheduler"],
             "core.logger": ["create_logger"], "core.trainer": ["Trainer"],
             "grpo.rewards": ["reward", "Rewards", "Scored"], "grpo.rollout": ["Rollouts"],
             "grpo.policies.policy": ["Policy"]}
    for module, members in names.items():
        for member in members:
            assert hasattr(importlib.import_module(module), member), f"{module}.{member}"
    import grpo
    assert inspect.isfunction(grpo.grpo_training_step), "not the module of that name"


@pytest.mark.parametrize("cls", [GRPOConfig, PretrainConfig])
def test_the_settings_of_a_script_are_one_page_and_what_depends_on_several_names_them(cls):
    known = settings_of(cls)
    assert cls.__annotations__.keys() == known.keys(), "all are lines of the class itself"
    for key, (kinds, allowed) in known.items():
        default = getattr(cls, key)
        assert type(checked(key, default, known, "the default")) is type(default), key
        if isinstance(allowed, str) and str not in kinds:
            low, high = allowed.partition(" or ")[0][1:-1].split(", ")
            assert float(low) < float(high), key
    for _, _, keys in cls().features():
        assert {*keys.split()} <= known.keys()
    for _, keys, _ in cls().conflicts():
        assert {*keys.split()} <= known.keys()
    for node in nodes_of(inspect.getsourcefile(cls)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "names":
            assert {keyword.arg for keyword in node.keywords} <= known.keys()
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("c", "self"):
            assert hasattr(cls(), node.attr), f"conflicts read {node.attr}"


def test_other_places_name_settings_and_each_is_used():
    known = all_settings(GRPOConfig, PretrainConfig)
    assert {key for keys, _, _ in OWN for key in keys.split()} <= known
    for name, (ours, _) in names_elsewhere().items():
        assert {key.partition("=")[0] for key in ours} <= known, name
    pages = ("grpo/grpo_config.py", "core/supervised/config.py", "core/settings/other_names.py")
    used = set()
    nodes = [node for name in set(OURS) - set(pages) for node in nodes_of(name)]
    for name in pages:  # properties use settings, features and conflicts only compare them
        for function in nodes_of(name):
            if isinstance(function, ast.FunctionDef) and not function.name.startswith(("features", "conflicts")):
                nodes += ast.walk(function)
    for node in nodes:
        used |= {getattr(node, "attr", "")}  # config.top_p
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            used |= {*node.value.split()}    # a name in a table
    assert not known - used, "settings that nothing uses"


def test_rollouts_have_at_most_a_dozen_fields():
    from grpo.rollout import Rollouts
    assert len(dataclasses.fields(Rollouts)) <= 12


def test_docstrings_say_what_is_meant():
    """Public functions of more than a few lines have one, every file has one, and none begins with What, Whether or
    How: such a fragment has no main clause."""
    wrong = []
    for path in FILES:
        for node in nodes_of(path):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            docstring, name = ast.get_docstring(node), getattr(node, "name", "")
            if (docstring or "It").split()[0].rstrip(",:") in (
                    "What", "Whether", "How", "Of", "As", "Those", "Where", "Which", "Who"):
                wrong.append(f"{path}: {name} begins with a fragment")
        for node in nodes_of(path)[0].body if str(path.relative_to(ROOT)) in OURS else ():  # of the module
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node) and node.end_lineno - node.lineno > 12:
                wrong.append(f"{path}: {node.name} has no docstring")
    assert not wrong, "\n".join(wrong)


def test_every_claim_names_its_test_and_every_file_of_tests_has_a_claim():
    named = {test for claims in CLAIMS.values() for test in claims.values()}
    for test in named:
        path, _, name = test.partition("::")
        functions = {node.name for node in nodes_of(f"tests/{path}") if isinstance(node, ast.FunctionDef)}
        assert name in functions, test
    found = {str(p.relative_to(pathlib.Path(ROOT, "tests"))) for p in pathlib.Path(ROOT, "tests").rglob("test_*.py")}
    assert found == {test.partition("::")[0] for test in named}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_every_planted_fault_has_its_place(fault):
    _, file, text, _, tests = fault
    assert pathlib.Path(ROOT, file).read_text().count(text) == 1
    assert all(pathlib.Path(ROOT, name).exists() for name in tests.split())
