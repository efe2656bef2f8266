"""What --help prints."""

import pytest

from core.config import load_config
from core.settings.help import HELP_WIDTH, help_lines
from core.settings.setting import Settings, setting
from grpo.grpo_config import GRPOConfig
from tests.tiny import all_settings


class Example(Settings):
    width: int = setting(8, "of the hidden states: a reason that goes on and on for so long that it needs a second line of "
                         "its own")
    device: str | None = setting("cpu", "cpu or cuda")
    names: tuple = setting((), "of people, in the order (first, last)")


def test_help_shows_defaults_and_reasons(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(Example, ["--width=4", "--help"])
    first, *lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert stop.value.code == 0 and "--key=value" in first
    assert lines == [
        "  --width=8       of the hidden states: a reason that goes on and on for so long that it needs a second line of its own",
        "  --device='cpu'  cpu or cuda",
        "  --names=()      of people, in the order (first, last)"]


def test_help_shows_the_usual_settings_all_of_them_or_those_of_a_room():
    usual, every, room = ([line.split("=")[0].strip(" -") for line in help_lines(GRPOConfig, which) if line.startswith("  --")]
                          for which in ("", "all", "vllm"))
    assert 25 < len(usual) < 40 and usual[:2] == ["dataset", "generator_checkpoint"] and set(every) == all_settings(GRPOConfig)
    assert room == ["vllm_url"] and all(len(line) <= HELP_WIDTH for line in help_lines(GRPOConfig, "all"))
