"""What the documents name is there: settings, metrics, files, functions, configs."""

import ast
import importlib.util
import pathlib
import re
import shlex
import sys

import pytest
import torch

from core.config import load_config
from core.settings.script import exit_code
from core.supervised.config import PretrainConfig
from grpo import losses
from grpo.grpo_config import GRPOConfig
from grpo.losses import OBJECTIVES
from grpo.policies.fill_views import FILL_ESTIMATORS
from grpo.reward_functions.registry import REWARDS
from grpo.rewards import Rewards
from tests.tiny import ROOT, all_settings, documented_keys, run_script

CONFIGS = sorted(pathlib.Path(ROOT, "config").glob("*.py"))
FIELDS = all_settings(GRPOConfig, PretrainConfig)
CODE = re.compile("`([^`]+)`")
OPENERS = {"top_p": 1.0, "judge_checkpoint": "j", "reward_functions": ("math_number",), "ppo_epochs": 2, "unmask_steps": 2}  # of rooms


def tables(document):
    """The rows of the tables of a document, as lists of cells, under the cells of their heading."""
    heading = None
    for line in pathlib.Path(ROOT, document).read_text().split("\n"):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            heading = None
        elif heading is None:
            heading = cells
        elif not set("".join(cells)) <= set("-"):
            yield heading, cells


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_shipped_config_is_one(path):
    script = re.match(r"# python (\S+) config/", path.read_text())[1]
    _, origin = load_config({"core/pretrain.py": PretrainConfig, "grpo/train_grpo.py": GRPOConfig}[script], [str(path)])
    assert len(origin) > 3


def test_every_metric_has_a_meaning_a_healthy_range_and_a_remedy():
    rows = list(tables("docs/metrics.md"))
    assert len(rows) > 50
    for heading, cells in rows:
        assert heading == ["key", "what it is", "healthy", "when it leaves that"]
        assert len(cells) == 4 and all(cells), cells


