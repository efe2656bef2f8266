"""Imports a user's Python file as its own module. Its neighbours, the files and packages beside it, are found only by
imports in the file and in its neighbours.

The file /me/mine.py is the package core.user_files.%2Fme%2Fmine%2Epy, and helper.py beside it is the module `helper` of
that package. A process that unpickles a user's function by its name therefore imports core/user_files.py first, which
then finds the user's file. Nothing is put on sys.path, where libraries and this project would find a neighbour called
datasets.py or metrics.py, and two files never share a neighbour.

The statement `import helper` and the function __import__ find the neighbours, at any time. importlib.import_module
finds them only by their relative names: import_module(".helper", __package__).
"""

import builtins
import functools
import importlib
import importlib.util
import os
import sys
import urllib.parse
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

from core.errors import USER_FILES, others

__path__ = []  # makes this module a package; the Finder finds its modules
PROJECT = ("core", "grpo")  # never neighbours: a copy of this project would have tables of its own


def load_user_file(path: str) -> ModuleType:
    """Runs a Python file again, and its neighbours when it imports them. Returns its module. Raises Mistake."""
    root = module_of(path)
    for name in list(sys.modules):
        if name == root or name.startswith(f"{root}."):
            del sys.modules[name]
    importlib.invalidate_caches()  # a file may be newer than the listing of its folder that Python keeps
    with others("it does not run", "correct it", place=path):
        return importlib.import_module(root)


def module_of(path: str) -> str:
    """Returns the name of the module of a file. It has no dot after USER_FILES, for any path."""
    path = os.fsencode(os.path.abspath(path))
    quoted = urllib.parse.quote(path, safe="")
    return USER_FILES + quoted.replace(".", "%2E")


def file_of(root: str) -> str:
    """Returns the path of the file of the module with this name."""
    quoted = root.removeprefix(USER_FILES)
    return os.fsdecode(urllib.parse.unquote_to_bytes(quoted))


class Finder:
    """Finds the user's files, each as a package of everything beside it, and their neighbours."""

    @staticmethod
    def find_spec(
            name: str,
            path: Sequence[str] | None,
            target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(USER_FILES):
            return None
        depth = name.removeprefix(USER_FILES).count(".")
        if depth == 0:
            file = file_of(name)
            folder = os.path.dirname(file)
            return importlib.util.spec_from_file_location(
                name,
                file,
                loader=Loader(name, file),
                submodule_search_locations=[folder])
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(name, spec.origin)
        if spec.origin is None and depth == 1:
            # Python merges all folders of one name without __init__.py. The user's may be called data, as ours is
            usual = PathFinder.find_spec(name, sys.path)
            if usual is not None and usual.origin is None:
                users = spec.submodule_search_locations
                spec.submodule_search_locations = [*users, *usual.submodule_search_locations]
        return spec


class Builtins(dict):
    """Builtins of a module. Names added later to Python's builtins, as gettext does, are found there."""

    def __missing__(self, name):
        return vars(builtins)[name]


class Loader(SourceFileLoader):
    """Runs the user's file, or a neighbour, with an import that finds the neighbours."""

    def exec_module(self, module: ModuleType) -> None:
        root, *_ = self.name.removeprefix(USER_FILES).split(".")
        own_import = functools.partial(import_for, USER_FILES + root)
        # A function takes its builtins from the globals of its module, so that its later imports use own_import
        vars(module)["__builtins__"] = Builtins(vars(builtins), __import__=own_import)
        super().exec_module(module)

    def set_data(self, *arguments, **settings) -> None:
        """Writes no __pycache__ into the user's folder."""


def import_for(
        root: str,
        name: str,
        globals: dict | None = None,
        locals: dict | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0) -> ModuleType:
    """Replaces __import__ in the user's file `root` and in its neighbours."""
    top, dot, rest = name.partition(".")
    own = neighbour(root, top) if level == 0 else None
    if own is None:
        return __import__(name, globals, locals, fromlist, level)
    module = __import__(own + dot + rest, fromlist=fromlist)
    if fromlist:
        return module
    return sys.modules[own]  # `import a.b` gives a


def neighbour(root: str, top: str) -> str | None:
    """Returns the name of the module that `import top` means in the user's file `root`; None if it is no neighbour."""
    name = f"{root}.{top}"
    if name in sys.modules:
        return name
    file = file_of(root)
    found = PathFinder.find_spec(top, [os.path.dirname(file)])
    if found is None or top in PROJECT:
        return None
    if found.origin == file:  # a neighbour imports the user's file itself
        return root
    try:
        usual = importlib.util.find_spec(top)
    except ValueError:  # for a module without a spec, such as a script
        usual = None
    if usual is None:
        return name
    if found.origin is None:  # a folder without __init__.py, perhaps of data, hides no package
        return name if usual.origin is None else None
    path = os.path.realpath(usual.origin or "")
    if os.path.realpath(found.origin) == path:  # sys.path has the folder, too: one copy is enough
        return None
    return name


sys.meta_path.insert(0, Finder)
