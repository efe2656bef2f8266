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
    """The files of a folder as [(path, syntax tree)], each after those of them that it imports, else by name."""
    trees = {path.relative_to(ROOT): ast.parse(path.read_bytes()) for path in sorted(paths)}
    modules = {".".join(path.with_suffix("").parts): path for path in trees}
    order = TopologicalSorter()
    for path, tree in trees.items():
        found = (modules.get(node.module) for node in tree.body if isinstance(node, ast.ImportFrom))
        order.add(path, *filter(None, found))
    return [(path, trees[path]) for path in order.static_order()]


def main(argv):
    """Prints the map of the folders of a command line."""
    if not all((ROOT / folder).is_dir() and ROOT in (ROOT / folder).resolve().parents for folder in argv):
        raise UsageError("python grpo/tools/map.py [FOLDER...], with folders of this repository")
    for top in argv or ("core", "grpo", "bench"):
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            print(f"\n{folder.relative_to(ROOT)}/")
            for path, tree in in_order(folder.glob("*.py")):
                about = (ast.get_docstring(tree) or "").partition("\n")[0]
                if about:
                    print(f"  {path.name:22} {about}")


if __name__ == "__main__":
    run_script(main)
