"""What --help prints."""

import dataclasses
import importlib.util
import pathlib
import re
import sys

import pytest

from core.config import load_config
from core.settings.help import HELP_WIDTH, help_lines

ROOT = pathlib.Path(__file__).resolve().parents[3]
CONFIGS = sorted({(str(path.relative_to(ROOT)), name) for folder in ("core", "grpo", "data")
                  for path in ROOT.joinpath(folder).rglob("*.py")
                  for name in re.findall(r"load_config\((\w+Config),", path.read_text())})


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the two example configs below share."""

    # data
    folder: str = "here"        # where texts are
    # system
    device: str | None = None   # cpu or cuda


@dataclasses.dataclass(frozen=True)
class Example(Shared):
    # model
    width: int = 8              # of the hidden states: a reason that goes on and on for so long that it needs
                                #   a second line of its own
    rate: float = 0.5           # how fast

    # system
    device: str | None = "cpu"
    names: tuple = ()           # of people, in the order (first, last)


def test_help_shows_sections_defaults_types_and_reasons(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(Example, ["--width=4", "--help"])
    first, *lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert stop.value.code == 0 and "--key=value" in first
    assert lines == [
        "", "model",
        "  --width=8        int         of the hidden states: a reason that goes on and on for so long that it "
        "needs a second",
        "                               line of its own",
        "  --rate=0.5       float       how fast",
        "", "system",
        "  --device='cpu'   str | None  cpu or cuda",
        "  --names=()       tuple       of people, in the order (first, last)",
        "", "data",
        "  --folder='here'  str         where texts are"]


@pytest.mark.parametrize(("path", "name"), CONFIGS)
def test_every_key_of_every_script_has_a_reason(path, name):
    spec = importlib.util.spec_from_file_location(f"config_of_{path.replace('/', '_')[:-3]}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = help_lines(getattr(module, name))
    fields = dataclasses.fields(getattr(module, name))
    shown = [line.split("=")[0] for line in lines if re.match(r"  --\w+=.+?  +\w.*  +\S", line)]
    assert shown == list(dict.fromkeys(shown)) and set(shown) == {f"  --{field.name}" for field in fields}
    assert max(map(len, lines)) <= HELP_WIDTH
