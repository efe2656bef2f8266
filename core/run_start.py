"""What is known about the start of a run: settings with their origin, machine, versions, command. Without names of the
user and the machine."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from datetime import datetime, timezone

import torch

from core.config_help import default_of
from core.user_code import ROOT
from core.whole_files import writing

PACKAGES = ("torch", "numpy", "safetensors", "transformers", "peft", "datasets", "tokenizers", "ray")


def record_start(config, origin, dist, step):
    """Adds a record to <out_dir>/starts.jsonl, which has one for each start of the run.

    origin: {key: the file or argument that set it}; step: the steps that are done; not 0 when the run is resumed
    """
    default = {field.name: default_of(field) for field in dataclasses.fields(config)}
    settings = {key: {"value": getattr(config, key), "default": default[key], "set in": place}
                for key, place in origin.items() if getattr(config, key) != default[key]}
    record = {"time": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "step": step,
              "command": command(), "commit": commit(), **machine(dist), "python": platform.python_version(),
              **{name: importlib.metadata.version(name) for name in PACKAGES if name in sys.modules},
              "settings": settings}
    line = json.dumps(without_home({key: x for key, x in record.items() if x is not None}))
    path = os.path.join(config.out_dir, "starts.jsonl")
    with writing(path), open(path, "a") as f:
        f.write(line + "\n")


def without_home(value):
    """A value, its texts with ~ for the home folder, which has the user's name. A longer name, as /home/al in
    /home/alice, is another folder."""
    if isinstance(value, dict):
        return {without_home(key): without_home(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [without_home(x) for x in value]
    home = os.path.expanduser("~")
    return re.sub(re.escape(home) + r"(?![\w.-])", "~", value) if isinstance(value, str) and len(home) > 1 else value


def command():
    """The command line, its script as a path from the repository."""
    script, *arguments = sys.argv
    path = os.path.relpath(os.path.realpath(script), ROOT)
    return shlex.join(["python", script if path.startswith("..") else path, *arguments])


def commit():
    """The commit of this code, with -dirty if files were changed; None if it is in no repository of its own."""
    if not os.path.exists(os.path.join(ROOT, ".git")) or not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"], capture_output=True,
                          text=True)
    return done.stdout.strip() or None


def machine(dist):
    """What the run computes with. Memory in GB of 10^9 bytes."""
    found = {"system": f"{platform.system()} {platform.release()}", "processor": processor(),
             "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
             "torch threads": torch.get_num_threads(), "ranks": dist.world, "device": str(dist.device),
             "precision": str(dist.dtype).removeprefix("torch.")}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB"
    if dist.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(dist.device)
        found |= {"gpu": gpu.name, "gpu memory": f"{gpu.total_memory / 1e9:.1f} GB", "cuda": torch.version.cuda}
    return found


def processor():
    """The model of the CPU, or its architecture where the system does not tell."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            names = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
