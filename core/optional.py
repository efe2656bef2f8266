"""Packages that only a part of the project needs: imported where they are used, with the remedy if they are missing."""

import importlib
import warnings

REQUIREMENTS = "requirements-hf.txt"


def require(name, why, install=f"-r {REQUIREMENTS}"):
    """The package of that name. Raises ValueError with the pip command if it is not installed.

    why: the setting that asks for it, with its value; install: what pip is to install
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
            raise  # the package is there; something that it needs is not
        raise ValueError(f"{why} needs the package {name.split('.')[0]}: pip install {install}") from None


def quiet_transformers(path, key):
    """The package transformers, without its progress bars and warnings."""
    transformers = require("transformers", f"{key}={path}")
    quiet_hub(f"{key}={path}").utils.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    return transformers


def quiet_hub(why):
    """The package huggingface_hub, without its warnings, such as a line for each attempt at a connection."""
    hub = require("huggingface_hub", why)
    hub.logging.set_verbosity_error()
    return hub
