"""The names of what a run writes into its folder. A later run there sets these aside and nothing else."""

import re

STATE = "state.pt"
BEFORE = "state-before.pt"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
CONSOLE = "console.log"
CONFIG = "config.json"
TRACKER_IDS = "trackers.json"
REPORT = "report.html"
CURVES = "curves.png"
LOCK = "lock"
PREVIOUS = "previous"          # the folder of earlier runs
VLLM_WEIGHTS = "vllm-weights"

FILES = (STATE, BEFORE, METRICS, SAMPLES, CONSOLE, CONFIG, TRACKER_IDS, REPORT, CURVES)
OTHERS = r"model(-\d+)?(\.safetensors)?|events\.out\.tfevents\..*"  # models are files or folders; TensorBoard's
SET_ASIDE = re.compile(rf"({'|'.join(map(re.escape, FILES))}|{OTHERS})(\.tmp)?")
STAYING = (LOCK, PREVIOUS, "wandb", VLLM_WEIGHTS)  # what a later run leaves where it is


def is_set_aside(name):
    """True if a later run sets aside what has this name."""
    return bool(SET_ASIDE.fullmatch(name))
