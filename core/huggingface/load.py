"""Loads models in Hugging Face format, with or without a LoRA adapter, checks them, and saves them."""

import copy
import os
import re

import torch

from core.errors import Mistake, others
from core.files import HUB
from core.huggingface.card import write_card
from core.huggingface.files import (
    base_of,
    check_weights,
    config_value,
    declared_in,
    is_adapter,
    published_as,
    read_config,
    reads_both_ways,
    writing_folder,
)
from core.huggingface.lora import FULL, POLICY, adapter_weights, add_adapter, open_adapter, save_adapter
from core.huggingface.model import CACHE_NAMES, HuggingFaceModel
from core.huggingface.tokenizer import HuggingFaceTokenizer, declared_ends, load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.settings.optional import local_name, opening, quiet_transformers, require
from core.settings.setting import check_finite
from core.tokenizer import same_vocabulary

FAMILIES = "use a model of a family that docs/huggingface.md names"


def load_huggingface(
        path,
        device,
        mode,
        tokenizer,
        key,
        adapter,
        dtype):
    """Loads a Hugging Face model for core.models.load_model, in float32. An adapter's frozen weights are in `dtype`."""
    named = f"{key}={path}"
    own = load_huggingface_tokenizer(path, key)
    if adapter.has_adapter:
        require("peft", adapter.adapter_setting)  # before reading the weights, which may take minutes
    if tokenizer is not None and not same_vocabulary(own.description(), tokenizer):
        raise Mistake(f"{named} has a vocabulary of {own.vocab_size} tokens that is not that of the dataset or the "
                      "generator; use models with the same tokenizer")
    net, mode = open_transformer(
        path,
        key,
        mode,
        adapter,
        dtype,
        device)
    if mode == MASKED_FILL and own.mask_token_id is None:
        raise Mistake(f"{named} has no mask token; name one as mask_token in its tokenizer_config.json")
    if mode == MASKED_FILL and own.mask_token_id in own.stop_token_ids:
        raise Mistake(f"{named} has the end token {own.mask_token_id} as its mask_token_id; correct mask_token_id in "
                      "its config.json")
    if adapter.has_adapter:
        net = add_adapter(net, adapter)
        for settings in net.peft_config.values():
            settings.base_model_name_or_path = local_name(path)
    if adapter.load_in_4bit:  # 4-bit weights are already on the device
        device = None
    return checked(net, own, mode, adapter.has_adapter, named, device)


def wrap(net, backend):
    """Wraps a causal transformers model, or peft's adapter on one, and its transformers tokenizer. Returns (model,
    tokenizer), from which CausalPolicy makes a policy. Raises Mistake if they do not fit.

    The model itself is trained, no copy of it. Without an adapter, all its weights become float32.
    """
    transformers = require("transformers", "a Hugging Face model")
    has_adapter = "get_base_model" in dir(net)  # of peft
    undivided = net.get_base_model() if has_adapter else net
    name = type(undivided).__name__
    named = f"model={name}"
    if not isinstance(undivided, transformers.GenerationMixin):
        raise Mistake(f"{named} is no causal model of transformers; hand over AutoModelForCausalLM's object, or peft's")
    if not isinstance(backend, transformers.PreTrainedTokenizerBase):
        raise Mistake(f"tokenizer={type(backend).__name__} is no tokenizer of transformers; hand over AutoTokenizer's")
    config = undivided.config
    config.architectures = [name]  # a model that was not read from files has none
    mode = mode_of(config, name, "model")
    if mode != LANGUAGE_MODEL:
        raise Mistake(f"{named} has mode {mode}, but {LANGUAGE_MODEL} is needed here")
    ends = declared_ends(config.to_dict(), undivided.generation_config.to_dict(), backend, named)
    path = undivided.name_or_path
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and not os.path.isdir(path):
        path = f"{HUB}{path}"
    tokenizer = HuggingFaceTokenizer(backend, path, ends, fills=False)
    trained = {p for p in net.parameters() if p.requires_grad}
    if has_adapter and trained != set(adapter_weights(net, POLICY).values()):
        raise Mistake(f"{named}: a save writes the LoRA adapter {POLICY!r} and nothing else, so it must be what is "
                      "trained; make it with get_peft_model(net, LoraConfig(...)) without DoRA, bias and "
                      "modules_to_save, or open it with is_trainable=True")
    if not trained:
        raise Mistake(f"{named} has no weight that requires a gradient; call requires_grad_()")
    if not has_adapter:
        net.float()
    model = checked(net, tokenizer, mode, has_adapter, named)
    return model, tokenizer