def names_in(path):
    """The functions, classes and constants of a file; methods and fields as CLASS.name."""
    tree = ast.parse(pathlib.Path(ROOT, path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                name = part.target if isinstance(part, ast.AnnAssign) else part
                names.add(f"{node.name}.{getattr(name, 'id', getattr(name, 'name', ''))}")
    return names


def test_every_equation_stands_beside_a_function_that_exists():
    places = [place for heading, cells in tables("docs/algorithm.md") if heading[-1] == "where"
              for place in CODE.findall(cells[-1])]
    assert len(places) > 35
    for place in places:
        path, _, names = place.partition(": ")
        assert not names or set(names.split(", ")) <= names_in(path), place


def test_a_server_that_a_command_starts_is_reached_from_its_own_machine_alone():
    """vLLM listens on all interfaces unless it is told not to, and its development mode runs what a request names."""
    documents = [*pathlib.Path(ROOT).glob("*.md"), *pathlib.Path(ROOT, "docs").glob("*.md")]
    text = "\n".join(path.read_text().replace("\\\n", " ") for path in documents)
    commands = [line for line in text.split("\n") if re.search(r"\bvllm serve \S+ --", line)]
    assert len(commands) >= 2
    assert all(" --host 127.0.0.1 " in line and " --api-server-count 1 " in line for line in commands), commands


def test_every_objective_and_estimator_has_its_row():
    for heading, names in (("`objective`", OBJECTIVES), ("`fill_estimator`", FILL_ESTIMATORS)):
        cells = " ".join(cells[0] for head, cells in tables("docs/algorithm.md") if head[0] == heading)
        assert set(CODE.findall(cells)) == set(names)


def test_settings_of_papers_are_settings():
    rows = [cells for head, cells in tables("docs/algorithm.md") if head == ["paper", "settings"]]
    assert len(rows) >= 14
    for paper, settings in rows:
        values = [part for part in CODE.findall(settings) if "=" in part and "..." not in part]
        assert values, paper
        for key, value in (part.split("=") for part in values):
            GRPOConfig(**OPENERS | {key: ast.literal_eval(value)} | (
                {"advantage": "leave_one_out"} if key == "train_pass_k" else {}))


def test_the_guide_names_settings_and_metrics_that_exist():
    values = {"OMP_NUM_THREADS", "auto", "float32", "static", "ema", "periodic", "adamw", "muon", "keep", "resample",
              "grpo", "all-linear", "none", "group", *OBJECTIVES, *FILL_ESTIMATORS, *REWARDS}
    for heading, cells in tables("grpo/README.md"):
        named = {part.partition("=")[0] for part in CODE.findall(" ".join(cells))}
        assert named <= FIELDS | documented_keys() | values, named
    questions = pathlib.Path(ROOT, "grpo/README.md").read_text().split("## Eight questions")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:--)?([a-z_/]+)(?:=[^` ]*)?`", questions))
    assert questions.count("\n\n**") == 8 and len(named) > 15 and named <= FIELDS | documented_keys(), named


def test_every_test_that_a_page_names_exists():
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", pathlib.Path(ROOT, "docs/known_wrong.md").read_text())
    assert len(named) > 15
    for path, name in named:
        assert name.startswith("test_") and name in names_in(path), f"{path}::{name}"


def test_a_walk_names_what_is_in_its_files():
    text = pathlib.Path(ROOT, "docs", "architecture.md").read_text()
    stops = re.findall(r"^\d+\. `([^`]+)`[^:]*:(.*)$", text, re.M)
    assert len(stops) > 20
    for file, remark in stops:
        source = pathlib.Path(ROOT, file).read_text()
        for name in CODE.findall(remark):
            assert name.rpartition(".")[2] in source, f"{file} has no {name}"


@pytest.mark.slow
def test_the_python_example_runs_and_learns(tmp_path):
    code = re.search("```python\n(import torch.*?)```", pathlib.Path(ROOT, "grpo/README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "example.py").write_text(f"import sys\nsys.path.insert(0, {ROOT!r})\n" + code)
    done = run_script(tmp_path / "example.py")
    assert done.returncode == 0, done.stderr
    rewards = [float(line.split()[1]) for line in done.stdout.strip().split("\n")]
    assert len(rewards) == 20 and rewards[-1] > rewards[0] + 0.1


def test_the_reward_of_the_readme_suits_its_command(tmp_path, monkeypatch):
    text = pathlib.Path(ROOT, "README.md").read_text()
    (tmp_path / "mine.py").write_text(re.search("```python\n(.*?)```", text, re.DOTALL)[1])
    command = re.search("python grpo/train_grpo.py ([^`]* --reward_file=mine.py[^`]*)```", text)[1]
    (tmp_path / "config").symlink_to(pathlib.Path(ROOT, "config"))
    monkeypatch.chdir(tmp_path)
    config, _ = load_config(GRPOConfig, shlex.split(command))
    assert Rewards(config).names == ("short",)


def test_the_objective_of_the_guide_is_one_that_a_config_brings(tmp_path):
    text = pathlib.Path(ROOT, "grpo/README.md").read_text()
    (tmp_path / "mine.py").write_text(re.search("```python\n(# mine.py.*?objective = .*?)```", text, re.DOTALL)[1])
    try:
        config, _ = load_config(GRPOConfig, [f"{ROOT}/config/grpo_arithmetic.py", str(tmp_path / "mine.py")])
        row = losses.OBJECTIVES[config.objective]
        logp, advantage, weight = torch.randn(2, 3, requires_grad=True), torch.tensor([[1.0], [-2.0]]), torch.ones(2, 3)
        loss, _, _ = losses.policy_loss(logp, logp.detach(), advantage, weight, row)
        gradient, = torch.autograd.grad(loss, logp)
        assert torch.equal(gradient, -advantage.expand(2, 3))
    finally:
        del losses.OBJECTIVES["mine"], losses.SURROGATES["no_clip"]


@pytest.mark.parametrize("document", ["README.md", "AGENTS.md", "grpo/README.md", "docs/results.md", "dev/LOG.md",
                                      "docs/architecture.md", "docs/huggingface.md", "docs/own_text.md",
                                      "docs/tasks.md", "docs/diffusion.md", "data/sudoku/README.md",
                                      "docs/environments.md", "data/guess/README.md", "data/calculator/README.md",
                                      "data/char_diffusion/README.md"])
def test_commands_name_scripts_and_configs_that_exist(document):
    text = pathlib.Path(ROOT, document).read_text()
    for path in re.findall(r"(?:python|nproc_per_node=\d+) ((?:core|grpo|data|bench)/\S+?\.py)", text) + re.findall(
            r"\b(config/\w+\.py)", text):
        assert pathlib.Path(ROOT, path).exists(), path


SCRIPTS = [str(p.relative_to(ROOT)) for folder in ("core", "grpo", "data", "bench") for p in sorted(
    pathlib.Path(ROOT, folder).rglob("*.py")) if "\n    run_script(main)\n" in p.read_text()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(f"script_{script.replace('/', '_')}", pathlib.Path(ROOT, script))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    code, (out, err) = exit_code(module.main), capsys.readouterr()
    assert code in (0, None) and "--" in out and not err, err
