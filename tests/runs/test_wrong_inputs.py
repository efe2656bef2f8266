"""Wrong inputs end in one line that names the key or file and the remedy; nothing of the user's is lost."""

import pathlib
import re
from importlib.util import find_spec

import pytest

from core.model import SEQUENCE_SCORER
from core.models import save_model
from tests.families import model_folder
from tests.tiny import CAUSAL, causal_model, model, run_here, save
from tests.wrong_inputs import FILES, PRETRAIN, ROWS, TRAIN


@pytest.fixture(scope="module")
def places(dataset, prompts, tmp_path_factory):
    """{name in braces: path}"""
    folder = tmp_path_factory.mktemp("wrong")
    save_model(str(folder / "causal.safetensors"), causal_model(), CAUSAL)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return {name: str(folder / name) for name in FILES} | {
        "text": dataset, "prompts": prompts, "folder": str(folder),
        "llama": model_folder(folder / "llama", "llama") if find_spec("transformers") else "",
        "judge": save(folder / "judge.safetensors", model(SEQUENCE_SCORER)),
        "generator": save(folder / "generator.safetensors", model()), "causal": str(folder / "causal.safetensors")}


def inputs(places):
    """The bytes of every input."""
    return {name: pathlib.Path(path).read_bytes() for name, path in places.items() if pathlib.Path(path).is_file()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_wrong_input_is_one_line_with_its_key_and_the_remedy(row, places, tmp_path):
    script, arguments, code, words = row
    if "{llama}" in arguments:
        pytest.importorskip("transformers")
    places = places | {"out": str(tmp_path / "out")}
    text = re.sub(r"\{([^}]+)\}", lambda name: places.get(name[1], name[0]), arguments)
    if script in (TRAIN, PRETRAIN) and "--out_dir" not in text:
        text += f" --out_dir={places['out']}"
    before = inputs(places)
    done = run_here(script, *text.split())
    lines = done.stderr.strip().split("\n")
    assert done.returncode == code and len(lines) == 1, (done.returncode, done.stderr)
    assert all(word in lines[0] for word in words.split()), lines
    assert inputs(places) == before
