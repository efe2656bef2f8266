"""Builds missing files by their recipes: a dataset with its prepare.py, a checkpoint with core/pretrain.py."""

import os
import subprocess
import sys

from core.settings.user_code import ROOT

RECIPES = {  # {a checkpoint that a shipped config names: the config that trains it, or a prepare.py}
    "data/smollm2/model": "data/smollm2/prepare.py",
    "out-equations/generator.safetensors": "config/pretrain_equations.py",
    "out-trunk/model.safetensors": "config/pretrain_trunk.py",
}


def build_missing(path, recipe, key, command, say, dry=False):
    """Runs `command`, which follows the file `recipe`, if the file `path` is missing. key: what names it

    dry: only say so. Returns whether the file is still missing
    """
    if os.path.exists(path):
        return False
    if dry:
        say(f"{key}: {path} is missing; it would be built by {recipe}")
        return True
    say(f"{key}: {path} is missing; building it with {recipe} (if you interrupt it, the next start goes on from there)")
    alone = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}  # it is no rank of this run
    done = subprocess.run([sys.executable, *command], env=alone)
    if done.returncode or not os.path.exists(path):
        raise ValueError(f"{key}: building {path} with {recipe} failed or was stopped, see above; start again to go on")
    return False


def build_missing_dataset(folder, say, dry=False):
    """Runs the prepare.py of a folder that has one, but no meta.json, the file that it writes last."""
    recipe = os.path.join(folder, "prepare.py")
    if not os.path.exists(recipe):
        return False
    return build_missing(os.path.join(folder, "meta.json"), recipe, "dataset", [recipe, f"--out={folder}"], say, dry)


def build_missing_checkpoint(path, key, dataset, say, dry=False):
    """Builds the missing checkpoint `path` if RECIPES has it; a config trains it on `dataset`. The training has its own
    folder beside the checkpoint; if it was interrupted, it is resumed there."""
    recipe = RECIPES.get(path, "")
    if not os.path.exists(recipe):  # it is not started in the repository's folder
        return False
    command = [recipe]
    if not recipe.endswith("prepare.py"):
        out_dir = os.path.splitext(path)[0] + "-run"
        command = [os.path.join(ROOT, "core", "pretrain.py"), recipe, f"--dataset={dataset}", f"--out_dir={out_dir}",
                   f"--export={path}", "--resume=auto"]
    return build_missing(path, recipe, key, command, say, dry)
