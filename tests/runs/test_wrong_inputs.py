"""Wrong inputs end in one line that names the key or file and the remedy; nothing of the user's is lost."""

import pathlib
import re

import pytest

from core.model import SEQUENCE_SCORER
from core.models import save_model
from tests.families import change_folder, model_folder
from tests.tiny import CAUSAL, causal_model, model, run_here, save
from tests.wrong_inputs import FILES, FOLDERS, PRETRAIN, ROWS, TRAIN


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
        "generator": save(folder / "generator.safetensors", model()), "causal": str(folder / "causal.safetensors")}


def braces(text, places):
    """The text with the paths in the place of names in braces."""
    return re.sub(r"\{([^}]+)\}", lambda name: places.get(name[1], name[0]), text)


def inputs(places):
    """The bytes of every input."""
    return {name: pathlib.Path(path).read_bytes() for name, path in places.items() if pathlib.Path(path).is_file()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_wrong_input_is_one_line_with_its_key_and_the_remedy(row, places, tmp_path):
    script, arguments, code, words = row
    places = places | {"out": str(tmp_path / "out")}
    text = braces(arguments, places)
    if script in (TRAIN, PRETRAIN) and "--out_dir" not in text:
        text += f" --out_dir={places['out']}"
    before = inputs(places)
    done = run_here(script, *text.split())
    lines = done.stderr.strip().split("\n")
    assert done.returncode == code and len(lines) == 1, (done.returncode, done.stderr)
    assert lines[0].isprintable()
    for word in braces(words, places).split():
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", lines[0]), (word, lines)
    assert inputs(places) == before
