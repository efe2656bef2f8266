"""Folders in Hugging Face format and names of the hub: reads their configs, and refuses unsafe files.

Published diffusion language models are opened with transformers' own classes that read in both directions. Three values
of a config describe them. is_causal=False: every token reads every other one. shifted_logits=True: the state of a token
predicts the next one, as in the causal model that it was made from. attention_block=B: a token reads the tokens of its
own block of B and of the blocks before it.
"""

import contextlib
import os
import pathlib
import shutil
from typing import NamedTuple

from core.errors import Mistake
from core.files import HUB, put, read_object, writing
from core.settings.optional import local_name, opening, quiet_transformers
from core.settings.setting import shown

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"  # names the files of weights that lie in several
COUNTS = ("num_hidden_layers", "max_position_embeddings", "attention_block")  # values of a config that are 1 or more
LEFT_OUT = ("model_type", "architectures", "auto_map", "transformers_version")
LLADA_SETTINGS = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
                  "n_layers": "num_hidden_layers", "mlp_hidden_size": "intermediate_size",
                  "max_sequence_length": "max_position_embeddings", "weight_tying": "tie_word_embeddings",
                  "embedding_size": "vocab_size", "vocab_size": None}  # there are as many rows as embedding_size says
LLADA_MUST_BE = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True,
                 "alibi": False, "include_bias": False, "include_qkv_bias": False, "attention_layer_norm": False,
                 "scale_logits": False, "input_emb_norm": False}
LLADA_LAYER = {"attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "q_proj": "self_attn.q_proj",
               "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
               "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj"}
LLADA_NAMES = {r"^model\.transformer\.wte\.": "model.embed_tokens.", r"^model\.transformer\.ln_f\.": "model.norm.",
               r"^model\.transformer\.ff_out\.": "lm_head."}
LLADA_NAMES |= {rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\.": rf"model.layers.\1.{ours}."
                for theirs, ours in LLADA_LAYER.items()}


class Published(NamedTuple):
    """The way to open the folders of one model_type with a class of transformers."""
    config: str                   # a class of configs of transformers
    settings: dict = {}           # {name in their config.json: name in that class, None: left out}
    must_be: dict = {}            # {name: value} that they must have, if they name it at all
    names: dict = {}              # {regular expression: replacement} of the names of weights
    more: dict = {}               # values of the config that theirs may lack
    tokenizer: str | None = None  # the class of transformers, where theirs needs code


PUBLISHED = {  # model_type: row, and its arXiv number
    "llada": Published("LlamaConfig", LLADA_SETTINGS, LLADA_MUST_BE, LLADA_NAMES),                     # 2502.09992
    "Dream": Published("Qwen2Config", more={"shifted_logits": True}, tokenizer="Qwen2Tokenizer"),      # 2508.15487
    "sdar": Published("Qwen3Config", {"block_size": "attention_block"}, more={"attention_block": 4}),  # 2510.06303
    "a2d-llama": Published("LlamaConfig"),                                                             # library dllm
    "a2d-qwen2": Published("Qwen2Config"),
    "a2d-qwen3": Published("Qwen3Config")}


def refuse(named, *faults):
    """Raises Mistake for the first fault that is there. faults: (whether it is there, what it is and what to do)"""
    for is_there, text in faults:
        if is_there:
            raise Mistake(f"{named} {text}")


def is_adapter(path):
    """Tells whether a folder holds an adapter."""
    return os.path.exists(os.path.join(path, ADAPTER))


def base_of(path, key):
    """The model that the adapter in a folder was trained on, by its adapter_config.json; the path of a model itself."""
    if not is_adapter(path):
        return path
    name = "base_model_name_or_path"
    base = str(declared_in(path, ADAPTER, key).get(name))
    if os.path.isdir(base) and not os.path.samefile(base, path):
        return base
    refuse(f"{key}={path}", (os.path.isabs(base) or "/" not in base, f"is an adapter whose base model {base!r} is not "
                             f"there; put it there again or correct {name} in {ADAPTER}"))
    return f"{HUB}{base}"


def declared_in(path, file, key):
    """The values of a JSON file of the model at `path`, which the setting `key` names; none without the file."""
    find = quiet_transformers(path, key).utils.cached_file
    with opening(path, key):
        found = find(local_name(path), file, _raise_exceptions_for_missing_entries=False)
    return {} if found is None else read_object(found, f"{key}={path}: {file}", "copy its files again")


