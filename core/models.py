"""Models and tokenizers of every kind: a model file of ours, a folder in Hugging Face format, or hf:owner/name.

The only place that asks whose model it is.
"""

import copy
import json
import os
import shutil

import torch

from core.distributions import at_least_float32
from core.files.json_text import object_from_json
from core.files.model_file import read_model_file, read_tokenizer, write_model_file
from core.files.whole_files import writing
from core.huggingface.files import base_of, check_target, is_adapter, local_name, open_transformer, replace_files
from core.huggingface.lora import POLICY, add_adapter, peft_names
from core.huggingface.model import HuggingFaceModel
from core.huggingface.settings import FULL
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.settings.user_code import guarded
from core.tokenizer import same_vocabulary

FACTS = "nano_grpo.json"


def is_huggingface(path, key="checkpoint"):
    """Whether the path names a Hugging Face model: hf:owner/name, or a folder that holds one. Raises ValueError for
    another folder."""
    if path.startswith("hf:"):
        return True
    if not os.path.isdir(path):
        return False
    if is_adapter(path):
        return True
    file, described = os.path.join(path, "config.json"), False
    if os.path.isfile(file):
        with open(file, "rb") as f:
            described = "model_type" in object_from_json(f.read(), f"{key}={path}: config.json", "copy it again")
    if not described:
        own = [name for name in ("model.safetensors", "model") if os.path.exists(os.path.join(path, name))]
        remedy = f"name the model in it, {os.path.join(path, own[0])}" if own else "correct the path"
        raise ValueError(f"{key}={path} is a folder without a Hugging Face config.json; {remedy}")
    return True


def load_model(path, device="cpu", mode=None, tokenizer=None, key="checkpoint", adapter=FULL, dtype=torch.float32):
    """A model in eval mode, and facts about its training.

    mode: the mode that it must have; tokenizer: the one whose vocabulary it must have
    adapter: a LoraConfig: whether an adapter of a Hugging Face model is trained; dtype: of the weights beside it
    Raises FileNotFoundError or ValueError naming `key`, the path and what was found there.
    """
    if is_huggingface(path, key):
        return load_huggingface(path, device, mode, tokenizer, key, adapter, dtype), {}
    if adapter.has_adapter and os.path.exists(path):
        raise ValueError(f"{adapter.asked_for} is for Hugging Face models, which {key}={path} is not; leave it out")
    return read_model_file(path, device, mode, tokenizer, key)


def load_tokenizer(path, key="checkpoint"):
    """The tokenizer of a model."""
    if not is_huggingface(path, key):
        return read_tokenizer(path, key)
    if is_adapter(path):
        base_of(path, key)  # raises an error if it is gone, which transformers' tokenizer would report as its own
    return load_huggingface_tokenizer(path, key)


def save_model(path, model, tokenizer, dtype=torch.float32, weights=None, **facts):
    """Writes the model with its tokenizer and plain facts (step, metrics): a file of ours, or a folder in Hugging Face
    format, which holds the adapter alone if there is one.

    weights: what model.weights() gives, whole, if the model has only parts of them; in float32
    """
    write = write_model_file if isinstance(model, GPT) else save_huggingface
    write(path, model, tokenizer, dtype, weights, **facts)


def load_huggingface(path, device="cpu", mode=None, tokenizer=None, key="checkpoint", adapter=FULL,
                     dtype=torch.float32):
    """The model of a folder or of hf:owner/name, in eval mode: in float32, or with an adapter on weights in `dtype`.

    mode, tokenizer: the mode and the vocabulary that it must have
    Raises ValueError or FileNotFoundError naming `key`, the path and what does not fit.
    """
    own = load_tokenizer(path, key)
    if tokenizer is not None and not same_vocabulary(own.description(), tokenizer, path):
        raise ValueError(f"{key}={path} has another vocabulary ({own.vocab_size} tokens) than the dataset or generator "
                         f"({tokenizer.vocab_size}, not the same); use models with the same tokenizer")
    net, mode = open_transformer(path, key, mode, adapter, dtype, device)
    rows = net.base_model.get_input_embeddings().num_embeddings
    if own.vocab_size > rows:
        raise ValueError(f"{key}={path}: its tokenizer has {own.vocab_size} tokens, but the model reads {rows}; copy "
                         "the tokenizer files that belong to the model")
    if mode == MASKED_FILL and own.mask_token_id is None:
        raise ValueError(f"{key}={path} fills in masks, but its tokenizer has no mask token; copy the tokenizer files "
                         "that belong to the model")
    if adapter.has_adapter:
        net = add_adapter(net, adapter)
        for settings in net.peft_config.values():
            settings.base_model_name_or_path = local_name(path)
    apart = "hidden states alone"
    if mode == LANGUAGE_MODEL:
        apart += " and a cache of keys and values"
    with guarded(f"{key}={path}: {type(net).__name__} does not work with {apart}", "use a model of a family that "
                 "docs/huggingface.md names"):
        model = HuggingFaceModel(net, own, mode, adapter).eval()
        if not adapter.load_in_4bit:
            model.to(device)
        check_outputs(model, f"{key}={path}")
    return model


