"""The names of what a run writes into its folder. Its writers take them from here; a later run there sets these aside
and nothing else."""

import re

STATE, OLDER = "state.pt", re.compile(r"state-\d+\.pt")
METRICS, SAMPLES, CONSOLE, STARTS = "metrics.jsonl", "samples.jsonl", "console.log", "starts.jsonl"
CONFIG, TRACKER_IDS, REPORT, CURVES = "config.json", "trackers.json", "report.html", "curves.png"
LOCK, PREVIOUS = "lock", "previous"
BAD_STEPS = "bad_steps"  # the folder of core/run/bad_steps.py
WANDB, VLLM_WEIGHTS = "wandb", "vllm-weights"  # folders of the programs that the run talks to

NAMES = (STATE, METRICS, SAMPLES, CONSOLE, STARTS, CONFIG, TRACKER_IDS, REPORT, CURVES)
FILES = re.compile("(" + "|".join([*map(re.escape, NAMES), OLDER.pattern, r"events\.out\.tfevents\..*"]) + r")(\.tmp)?")
MODELS = re.compile(r"model(-\d+)?(\.safetensors)?(\.tmp)?")  # the latest and the numbered ones: files, or folders
FOLDERS = (BAD_STEPS, PREVIOUS, WANDB, VLLM_WEIGHTS)
STAYING = (LOCK, f"{LOCK}.tmp", PREVIOUS, WANDB, VLLM_WEIGHTS)  # what a later run leaves where it is


def is_set_aside(name):
    """Whether a later run sets what has this name aside."""
    return name == BAD_STEPS or bool(FILES.fullmatch(name) or MODELS.fullmatch(name))


def shows_a_run(name):
    """Whether a folder with this name in it holds a run. starts.jsonl is what a run writes first."""
    return name in (STATE, METRICS, STARTS, f"{STARTS}.tmp") or bool(OLDER.fullmatch(name))
