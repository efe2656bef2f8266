"""Settings: intervals and choices, rooms that open with a value, what excludes what."""

import math
from dataclasses import asdict, fields

import pytest

from core.model import GPTConfig
from core.sample import SampleConfig
from core.settings.setting import Settings, allowed_types, check_value, is_inside, load_class, setting
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig


@pytest.mark.parametrize(("value", "interval", "inside"), [
    (1, "[1, 5]", True), (5, "[1, 5]", True), (6, "[1, 5]", False), (1, "(1, 5)", False), (5, "(1, 5)", False),
    (math.nan, "[1, 5]", False), (math.inf, "[0, inf)", False), (1e308, "[0, inf)", True)])
def test_a_bracket_tells_whether_an_interval_has_its_end(value, interval, inside):
    assert is_inside(value, interval) is inside


@pytest.mark.parametrize("cls", [GRPOConfig, PretrainConfig, GPTConfig, SampleConfig, *map(load_class, GRPOConfig.rooms)])
def test_every_number_of_a_config_has_an_interval(cls):
    for f in fields(cls):
        if {int, float} & set(allowed_types(f.type)):
            with pytest.raises(ValueError, match=f"^{f.name}=-1 must be "):
                check_value(f.name, -1, f.metadata["allowed"])


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
    assert asdict(closed) == {"house": 5, "garden": "none", "cellars": ()}
    assert asdict(both) == {"house": 5, "garden": "wild", "cellars": ("wine", "coal"), "trees": 4, "pond": False, "depth": 2.0}
    assert isinstance(both, House) and isinstance(both, Garden) and not isinstance(closed, Garden)
    assert closed.trees == 3, "a closed room's settings read as their defaults"
    assert House(trees=3) == closed and not hasattr(closed, "roof")
    for values in ({"trees": 8}, {"depth": 8.0}, {"garden": "zen", "trees": 10}, {"garden": "zen", "pond": True},
                   {"cellars": ("cheese",), "depth": 6.0}):
        with pytest.raises(ValueError, match=f"^{[*values][-1]}="):
            House(**values)
