"""Opening models in Hugging Face format: what a folder holds, which class reads it, and what is refused."""

import os
import re
import shutil
from types import SimpleNamespace

import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from core.lora import FULL, POLICY, adapter_weights, check_tied, first_line
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.optional import quiet_transformers, require
from core.whole_files import flush

READS = {LANGUAGE_MODEL: "AutoModelForCausalLM", MASKED_FILL: "AutoModelForMaskedLM",
         SEQUENCE_SCORER: "AutoModelForPreTraining"}
ENDINGS = {"ForCausalLM": LANGUAGE_MODEL, "LMHeadModel": LANGUAGE_MODEL, "ForMaskedLM": MASKED_FILL,
           "ForPreTraining": MASKED_FILL}  # of the name of the class that wrote a folder
READING = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ArithmeticError, ImportError,
           safetensors.SafetensorError)  # what libraries raise for a file that is not what it should be
WHOLE, PARTS = re.compile(r"model.*\.safetensors"), re.compile(r"adapter_.*")  # files of a model, of an adapter
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


def local_name(path):
    """What transformers calls it: owner/name without hf:, or the folder, so that it is found from other folders too."""
    return path.removeprefix("hf:") if path.startswith("hf:") else os.path.abspath(path)


def check_weights(path, key):
    """Raises ValueError if a folder has no weights that can be read without running code from it."""
    if path.startswith("hf:"):
        return
    names = os.listdir(path)
    if any(name.endswith(".safetensors") for name in names):
        return
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        raise ValueError(f"{key}={path} holds pickled weights ({pickled[0]}), which can run code as they are read; "
                         "convert them to safetensors (model.save_pretrained of transformers writes them)")
    raise ValueError(f"{key}={path} has no *.safetensors file: copy the weights there")


def calling(function, path, key, **settings):
    """function(name, **settings) of transformers, with its errors as one line that names the setting."""
    try:
        return function(local_name(path), trust_remote_code=False, **settings)
    except (*READING, require("huggingface_hub", f"{key}={path}").errors.StrictDataclassError) as error:
        text = str(error)
        if "trust_remote_code" in text:
            raise ValueError(f"{key}={path} needs code of its own (trust_remote_code), which is refused; use a model "
                             "that transformers knows") from None
        if path.startswith("hf:") and isinstance(error, OSError):
            raise ValueError(f"{key}={path} could not be downloaded ({first_line(error)}); check the name and the "
                             "network, or download it elsewhere and name its folder") from None
        if isinstance(error, ImportError):
            raise ValueError(f"{key}={path}: {first_line(error)}; install what is missing, or use attention='auto' and "
                             "weights that are not quantised") from None
        raise ValueError(f"{key}={path} could not be read ({first_line(error)}); use a folder that save_pretrained of "
                         "transformers wrote") from None


def model_mode(path, key):
    """What the model of a folder or hub name is for, from its config alone; an adapter is for what its base is for."""
    base = path if path.startswith("hf:") or not is_adapter(path) else base_of(path, key)
    return found_mode(read_config(base, key), path, key)


def is_adapter(path):
    return os.path.exists(os.path.join(path, "adapter_config.json"))


def base_of(path, key):
    """The folder or hub name of the model that an adapter was trained on."""
    peft = require("peft", f"{key}={path}")
    config = calling_peft(peft.PeftConfig.from_pretrained, path, key)
    base = config.base_model_name_or_path or ""
    if config.peft_type != peft.PeftType.LORA:
        raise ValueError(f"{key}={path} is an adapter of kind {config.peft_type}; only LoRA adapters are supported")
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
    check_weights(path, key)
    if getattr(config, "quantization_config", None) and not adapter.has_adapter:
        raise ValueError(f"{key}={path} has quantised weights, which cannot be trained or merged; use the unquantised "
                         "model, or lora_rank=16")
    found = found_mode(config, path, key, mode)
    if mode is not None and found != mode:
        raise ValueError(f"{key}={path} has mode {found}, but {mode} is needed here")
    transformers = quiet_transformers(path, key)
    if found == SEQUENCE_SCORER and config.model_type == "deberta-v2":
        return read_detector(path, key, transformers), found
    settings = {"dtype": dtype if adapter.has_adapter else torch.float32, "use_safetensors": True}
    if adapter.attention != "auto":
        settings["attn_implementation"] = adapter.attention
    if adapter.load_in_4bit:
        settings |= four_bits(transformers, dtype, device)
    net, report = calling(getattr(transformers, READS[found]).from_pretrained, path, key, output_loading_info=True,
                          **settings)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ValueError(f"{key}={path} has no weights for {', '.join(missing[:3])}"
                         f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}, which {type(net).__name__} "
                         "needs; use a complete checkpoint of that kind")
    return net, found


def four_bits(transformers, dtype, device):
    """Arguments of from_pretrained that hold the weights in 4 bits."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"load_in_4bit=True needs a CUDA GPU, but the device is {device}; set load_in_4bit=False")
    require("bitsandbytes", "load_in_4bit=True", "bitsandbytes")
    return {"device_map": {"": device}, "quantization_config": transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)}


def merged(path, key, mode):
    """(the base model of an adapter's folder with the adapter merged into its weights, its mode), in float32."""
    peft = require("peft", f"{key}={path}")
    base, file = base_of(path, key), os.path.join(path, "adapter_model.safetensors")
    if not os.path.isfile(file):
        raise ValueError(f"{key}={path} is an adapter without adapter_model.safetensors; pickled weights are refused")
    net, found = open_transformer(base, key, mode)
    adapted = calling_peft(lambda path: peft.PeftModel.from_pretrained(net, path), path, key)
    with safetensors.safe_open(file, "pt") as f:
        if apart := sorted(adapter_weights(adapted, POLICY).keys() ^ set(f.keys())):
            raise ValueError(f"{key}={path} is an adapter of another model than {base}: {apart[0]} is in only one of "
                             "the two")
    check_tied(adapted, f"{key}={path}")
    return adapted.merge_and_unload().requires_grad_(True), found


def calling_peft(function, path, key):
    """function(path) of peft, with its errors as one line that names the setting."""
    try:
        return function(path)
    except READING as error:
        raise ValueError(f"{key}={path} is not an adapter that peft can read ({first_line(error)}); use a folder that "
                         "a LoRA run wrote") from None


def read_detector(path, key, transformers):
    """DeBERTa-v3's detector, from a folder or hub name."""
    from transformers.utils import cached_file
    file = calling(lambda name, trust_remote_code: cached_file(name, "model.safetensors"), path, key)
    layers, weights = transformers.DebertaV2Model(read_config(path, key)), calling(
        lambda name, trust_remote_code: load_file(file), path, key)
    net = ReplacedTokenHead(WithFirstState(layers))
    named = {name.replace("deberta.layers.", "deberta."): name for name in net.state_dict()}
    missing = [name for name in named if name not in weights]
    if missing:
        raise ValueError(f"{key}={path} has no weights for {', '.join(missing[:3])}, which a detector of replaced "
                         "tokens needs; use DeBERTa-v3's discriminator")
    net.load_state_dict({own: weights[name].float() for name, own in named.items()})
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
        flush(os.path.join(new, name))
        os.replace(os.path.join(new, name), os.path.join(folder, name))
    flush(folder)
    shutil.rmtree(new)
