"""Loads models in Hugging Face format, with or without a LoRA adapter, checks them, and saves them."""

import copy

import torch

from core.errors import others
from core.huggingface.files import (
    base_of, check_weights, is_adapter, published_as, read_config, reads_both_ways, refuse, writing_folder)
from core.huggingface.lora import FULL, add_adapter, open_adapter, save_adapter
from core.huggingface.model import CACHE_NAMES, HuggingFaceModel
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.settings.optional import local_name, opening, quiet_transformers, require
from core.settings.setting import check_finite
from core.tokenizer import same_vocabulary

CLASSES = {LANGUAGE_MODEL: "AutoModelForCausalLM", MASKED_FILL: "AutoModelForMaskedLM",
           SEQUENCE_SCORER: "AutoModelForPreTraining"}
FAMILIES = "use a model of a family that docs/huggingface.md names"


def load_huggingface(path, device, mode, tokenizer, key, adapter, dtype):
    """The model of core.models.load_model: in float32, or with an adapter on weights in `dtype`."""
    named, own = f"{key}={path}", load_huggingface_tokenizer(path, key)
    if adapter.has_adapter:
        require("peft", adapter.asked_for)  # here, before the weights are read
    has_other = tokenizer is not None and not same_vocabulary(own.description(), tokenizer)
    refuse(named, (has_other, f"has a vocabulary of {own.vocab_size} tokens that is not that of the dataset or the "
                   "generator; use models with the same tokenizer"))
    net, mode = open_transformer(path, key, mode, adapter, dtype, device)
    check_vocabulary(net.base_model, own, named)
    refuse(named, (mode == MASKED_FILL and own.mask_token_id is None,
                   "has no mask token; name one as mask_token in its tokenizer_config.json"),
           (mode == MASKED_FILL and own.mask_token_id in own.stop_token_ids,
            f"has the end token {own.mask_token_id} as its mask_token_id; correct mask_token_id in its config.json"))
    if adapter.has_adapter:
        net = add_adapter(net, adapter)
        for settings in net.peft_config.values():
            settings.base_model_name_or_path = local_name(path)
    with others(f"{named}: {type(net).__name__} does not work with hidden states alone", FAMILIES, quiet=True,
                ours_too=True):
        model = HuggingFaceModel(net, own, mode, adapter.has_adapter).eval()
        if not adapter.load_in_4bit:
            model.to(device)
        check_outputs(model, named)
    return model


def open_transformer(path, key, mode, adapter=FULL, dtype=torch.float32, device="cpu"):
    """(transformers model, mode) of a folder or hub name, in float32, or with an adapter in `dtype`. A folder with an
    adapter gives its base model with the adapter merged into the weights."""
    named = f"{key}={path}"
    if is_adapter(path):
        refuse(named, (adapter.has_adapter, f"is an adapter: to train it further, set {key} to the model that it was "
                       f"trained on and lora_init_from={path}"))
        require("peft", named)
        net, found = open_transformer(base_of(path, key), key, mode)
        net = open_adapter(net, path, key)
        with others(f"{named} cannot be merged into its base model", "name a plain LoRA adapter"):
            net = net.merge_and_unload()
        return net.requires_grad_(True), found
    config = read_config(path, key)
    found = mode_of(config, path, key)
    quantised = getattr(config, "quantization_config", None)
    refuse(named,
           (mode not in (None, found), f"has mode {found}, but {mode} is needed here"),
           (quantised and not adapter.has_adapter, "has quantised weights; use the unquantised model, or lora_rank=16"))
    check_weights(path, key, config)
    transformers, published = quiet_transformers(path, key), published_as(path, key)
    settings = {"dtype": dtype if adapter.has_adapter else torch.float32}
    if adapter.load_in_4bit:
        settings |= four_bits(transformers, dtype, device)
    if published is not None:
        settings |= {"config": config, "key_mapping": published.names}
    kind = getattr(transformers, CLASSES[LANGUAGE_MODEL if reads_both_ways(config) else found])
    net = read_weights(kind, path, key, **settings)
    for part in net.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):  # of bitsandbytes: products without a gradient
            part.support_avx512bf16_for_cpu = False
    if published is not None:
        net._weight_conversions = None  # it is saved with the names of transformers
    return net, found


