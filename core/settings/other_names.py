"""Names of settings in other projects, from the tables of docs/coming_from.md, which so cannot say something else."""

import pathlib
import re

TABLES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"
SETTING = re.compile(r"`(\w+)`")


def rows():
    """Yields (a name in another project, its settings here, the settings that its remark names)."""
    if not TABLES.is_file():  # a copy of the code without its documents
        return
    for line in TABLES.read_text(encoding="utf-8").split("\n"):
        cells = line.strip().strip("|").split("|")
        if len(cells) != 3:
            continue
        names = [name.strip(" .").partition("=")[0] for name in cells[0].split(",")]
        settings = SETTING.findall(cells[1])
        remark = SETTING.findall(cells[2])
        for i, name in enumerate(names):
            if len(names) == len(settings):  # they stand in the same order
                yield name, [settings[i]], remark
            else:
                yield name, settings, remark


def settings_of(name, known):
    """The settings among `known` that do what `name` does in another project; None if no table has the name.

    name: whole, or with a part of the groups that it is in, as in actor.grad_clip
    """
    found = None
    for other, settings, remark in rows():
        if other == name or other.endswith(f".{name}") or name.endswith(f".{other}"):
            here = [s for s in settings if s in known] or [s for s in remark if s in known]
            found = (found or []) + here
    return None if found is None else list(dict.fromkeys(found))
