"""Kills small real runs at random moments, resumes them, and compares them with runs that nothing interrupted.

python tests/kill.py --kills=50
python tests/kill.py --kills=12 --signal=TERM --seed=3 --kinds=causal,causal-2
A run is killed with all its ranks, up to KILLS_OF_A_RUN times, and ends in peace. The tensors of its state, its model
file, its samples and its metrics without times must be those of the uninterrupted run, to the last bit. The first kill
of a run comes as soon as it has written a file.
"""

import multiprocessing
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass

os.environ["OMP_NUM_THREADS"] = "1"  # of a rank; a process that has started threads cannot be forked
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch.utils._pytree import tree_flatten

from core import pretrain
from core.checkpoint_manager import read_state
from core.config import load_config
from core.errors import run_script
from core.files import BEST
from core.models import save_model
from core.run import LOCK
from core.settings.setting import Settings
from grpo import train_grpo
from tests.tiny import (
    CAUSAL, TEXT, causal_model, judge, model, read_records, save, without_clock, write_prompt_dataset,
    write_text_dataset)

FORK = multiprocessing.get_context("fork")
KILLS_OF_A_RUN, RUNS_OF_A_KILL = 5, 3  # at most; a run may end before its first kill
RUN = {"max_iters": 12, "save_interval": 1, "eval_interval": 4, "log_interval": 1,
       "batch_size": 4, "device": "cpu", "resume": "auto", "learning_rate": 1e-2}
GRPO = RUN | {"group_size": 3, "ppo_epochs": 2, "minibatches": 2, "reference_mode": "ema", "ema_alpha": 0.9,
              "kl_target": 0.01, "eval_problems": 4, "eval_completions": 2, "sample_interval": 4,
              "keep_best": "eval/mean_reward"}


@dataclass(frozen=True)
class Kill(Settings):
    """The settings of this script."""
    kills: int = 50  # signals to send
    signal: str = "KILL"  # KILL or TERM
    seed: int = 0  # of the moments
    kinds: str = "fill,causal,fill-2,causal-2,pretrain,pretrain-2"  # of runs


def kinds(folder):
    """{kind: (main, settings, ranks)} of runs on data and models that are written to the folder."""
    write_text_dataset(folder / "text", TEXT)
    write_prompt_dataset(folder / "sums")
    save_model(str(folder / "causal.safetensors"), causal_model(scale=3.0), CAUSAL)
    fill = GRPO | {"dataset": folder / "text", "generator_checkpoint": save(folder / "fill.safetensors", model()),
                   "judge_checkpoint": save(folder / "judge.safetensors", judge()), "dtype": "float32",
                   "block_size": 32}
    causal = GRPO | {"dataset": folder / "sums", "generator_checkpoint": folder / "causal.safetensors",
                     "task_type": "general", "max_new_tokens": 5, "reward_workers": 0}
    supervised = RUN | {"dataset": folder / "text", "block_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2,
                        "eval_batches": 2, "keep_best": "val_loss"}
    return {f"{name}{'' if ranks == 1 else f'-{ranks}'}": (main, settings, ranks)
            for name, main, settings in (("fill", train_grpo.main, fill), ("causal", train_grpo.main, causal),
                                         ("pretrain", pretrain.main, supervised)) for ranks in (1, 2)}


class Run:
    """The processes of a run, one for each rank. At the end of its `with` they end."""

    def __init__(self, kind, out_dir):
        main, settings, ranks = kind
        self.log = f"{out_dir}.log"
        argv = ["", *(f"--{key}={value}" for key, value in (settings | {"out_dir": out_dir}).items())]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        self.ranks = [FORK.Process(target=become, args=(main, argv, self.log, env, rank)) for rank in range(ranks)]
        for process in self.ranks:
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.send(signal.SIGKILL)

    def send(self, number):
        for process in self.ranks:
            if process.exitcode is None:
                os.kill(process.pid, number)
        self.ended(60)

    def ended(self, seconds):
        """Whether all processes have ended after at most that long."""
        until = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(0, until - time.monotonic()))
        return all(process.exitcode is not None for process in self.ranks)

    def check(self, *allowed):
        """An error if a process has not ended, or with another exit code."""
        wrong = [process.exitcode for process in self.ranks if process.exitcode not in allowed]
        return f"ended with exit code {wrong[0]}: {pathlib.Path(self.log).read_text()[-2000:]}" if wrong else ""