def checked(net, tokenizer, mode, has_adapter, named, device=None):
    """Makes a HuggingFaceModel in eval mode. Raises Mistake if it does not work. device: None: where its weights are"""
    fault = f"{named}: {type(net).__name__} does not work with hidden states only"
    with others(fault, FAMILIES, quiet=True, ours_too=True):
        model = HuggingFaceModel(net, tokenizer, mode, has_adapter).eval()
        check_vocabulary(model.body, tokenizer, named)
        if device is not None:
            model.to(device)
        check_outputs(model, named)
    return model


def open_transformer(
        path,
        key,
        mode,
        adapter=FULL,
        dtype=torch.float32,
        device="cpu"):
    """Opens a folder or hub name. Returns (transformers model, mode); the model is in float32, or in `dtype` if an
    adapter is trained on it. For an adapter folder, returns the base model with the adapter merged into it."""
    named = f"{key}={path}"
    if is_adapter(path):
        if adapter.has_adapter:
            raise Mistake(f"{named} is an adapter: to train it further, set {key} to the model that it was trained on "
                          f"and lora_init_from={path}")
        require("peft", named)
        net, mode = open_transformer(base_of(path, key), key, mode)
        net = open_adapter(net, path, key)
        with others(f"{named} cannot be merged into its base model", "name a plain LoRA adapter"):
            net = net.merge_and_unload()
        return net.requires_grad_(True), mode
    config = read_config(path, key)
    found = mode_of(config, path, key)
    if mode not in (None, found):
        raise Mistake(f"{named} has mode {found}, but {mode} is needed here")
    if config_value(config, "quantization_config") and not adapter.has_adapter:
        raise Mistake(f"{named} has quantised weights; use the unquantised model, or lora_rank=16")
    check_weights(path, key, config)
    transformers = quiet_transformers(path, key)
    if found == SEQUENCE_SCORER:
        kind = transformers.AutoModelForPreTraining
    elif found == LANGUAGE_MODEL or reads_both_ways(config):
        kind = transformers.AutoModelForCausalLM
    else:
        kind = transformers.AutoModelForMaskedLM
    settings = {"dtype": dtype if adapter.has_adapter else torch.float32}
    if adapter.load_in_4bit:
        settings |= four_bits(transformers, dtype, device)
    published = published_as(declared_in(path, "config.json", key))
    if published is not None:
        settings["config"] = config
        settings["key_mapping"] = published.names
    net = read_weights(kind, path, key, **settings)
    if published is not None:
        net._weight_conversions = None  # otherwise it would be saved under the published names
    for part in net.modules():
        # In eval mode without gradients, bitsandbytes would repack the weights for AVX-512 in place, and later training
        # steps would compute gradients from the reordered weights
        if type(part).__name__ == "Linear4bit":
            part.support_avx512bf16_for_cpu = False
    return net, found


def model_mode(path, key):
    """Returns the mode of a folder or hub name from its config only. An adapter has the mode of its base model."""
    base = base_of(path, key)
    config = read_config(base, key)
    return mode_of(config, path, key)


