"""A reward file is a module like any other: its neighbours are its own, at any time, and nothing else changes."""

import builtins
import functools
import importlib
import importlib.util
import json
import math
import os
import pathlib
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from core import data
from core.data import check_masks
from core.errors import Mistake, definition
from core.records import read_records
from core.user_files import module_of
from grpo.environments import Episode, find_environment
from grpo.reward_functions import registry
from grpo.reward_functions.registry import REWARDS, Call, load_reward_file, register_functions, run_reward
from grpo.reward_functions.workers import Workers
from grpo.rewards import Rewards
from tests.tiny import ROOT, config

ONE = "one = 1.0\n"
VALUE = "def value():\n    return one\n"
LATE = "def value():\n    from helper import one\n    return one\n"
MINE = "\n\ndef mine(completions):\n    return [value() for _ in completions]\n"
POOL = """
import multiprocessing

def length(text):
    from helper import one
    return len(text) * one

def value():
    with multiprocessing.get_context("%s").Pool(1) as pool:
        return pool.map(length, ["a"])[0]
"""
HINTS = """
from __future__ import annotations

import pickle
import typing
from dataclasses import dataclass

@dataclass
class Parts:
    length: Length = None

@dataclass
class Length:
    x: float = 0.0

def value():
    assert typing.get_type_hints(Parts) == {"length": Length}
    return pickle.loads(pickle.dumps(Length(1.0))).x
"""

# {case: files, of which the first is the reward file, where value() must be 1.0}
CASES = {
    "an import in a function": {"mine.py": LATE, "helper.py": ONE},
    "a neighbour of a neighbour": {"mine.py": "from early import value\n", "early.py": LATE, "helper.py": ONE},
    "a package": {
        "mine.py": "import pkg.sub\n\ndef value():\n    return pkg.sub.value() * pkg.one\n", "pkg/__init__.py": ONE,
        "pkg/sub.py": "from . import one\nfrom .other import value\n", "pkg/other.py": LATE, "helper.py": ONE},
    "a folder of modules": {"mine.py": "from pkg.sub import one\n" + VALUE, "pkg/sub.py": ONE},
    "one that the project has too": {
        "mine.py": "from data.sub import one\nfrom data.gsm8k.reward import last_number\n" + VALUE, "data/sub.py": ONE},
    "folders of data": {
        "mine.py": "import json\nimport time\none = json.loads('1.0') if time.time() else 0.0\n" + VALUE,
        "json/a.txt": "", "time/a.txt": ""},
    "a module of a library's name": {"mine.py": "from json import one\n" + VALUE, "json.py": ONE},
    "a folder of the project's name": {
        "mine.py": "from core.errors import Mistake\n\ndef value():\n    return float(Mistake.exit_code)\n",
        "core/__init__.py": "", "core/errors.py": ""},
    "a relative import": {"mine.py": "from .helper import one\n" + VALUE, "helper.py": ONE},
    "__import__": {"mine.py": "one = __import__('helper').one\n" + VALUE, "helper.py": ONE},
    "a neighbour that imports the file": {
        "mine.py": ONE + "from helper import value\n",
        "helper.py": "import mine\n\ndef value():\n    return mine.one\n"},
    "processes that fork": {"mine.py": POOL % "fork", "helper.py": ONE},
    "processes that are spawned": {"mine.py": POOL % "spawn", "helper.py": ONE},
    "types and pickles": {"mine.py": HINTS},
    "a name with dots": {"mine.v2.py": LATE, "helper.py": ONE, "mine.py": "1 / 0"},
    "a name without .py": {"mine": LATE, "helper.py": ONE, "mine.py": "1 / 0"},
    "a package of the same name": {"mine.py": "from mine.sub import one\n" + VALUE, "mine/__init__.py": "",
                                   "mine/sub.py": ONE},
}


def write(folder, files):
    """Writes files. Returns the path of the first."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder / next(iter(files)))


def called(name):
    """The value of a reward for one completion."""
    values, _ = run_reward(Call(name, {"completions": ["a"]}, {}, 1))
    return values[0]


def worth(path, name="mine"):
    """The value of a function of a reward file in a run of that file."""
    register_functions([name], path)
    return called(name)


@pytest.fixture(autouse=True)
def as_in_a_script(monkeypatch):
    """A script of grpo/ has that folder first on sys.path, and Python keeps what it compiles."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(os.path.join(ROOT, "grpo"))


