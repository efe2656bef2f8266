"""Prints the map: every file with the first line of its docstring, after the files of its folder that it imports.

python grpo/tools/map.py          core/, grpo/ and bench/
python grpo/tools/map.py tests    another folder; --help is the only option
"""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from core.errors import UsageError, run_script


def in_order(paths):
    """The files of a folder as [(path, syntax tree)], by name, but each after the files that it imports from there."""
    trees = {}
    modules = {}  # {name of a module: path}
    for path in sorted(paths):
        path = path.relative_to(ROOT)
        trees[path] = ast.parse((ROOT / path).read_bytes())
        module = ".".join(path.with_suffix("").parts)
        modules[module] = path
    order = TopologicalSorter()
    for path, tree in trees.items():
        order.add(path)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                order.add(path, modules[node.module])
    return [(path, trees[path]) for path in order.static_order()]


def main(argv):
    """Prints the map of the folders of a command line."""
    for top in argv:
        folder = (ROOT / top).resolve()
        if not folder.is_dir() or ROOT not in folder.parents:
            raise UsageError("python grpo/tools/map.py [FOLDER...], with folders of this repository")
    for top in argv or ("core", "grpo", "bench"):
        folders = {path.parent for path in (ROOT / top).rglob("*.py")}
        for folder in sorted(folders):
            print(f"\n{folder.relative_to(ROOT)}/")
            for path, tree in in_order(folder.glob("*.py")):
                docstring = ast.get_docstring(tree) or ""
                about, _, _ = docstring.partition("\n")
                if about:
                    print(f"  {path.name:22} {about}")


if __name__ == "__main__":
    run_script(main)
