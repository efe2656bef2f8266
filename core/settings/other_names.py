"""What a setting of another project is called here: the tables of docs/coming_from.md are read, so that they say it."""

import pathlib
import re

TABLES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"


def rows():
    """Yields (a name in another project, its settings here, the settings that its remark names)."""
    if not TABLES.is_file():  # a copy of the code without its documents
        return
    for line in TABLES.read_text(encoding="utf-8").split("\n"):
        cells = line.strip().strip("|").split("|")
        if len(cells) != 3:
            continue
        names = [name.strip(" .").partition("=")[0] for name in cells[0].split(",")]
        settings, remark = (re.findall(r"`(\w+)`", cell) for cell in cells[1:])
        for i, name in enumerate(names):
            own = settings[i : i + 1] if len(names) == len(settings) else settings  # in the same order
            yield name, own, remark


def settings_of(name, known):
    """The settings among `known` that do what `name` does elsewhere; None if no table has the name.

    name: whole, or with some of the groups that it is in, as in actor.grad_clip
    """
    found = None
    for other, settings, remark in rows():
        if other == name or other.endswith(f".{name}") or name.endswith(f".{other}"):
            here = [s for s in settings if s in known] or [s for s in remark if s in known]
            found = [*(found or []), *here]
    return found if found is None else list(dict.fromkeys(found))
