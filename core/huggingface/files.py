"""Folders in Hugging Face format and names of the hub: reads their configs, and refuses unsafe files.

Published diffusion language models are opened with the causal classes of transformers, which can also read in both
directions. Three values of a config describe them. is_causal=False: every token reads every other one.
shifted_logits=True: the state of a token predicts the next one, as in the causal model that it was made from.
attention_block=B: a token reads the tokens of its own block of B and of the blocks before it.
"""

import contextlib
import os
import pathlib
import shutil
from typing import NamedTuple

from core.errors import Mistake
from core.files import HUB, put_in_place, read_object, writing
from core.settings.optional import local_name, opening, quiet_transformers
from core.settings.setting import shown

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"  # lists the files of weights, if there are several
COUNTS = ("num_hidden_layers", "max_position_embeddings", "attention_block")  # values of a config that are 1 or more
LEFT_OUT = ("model_type", "architectures", "auto_map", "transformers_version")  # of a published config

LLADA_SETTINGS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "embedding_size": "vocab_size",
    "vocab_size": None}  # its embedding has more rows, embedding_size
LLADA_MUST_BE = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True}
LLADA_MUST_BE |= dict.fromkeys((
    "alibi", "include_bias", "include_qkv_bias", "attention_layer_norm", "scale_logits", "input_emb_norm"), False)
