"""What the documents name is there: settings, metrics, files, functions, configs."""

import ast
import dataclasses
import importlib.util
import inspect
import pathlib
import re
import sys

import pytest

from core.config import load_config
from core.huggingface.settings import CHOICES, LoraConfig
from core.settings.script import exit_code
from core.supervised.config import PretrainConfig
from grpo.advantages import ADVANTAGES
from grpo.grpo_config import GRPOConfig
from grpo.kl import KL_ESTIMATORS
from grpo.objectives import OBJECTIVES
from grpo.policies.fill_views import FILL_ESTIMATORS
from grpo.reward_functions.registry import REWARDS
from tests.tiny import ROOT, documented_keys, run_script

CONFIGS = sorted(pathlib.Path(ROOT, "config").glob("*.py"))
FIELDS = {f.name for cls in (GRPOConfig, PretrainConfig) for f in dataclasses.fields(cls)}
CODE = re.compile("`([^`]+)`")


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


def test_the_settings_that_newcomers_look_for_exist():
    rows = [cells for heading, cells in tables("docs/coming_from.md")]
    assert len(rows) > 50 and all(len(cells) == 3 and all(cells[:2]) for cells in rows)
    values = {"`advantage`": ADVANTAGES, "`objective`": OBJECTIVES, "`kl_estimator`": KL_ESTIMATORS}
    for cells in rows:
        if cells[1] in values:  # the values that take the place of another project's
            found = CODE.findall(cells.pop())
            assert found and set(found) <= set(values[cells[1]]), (cells, found)
    named = {name for cells in rows for name in CODE.findall(" ".join(cells[1:])) if not name.startswith("python ")}
    named |= set(CODE.findall(pathlib.Path(ROOT, "docs/coming_from.md").read_text().split("## nanoGPT")[1]))
    named = {name for name in named if not name.startswith(("python ", "--")) and "=" not in name}
    assert len(named) > 50 and named <= FIELDS, named - FIELDS


def test_the_settings_of_trl_have_the_names_that_trl_gives_them():
    trl = pytest.importorskip("trl")
    rows = [cells for heading, cells in tables("docs/coming_from.md") if heading[0] == "TRL"]
    gone = {cells[0] for cells in rows if cells[2].startswith("gone from TRL")}
    named = {cells[0].partition("=")[0] for cells in rows}
    known = {f.name for f in dataclasses.fields(trl.GRPOConfig)} | set(inspect.signature(trl.GRPOTrainer).parameters)
    assert len(named) > 35 and named - known == gone, named - known
    for name in ("temperature", "top_p"):
        told = next(cells[2] for cells in rows if cells[0] == name)
        here, there = (cls.__dataclass_fields__[name].default for cls in (GRPOConfig, trl.GRPOConfig))
        assert told == f"{here} here, {there} there"


def test_every_metric_has_a_meaning_a_healthy_range_and_a_remedy():
    rows = list(tables("docs/metrics.md"))
    assert len(rows) > 50
    for heading, cells in rows:
        assert heading == ["key", "what it is", "healthy", "when it leaves that"]
        assert len(cells) == 4 and all(cells), cells


def test_every_equation_stands_beside_a_function_that_exists():
    places = [place for heading, cells in tables("docs/algorithm.md") if heading[-1] == "where"
              for place in CODE.findall(cells[-1])]
    assert len(places) > 35
    for place in places:
        path, _, names = place.partition(": ")
        tree = ast.parse(pathlib.Path(ROOT, path).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        found |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                  if isinstance(target, ast.Name)}
        found |= {f"{c.name}.{node.name}" for c in tree.body if isinstance(c, ast.ClassDef) for node in c.body
                  if isinstance(node, ast.FunctionDef)}
        found |= {f"{c.name}.{node.target.id}" for c in tree.body if isinstance(c, ast.ClassDef) for node in c.body
                  if isinstance(node, ast.AnnAssign)}
        for name in names.split(", ") if names else ():
            assert name in found, place


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
            dataclasses.replace(GRPOConfig(top_p=1.0, batch_size=16), **{key: ast.literal_eval(value)} | (
                {"advantage": "leave_one_out"} if key == "train_pass_k" else {}))