def published_as(path, key):
    """The row of PUBLISHED for a folder or hub name, or None."""
    return PUBLISHED.get(str(declared_in(path, "config.json", key).get("model_type")))


def read_config(path, key):
    """The model's config. Raises Mistake for a model that needs code of its own, and for a published diffusion model
    of another shape than the known one."""
    named, transformers = f"{key}={path}", quiet_transformers(path, key)
    published, values = published_as(path, key), declared_in(path, "config.json", key)
    with opening(path, key):
        if published is None:
            config = transformers.AutoConfig.from_pretrained(local_name(path), trust_remote_code=False)
        else:
            config = as_known(values, published, named)
    takes_masks = getattr(config, "_attn_implementation", None) in (None, "sdpa")
    refuse(named, (hasattr(config, "attention_block") and not takes_masks, "has attention_block in its config.json, "
                   "which needs attn_implementation='sdpa' there, or none"))
    theirs = {ours: name for name, ours in published.settings.items()} if published else {}
    for name in COUNTS:
        count = getattr(config, name, None)
        is_wrong = count is not None and (type(count) is not int or count < 1)
        refuse(named, (is_wrong, f"has {theirs.get(name, name)}={shown(count)} in its "
                       "config.json, which must be a whole number above 0; copy the file again"))
    return config


def as_known(values, published, named):
    """The config of transformers for the values of a published config.json."""
    import transformers
    must_be = published.must_be.items()
    other = [f"{name}={values[name]!r}" for name, wanted in must_be if values.get(name, wanted) != wanted]
    refuse(named, (other, f"is a variant that is not known here, with {', '.join(other)} in its config.json; use "
                   "another model"))
    known = {published.settings.get(name, name): x for name, x in values.items() if name not in LEFT_OUT}
    known.pop(None, None)
    given = {name: x for name, x in known.items() if x is not None}
    return getattr(transformers, published.config)(**published.more | given | {"is_causal": False})


def reads_both_ways(config):
    """Tells whether a config is that of a causal class of transformers whose tokens read those behind them too."""
    from transformers.models.auto import modeling_auto as known
    fills, writes = known.MODEL_FOR_MASKED_LM_MAPPING_NAMES, known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    causal = getattr(config, "is_causal", True)
    return causal is False and config.model_type in writes and config.model_type not in fills


def check_weights(path, key, config):
    """Raises Mistake unless the weights of a folder or hub name are safetensors files in it, which run no code."""
    files = [getattr(config, "transformers_weights", None) or "model.safetensors"]
    with opening(path, key):
        files += declared_in(path, INDEX, key).get("weight_map", {}).values()
        for name in files:
            is_safe = name == os.path.basename(name) and name.endswith(".safetensors")
            refuse(f"{key}={path}", (not is_safe, f"takes weights from {shown(name)}; convert them to *.safetensors "
                                     "files of the folder, which run no code, with model.save_pretrained"))


def check_target(folder, adapter):
    """Raises Mistake if the folder export=folder holds a model where an adapter is to come, or the reverse."""
    other = "model*.safetensors" if adapter else "adapter_*.safetensors"
    found = [file.name for file in pathlib.Path(folder).glob(other)]
    refuse(f"export={folder}", (found, f"holds {', '.join(found)}; a model and an adapter in the same folder could "
                                "not be told apart, so name another"))


@contextlib.contextmanager
def writing_folder(path):
    """A new folder to write into, which becomes `path`. If there is one, its files take the places of those, the
    weights last, so that neither ever holds half a file. After an error nothing of it is left. Raises CannotWrite."""
    path = os.path.normpath(path)
    new = f"{path}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    try:
        with writing(path):
            os.makedirs(new)
            yield new
            for file in pathlib.Path(new).glob("*.*"):
                put(file, file)  # it is on the disk
            if not os.path.exists(path):
                os.rename(new, path)
                return
            for name in sorted(os.listdir(new), key=lambda name: name.endswith(".safetensors")):
                target = os.path.join(path, name)
                shutil.rmtree(target, ignore_errors=True)  # chat templates of a tokenizer that has several
                os.replace(os.path.join(new, name), target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
