"""The rules of the house that a machine can check."""

import ast
import importlib
import pathlib

import pytest

from tests.tiny import ROOT

ORDER = {
    "core": ["config", "distributed", "logger", "scheduler", "tokenizer", "masking", "model", "batch",
             "dataset_consumer", "prompts", "losses", "sampling", "judge", "checkpoint_manager", "training_step",
             "trainer", "recipes", "pretrain_config", "pretrain", "sample"],
    "grpo": ["advantages", "objectives", "reference", "fill_views", "reward_registry", "sandbox_child", "sandbox",
             "text_rewards", "verifiers", "rewards", "grpo_config", "rollout", "scoring", "data_buffer", "step_metrics",
             "models", "grpo_training_step", "evaluate", "evaluate_prompts", "problems", "samples", "plots",
             "grpo_trainer", "train_grpo", "report", "bench", "study"],
}
TABLES = {"rewards"}  # run alone, it prints what it holds
FILES = sorted(p for folder in ("core", "grpo", "config", "data") for p in pathlib.Path(ROOT, folder).rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if "." not in node.module)


@pytest.mark.parametrize("package", ORDER)
def test_a_file_imports_only_what_stands_above_it(package):
    found = {p.stem for p in pathlib.Path(ROOT, package).glob("*.py")} - {"__init__"}
    assert found == set(ORDER[package]), "ORDER lists every file of the package"
    scripts = {p.stem for p in pathlib.Path(ROOT, package).glob("*.py") if "__main__" in p.read_text()}
    for place, name in enumerate(ORDER[package]):
        for module in imports(pathlib.Path(ROOT, package, name + ".py")):
            parent, _, child = module.partition(".")
            assert not (package == "core" and parent == "grpo"), f"core/{name}.py imports grpo"
            if parent == package and child:
                assert ORDER[package].index(child) < place, (
                    f"{package}/{name}.py imports {module}, which stands below it")
                assert child not in scripts - TABLES, f"{package}/{name}.py imports the script {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_idea(path):
    lines = path.read_text().split("\n")
    assert len(lines) <= 301
    assert max(map(len, lines)) <= 120
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 50, f"{node.name} is too long"
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") not in ("eval", "exec")
        if isinstance(node, ast.ExceptHandler):
            caught = {getattr(part, "id", "") for part in ast.walk(node.type)} if node.type else {"Exception"}
            assert not caught & {"Exception", "BaseException"}


def test_only_the_trainer_knows_the_buffer():
    users = [p.name for p in FILES if any(name.startswith("grpo.data_buffer") for name in imports(p))]
    assert users == ["grpo_trainer.py"]


def test_the_canonical_names_are_where_users_look_for_them():
    names = {"grpo": ["GRPOTrainer", "grpo_training_step", "GRPOConfig"],
             "core.model": ["GPT", "GPTConfig", "LANGUAGE_MODEL", "MASKED_FILL", "SEQUENCE_SCORER"],
             "core.dataset_consumer": ["DatasetConsumer"], "core.batch": ["unpack_batch"],
             "core.sampling": ["predict_and_sample_tokens"], "core.judge": ["calculate_judge_scores"],
             "core.checkpoint_manager": ["CheckpointManager"], "core.scheduler": ["CosineLRScheduler"],
             "core.logger": ["create_logger"], "core.trainer": ["Trainer"]}
    for module, members in names.items():
        for member in members:
            assert hasattr(importlib.import_module(module), member), f"{module}.{member}"


def test_every_public_function_says_what_it_does():
    silent = []
    for path in FILES:
        if path.parent.name in ("core", "grpo"):
            for node in ast.parse(path.read_text()).body:
                public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
                if public and not ast.get_docstring(node) and node.end_lineno - node.lineno > 12:
                    silent.append(f"{path.name}:{node.name}")
    assert not silent
