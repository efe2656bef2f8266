"""Optional packages: imported where they are used; one that is missing or too old is an error with the pip command."""

import functools
import importlib
import logging
import os
import sys
import warnings

from core.errors import FLOORS, Mistake, check_version, described, others
from core.files import HUB, on_hub

# transformers must not find this package: with it, it fetches code from the hub and runs it
sys.modules.setdefault("kernels", None)


def require(name, why, install="-r requirements-hf.txt"):
    """The package of that name. Raises Mistake with the pip command if it is not installed, too old, or does not load.
    why: the setting that asks for it, with its value; install: the arguments of pip install"""
    package = name.split(".")[0]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if isinstance(error, ModuleNotFoundError) and missing == package:
            raise Mistake(f"{why} needs the package {package}: pip install {install}") from None
        # A package that it needs is missing or of another version
        raise Mistake(f"{why}: {package} does not load ({described(error)}): pip install {install}") from error
    if name in FLOORS:
        check_version(name, module.__version__, why, install)
    return module


def local_name(path):
    """The name for Hugging Face's libraries: owner/name, or an absolute path, which other working directories find."""
    if on_hub(path):
        return path.removeprefix(HUB)
    return os.path.abspath(path)


@functools.cache
def say_opening(path, key):
    """Prints on rank 0, once for each path, that a name of the hub is opened: without a network the hub's library gives
    up only after a minute or two."""
    if on_hub(path) and os.environ.get("RANK", "0") == "0":
        print(f"opening {key}={path}; if the hub does not answer, the error may take two minutes", flush=True)


def quiet_transformers(path, key):
    """The package transformers, without its progress bars and warnings, to open what the setting `key` names."""
    say_opening(path, key)
    transformers = require("transformers", f"{key}={path}")
    quiet_hub(f"{key}={path}").utils.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    return transformers


def opening(path, key, what=""):
    """The block in which a library opens what the setting `key` names: its error becomes a Mistake.
    what: the part of it that is opened"""
    remedy = "copy its files again, as save_pretrained wrote them"
    if on_hub(path):
        remedy = "check the name and the network, or download it elsewhere (hf download) and name its folder"
    remedy += "; if it needs code of its own, which is never run here, use another model"
    return others(f"{key}={path}{what} could not be read", remedy, quiet=True)


def quiet_hub(why):
    """The package huggingface_hub, without its warnings, such as a line for each attempt at a connection."""
    hub = require("huggingface_hub", why)
    hub.logging.set_verbosity_error()
    return hub
