"""Settings: config files and arguments, rooms that open with a value, one line and an exit code for a mistake."""

import dataclasses
import json

import pytest

from core.config import load_config
from core.errors import Mistake
from core.settings.help import help_lines
from core.settings.setting import Settings, setting
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from tests.tiny import all_settings

JUDGE = "--mode=sequence_scorer"


def load(*argv):
    return load_config(PretrainConfig, [str(argument) for argument in argv])[0]


def test_later_arguments_win_and_a_config_file_may_compute(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("_half = 0.5\ndropout = _half / 2\nn_layer = 4 * 3\nlearning_rate = 1\n")
    c = load("--n_layer=6", path, "--seed=7")
    assert (c.dropout, c.n_layer, c.learning_rate, c.seed) == (0.25, 12, 1.0, 7)
    assert type(c.learning_rate) is float and load(path, "--n_layer=6").n_layer == 6


@pytest.mark.parametrize("folder, named", [("mine", ["--out_dir=mine"]), ("out-pretrain", [])])
def test_a_folder_alone_resumes_with_the_settings_of_its_run(tmp_path, monkeypatch, folder, named):
    monkeypatch.chdir(tmp_path)
    first = PretrainConfig(n_layer=2, seed=7, out_dir="where it was", mode="sequence_scorer", fill_checkpoints=("a",),
                           report_to=("wandb",), wandb_project="p")
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps(dataclasses.asdict(first) | {"starts": []}))
    command = ["--resume=True", *named, "--seed=9"]
    assert load(*command) == dataclasses.replace(first, resume=True, seed=9, out_dir=folder)
    assert load("--resume=auto", *command[1:]).fill_checkpoints == load(*command[1:]).fill_checkpoints == ()


def test_help_shows_every_setting_and_with_all_those_of_the_rooms():
    own, every = ({line.split("=")[0].strip(" -") for line in help_lines(GRPOConfig, rooms) if line.startswith("  --")}
                  for rooms in (False, True))
    assert own == {f.name for f in dataclasses.fields(GRPOConfig)} and every == all_settings(GRPOConfig)


class Garden(Settings):
    excludes = (("pond lake=deep", "garden=zen house", "there is no water"),)

    trees: int = setting(3, "trees in the garden", "[0, 9]")
    pond: bool = setting(False, "whether it has one")


class Cellar(Settings):
    excludes = (("depth>house", "", "the house would fall"),)
    depth: float = setting(2.0, "metres", "(0, 9]")


class House(Settings):
    rooms = {f"{__name__}:Garden": "garden!=none", f"{__name__}:Cellar": "cellars=wine cellars=cheese"}

    house: int = setting(5, "metres", "[1, 9]")
    garden: str = setting("none", "its style", ("none", "zen", "wild"))
    cellars: tuple[str, ...] = setting((), "what they are for")


def test_a_room_has_its_settings_only_while_it_is_open():
    closed, both = House(), House(garden="wild", cellars=("wine", "coal"), trees=4)
    assert dataclasses.asdict(closed) == {"house": 5, "garden": "none", "cellars": ()}
    assert dataclasses.asdict(both) == {"house": 5, "garden": "wild", "cellars": ("wine", "coal"), "trees": 4,
                                        "pond": False, "depth": 2.0}
    assert isinstance(both, House) and isinstance(both, Garden) and not isinstance(closed, Garden)
    assert closed.trees == 3, "a closed room's settings read as their defaults"
    assert House(trees=3) == closed and not hasattr(closed, "roof")
    for values in ({"trees": 8}, {"garden": "zen", "trees": 10}, {"garden": "zen", "pond": True},
                   {"cellars": ("cheese",), "depth": 6.0}):
        with pytest.raises(Mistake, match=f"^{[*values][-1]}="):
            House(**values)
