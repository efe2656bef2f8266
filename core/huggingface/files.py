"""Folders in Hugging Face format and names of the hub: what they hold, and what is refused because it is not safe."""

import os
import pathlib
import shutil

from core.files.json_lines import read_object
from core.files.whole_files import put
from core.huggingface.diffusion import PUBLISHED, as_known, check_block
from core.settings.optional import HUB, local_name, opening, quiet_transformers
from core.settings.ranges import shown

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"  # names the files of weights that lie in several
AGAIN = "copy its files again"


def is_adapter(path):
    """Tells whether a folder holds an adapter."""
    return os.path.exists(os.path.join(path, ADAPTER))


def base_of(path, key):
    """The folder or hub name of the model that the adapter in a folder was trained on, by its adapter_config.json."""
    name = "base_model_name_or_path"
    base = str(declared_in(path, ADAPTER, key).get(name))
    if os.path.isdir(base) and not os.path.samefile(base, path):
        return base
    if os.path.isabs(base) or "/" not in base:
        raise ValueError(f"{key}={path} is an adapter whose base model {base!r} is not there; put it there again or "
                         f"correct {name} in {ADAPTER}")
    return f"{HUB}{base}"


def declared_in(path, file, key):
    """The values of a JSON file of the model at `path`, which the setting `key` names; none without the file."""
    find = quiet_transformers(path, key).utils.cached_file
    with opening(path, key):
        found = find(local_name(path), file, _raise_exceptions_for_missing_entries=False)
    return {} if found is None else read_object(found, f"{key}={path}: {file}", AGAIN)


def calling(function, path, key, **settings):
    """function(name, **settings) of transformers, with its errors as one line."""
    with opening(path, key):
        return function(local_name(path), trust_remote_code=False, **settings)


def read_config(path, key):
    """The model's config. Raises ValueError for a model that needs code of its own."""
    transformers = quiet_transformers(path, key)
    values = calling(transformers.PretrainedConfig.get_config_dict, path, key)[0]
    if values.get("model_type") in PUBLISHED:
        with opening(path, key):
            config = as_known(values, f"{key}={path}")
    else:
        config = calling(transformers.AutoConfig.from_pretrained, path, key)
    check_block(config, f"{key}={path}")
    return config


def check_weights(path, key, config):
    """Raises ValueError unless the weights of a folder or hub name are safetensors files in it, which run no code."""
    named = [getattr(config, "transformers_weights", None) or "model.safetensors"]
    with opening(path, key):
        named += declared_in(path, INDEX, key).get("weight_map", {}).values()
        for name in named:
            if name != os.path.basename(name) or not name.endswith(".safetensors"):
                raise ValueError(f"{key}={path} takes weights from {shown(name)}; convert them to *.safetensors files "
                                 "of the folder, which run no code, with model.save_pretrained")


def check_target(folder, adapter):
    """Raises ValueError if the folder export=folder holds a model where an adapter is to come, or the reverse."""
    other = "model*.safetensors" if adapter else "adapter_*.safetensors"
    for file in pathlib.Path(folder).glob(other):
        raise ValueError(f"export={folder} holds {file.name}; a model and an adapter in the same folder could not be "
                         "told apart, so name another")


def replace_files(new, folder):
    """Moves the files of one folder into another, the weights last, so that neither ever holds half a file."""
    os.makedirs(folder, exist_ok=True)
    for name in sorted(os.listdir(new), key=lambda name: name.endswith(".safetensors")):
        source, target = os.path.join(new, name), os.path.join(folder, name)
        if os.path.isdir(source):  # chat templates of a tokenizer that has several
            shutil.rmtree(target, ignore_errors=True)
            os.replace(source, target)
        else:
            put(source, target)
    os.rmdir(new)
