"""Opening models in Hugging Face format: what a folder holds, which class reads it, and what is refused."""

import os
import re
import shutil
import warnings
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn

from core.files.json_text import object_from_json
from core.files.whole_files import as_usual, flush
from core.huggingface.lora import check_kind, open_adapter
from core.huggingface.settings import FULL
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.settings.optional import opening, quiet_transformers, require
from core.settings.ranges import check_finite, shown

READS = {LANGUAGE_MODEL: "AutoModelForCausalLM", MASKED_FILL: "AutoModelForMaskedLM",
         SEQUENCE_SCORER: "AutoModelForPreTraining"}
ENDINGS = {"ForCausalLM": LANGUAGE_MODEL, "LMHeadModel": LANGUAGE_MODEL, "ForMaskedLM": MASKED_FILL,
           "ForPreTraining": MASKED_FILL}  # of the name of the class that wrote a folder
WHOLE, PARTS = re.compile(r"model.*\.safetensors"), re.compile(r"adapter_.*")  # files of a model, of an adapter
AGAIN = "copy its files again"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
INDEX = "model.safetensors.index.json"  # names the files of weights that lie in several
MOST_LAYERS = 2000                      # or experts, of any model; building them takes time and memory for each


def local_name(path):
    """What transformers calls it: owner/name without hf:, or the folder, so that it is found from other folders too."""
    return path.removeprefix("hf:") if path.startswith("hf:") else os.path.abspath(path)


def check_weights(path, key, config):
    """Raises ValueError unless the weights of a folder or hub name are safetensors files in it, which run no code."""
    with opening(path, key):
        named = list(files_of_weights(path, key, config))
        for name in named:
            if name != os.path.basename(name) or not name.endswith(".safetensors"):
                raise ValueError(f"{key}={path} takes weights from {shown(name)}, but only *.safetensors files of the "
                                 "folder itself are read, because others can run code; convert them with "
                                 "model.save_pretrained")
    if path.startswith("hf:"):
        return
    names = os.listdir(path)
    if lacking := sorted(set(named) - set(names)):
        raise ValueError(f"{key}={path} has no {lacking[0]}, from which it takes weights; copy the file there")
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
        with open(index, "rb") as f:
            yield from set(object_from_json(f.read(), f"{key}={path}: {INDEX}", AGAIN)["weight_map"].values())


def calling(function, path, key, **settings):
    """function(name, **settings) of transformers, with its errors as one line that names the setting."""
    with opening(path, key):
        warnings.filterwarnings("error", message="Casting complex values")
        return function(local_name(path), trust_remote_code=False, **settings)


def model_mode(path, key):
    """What the model of a folder or hub name is for, from its config alone; an adapter is for what its base is for."""
    base = path if path.startswith("hf:") or not is_adapter(path) else base_of(path, key)
    return found_mode(read_config(base, key), path, key)


def is_adapter(path):
    return os.path.exists(os.path.join(path, "adapter_config.json"))


def base_of(path, key):
    """The folder or hub name of the model that an adapter was trained on."""
    peft = require("peft", f"{key}={path}")
    with opening(path, key, ": the adapter"):
        config = peft.PeftConfig.from_pretrained(path)
    check_kind(config, f"{key}={path}")
    base = config.base_model_name_or_path or ""
    if os.path.abspath(base) == os.path.abspath(path):
        raise ValueError(f"{key}={path} is an adapter that names itself as its base model; correct "
                         "base_model_name_or_path in adapter_config.json")
    if os.path.isdir(base):
        return base
    if os.path.isabs(base) or "/" not in base:
        raise ValueError(f"{key}={path} is an adapter whose base model {base!r} is not there; put it there again or "
                         "correct base_model_name_or_path in adapter_config.json")
    return f"hf:{base}"


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


def found_mode(config, path, key, wanted=None):
    """What the model is for: one of MODES. Raises ValueError if it is for something else."""
    written_by = (config.architectures or [""])[0]
    if config.model_type == "electra" and written_by.endswith("ForPreTraining"):
        return SEQUENCE_SCORER
    if config.model_type == "deberta-v2" and wanted == SEQUENCE_SCORER:
        return SEQUENCE_SCORER
    if written_by.endswith("ForSequenceClassification"):
        raise ValueError(f"{key}={path} is a reward model or classifier ({written_by}); name it in "
                         "reward_model_checkpoint, with the reward reward_model")
    if config.is_encoder_decoder:
        raise ValueError(f"{key}={path} has an encoder and a decoder ({written_by or config.model_type}), which is not "
                         "supported; use a causal or a masked language model")
    for ending, mode in ENDINGS.items():
        if written_by.endswith(ending):
            return mode
    from transformers.models.auto import modeling_auto as known
    if config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return MASKED_FILL
    if config.model_type in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return LANGUAGE_MODEL
    raise ValueError(f"{key}={path} has model_type {config.model_type} ({written_by or 'no architecture'}), which is "
                     "neither a causal nor a masked language model nor a detector of replaced tokens")


class ReplacedTokenHead(nn.Module):
    """DeBERTa-v3's detector of replaced tokens (arXiv 2111.09543), which transformers does not have.

    The names of its weights are those of the published files: deberta.*, mask_predictions.*
    """

    base_model_prefix = "deberta"

    def __init__(self, body):
        super().__init__()
        C, self.config = body.config.hidden_size, body.config
        self.deberta, self.mask_predictions = body, nn.ModuleDict({
            "dense": nn.Linear(C, C), "LayerNorm": nn.LayerNorm(C, self.config.layer_norm_eps),
            "classifier": nn.Linear(C, 1)})

    @property
    def base_model(self):
        return self.deberta

    def forward(self, input_ids):
        h = self.deberta(input_ids=input_ids).last_hidden_state                      # (B, T, C)
        h = self.mask_predictions["dense"](self.mask_predictions["LayerNorm"](h))
        return SimpleNamespace(logits=self.mask_predictions["classifier"](nn.functional.gelu(h)).squeeze(-1))  # (B, T)


