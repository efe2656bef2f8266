"""Wrong inputs end in one line that names the key or file and the remedy; nothing of the user's is lost. A bug of ours
keeps its traceback."""

import pathlib
import re

import pytest

from core import data
from core.errors import Mistake, check_version
from core.fill_in import UNMASK_ORDERS
from core.model import SEQUENCE_SCORER
from core.models import save_model
from grpo import losses
from core.settings.optional import require
from tests.families import change_folder, model_folder
from tests.tiny import CAUSAL, ROOT, causal_model, model, run_here, save
from tests.wrong_inputs import BUGS, FILES, FOLDERS, LEARN, PRETRAIN, RANKS, ROWS, TRAIN, VERSIONS


@pytest.fixture(scope="module")
def places(dataset, prompts, tmp_path_factory):
    """{name in braces: path}"""
    folder = tmp_path_factory.mktemp("wrong")
    save_model(str(folder / "causal.safetensors"), causal_model(), CAUSAL)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name, (family, change) in FOLDERS.items():
        change_folder(model_folder(folder / name, family), change)
    return {name: str(folder / name) for name in (*FILES, *FOLDERS)} | {
        "text": dataset, "prompts": prompts, "folder": str(folder),
        "llama": model_folder(folder / "llama", "llama"),
        "judge": save(folder / "judge.safetensors", model(SEQUENCE_SCORER)),
        "cls": save(folder / "cls.safetensors", model(SEQUENCE_SCORER, judge_head="cls")),
        "generator": save(folder / "generator.safetensors", model()), "causal": str(folder / "causal.safetensors")}


@pytest.fixture(autouse=True)
def own_tables(monkeypatch):
    """What the users' files add to tables is not there in other tests."""
    monkeypatch.setattr(data, "MASKS", dict(data.MASKS))
    yield
    for table in (losses.OBJECTIVES, losses.SURROGATES, losses.KL_ESTIMATORS, UNMASK_ORDERS):
        table.pop("mine", None)


def braces(text, places):
    """The text with the paths in the place of names in braces."""
    return re.sub(r"\{([^}]+)\}", lambda name: places.get(name[1], name[0]), text)


def command(script, arguments, places):
    """The arguments of a row, as a list; a run has a folder of its own."""
    text = braces(arguments, places)
    if script in (TRAIN, PRETRAIN) and "--out_dir" not in text:
        text += f" --out_dir={places['out']}"
    return text.split()


def inputs(places):
    """The bytes of every input."""
    return {name: pathlib.Path(path).read_bytes() for name, path in places.items() if pathlib.Path(path).is_file()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_wrong_input_is_one_line_with_its_key_and_the_remedy(row, places, tmp_path):
    script, arguments, code, words = row
    check_one_line(script, arguments, code, words, places | {"out": str(tmp_path / "out")})


@pytest.mark.parametrize("row", VERSIONS, ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_an_old_package_is_one_line_with_its_floor_before_weights_are_read(row, places, tmp_path, monkeypatch):
    package, version, script, arguments, words = row
    monkeypatch.setattr(pytest.importorskip(package), "__version__", version)
    monkeypatch.setattr("core.huggingface.load.read_weights", function_with_a_bug())
    check_one_line(script, arguments, 1, words, places | {"out": str(tmp_path / "out")})


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cu130", "2.13.0a0+git1234", "2.13.0.dev2026", "2.100", "3.0"])
def test_a_version_from_the_floor_on_passes(version):
    check_version("torch.distributed.fsdp", version, "", "")


def test_a_package_that_does_not_load_is_named_with_what_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "halved.py").write_text("import package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Mistake, match="key=1.*halved.*package_that_nobody_has.*pip install whole"):
        require("halved", "key=1", "whole")


def check_one_line(script, arguments, code, words, places):
    """Runs a row, which must end in one line with these words and leave the inputs as they are."""
    before = inputs(places)
    done = run_here(script, *command(script, arguments, places))
    lines = done.stderr.strip().split("\n")
    assert done.returncode == code and len(lines) == 1, (done.returncode, done.stderr)
    assert lines[0].isprintable()
    for word in braces(words, places).split():
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", lines[0]), (word, lines)
    assert inputs(places) == before


@pytest.mark.parametrize(("variables", "words"), RANKS, ids=str)
def test_variables_of_torchrun_that_do_not_fit_together_are_one_line(variables, words, places, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = run_here(PRETRAIN, *command(PRETRAIN, LEARN, places | {"out": str(tmp_path)}))
    line, = done.stderr.splitlines()
    assert done.returncode == 1 and all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", line) for word in words.split())


def function_with_a_bug():
    """A function in a file of ours that raises the ValueError of int("x"), whatever it is called with."""
    names = {}
    exec(compile("def bug(*_, **__): int('x')", f"{ROOT}/core/bug.py", "exec"), names)
    return names["bug"]


@pytest.mark.parametrize("row", BUGS, ids=lambda row: row[2])
def test_a_bug_of_ours_keeps_its_traceback(row, places, tmp_path, monkeypatch):
    script, arguments, function = row
    monkeypatch.setattr(function, function_with_a_bug())
    places = places | {"out": str(tmp_path / "out")}
    with pytest.raises(ValueError, match="invalid literal") as found:
        run_here(script, *command(script, arguments, places))
    assert type(found.value) is ValueError and str(found.traceback[-1].path).endswith("core/bug.py")
