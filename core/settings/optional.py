"""Imports optional packages on first use. A missing or outdated package is an error with the pip command."""

import functools
import importlib
import logging
import os
import sys
import warnings

from core.errors import FLOORS, Mistake, check_version, described, others
from core.files import HUB, on_hub

# Hides the package kernels: if transformers finds it, it downloads code from the hub and runs it
sys.modules.setdefault("kernels", None)


def require(name, why, install="-r requirements-hf.txt"):
    """Imports a package. Raises Mistake with the pip command if it is missing, too old, or does not load.
    why: the setting that needs it, with its value; install: the arguments of pip install"""
    package = name.split(".")[0]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing == package:
            raise Mistake(f"{why} needs the package {package}: pip install {install}") from None
        # One of its dependencies is missing or incompatible
        raise Mistake(f"{why}: {package} does not load ({described(error)}): pip install {install}") from error
    if name in FLOORS:
        check_version(name, module.__version__, why, install)
    return module


def local_name(path):
    """Returns the name for Hugging Face's libraries: owner/name, or an absolute path, which does not depend on the
    working directory."""
    if on_hub(path):
        return path.removeprefix(HUB)
    return os.path.abspath(path)


@functools.cache
def say_opening(path, key):
    """Prints on rank 0, once per path, that a hub name is being opened: without a network, the hub library gives up
    only after a minute or two."""
    if on_hub(path) and os.environ.get("RANK", "0") == "0":
        print(f"opening {key}={path}; if the hub does not answer, the error may take two minutes", flush=True)


def quiet_transformers(path, key):
    """Imports transformers, with progress bars and warnings disabled. path, key: the model to open and its setting"""
    say_opening(path, key)
    transformers = require("transformers", f"{key}={path}")
    quiet_hub(f"{key}={path}").utils.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    return transformers


def opening(path, key, what=""):
    """Returns a context manager that turns a library's errors on opening `path` into a Mistake.
    key: the setting that names the path; what: the part that is opened"""
    remedy = "copy its files again, as save_pretrained wrote them"
    if on_hub(path):
        remedy = "check the name and the network, or download it elsewhere (hf download) and name its folder"
    remedy += "; if it needs code of its own, which is never run here, use another model"
    return others(f"{key}={path}{what} could not be read", remedy, quiet=True)


def quiet_hub(why):
    """Imports huggingface_hub, with warnings disabled, such as a line for every connection attempt."""
    hub = require("huggingface_hub", why)
    hub.logging.set_verbosity_error()
    return hub
