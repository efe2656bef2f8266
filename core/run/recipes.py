"""Builds missing files by their recipes: a dataset with its prepare.py, a checkpoint with core/pretrain.py."""

import os
import subprocess
import sys

from core.run.folder import lock
from core.settings.user_code import ROOT

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RECIPES = {  # {a checkpoint that a shipped config names: the config that trains it, with settings, or a prepare.py}
    "data/arithmetic/pretrained/generator.safetensors": "config/pretrain_arithmetic.py",
    "data/char_diffusion/pretrained/generator.safetensors": "config/pretrain_generator.py",
    "data/char_diffusion/pretrained/gold_judge.safetensors":
        "config/pretrain_judge.py --mask_random=2.0 --mask_line=0.5 --mask_low=0.02 --mask_high=0.5 "
        "--max_iters=450 --learning_rate=0.0015 --seed=7 --fill_temperature_low=0.5 --fill_temperature_high=1.2 "
        "--clean_share=0.2",
    "data/char_diffusion/pretrained/judge.safetensors": "config/pretrain_judge.py",
    "data/code/pretrained/generator.safetensors":
        "config/pretrain_arithmetic.py --block_size=192 --batch_size=32 --max_iters=250 --lr_decay_iters=400",
    "data/countdown/pretrained/any_order.safetensors":
        "config/pretrain_generator.py --block_size=34 --max_iters=4000 --learning_rate=0.003 --save_interval=1000",
    "data/countdown/pretrained/generator.safetensors":
        "config/pretrain_arithmetic.py --block_size=64 --max_iters=800 --lr_decay_iters=1600 --eval_interval=200 "
        "--save_interval=200",
    "data/guess/pretrained/generator.safetensors":
        "config/pretrain_arithmetic.py --max_iters=250 --lr_decay_iters=None --save_interval=100",
    "data/smollm2/model": "data/smollm2/prepare.py",
    "data/sudoku/pretrained/generator.safetensors": "config/pretrain_sudoku.py",
    "out-equations/generator.safetensors": "config/pretrain_equations.py",
    "out-trunk/model.safetensors": "config/pretrain_trunk.py",
}


def build_missing(path, recipe, key, command, say, dry=False):
    """Runs `command`, which follows `recipe` (a file, settings), if the file `path` is missing. key: what names it

    dry: only say so. Returns whether the file is still missing
    """
    if os.path.exists(path):
        return False
    if dry:
        say(f"{key}: {path} is missing; it would be built by {' '.join(recipe)}")
        return True
    with open(recipe[0]) as file:
        lock(file, wait=True)  # another run of this machine may be building it
        if os.path.exists(path):
            return False
        say(f"{key}: {path} is missing; building it with {' '.join(recipe)} (if you interrupt it, the next start goes "
            "on from there)")
        # The command runs as a single process, not as a rank of this run
        environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
        done = subprocess.run([sys.executable, *command], env=environment)
    if done.returncode or not os.path.exists(path):
        raise ValueError(f"{key}: building {path} with {recipe[0]} failed or was stopped, see above; start again to go "
                         "on")
    return False


def build_missing_dataset(folder, say, dry=False):
    """Runs the prepare.py of a folder that has one, but no meta.json, the file that it writes last."""
    recipe = os.path.join(folder, "prepare.py")
    if not os.path.exists(recipe):
        return False
    return build_missing(os.path.join(folder, "meta.json"), [recipe], "dataset", [recipe, f"--out={folder}"], say, dry)


def build_missing_checkpoint(path, key, dataset, say, dry=False):
    """Builds the missing checkpoint `path` if RECIPES has it; a config trains it on `dataset`. The training has its own
    folder beside the checkpoint; if it was interrupted, it is resumed there."""
    recipe = RECIPES.get(path, "").split()
    if not recipe or not os.path.exists(recipe[0]):  # it is not started in the repository's folder
        return False
    command = recipe
    if os.path.basename(recipe[0]) != "prepare.py":
        out_dir = os.path.splitext(path)[0] + "-run"
        command = [os.path.join(ROOT, "core", "pretrain.py"), *recipe, f"--dataset={dataset}", f"--out_dir={out_dir}",
                   f"--export={path}", "--resume=auto"]
    return build_missing(path, recipe, key, command, say, dry)