def mode_of(config, path, key):
    """Returns the mode of a model from its family and the class that saved it. Raises Mistake if the model has none of
    our modes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WRITES
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as FILLS
    fills = config.model_type in FILLS
    classes = config.architectures or ["no architecture"]
    name = classes[0]
    if name.endswith("ForSequenceClassification"):
        raise Mistake(f"{key}={path} is a reward model or classifier ({name}); name it in reward_model_checkpoint, "
                      "with the reward reward_model")
    if config.is_encoder_decoder or not (fills or config.model_type in WRITES):
        raise Mistake(f"{key}={path} has model_type {config.model_type} ({name}), which is neither a causal nor a "
                      "masked language model nor a detector of replaced tokens; use one of these")
    if config.model_type == "electra" and name.endswith("ForPreTraining"):
        return SEQUENCE_SCORER
    if reads_both_ways(config):
        return MASKED_FILL
    if fills and not name.endswith(("ForCausalLM", "LMHeadModel")):
        return MASKED_FILL
    return LANGUAGE_MODEL


def read_weights(kind, path, key, **settings):
    """Loads a model with a transformers class. Raises Mistake unless all its weights are present and finite.
    settings: arguments of from_pretrained"""
    with opening(path, key):
        net, report = kind.from_pretrained(
            local_name(path),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report lists them, and they are refused below
            **settings)
    lacking = list(report["missing_keys"])
    for name, *_ in report["mismatched_keys"]:
        lacking.append(name)
    if lacking:
        raise Mistake(f"{key}={path} lacks {len(lacking)} weights that {type(net).__name__} needs, or has them in "
                      f"another shape, such as {min(lacking)}; use a complete checkpoint of that kind")
    check_finite(net.named_parameters(), f"{key}={path}")
    return net


def four_bits(transformers, dtype, device):
    """Returns the arguments of from_pretrained that load the weights in 4 bits."""
    if torch.device(device).type == "mps":
        raise Mistake("load_in_4bit=True is for CUDA and CPUs; set load_in_4bit=False")
    require("bitsandbytes", "load_in_4bit=True", "bitsandbytes")
    quantisation = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype)
    return {"device_map": {"": device}, "quantization_config": quantisation}


def check_vocabulary(net, tokenizer, named):
    """Raises Mistake if a tokenizer has more tokens than the input embedding of a transformers model."""
    rows = net.get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > rows:
        raise Mistake(f"{named} has a tokenizer of {tokenizer.vocab_size} tokens, but the model reads {rows}; copy "
                      "the tokenizer files that belong to the model")


@torch.no_grad()
def check_outputs(model, named):
    """Raises Mistake if calling the body and the output layers separately gives different logits than the whole model.

    HuggingFaceModel calls the body and the output layers separately. A family may do more between them than pass on the
    last hidden states: scale them, or use another output of the body. Not every family has been tested, so every model
    is checked on six tokens when it is loaded.
    """
    if model.mode == LANGUAGE_MODEL and model.cache_name is None:
        raise Mistake(f"{named} would complete without its prompt: {type(model.body).__name__} takes no cache "
                      f"({', '.join(CACHE_NAMES)}); {FAMILIES}")
    weight = next(model.parameters())
    tokens = torch.arange(6, device=weight.device)
    inputs = model.inputs(tokens[None])
    expected = model.net(**inputs).logits.float()                                    # (1, T, V), of a judge (1, T)
    h = model.body(**inputs).last_hidden_state                                       # (1, T, C)
    found = model.head_logits(h).view_as(expected)
    difference = (found - expected).abs().max()
    tolerance = 1e-3 if weight.dtype == torch.float32 else 0.1
    if difference > tolerance * expected.abs().max():
        raise Mistake(f"{named} gives other logits when the output layers of {type(model.net).__name__} are called "
                      f"separately; {FAMILIES}")


def save_huggingface(path, model, tokenizer, dtype, weights, facts):
    """Implements core.models.save_model for Hugging Face models: writes a folder for from_pretrained or, with an
    adapter, for peft. An adapter stays in float32. With facts, the folder has a model card."""
    with writing_folder(path) as folder:
        if model.has_adapter:
            save_adapter(model.net, weights or model.weights(), folder)
        else:
            net = model.net
            if dtype != torch.float32:
                net = copy.deepcopy(net).to(dtype)
            if weights is not None:
                weights = dict(weights)  # save_pretrained removes tied weights from it
            net.save_pretrained(
                folder,
                state_dict=weights,
                max_shard_size="1000GB")  # one file, so that it can be replaced atomically
        tokenizer.save(folder)
        if facts:
            write_card(folder, path, tokenizer.path, facts)