@torch.no_grad()
def check_outputs(model, named):
    """Raises ValueError if the model's layers cannot be used apart, or through a cache, as the model interface does.

    named: the setting and the path, for the error
    """
    T = min(6, model.longest_input)
    tokens = torch.arange(T, device=next(model.parameters()).device)[None] % model.vocabulary  # (1, T)
    ours, framed = model(tokens), torch.tensor([[*model.start_ids, *tokens[0].tolist(), *model.end_ids]])
    with model.adapting():
        output = model.net(input_ids=framed.to(tokens.device))
    theirs = at_least_float32(getattr(output, "logits", output))[:, len(model.start_ids) : len(model.start_ids) + T]
    if model.mode == SEQUENCE_SCORER:
        theirs, written = -theirs, slice(None)
    else:
        written = torch.ones(model.vocabulary, dtype=torch.bool)
        written[list(model.banned_ids)] = False
        ours, theirs = ours[..., written], theirs[..., : model.vocabulary][..., written]
    bound = theirs.abs().max() * (1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1)
    if (ours - theirs).abs().max() > bound:
        raise ValueError(f"{named}: {type(model.net).__name__} computes its logits in a way that is not supported here")
    if model.mode == LANGUAGE_MODEL and T > 2:
        past = model.new_cache()
        parts = [model(tokens[:, :1], past=past), model(tokens[:, 1:-1], past=past)]
        past = past.expand(tokens.new_zeros(2))
        past.keep(torch.tensor([1], device=tokens.device))
        parts.append(model(tokens[:, -1:], past=past))
        padded = model(torch.cat((tokens[:, :1], tokens), 1), padding=tokens.new_ones(1))[:, 1:]
        if max((x[..., written] - theirs).abs().max() for x in (torch.cat(parts, 1), padded)) > bound:
            raise ValueError(f"{named}: {type(model.net).__name__} gives other logits with a cache of keys and values, "
                             "or behind padding, which generation needs; use a model with plain attention layers")


def save_huggingface(path, model, tokenizer, dtype=torch.float32, weights=None, **facts):
    """Writes a folder that from_pretrained opens, or with an adapter a folder that peft opens, and plain facts.

    dtype: of the weights, but not of an adapter's; weights: as in save_model. They appear last, whole.
    """
    check_target(path, model.has_adapter, "the folder")
    new = path + ".tmp"
    shutil.rmtree(new, ignore_errors=True)
    try:
        with writing(path):
            weights = dict(model.weights() if weights is None else weights)  # tied ones will be taken out of it
            if model.has_adapter:
                model.net.save_pretrained(new, selected_adapters=[POLICY], save_embedding_layers=False,
                                          state_dict=peft_names(model.net, weights))
                os.remove(os.path.join(new, "README.md"))  # peft's, an empty form; core/run/model_card.py writes ours
            else:
                net = model.net if dtype == torch.float32 else copy.deepcopy(model.net).to(dtype)
                net.save_pretrained(new, max_shard_size="1000GB",  # one file, which can be replaced at once
                                    state_dict=weights if net is model.net else None)
            tokenizer.save(new)
            with open(os.path.join(new, FACTS), "w") as f:
                json.dump(facts, f)
            replace_files(new, path)
    finally:
        shutil.rmtree(new, ignore_errors=True)