LLADA_LAYER = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj"}
LLADA_NAMES = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head."}
for theirs, ours in LLADA_LAYER.items():
    LLADA_NAMES[rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\."] = rf"model.layers.\1.{ours}."


class Published(NamedTuple):
    """A family of published models, and how a family of transformers opens them in place of their own code."""
    family: str                   # the model_type of transformers
    settings: dict = {}           # {name in their config.json: name in that family, None: left out}
    must_be: dict = {}            # {name: required value}, where config.json has the name
    names: dict = {}              # {regular expression: replacement} for the names of weights
    more: dict = {}               # values for config.json if it lacks them
    tokenizer: str | None = None  # the model_type whose tokenizer replaces theirs, if theirs needs code


PUBLISHED = {  # model_type: row, and its arXiv number
    "llada": Published("llama", LLADA_SETTINGS, LLADA_MUST_BE, LLADA_NAMES),                    # 2502.09992
    "Dream": Published("qwen2", more={"shifted_logits": True}, tokenizer="qwen2"),              # 2508.15487
    "sdar": Published("qwen3", {"block_size": "attention_block"}, more={"attention_block": 4}),  # 2510.06303
    "a2d-llama": Published("llama"),                                                            # library dllm
    "a2d-qwen2": Published("qwen2"),
    "a2d-qwen3": Published("qwen3")}


def config_value(config, name):
    """A value of a transformers config; None if its family has no such value, or the folder does not set it."""
    return getattr(config, name, None)


def is_adapter(path):
    """True for a folder that holds an adapter."""
    return os.path.exists(os.path.join(path, ADAPTER))


def base_of(path, key):
    """The base model of an adapter's folder, as its adapter_config.json names it; the path of a model itself."""
    if not is_adapter(path):
        return path
    name = "base_model_name_or_path"
    values = declared_in(path, ADAPTER, key)
    base = str(values.get(name))
    if os.path.isdir(base) and not os.path.samefile(base, path):
        return base
    if os.path.isabs(base) or "/" not in base:
        raise Mistake(f"{key}={path} is an adapter whose base model {base!r} is not there; put it there again or "
                      f"correct {name} in {ADAPTER}")
    return f"{HUB}{base}"


def declared_in(path, file, key):
    """The values of a JSON file of the model at `path`, which the setting `key` names; {} without such a file."""
    find = quiet_transformers(path, key).utils.cached_file
    with opening(path, key):
        found = find(local_name(path), file, _raise_exceptions_for_missing_entries=False)
    if found is None:
        return {}
    return read_object(found, f"{key}={path}: {file}", "copy its files again")


def published_as(path, key):
    """The row of PUBLISHED for a folder or hub name, or None."""
    values = declared_in(path, "config.json", key)
    return PUBLISHED.get(str(values.get("model_type")))


def read_config(path, key):
    """The model's config. Raises Mistake for a model that needs code of its own, for an unknown variant of a published
    diffusion model, and for impossible values."""
    named = f"{key}={path}"
    transformers = quiet_transformers(path, key)
    values = declared_in(path, "config.json", key)
    published = published_as(path, key)
    with opening(path, key):
        if published is None:
            config = transformers.AutoConfig.from_pretrained(local_name(path), trust_remote_code=False)
        else:
            config = published_config(values, published, named)
    # Other kernels take no mask from us: they would ignore the blocks without an error
    takes_masks = config._attn_implementation in (None, "sdpa")
    if config_value(config, "attention_block") is not None and not takes_masks:
        raise Mistake(f"{named} has attention_block in its config.json, which needs attn_implementation='sdpa' there, "
                      "or none")
    for name in COUNTS:
        count = config_value(config, name)
        if count is None or (type(count) is int and count >= 1):
            continue
        if published is not None:
            for theirs, ours in published.settings.items():
                if ours == name:
                    name = theirs
        raise Mistake(f"{named} has {name}={shown(count)} in its config.json, which must be a whole number above 0; "
                      "copy the file again")
    return config


def published_config(values, published, named):
    """The config of transformers for the values of a published config.json."""
    import transformers
    for name, wanted in published.must_be.items():
        if values.get(name, wanted) != wanted:
            raise Mistake(f"{named} is an unknown variant, with {name}={values[name]!r} in its config.json; use "
                          "another model")
    known = dict(published.more)
    for name, value in values.items():
        name = published.settings.get(name, name)
        if name not in (None, *LEFT_OUT) and value is not None:
            known[name] = value
    known["is_causal"] = False
    return transformers.AutoConfig.for_model(published.family, **known)


def reads_both_ways(config):
    """True for a config of a causal class of transformers whose tokens also read later ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as FILLS
    return config_value(config, "is_causal") is False and config.model_type not in FILLS


def check_weights(path, key, config):
    """Raises Mistake unless the weights of a folder or hub name are safetensors files in it, which run no code."""
    index = declared_in(path, INDEX, key)
    files = [config_value(config, "transformers_weights") or "model.safetensors"]
    with opening(path, key):
        files += index.get("weight_map", {}).values()
        for name in files:
            if name != os.path.basename(name) or not name.endswith(".safetensors"):
                raise Mistake(f"{key}={path} takes weights from {shown(name)}; convert them to *.safetensors files of "
                              "the folder, which run no code, with model.save_pretrained")


def check_target(folder, adapter):
    """Raises Mistake if export=folder would put a model beside an adapter, or an adapter beside a model."""
    other = "model*.safetensors" if adapter else "adapter_*.safetensors"
    found = [file.name for file in pathlib.Path(folder).glob(other)]
    if found:
        raise Mistake(f"export={folder} holds {', '.join(found)}; a model and an adapter in the same folder could not "
                      "be told apart, so name another")


@contextlib.contextmanager
def writing_folder(path):
    """Gives a new folder to write into, which becomes `path`. If `path` exists, the new files replace its files of the
    same name, so that it never holds half a file. After an error the new folder is removed. Raises CannotWrite."""
    path = os.path.normpath(path)
    new = f"{path}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    try:
        with writing(path):
            os.makedirs(new)
            yield new
            for file in pathlib.Path(new).glob("*.*"):
                put_in_place(file, file)  # from memory to the disk
            if not os.path.exists(path):
                os.rename(new, path)
                return
            # The weights come last: if this is interrupted, the old ones are still there
            names = os.listdir(new)
            names.sort(key=lambda name: name.endswith(".safetensors"))
            for name in names:
                target = os.path.join(path, name)
                shutil.rmtree(target, ignore_errors=True)  # a tokenizer may have a folder of chat templates
                os.replace(os.path.join(new, name), target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
