"""Kills Ray workers at random moments while small real runs go on, and compares these with an undisturbed run.

python tests/kill_workers.py --kills=20
python tests/kill_workers.py --kills=4 --seed=3 --max_staleness=0
A worker is killed while it starts, waits or writes. The run must end by itself, with the same bits in its weights and
the same metrics: then every problem of every iteration was trained exactly once. Needs ray.
"""

import contextlib
import os
import pathlib
import random
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from core.config import load_config
from core.files.json_lines import read_records
from core.models import save_model
from core.settings.script import run_script
from grpo import train_grpo
from grpo.samplers.ray_cluster import start_ray
from tests.kill import campaign, same_states
from tests.tiny import CAUSAL, ROOT, causal_model, without_clock, write_prompt_dataset

RUN = {"max_iters": 100, "save_interval": 100, "eval_interval": 100, "sample_interval": 100, "log_interval": 100,
       "batch_size": 4, "group_size": 3, "eval_problems": 2, "eval_completions": 2, "pass_k": 2, "device": "cpu",
       "learning_rate": 1e-2, "max_new_tokens": 5, "top_p": 1.0, "reward_functions": "('letters',)",
       "sampler": "ray", "ray_workers": 2, "sampler_timeout": 60.0}
LETTERS = '''
from grpo.rewards import reward

@reward(low=0.0, high=1.0)
def letters(prompts, completions, **columns):
    """The share of letters among the characters."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]
'''


@dataclass(frozen=True)
class KillWorkers:
    """The settings of this script."""
    kills: int = 20         # workers to kill
    seed: int = 0           # of the moments
    max_staleness: int = 1  # iterations that are sampled ahead


def settings_of(folder, **more):
    """The settings of a run on data and a model that are written to the folder."""
    write_prompt_dataset(folder / "sums")
    save_model(str(folder / "causal.safetensors"), causal_model(scale=3.0), CAUSAL)
    (folder / "letters.py").write_text(LETTERS)
    return RUN | {"dataset": folder / "sums", "generator_checkpoint": folder / "causal.safetensors",
                  "reward_file": folder / "letters.py"} | more


def process(pid):
    """(its title, the number of its parent), or None if it has ended."""
    try:
        title = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        return title, int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def workers():
    """{number: title} of the processes of workers of the Ray that this process started. The title tells what a worker
    is called for: ray::RayWorker.__init__, while it starts."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = {pid: x for pid in pids if (x := process(pid))}
    mine = {pid for pid, (_, parent) in found.items() if parent == os.getpid()}
    return {pid: title for pid, (title, parent) in found.items()
            if title.startswith(b"ray::RayWorker") and parent in mine}


class Killer(threading.Thread):
    """Ends one of the run's workers at a random moment, `kills` times, each once all of them are there again."""

    def __init__(self, kills, rng):
        super().__init__(daemon=True)
        self.kills, self.rng = kills, rng
        self.killed, self.over = [], threading.Event()

    def run(self):
        while len(self.killed) < self.kills and not self.over.wait(self.rng.uniform(0, 1.5)):
            alive = workers().keys() - set(self.killed)
            if len(alive) == RUN["ray_workers"]:
                pid = self.rng.choice(sorted(alive))
                with contextlib.suppress(ProcessLookupError):  # the run has just ended it
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)


def train(settings, out_dir):
    """A run in this process; what it prints goes to a file."""
    with open(f"{out_dir}.log", "w") as log, contextlib.redirect_stdout(log):
        train_grpo.main([f"--{key}={value}" for key, value in (settings | {"out_dir": out_dir}).items()])


def disturbed(settings, out_dir, kills, rng):
    """A run whose workers are killed. Returns how many were."""
    killer = Killer(kills, rng)
    killer.start()
    try:
        train(settings, out_dir)
    finally:
        killer.over.set()
        killer.join()
    replaced = sum(r.get("sampler/replaced_workers", 0.0) for r in read_records(f"{out_dir}/metrics.jsonl"))
    print(f"  killed {killer.killed}, {replaced:.0f} replaced", flush=True)
    return len(killer.killed)


def steps(out_dir):
    """The metrics of the steps of a run, without times and the count of replaced workers."""
    return [{key: x for key, x in record.items() if key != "sampler/replaced_workers"}
            for record in without_clock(read_records(f"{out_dir}/metrics.jsonl"))]


def main(argv):
    import ray
    options, _ = load_config(KillWorkers, argv)
    start_ray(ray, {"PYTHONPATH": ROOT}, num_cpus=2, object_store_memory=2**27)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        settings, whole = settings_of(folder, max_staleness=options.max_staleness), folder / "whole"
        train(settings, whole)

        def killed(run, kills):
            out_dir = folder / f"run-{run}"
            done = disturbed(settings, out_dir, kills, rng)
            same = same_states(whole, out_dir) and steps(whole) == steps(out_dir)
            return done, "" if same else "it differs"

        try:
            campaign(options.kills, killed)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    run_script(main)