def model_mode(path, key):
    """The mode of the model of a folder or hub name, from its config alone; an adapter has that of its base model."""
    return mode_of(read_config(base_of(path, key), key), path, key)


def mode_of(config, path, key):
    """The mode of a model with this config, by the class that saved it or its family. Raises Mistake for others."""
    from transformers.models.auto import modeling_auto as known
    fills, writes = known.MODEL_FOR_MASKED_LM_MAPPING_NAMES, known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = [*(config.architectures or ()), ""][0]  # of the class
    is_known = config.model_type in (*fills, *writes) and not config.is_encoder_decoder
    refuse(f"{key}={path}",
           (name.endswith("ForSequenceClassification"), f"is a reward model or classifier ({name}); name it in "
            "reward_model_checkpoint, with the reward reward_model"),
           (not is_known, f"has model_type {config.model_type} ({name or 'no architecture'}), which is neither a "
            "causal nor a masked language model nor a detector of replaced tokens; use one of these"))
    if config.model_type == "electra" and name.endswith("ForPreTraining"):
        return SEQUENCE_SCORER
    is_masked = config.model_type in fills and not name.endswith(("ForCausalLM", "LMHeadModel"))
    return MASKED_FILL if is_masked or reads_both_ways(config) else LANGUAGE_MODEL


def read_weights(kind, path, key, **settings):
    """The model of a class of transformers from a folder or hub name, all of whose weights are there and finite."""
    with opening(path, key):
        net, report = kind.from_pretrained(local_name(path), trust_remote_code=False, use_safetensors=True,
                                           output_loading_info=True, ignore_mismatched_sizes=True, **settings)
    lacking = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    refuse(f"{key}={path}", (lacking, f"lacks {len(lacking)} weights that {type(net).__name__} needs, or has them in "
                             f"another shape, such as {''.join(lacking[:1])}; use a complete checkpoint of that kind"))
    check_finite(net.named_parameters(), f"{key}={path}")
    return net


def four_bits(transformers, dtype, device):
    """Arguments of from_pretrained that hold the weights in 4 bits."""
    refuse("load_in_4bit=True", (torch.device(device).type == "mps", "is for CUDA and CPUs; set load_in_4bit=False"))
    require("bitsandbytes", "load_in_4bit=True", "bitsandbytes")
    return {"device_map": {"": device}, "quantization_config": transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)}


def check_vocabulary(net, tokenizer, named):
    """Raises Mistake if a tokenizer has more tokens than a transformers model reads."""
    rows = net.get_input_embeddings().num_embeddings
    refuse(named, (tokenizer.vocab_size > rows, f"has a tokenizer of {tokenizer.vocab_size} tokens, but the model "
                   f"reads {rows}; copy the tokenizer files that belong to the model"))


@torch.no_grad()
def check_outputs(model, named):
    """Raises Mistake if the output layers alone give other logits than the whole model of transformers."""
    refuse(named, (model.mode == LANGUAGE_MODEL and model.cache_name is None, f"would complete without its prompt: "
                   f"{type(model.body).__name__} takes no cache ({', '.join(CACHE_NAMES)}); {FAMILIES}"))
    inputs = model.inputs(torch.arange(6, device=next(model.parameters()).device)[None])
    expected = model.net(**inputs).logits.float()                                    # (1, T, V), of a judge (1, T)
    found = model.head_logits(model.body(**inputs).last_hidden_state).view_as(expected)
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    differs = (found - expected).abs().max() > tolerance * expected.abs().max()
    refuse(named, (differs, f"gives other logits where the output layers of {type(model.net).__name__} are computed "
                   f"apart; {FAMILIES}"))


def save_huggingface(path, model, tokenizer, dtype, weights):
    """core.models.save_model, as a folder for from_pretrained or peft. dtype: of weights that are no adapter's"""
    with writing_folder(path) as folder:
        if model.has_adapter:
            save_adapter(model.net, weights or model.weights(), folder)
        else:
            net = model.net if dtype == torch.float32 else copy.deepcopy(model.net).to(dtype)
            net.save_pretrained(folder, state_dict=weights and dict(weights),  # tied ones are taken out of it
                                max_shard_size="1000GB")  # one file, which can be replaced at once
        tokenizer.save(folder)