@pytest.mark.parametrize("case", CASES)
def test_a_reward_file_and_its_neighbours_import_each_other(case, tmp_path):
    first, *others = CASES[case].items()
    path = write(tmp_path, dict([(first[0], first[1] + MINE), *others]))
    before = list(sys.path)
    assert worth(path) == 1.0
    assert sys.path == before and not list(tmp_path.rglob("__pycache__"))


# One is imported already, one is not, one is a file of grpo/, and one a package that this project imports
@pytest.mark.parametrize("name", ["json", "colorsys", "metrics", "datasets"])
def test_a_neighbour_is_seen_by_nobody_else(name, tmp_path, monkeypatch):
    usual = importlib.util.find_spec(name)
    monkeypatch.delitem(sys.modules, "library_of_a_test", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    path = write(tmp_path / "his", {
        "mine.py": f"import library_of_a_test as library\nimport {name}\n\ndef value():\n    import {name} as again\n"
                   f"    return {name}.one * again.one\n{MINE}", f"{name}.py": ONE})
    write(tmp_path / "libraries", {"library_of_a_test.py": f"def found():\n    import {name}\n    return {name}\n"})
    assert worth(path) == 1.0
    assert name not in sys.modules or sys.modules[name].__file__ == usual.origin
    assert importlib.util.find_spec(name).origin == usual.origin
    if name in ("json", "colorsys"):
        assert sys.modules["library_of_a_test"].found().__file__ == usual.origin


def test_a_neighbour_that_everybody_can_import_has_one_copy(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "helper_of_a_test", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path, {"mine.py": "import helper_of_a_test\n", "helper_of_a_test.py": ONE})
    load_reward_file(path)
    module = sys.modules[module_of(path)]
    assert module.helper_of_a_test is importlib.import_module("helper_of_a_test")


def test_a_reward_s_name_may_begin_with_an_underscore(tmp_path):
    assert worth(write(tmp_path, {"mine.py": "def _mine(completions):\n    return [1.0]\n"}), "_mine") == 1.0


TABLES = """
import helper
from core.data import mask
from grpo.environments import environment
from grpo.rewards import reward

@reward(0, helper.one, slow={slow}, check=helper.check)
def mine(completions):
    return [helper.one]

def plain(completions):
    return [helper.one]

@environment
class Game:
    one = helper.one

@mask
def {mask}(rng, tokens, count, newline):
    return helper.one
"""
OF_HELPER = """
from grpo.rewards import reward

def check(**fields):
    return one

@reward(0, 1)
def of_helper(completions):
    return [one]
"""


def test_two_files_of_one_name_are_not_mixed_up(tmp_path, monkeypatch):
    """The second has a mask of the name of one of ours, and a reward that the first has not."""
    monkeypatch.setattr(data, "MASKS", dict(data.MASKS))
    ours = data.MASKS["line"]
    a = write(tmp_path / "a", {"mine.py": TABLES.format(slow=True, mask="drawn"), "helper.py": f"one = 2\n{OF_HELPER}"})
    b = write(tmp_path / "b", {"mine.py": TABLES.format(slow=False, mask="line") + "\nreward(0, 1)(plain)\n",
                               "helper.py": f"one = 3\n{OF_HELPER}"})
    for path, one in ((a, 2), (b, 3), (a, 2), (b, 3)):
        assert [worth(path, name) for name in ("mine", "plain", "of_helper")] == [one, one, one]
        mine = REWARDS["mine"]
        assert (mine.high, mine.slow, mine.check()) == (one, path == a, one)
        assert REWARDS["plain"].high == (1.0 if path == b else math.inf)
        assert find_environment("Game", path).one == one
        assert data.MASKS["drawn" if path == a else "line"](None, None, None, None) == one
    load_reward_file(a)
    assert "plain" not in REWARDS, "it has no @reward in this file, and this run does not name it"
    assert data.MASKS["line"] is ours
    load_reward_file(None)
    assert not {"mine", "of_helper"} & set(REWARDS)
    with pytest.raises(Mistake):
        find_environment("Game", None)
    with pytest.raises(Mistake):
        check_masks({"drawn": 1.0})


SAME = """
from grpo.rewards import reward

@reward(0, {high})
def mine(completions):
    {line}
    return [{high}]
"""


@pytest.mark.parametrize("line", ["pass", "import helper"])
def test_of_two_rewards_of_one_name_that_of_the_run_s_file_counts(line, tmp_path):
    """A neighbour has one too, which is imported before, or in the call."""
    before = "" if line == "import helper" else "import helper\n"
    path = write(tmp_path, {"mine.py": before + SAME.format(high=2, line=line),
                            "helper.py": SAME.format(high=3, line="pass")})
    assert worth(path) == called("mine") == REWARDS["mine"].high == 2


@pytest.mark.parametrize("text", ["def contains(completions):\n    return [1.0]\n",
                                  SAME.format(high=2, line="pass").replace("mine", "contains")])
def test_a_file_cannot_take_the_name_of_a_reward_of_ours(text, tmp_path):
    with pytest.raises(Mistake, match="contains"):
        worth(write(tmp_path, {"mine.py": text}), "contains")
    assert REWARDS["contains"].fn.__module__ == "grpo.reward_functions.text"


OBJECTS = """
import functools
from grpo.rewards import reward

class Shorter:
    def __init__(self, most):
        self.most = most

    def __call__(self, completions, **columns):
        return [float(len(text) < self.most) for text in completions]

class Later(Shorter):
    async def __call__(self, completions, **columns):
        return super().__call__(completions)

short, long = reward(0, 1)(Shorter(3)), reward(0, 1)(Shorter(30))
later = reward(0, 1)(Later(3))
part = reward(0, 1)(functools.partial(Shorter.__call__, Shorter(3)))
bare = reward(Shorter(3))
plain = Shorter(3)
alias = short
"""


@pytest.mark.parametrize("name, longest, high", [
    ("short", 2, 1), ("long", 29, 1), ("later", 2, 1), ("part", 2, 1), ("alias", 2, 1), ("bare", 2, math.inf),
    ("plain", 2, math.inf), ("far", 2, 1)])
def test_an_object_with_call_is_a_reward_by_the_name_of_its_variable(name, longest, high, tmp_path):
    write(tmp_path, {"mine.py": "import helper\n" + OBJECTS, "helper.py": OBJECTS.replace("alias", "far")})
    rewards = Rewards(config(reward_file=str(tmp_path / "mine.py"), reward_functions=(name,)))
    assert rewards.names == (name,) and REWARDS[name].high == high
    texts = ["a" * n for n in (longest, longest + 1)]
    assert run_reward(Call(name, {"completions": texts}, {}, 2))[0] == [1.0, 0.0]


def test_of_two_objects_of_one_name_that_of_the_file_counts_with_its_range(tmp_path):
    (tmp_path / "helper.py").write_text(OBJECTS)
    (tmp_path / "mine.py").write_text("from grpo.rewards import reward\nfrom helper import Shorter\n\n"
                                      "short = reward(0, 7)(Shorter(9))\n")
    rewards = Rewards(config(reward_file=str(tmp_path / "mine.py"), reward_functions=("short",)))
    assert rewards.success == "short" and (REWARDS["short"].high, REWARDS["short"].fn.most) == (7, 9)


def test_a_class_is_no_reward(tmp_path):
    (tmp_path / "mine.py").write_text("from grpo.rewards import reward\n\n\n@reward\nclass Mine:\n"
                                      "    def __call__(self, completions):\n        return [0.0] * len(completions)\n")
    with pytest.raises(Mistake, match="mine.py.*Mine.*object"):
        Rewards(config(reward_file=str(tmp_path / "mine.py"), reward_functions=("Mine",)))


def test_a_file_that_is_read_again_is_read_with_its_neighbours(tmp_path):
    path = write(tmp_path, {"mine.py": "from helper import one\n" + VALUE + MINE, "helper.py": ONE})
    assert worth(path) == 1.0
    write(tmp_path, {"helper.py": "one = 3.0\n"})
    assert worth(path) == 1.0
    registry.run_reward_file.cache_clear()
    assert worth(path) == 3.0
    # Another neighbour, written so soon after that the time of the folder does not tell
    before = os.stat(tmp_path)
    write(tmp_path, {"mine.py": "from other import one\n" + VALUE + MINE, "other.py": "one = 4.0\n"})
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    registry.run_reward_file.cache_clear()
    assert worth(path) == 4.0


WRONG = {  # {case: (files, the place that the error names)}
    "a neighbour that is missing": ({"mine.py": "\nimport gone_of_a_test\n"}, "mine.py, line 2"),
    "one that is missing in a call": ({"mine.py": "def mine(completions):\n    import gone_of_a_test\n"},
                                      "mine.py, line 2"),
    "a neighbour that a file among installed packages lacks": ({"site-packages/mine.py": "import gone_of_a_test\n"},
                                                               "site-packages/mine.py"),
    "a module that a package lacks": ({"mine.py": "import pkg.gone\n", "pkg/__init__.py": ""}, "mine.py, line 1"),
    "a name that a neighbour lacks": ({"mine.py": "from helper import gone\n", "helper.py": ""}, "mine.py, line 1"),
    "a neighbour that fails": ({"mine.py": "import helper\n", "helper.py": "import later\n1 / 0\n", "later.py": ""},
                               "helper.py, line 2"),
    "a neighbour that is no Python": ({"mine.py": "import helper\n", "helper.py": "a = 1\nb = =\n"},
                                      "helper.py, line 2")}


@pytest.mark.parametrize("case", WRONG)
def test_an_import_that_fails_is_one_line_with_its_place_and_can_be_tried_again(case, tmp_path):
    files, place = WRONG[case]
    path = write(tmp_path, files)
    with pytest.raises(Mistake, match=place) as found:
        worth(path)
    assert str(found.value).isprintable()
    assert "call" in case or module_of(path) not in sys.modules
    registry.run_reward_file.cache_clear()
    write(pathlib.Path(path).parent, {"mine.py": LATE + MINE, "helper.py": ONE})
    assert worth(path) == 1.0


CHANGED = """
import torch
from grpo.environments import environment

def change():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")

def mine(completions):
    change()
    return [1.0]

@environment
class Changing:
    def reset(self, record):
        change()

    def step(self, text):
        change()
        return None, 1.0

change()
"""


def torch_defaults():
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.empty(1).device


def test_what_a_file_changes_of_torch_ends_with_its_call(tmp_path):
    before = torch_defaults()
    path = write(tmp_path, {"mine.py": CHANGED})
    load_reward_file(path)
    assert torch_defaults() == before
    assert worth(path) == 1.0 and torch_defaults() == before
    one = Episode(SimpleNamespace(environment="Changing", reward_file=path, reward_timeout=9.0, max_turns=2))
    one.begin(0, {"prompt": "a"})
    assert torch_defaults() == before
    one.step("a")
    assert torch_defaults() == before and one.reward == 1.0


SLOW = "from grpo.rewards import reward\n\n@reward(0, 1, slow=True)\ndef mine(completions):\n    return [value()]\n"


@pytest.mark.slow
def test_a_worker_process_finds_the_neighbours(tmp_path, monkeypatch):
    """Of a file that the run names by a relative path."""
    write(tmp_path, {"mine.py": LATE + SLOW, "helper.py": ONE})
    monkeypatch.chdir(tmp_path)
    register_functions(["mine"], "mine.py")
    workers = Workers(1, 300.0, "mine.py")
    try:
        assert workers.call(Call("mine", {"completions": ["a"]}, {}, 1)) == ([1.0], {})
    finally:
        workers.close()


OF_TRL = """
import os

def shorter(completions, answer, trainer_state, log_metric, **columns):
    log_metric("process", os.getpid())
    texts = [completion[0]["content"] for completion in completions]
    return [None if text == truth else trainer_state.global_step - len(text) for text, truth in zip(texts, answer)]

async def longer(completions, *, scale=2, **columns):
    return [scale * len(completion[0]["content"]) for completion in completions]
"""


@pytest.mark.slow
def test_functions_of_trl_that_are_named_slow_have_their_values_in_another_process(tmp_path):
    write(tmp_path, {"mine.py": OF_TRL})
    settings = {"reward_file": str(tmp_path / "mine.py"), "reward_functions": ("shorter", "longer", "repetition"),
                "reward_settings": {"scale": 3}, "task_type": "general", "reward_timeout": 300.0}
    chat = [{"role": "user", "content": "a"}]
    texts = SimpleNamespace(prompts=["a"] * 3, completions=["1", "22", "333"], completion_ids=[[0]] * 3,
                            columns={"prompt": [chat] * 3, "answer": ["1"] * 3})
    found, processes = [], []
    for slow in ((), ("longer", "shorter", "repetition")):
        rewards = Rewards(config(slow_rewards=slow, **settings))
        rewards.check([{"prompt": chat, "answer": "1", "where": "a"}])
        rewards.state.global_step = 7
        try:
            values, metrics = rewards.score(texts, 3)
        finally:
            rewards.close()
        found.append({name: x.nan_to_num(-1).tolist() for name, x in values.items()})
        total, count = metrics["process"]
        processes.append((total == count * os.getpid(), count))
    assert found[0] == found[1] and found[0]["shorter"] == [-1, 5, 4] and found[0]["longer"] == [3, 6, 9]
    assert processes == [(True, 1), (False, 3)]


def test_runs_of_one_process_take_turns_with_rewards_of_their_own(tmp_path):
    runs = {}
    for value, name in enumerate(("a", "b", "same", "same")):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "mine.py").write_text(f"def {name}(completions):\n    return [{value}.0 for _ in completions]\n")
        c = config(reward_file=str(folder / "mine.py"), reward_functions=(name,), task_type="general", max_new_tokens=5)
        runs[value] = Rewards(c)
    texts = SimpleNamespace(prompts=["p"], completions=["x"], columns={}, completion_ids=[[0]])
    for value, rewards in [*runs.items(), *runs.items()]:
        found, = rewards.score(texts, 1)[0].values()
        assert found.tolist() == [value]