def test_answers_name_settings_that_exist():
    known = FIELDS | documented_keys() | set(OBJECTIVES) | set(FILL_ESTIMATORS) | set(REWARDS) | set(CHOICES["attention"]) | {
        "OMP_NUM_THREADS", "auto", "float32", "static", "ema", "periodic", "adamw", "muon", "keep", "resample", "grpo",
        "all-linear", "none", "group"}
    seen = set()
    for heading, cells in tables("grpo/README.md"):
        named = {part.partition("=")[0] for part in CODE.findall(" ".join(cells))}
        assert named <= known, named - known
        told = {part.partition("=")[0] for part in CODE.findall(cells[0 if heading[0] == "key" else -1])}
        assert told & (FIELDS | {"OMP_NUM_THREADS"}), cells
        seen |= told
    quiet = {"clip_low", "clip_high", "clip_cap", "kl_in_reward", "kl_importance", "overlong_buffer",
             "ema_alpha", "reference_update_freq", "unmask_steps", "fill_estimator", "ppo_epochs", "minibatches",
             "reward_normalisation", *(f.name for f in dataclasses.fields(LoraConfig))}
    assert quiet <= seen, quiet - seen


def walks():
    """{heading: files} of the numbered lists of docs/architecture.md, and the names that each entry mentions."""
    text = pathlib.Path(ROOT, "docs", "architecture.md").read_text()
    for part in text.split("## Walk ")[1:]:
        yield part.split("\n")[0], re.findall(r"^\d+\. `([^`]+)`[^:]*:(.*)$", part, re.M)


def test_a_walk_through_the_code_never_goes_back_to_a_file():
    lengths = []
    for heading, stops in walks():
        files = [file for file, _ in stops]
        assert len(set(files)) == len(files), heading
        for file, text in stops:
            source = pathlib.Path(ROOT, file).read_text()
            for name in CODE.findall(text):
                assert name.rpartition(".")[2] in source, f"{heading}: {file} has no {name}"
        lengths.append(len(files))
    assert len(lengths) == 3 and lengths[0] < 12 and lengths[1] < 11 and lengths[2] < 19


def test_no_table_of_thirty_rows_stands_without_headings():
    for document in ("README.md", "grpo/README.md", "AGENTS.md", *(f"docs/{name}.md" for name in (
            "algorithm", "metrics", "results", "architecture", "huggingface", "security", "trackers", "coming_from"))):
        rows = 0
        for line in pathlib.Path(ROOT, document).read_text().split("\n"):
            rows = rows + 1 if line.startswith("|") else 0
            assert rows < 32, f"{document}: {line}"


@pytest.mark.slow
def test_the_python_example_runs_and_learns(tmp_path):
    code = re.search("```python\n(import torch.*?)```", pathlib.Path(ROOT, "grpo/README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "example.py").write_text(f"import sys\nsys.path.insert(0, {ROOT!r})\n" + code)
    done = run_script(tmp_path / "example.py")
    assert done.returncode == 0, done.stderr
    rewards = [float(line.split()[1]) for line in done.stdout.strip().split("\n")]
    assert len(rewards) == 20 and rewards[-1] > rewards[0] + 0.1


@pytest.mark.parametrize("document", ["README.md", "AGENTS.md", "grpo/README.md", "docs/results.md", "docs/log.md",
                                      "docs/architecture.md", "docs/huggingface.md", "docs/own_text.md",
                                      "data/char_diffusion/pretrained/README.md"])
def test_commands_name_scripts_and_configs_that_exist(document):
    text = pathlib.Path(ROOT, document).read_text()
    for path in re.findall(r"(?:python|nproc_per_node=\d+) ((?:core|grpo|data)/\S+?\.py)", text) + re.findall(
            r"\b(config/\w+\.py)", text):
        assert pathlib.Path(ROOT, path).exists(), path


SCRIPTS = [str(p.relative_to(ROOT)) for folder in ("core", "grpo", "data") for p in sorted(
    pathlib.Path(ROOT, folder).rglob("*.py")) if "\n    run_script(main)\n" in p.read_text()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(f"script_{script.replace('/', '_')}", pathlib.Path(ROOT, script))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    code, (out, err) = exit_code(module.main), capsys.readouterr()
    assert code in (0, None) and "--" in out and not err, err
