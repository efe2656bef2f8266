"""Reads the configs of Hugging Face folders and hub names, and refuses unsafe files.

Published diffusion language models are opened with the causal classes of transformers, which also support
bidirectional attention. Three config values describe them. is_causal=False: every token attends to every other token.
shifted_logits=True: the state of a token predicts the next token, as in the causal model it was initialised from.
attention_block=B: a token attends to its own block of B tokens and to all earlier blocks.
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
INDEX = "model.safetensors.index.json"  # lists the weight files, if there are several
COUNTS = ("num_hidden_layers", "max_position_embeddings", "attention_block")  # config values that must be at least 1
LEFT_OUT = ("model_type", "architectures", "auto_map", "transformers_version")  # not copied from a published config

LLADA_SETTINGS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "embedding_size": "vocab_size",
    "vocab_size": None}  # the embedding has embedding_size rows, which is more
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
    """A family of published models, opened with a transformers family instead of its own code."""
    family: str                   # model_type in transformers
    settings: dict = {}           # {name in the published config.json: name in that family; None: dropped}
    must_be: dict = {}            # {name: required value}, checked only if config.json has the name
    names: dict = {}              # {regular expression: replacement} for weight names
    more: dict = {}               # values used if config.json lacks them
    tokenizer: str | None = None  # model_type of a replacement tokenizer, if the published one needs code


PUBLISHED = {  # {model_type in the published config.json: its row}; arXiv numbers on the right
    "llada": Published("llama", LLADA_SETTINGS, LLADA_MUST_BE, LLADA_NAMES),                    # 2502.09992
    "Dream": Published("qwen2", more={"shifted_logits": True}, tokenizer="qwen2"),              # 2508.15487
    "sdar": Published("qwen3", {"block_size": "attention_block"}, more={"attention_block": 4}),  # 2510.06303
    "a2d-llama": Published("llama"),                                                            # from the library dllm
    "a2d-qwen2": Published("qwen2"),
    "a2d-qwen3": Published("qwen3")}


def config_value(config, name):
    """Returns a value of a transformers config, or None if the family lacks it or the folder does not set it."""
    return getattr(config, name, None)


def is_adapter(path):
    """True for a folder that holds an adapter."""
    return os.path.exists(os.path.join(path, ADAPTER))


def base_of(path, key):
    """Returns the base model that an adapter folder's adapter_config.json names. For a model, returns `path`."""
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
    """Returns the values of a JSON file of the model at `path`, or {} if the file is missing. key: the setting that
    names the model"""
    find = quiet_transformers(path, key).utils.cached_file
    with opening(path, key):
        found = find(local_name(path), file, _raise_exceptions_for_missing_entries=False)
    if found is None:
        return {}
    return read_object(found, f"{key}={path}: {file}", "copy its files again")


def published_as(values):
    """Returns the row of PUBLISHED for the values of a config.json, or None."""
    return PUBLISHED.get(str(values.get("model_type")))


def read_config(path, key):
    """Reads the config of a model. Raises Mistake if the model needs its own code, is an unknown variant of a published
    diffusion model, or has impossible values."""
    named = f"{key}={path}"
    transformers = quiet_transformers(path, key)
    values = declared_in(path, "config.json", key)
    published = published_as(values)
    with opening(path, key):
        if published is None:
            config = transformers.AutoConfig.from_pretrained(local_name(path), trust_remote_code=False)
        else:
            config = published_config(values, published, named)
    # Other attention kernels would silently ignore our block mask
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
    """Builds a transformers config from the values of a published config.json."""
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
    """True if the config belongs to a causal transformers class used with bidirectional attention."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as FILLS
    return config_value(config, "is_causal") is False and config.model_type not in FILLS


def check_weights(path, key, config):
    """Raises Mistake unless all weights of a folder or hub name are safetensors files inside it: loading them runs no
    code."""
    index = declared_in(path, INDEX, key)
    files = [config_value(config, "transformers_weights") or "model.safetensors"]
    with opening(path, key):
        files += index.get("weight_map", {}).values()
        for name in files:
            if name != os.path.basename(name) or not name.endswith(".safetensors"):
                raise Mistake(f"{key}={path} takes weights from {shown(name)}; convert them to *.safetensors files of "
                              "the folder, which run no code, with model.save_pretrained")


def check_target(folder, adapter):
    """Raises Mistake if export=folder would put a model and an adapter in the same folder."""
    other = "model*.safetensors" if adapter else "adapter_*.safetensors"
    found = [file.name for file in pathlib.Path(folder).glob(other)]
    if found:
        raise Mistake(f"export={folder} holds {', '.join(found)}; a model and an adapter in the same folder could not "
                      "be told apart, so name another")


@contextlib.contextmanager
def writing_folder(path):
    """Yields a temporary folder that becomes `path` at the end of the block. If `path` exists, the new files replace
    files of the same name one by one, so `path` never holds a partial file. After an error the temporary folder is
    removed. Raises CannotWrite."""
    path = os.path.normpath(path)
    new = f"{path}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    try:
        with writing(path):
            os.makedirs(new)
            yield new
            for file in pathlib.Path(new).glob("*.*"):
                put_in_place(file, file)  # flushes the file to disk
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
