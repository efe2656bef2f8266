"""The names of what a run writes into its folder. Its writers take them from here; a later run there sets these aside
and nothing else."""

import re

STATE = "state.pt"
BEFORE = "state-before.pt"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
CONSOLE = "console.log"
STARTS = "starts.jsonl"
CONFIG = "config.json"
TRACKER_IDS = "trackers.json"
REPORT = "report.html"
CURVES = "curves.png"
LOCK = "lock"
HELD = "lock.held"             # in place of a lock, where the file system has none
PREVIOUS = "previous"          # the folder of earlier runs
WANDB = "wandb"                # folders of the programs that the run talks to
VLLM_WEIGHTS = "vllm-weights"

NAMES = (STATE, BEFORE, METRICS, SAMPLES, CONSOLE, STARTS, CONFIG, TRACKER_IDS, REPORT, CURVES)
PATTERNS = [*map(re.escape, NAMES), r"events\.out\.tfevents\..*"]  # the last: TensorBoard's
FILES = re.compile(f"({'|'.join(PATTERNS)})(\\.tmp)?")
MODELS = re.compile(r"model(-\d+)?(\.safetensors)?(\.tmp)?")  # the latest and the numbered ones: files, or folders
STAYING = (LOCK, HELD, PREVIOUS, WANDB, VLLM_WEIGHTS)  # what a later run leaves where it is


def is_set_aside(name):
    """True if a later run sets aside what has this name."""
    return bool(FILES.fullmatch(name) or MODELS.fullmatch(name))


def shows_a_run(name):
    """True if a folder with this name in it holds a run. starts.jsonl is what a run writes first."""
    return name in (STATE, BEFORE, METRICS, STARTS, f"{STARTS}.tmp")
