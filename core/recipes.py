"""Builds a missing file that has a recipe: a dataset with its prepare.py, a checkpoint with core/pretrain.py."""

import os
import subprocess
import sys

from core.config import ROOT

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def build_missing(path, recipe, key, command, say):
    """Runs `command` if the file `path`, named by the setting `key`, is missing and there is a recipe for it."""
    if path is None or recipe is None or os.path.exists(path):
        return
    say(f"{key}: {path} is missing; building it with {recipe} (if you interrupt it, the next start goes on from there)")
    # The child runs alone, not as a rank of this run
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    if subprocess.run([sys.executable, *command], env=environment).returncode:
        raise ValueError(f"{key}: building {path} with {recipe} failed, see above")


def build_missing_dataset(folder, recipe, say):
    """Runs the recipe if the folder has no meta.json, which a prepare.py writes last."""
    build_missing(os.path.join(folder, "meta.json"), recipe, "dataset", [recipe, f"--out={folder}"], say)


def build_missing_checkpoint(path, recipe, key, dataset, say):
    """Pretrains to `path` on `dataset`, in a folder of its own beside it, where an interrupted run is resumed."""
    if path is None:
        return
    out_dir = os.path.splitext(path)[0] + "-run"
    command = [os.path.join(ROOT, "core", "pretrain.py"), str(recipe), f"--dataset={dataset}", f"--out_dir={out_dir}",
               f"--export={path}", f"--resume={os.path.exists(os.path.join(out_dir, 'state.pt'))}"]
    build_missing(path, recipe, key, command, say)