class WithFirstState(nn.Module):
    """DeBERTa's layers; the state of the start token is added to each state, as its detector expects it."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    config = property(lambda self: self.layers.config)

    def get_input_embeddings(self):
        return self.layers.get_input_embeddings()

    def forward(self, input_ids):
        h = self.layers(input_ids).last_hidden_state                                 # (B, T, C)
        return SimpleNamespace(last_hidden_state=h + h[:, :1])


def open_transformer(path, key, mode, adapter=FULL, dtype=torch.float32, device="cpu"):
    """(transformers model, mode) of a folder or hub name, in float32, or with an adapter in `dtype`.

    A folder with an adapter gives its base model with the adapter merged into the weights.
    """
    if not path.startswith("hf:") and is_adapter(path):
        if adapter.has_adapter:
            raise ValueError(f"{key}={path} is an adapter: to train it further, set {key} to the model that it was "
                             f"trained on and lora_init_from={path}")
        return merged(path, key, mode)
    config = read_config(path, key)
    check_weights(path, key, config)
    if getattr(config, "quantization_config", None) and not adapter.has_adapter:
        raise ValueError(f"{key}={path} has quantised weights, which cannot be trained or merged; use the unquantised "
                         "model, or lora_rank=16")
    found = found_mode(config, path, key, mode)
    if mode is not None and found != mode:
        raise ValueError(f"{key}={path} has mode {found}, but {mode} is needed here")
    transformers = quiet_transformers(path, key)
    if found == SEQUENCE_SCORER and config.model_type == "deberta-v2":
        return read_detector(path, key, transformers), found
    settings = {"dtype": dtype if adapter.has_adapter else torch.float32}
    if adapter.attention != "auto":
        settings["attn_implementation"] = adapter.attention
    if adapter.load_in_4bit:
        settings |= four_bits(transformers, dtype, device)
    return read_weights(getattr(transformers, READS[found]), path, key, **settings), found


def read_weights(kind, path, key, **settings):
    """The model of a class of transformers from a folder or hub name, all of whose weights are there and finite."""
    net, report = calling(kind.from_pretrained, path, key, output_loading_info=True, use_safetensors=True,
                          ignore_mismatched_sizes=True, **settings)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{key}={path} has no weights for {', '.join(missing[:3])}{more}, which {type(net).__name__} "
                         "needs; use a complete checkpoint of that kind")
    if report["mismatched_keys"]:
        name, found, wanted = sorted(report["mismatched_keys"])[0]
        raise ValueError(f"{key}={path}: {name} has the shape {tuple(found)}, but its config.json asks for "
                         f"{tuple(wanted)}; {AGAIN}")
    check_finite(net.named_parameters(), f"{key}={path}")
    return net


def four_bits(transformers, dtype, device):
    """Arguments of from_pretrained that hold the weights in 4 bits."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"load_in_4bit=True needs a CUDA GPU, but the device is {device}; set load_in_4bit=False")
    require("bitsandbytes", "load_in_4bit=True", "bitsandbytes")
    return {"device_map": {"": device}, "quantization_config": transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)}


def merged(path, key, mode):
    """(the base model of an adapter's folder with the adapter merged into its weights, its mode), in float32."""
    net, found = open_transformer(base_of(path, key), key, mode)
    return open_adapter(net, path, key).merge_and_unload().requires_grad_(True), found


def read_detector(path, key, transformers):
    """DeBERTa-v3's detector, from a folder or hub name."""
    with opening(path, key):
        weights = load_file(transformers.utils.cached_file(local_name(path), "model.safetensors"))
    layers = transformers.DebertaV2Model(read_config(path, key))
    net = ReplacedTokenHead(WithFirstState(layers))
    named = {name.replace("deberta.layers.", "deberta."): name for name in net.state_dict()}
    missing = [name for name in named if name not in weights]
    if missing:
        raise ValueError(f"{key}={path} has no weights for {', '.join(missing[:3])}, which a detector of replaced "
                         "tokens needs; use DeBERTa-v3's discriminator")
    with opening(path, key):
        net.load_state_dict({own: weights[name].float() for name, own in named.items()})
    check_finite(net.named_parameters(), f"{key}={path}")
    return net


def check_target(folder, adapter, key="out_dir"):
    """Raises ValueError if a model cannot be written to the folder without losing one of another kind.

    adapter: whether the model is an adapter; key: the setting that names the folder
    """
    if os.path.isfile(folder):
        raise ValueError(f"{key}={folder} is a file, but a folder is written; name another")
    other = [name for name in (os.listdir(folder) if os.path.isdir(folder) else ())
             if (WHOLE if adapter else PARTS).fullmatch(name)]
    if other:
        raise ValueError(f"{key}={folder} holds {'a model' if adapter else 'an adapter'} ({other[0]}), and "
                         f"{'an adapter' if adapter else 'a model'} beside it could not be told apart; name another")


def replace_files(new, folder):
    """Moves the files of one folder into another, the weights last, so that neither ever holds half a file."""
    os.makedirs(folder, exist_ok=True)
    for name in sorted(os.listdir(new), key=lambda name: name.endswith(".safetensors")):
        as_usual(os.path.join(new, name))
        flush(os.path.join(new, name))
        os.replace(os.path.join(new, name), os.path.join(folder, name))
    flush(folder)
    shutil.rmtree(new)