OF_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(ground_truth in solution_str) / (1 + extra_info["index"])
    return score if data_source == "plain" else {"score": score, "acc": score > 0}
"""
ADAPTER = """
from grpo.rewards import reward
from mine import compute_score

@reward(0, 1)  # the range of its scores
def verl_score(completions, data_source, reward_model, extra_info=None):
    rows = zip(completions, data_source, reward_model, extra_info or [None] * len(completions))
    scores = [compute_score(data_source=source, solution_str=text, ground_truth=rule["ground_truth"], extra_info=extra)
              for text, source, rule, extra in rows]
    return [score["score"] if isinstance(score, dict) else score for score in scores]
"""


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_the_adapter_for_verl_scores_records_of_verl(ending, tmp_path):
    path = write(tmp_path, {"verl_score.py": ADAPTER, "mine.py": OF_VERL})
    rows = [{"data_source": source, "prompt": [{"role": "user", "content": f"3 plus {n}?"}], "ability": "math",
             "reward_model": {"style": "rule", "ground_truth": str(3 + n)}, "extra_info": {"index": n}}
            for n, source in enumerate(("plain", "plain", "dict"))]
    data_path = str(tmp_path / f"rows{ending}")
    if ending == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), data_path)
    else:
        pathlib.Path(data_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = read_records(data_path)
    rewards = Rewards(config(reward_file=path, reward_functions=("verl_score",), max_new_tokens=5))
    rewards.check(records)
    columns = {key: [record[key] for record in records] for key in rows[0]}
    texts = SimpleNamespace(prompts=["p"] * 3, completions=["3", "5", "It is 5"], columns=columns,
                            completion_ids=[[0]] * 3)
    values, _ = rewards.score(texts, 1)
    assert values["verl_score"].tolist() == pytest.approx([1.0, 0.0, 1 / 3])


def test_builtins_that_are_added_later_are_found(tmp_path):
    (tmp_path / "mine.py").write_text("import builtins\n\ndef mine(completions):\n    builtins.later = 2.0\n"
                                      "    return [later for _ in completions]\n")
    try:
        mine = load_reward_file(str(tmp_path / "mine.py"))["mine"]
        assert mine(["x"]) == [2.0]
    finally:
        del builtins.later


def test_methods_of_an_environment_need_not_be_functions_of_python():
    class Cached:
        step = functools.lru_cache(lambda self, text: (None, 1.0))

    class Proxy:
        def __getattr__(self, name):
            return self

    assert definition(types.MethodType(functools.partial(print), Cached())) and definition(Cached)
    assert definition(Proxy()) == definition(Proxy.__getattr__)