def become(main, argv, log, env, rank):
    """A rank: a script with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    sys.argv = argv
    run_script(main)


def same(a, b):
    """True for equal tensors and plain values, nested in dicts, lists and tuples."""
    (one, form), (two, other) = map(tree_flatten, (a, b))
    return form == other and all(torch.equal(x, y) if torch.is_tensor(x) else x == y
                                 for x, y in zip(one, two, strict=True))


def difference(a, b):
    """The first thing in which two out_dirs, or their best models, differ, or nothing."""
    if not same(*(read_state(os.path.join(x, "state.pt")) for x in (a, b))):
        return "state.pt differs"
    if without_clock(read_records(f"{a}/metrics.jsonl")) != without_clock(read_records(f"{b}/metrics.jsonl")):
        return "metrics.jsonl differs"
    for name in ("model.safetensors", "samples.jsonl"):
        one, two = (pathlib.Path(x, name) for x in (a, b))
        if one.exists() != two.exists() or (one.exists() and one.read_bytes() != two.read_bytes()):
            return f"{name} differs"
    best_a, best_b = (os.path.join(x, BEST) for x in (a, b))
    if not os.path.exists(best_a):
        return ""
    found = difference(best_a, best_b)
    return found and f"best/{found}"


def has_written(out_dir, records):
    """Whether a run has written so many records of metrics. None: any file but the lock"""
    if records is None:
        return os.path.isdir(out_dir) and bool(set(os.listdir(out_dir)) - {LOCK})
    metrics = pathlib.Path(out_dir, "metrics.jsonl")
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= records


def killed_run(kind, out_dir, kills, number, rng):
    """A run that gets a signal `kills` times, the first as soon as it has written a file, the others a random moment
    after a random number of records. Returns (the number of signals that it got, an error or nothing)."""
    for done in range(kills):
        records = rng.randrange(RUN["max_iters"]) if done else None
        with Run(kind, out_dir) as run:
            while not has_written(out_dir, records) and not run.ended(0.005 if done else 0.0):
                pass
            if run.ended(rng.uniform(0, 0.2 if done else 0.01)):
                return done, run.check(0)
            run.send(number)
            if error := run.check(-number, 0):  # 0: after SIGTERM, or of a rank that had ended just before
                return done + 1, error
    with Run(kind, out_dir) as run:
        run.ended(600)
        return kills, run.check(0)


def main(argv):
    """Runs until so many kills were made, a line for each run. Exits 1 if one differs, or too few were killed."""
    options, _ = load_config(Kill, argv)
    rng, number = random.Random(options.seed), getattr(signal, f"SIG{options.signal}")
    names, done, wrong = options.kinds.split(","), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        all_kinds = kinds(folder)
        for i in range(RUNS_OF_A_KILL * options.kills):
            if done == options.kills:
                break
            name = names[i % len(names)]
            whole, out_dir = folder / name, folder / f"{name}-run-{i}"
            if not whole.exists() and (error := killed_run(all_kinds[name], whole, 0, number, rng)[1]):
                raise ValueError(f"{name}, uninterrupted: {error}")
            got, error = killed_run(all_kinds[name], out_dir, min(KILLS_OF_A_RUN, options.kills - done), number, rng)
            error = error or difference(whole, out_dir)
            done, wrong = done + got, wrong + bool(error)
            print(f"{name}, {got} kills: {error or 'the same bits and metrics'}", flush=True)
    print(f"{done} kills; {wrong} did not end with the bits and metrics of the uninterrupted run")
    if done < options.kills or wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    run_script(main)
