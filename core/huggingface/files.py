"""Folders in Hugging Face format and names of the hub: what they hold, and what is refused before a model is loaded."""

import os
import re
import shutil
import warnings

from core.files.json_text import read_object
from core.files.whole_files import as_usual, flush
from core.settings.optional import HUB, local_name, on_hub, opening, quiet_transformers
from core.settings.ranges import shown

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"  # names the files of weights that lie in several
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
FILES_OF = {"a model": re.compile(r"model.*\.safetensors"), "an adapter": re.compile(r"adapter_.*")}
MOST_LAYERS = 2000                      # or experts, of any model; building them takes time and memory for each
AGAIN = "copy its files again"


def is_adapter(path):
    """Whether a folder holds an adapter."""
    return os.path.exists(os.path.join(path, ADAPTER))


def base_of(path, key):
    """The folder or hub name of the model that the adapter in a folder was trained on, by its adapter_config.json."""
    name = "base_model_name_or_path"
    base = read_object(os.path.join(path, ADAPTER), f"{key}={path}: {ADAPTER}", AGAIN).get(name)
    base = base if isinstance(base, str) else ""
    if os.path.isdir(base) and os.path.samefile(base, path):
        raise ValueError(f"{key}={path} is an adapter that names itself as its base model; correct {name} in {ADAPTER}")
    if os.path.isdir(base):
        return base
    if os.path.isabs(base) or "/" not in base:
        raise ValueError(f"{key}={path} is an adapter whose base model {base!r} is not there; put it there again or "
                         f"correct {name} in {ADAPTER}")
    return f"{HUB}{base}"


def calling(function, path, key, **settings):
    """function(name, **settings) of transformers, with its errors as one line that names the setting."""
    with opening(path, key):
        warnings.filterwarnings("error", message="Casting complex values")
        return function(local_name(path), trust_remote_code=False, **settings)


def read_config(path, key):
    """The model's config. Raises ValueError for a model that needs code of its own."""
    transformers = quiet_transformers(path, key)
    values = calling(transformers.PretrainedConfig.get_config_dict, path, key)[0]
    for part in (values, *(x for x in values.values() if isinstance(x, dict))):
        for name, count in part.items():
            if re.search("layer|expert", name) and isinstance(count, int) and count > MOST_LAYERS:
                raise ValueError(f"{key}={path}: {name}={shown(count)} in its config.json is more than any model has; "
                                 f"{AGAIN}")
    return calling(transformers.AutoConfig.from_pretrained, path, key)


def written_by(config):
    """The name of the class that saved a model, or an empty text."""
    return (config.architectures or [""])[0]


def check_weights(path, key, config):
    """Raises ValueError unless the weights of a folder or hub name are safetensors files in it, which run no code."""
    with opening(path, key):
        named = list(files_of_weights(path, key, config))
        for name in named:
            if name != os.path.basename(name) or not name.endswith(".safetensors"):
                raise ValueError(f"{key}={path} takes weights from {shown(name)}, but only *.safetensors files of the "
                                 "folder itself are read, because others can run code; convert them with "
                                 "model.save_pretrained")
    if on_hub(path):
        return
    names = os.listdir(path)
    if missing := sorted(set(named) - set(names)):
        raise ValueError(f"{key}={path} has no {missing[0]}, from which it takes weights; copy the file there")
    if any(name.endswith(".safetensors") for name in names):
        return
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        raise ValueError(f"{key}={path} holds pickled weights ({pickled[0]}), which can run code as they are read; "
                         "convert them to safetensors (model.save_pretrained of transformers writes them)")
    raise ValueError(f"{key}={path} has no *.safetensors file: copy the weights there")


def files_of_weights(path, key, config):
    """The files that a model says its weights are in, as its config.json and the index beside it name them."""
    if name := getattr(config, "transformers_weights", None):
        yield name
    find = quiet_transformers(path, key).utils.cached_file
    index = find(local_name(path), INDEX, _raise_exceptions_for_missing_entries=False)
    if index is not None:
        yield from set(read_object(index, f"{key}={path}: {INDEX}", AGAIN)["weight_map"].values())


def check_target(folder, adapter, key="out_dir"):
    """Raises ValueError if a model cannot be written to the folder without losing one of another kind.

    adapter: whether the model is an adapter; key: the setting that names the folder
    """
    if os.path.isfile(folder):
        raise ValueError(f"{key}={folder} is a file, but a folder is written; name another")
    own, other = ("an adapter", "a model") if adapter else ("a model", "an adapter")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if FILES_OF[other].fullmatch(name):
            raise ValueError(f"{key}={folder} holds {other} ({name}), and {own} in the same folder could not be told "
                             "apart from it; name another")


def replace_files(new, folder):
    """Moves the files of one folder into another, the weights last, so that neither ever holds half a file."""
    os.makedirs(folder, exist_ok=True)
    for name in sorted(os.listdir(new), key=lambda name: name.endswith(".safetensors")):
        file = os.path.join(new, name)
        as_usual(file)
        flush(file)
        os.replace(file, os.path.join(folder, name))
    flush(folder)
    shutil.rmtree(new)
