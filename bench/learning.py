"""Learning on a GPU, a part of bench/gpu.py: runs of a published model, and of one from scratch, and their curves."""

import os
import subprocess
import sys
import time

from core.errors import Mistake
from core.files import METRICS, each_metrics
from grpo.evaluation.samples import evaluations, held_out

PRETRAIN, TRAIN = "core/pretrain.py", "grpo/train_grpo.py"
FIRST = 2  # steps whose seconds are not counted: they load kernels
FEW = ("--max_iters=3", "--batch_size=2", "--group_size=4", "--eval_problems=2", "--eval_completions=2",
       "--eval_interval=3", "--warmup_iters=0")  # of a miniature
SCRATCH = (  # 25 M parameters, stopped early, so that GRPO has something to teach them
    "--n_layer=8", "--n_embd=512", "--n_head=8", "--batch_size=512", "--max_iters=900", "--lr_decay_iters=1800",
    "--eval_interval=450", "--learning_rate=0.001")
MINI_SCRATCH = (
    "--n_layer=2", "--n_embd=32", "--n_head=2", "--batch_size=8", "--max_iters=4", "--eval_interval=4")
STEPS = ("--max_iters=400", "--batch_size=64", "--group_size=16", "--eval_problems=1024", "--eval_completions=8",
         "--eval_interval=100")


def side_by_side(*commands):
    """Runs scripts at the same time: several small runs fit on one GPU. Returns the seconds until the last has ended.
    Raises Mistake."""
    start = time.perf_counter()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    runs = []
    for command in commands:
        runs.append(subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.PIPE, text=True))
    errors = [run.communicate()[1] for run in runs]
    for command, run, error in zip(commands, runs, errors, strict=True):
        if run.returncode:  # the others may say the same
            sys.stderr.write(error)
            raise Mistake(f"python {' '.join(command)} ended with exit code {run.returncode}: see above")
    return time.perf_counter() - start


def found_in(folder):
    """The held-out metrics of each evaluation of a run, and the mean seconds of each phase of its steps."""
    path = os.path.join(folder, METRICS)
    curve = []
    for record in evaluations(each_metrics(path)):
        shown = {name: round(record[name], 4) for name in held_out(record) if record[name] is not None}
        curve.append({"step": record["step"], **shown})
    steps = [record for record in each_metrics(path) if "time/train" in record][FIRST:]
    names = [name for name in steps[-1] if name.startswith("time/")] if steps else []
    seconds = {}
    for name in names:
        total = sum(record.get(name, 0.0) for record in steps)
        seconds[name] = round(total / len(steps), 3)
    return {"curve": curve, "seconds of a step": seconds}


def learn(c):
    """Runs of a config on a model and a dataset, one for each seed, side by side."""
    file, few = ("config/grpo_arithmetic.py", FEW) if c.mini else ("config/grpo_smollm2.py", ())
    settings = [c.config or file, *few, f"--device={c.device_used}"]
    if c.model:
        settings.append(f"--generator_checkpoint={c.model}")
    if c.dataset:
        settings.append(f"--dataset={c.dataset}")
    settings += [f"--{key}={value}" for key, value in (c.settings or {}).items()]
    folders = {seed: os.path.join(c.folder, f"learn-{seed}") for seed in range(1, c.seeds + 1)}
    seconds = side_by_side(*(
        [TRAIN, *settings, f"--seed={seed}", f"--out_dir={folder}"] for seed, folder in folders.items()))
    for seed, folder in folders.items():
        yield {"seed": seed, "seconds of all": round(seconds), **found_in(folder)}


def scratch(c):
    """Countdown with four numbers: a model from scratch learns from solutions, then by GRPO."""
    data, model = os.path.join(c.folder, "countdown4"), os.path.join(c.folder, "countdown4.safetensors")
    trained = os.path.join(c.folder, "countdown4-grpo")
    problems = 400 if c.mini else 60_000
    on = f"--device={c.device_used}"
    prepared = side_by_side(
        ["data/countdown/prepare.py", "--numbers=4", "--largest=50", f"--problems={problems}", f"--out={data}"])
    pretrained = side_by_side(
        [PRETRAIN, "config/pretrain_arithmetic.py", f"--dataset={data}", "--block_size=64",
         *(MINI_SCRATCH if c.mini else SCRATCH), on, f"--out_dir={c.folder}/countdown4-pretrained",
         f"--export={model}"])
    seconds = side_by_side(
        [TRAIN, "config/grpo_countdown.py", f"--dataset={data}", f"--generator_checkpoint={model}",
         "--max_new_tokens=24", *(FEW if c.mini else STEPS), on, f"--out_dir={trained}"])
    yield {"seconds of preparing": round(prepared), "of pretraining": round(pretrained), "of GRPO": round(seconds),
           **found_in(trained)}
