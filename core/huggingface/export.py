"""A generator of ours as a folder that transformers loads: Qwen3's shape with equal logits, and its tokenizer.

A model that fills in masks is a Qwen3 with is_causal=False, in which every token reads every other one.

Qwen3's gated network is our squared relu if both of its inputs come from the same matrix: silu(s h) * h / s differs
from relu(h) ** 2 by at most 0.48 / s ** 2. With relu itself it would be equal, but vLLM's Qwen3 knows silu alone.
"""

import contextlib
import os
import pathlib
import re
import shutil

import torch

from core.files.whole_files import as_usual, writing
from core.huggingface.load import open_transformer
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.settings.optional import require
from core.tokenizer import PLAIN, CharTokenizer

STOP_NAME = "<|endoftext|>"  # the stop token of a CharTokenizer has no text of its own
SPECIAL_NAMES = ("<|mask|>", "<|pad|>", "<|cls|>")  # nor have these, which stand behind its base vocabulary
ROTARY_BASE = 10000.0        # of core.model.rotary_table
SHARPNESS = 4096.0           # s of the gated network: a power of two, which changes no digit of the weights
SHARPNESS_OF_FLOAT16 = 64.0  # which has no numbers above 65504, and few below 6e-5


@contextlib.contextmanager
def new_folder(path, key="out"):
    """A folder to write into, which gets its name when all is written; after an error nothing is left of it.

    key: the setting that names it, for the error if it exists
    """
    path = os.path.normpath(path)
    if os.path.lexists(path):
        raise ValueError(f"{key}={path} exists, and nothing is overwritten; name another folder or remove it")
    partial = path + ".tmp"
    try:
        os.makedirs(partial)
    except OSError as error:
        raise ValueError(f"{key}={path} cannot be written ({partial}: {error.strerror}); name another folder") from None
    with writing(path):
        try:
            yield partial
            for file in pathlib.Path(partial).glob("*.safetensors"):
                as_usual(file)
            os.rename(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def write_generator(model, tokenizer, folder, dtype=torch.float32, where="the model"):
    """Writes a generator of ours and its tokenizer into a folder, in Hugging Face's format.

    where: names the model for the error if it is none
    """
    transformers = require("transformers", "the export to Hugging Face's format")
    transformers.logging.disable_progress_bar()  # sampler='vllm' writes a folder at every sync
    if model.mode == SEQUENCE_SCORER:
        raise ValueError(f"{where} has mode {model.mode}, for which transformers has no architecture of this shape; "
                         "name a generator")
    if not isinstance(tokenizer, CharTokenizer):
        raise ValueError(f"{where} has a tokenizer of kind {tokenizer.description()['kind']}, but only a vocabulary of "
                         "characters is exported; train a model with --tokenizer=char")
    stop = tokenizer.stop_token_id
    net = transformers.Qwen3ForCausalLM(qwen3_config(model, stop))
    sharpness = SHARPNESS_OF_FLOAT16 if dtype == torch.float16 else SHARPNESS
    net.load_state_dict(qwen3_weights(model, sharpness))
    net.generation_config = transformers.GenerationConfig(eos_token_id=stop, pad_token_id=stop)
    net.to(dtype).save_pretrained(folder)
    fills = model.mode == MASKED_FILL
    as_fast_tokenizer(tokenizer, model.longest_input, fills).save_pretrained(folder)


def qwen3_config(model, stop_token_id):
    """The shape of the model in transformers' words. The ids behind the base vocabulary, which a causal model neither
    reads nor samples, are left out of it."""
    from transformers import Qwen3Config
    config = model.config
    return Qwen3Config(
        is_causal=model.mode == LANGUAGE_MODEL,
        vocab_size=rows_of(model),
        hidden_size=config.n_embd,
        intermediate_size=4 * config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        hidden_act="silu",
        max_position_embeddings=config.block_size,
        rms_norm_eps=model.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=config.tied,
        eos_token_id=stop_token_id,
        bos_token_id=None,
        pad_token_id=None)


def rows_of(model):
    """The number of tokens that the exported model knows."""
    return model.config.vocab_size if model.mode == MASKED_FILL else model.vocabulary


def qwen3_weights(model, sharpness=SHARPNESS):
    """{name in Qwen3: tensor} of the model. sharpness: s of the gated network

    Queries and keys are normalised with the smallest eps of float32 here, and with that of all other norms in Qwen3.
    RMSNorm(s * x, eps) is RMSNorm(x, eps / s ** 2), so a factor on their projections makes up for it.
    """
    embed = model.embed.weight[: rows_of(model)]
    head = embed if model.config.tied else model.head.weight
    unread = embed.new_zeros(len(embed) - len(head), embed.shape[1])  # no special token is sampled
    s = (model.norm.eps / torch.finfo(torch.float32).eps) ** 0.5
    out = {"model.embed_tokens.weight": embed,
           "model.norm.weight": model.norm.weight,
           "lm_head.weight": torch.cat((head, unread))}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attention.qkv.weight.chunk(3)                                # (C, C) each
        ones = torch.ones(len(q) // model.config.n_head)                             # (D,)
        layer = {"self_attn.q_proj": q * s,
                 "self_attn.k_proj": k * s,
                 "self_attn.v_proj": v,
                 "self_attn.o_proj": block.attention.out.weight,
                 "self_attn.q_norm": ones,
                 "self_attn.k_norm": ones,
                 "mlp.gate_proj": block.up.weight * sharpness,
                 "mlp.up_proj": block.up.weight / sharpness,
                 "mlp.down_proj": block.down.weight,
                 "input_layernorm": block.norm_1.weight,
                 "post_attention_layernorm": block.norm_2.weight}
        out |= {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    return {name: weight.detach().float().cpu() for name, weight in out.items()}


def as_fast_tokenizer(tokenizer, longest, fills=False):
    """transformers' fast tokenizer with the ids of a CharTokenizer: tags are found first, what is left is folded to
    ASCII and cut into characters, and one outside the vocabulary is left out.

    The name of the stop token in a text is read as plain characters, as ours does (split_special_tokens). With `fills`
    there is a mask token, whose name in a text, like those of other special tokens, is read as that token.
    longest: tokens that fit into the model
    """
    import tokenizers as t
    from transformers import PreTrainedTokenizerFast
    end = None if tokenizer.stop_token_id is None else STOP_NAME
    names = [*tokenizer.pieces, STOP_NAME][: tokenizer.base_vocab_size]
    special = {"eos_token": end, "pad_token": end}
    if fills:
        names += SPECIAL_NAMES
        special = {"eos_token": end} | dict(zip(("mask_token", "pad_token", "cls_token"), SPECIAL_NAMES, strict=True))
    fast = t.Tokenizer(t.models.BPE({name: i for i, name in enumerate(names)}, []))
    fast.normalizer = ascii_normalizer(tokenizer.characters)
    fast.decoder = t.decoders.Fuse()
    fast.add_tokens([t.AddedToken(tag, normalized=False) for tag in tokenizer.tags])
    return PreTrainedTokenizerFast(tokenizer_object=fast, **special, model_max_length=longest,
                                   split_special_tokens=not fills, clean_up_tokenization_spaces=False)


def ascii_normalizer(characters):
    """fold_to_ascii as a normalizer of the library `tokenizers`; it leaves out what is not among `characters`.

    Its Unicode tables are its own: of characters that came into Unicode lately, a dozen are folded otherwise.
    """
    from tokenizers import Regex
    from tokenizers.normalizers import NFKD, Replace, Sequence
    unknown = f"[^{''.join(map(re.escape, characters))}]"
    return Sequence([*(Replace(c, text) for c, text in PLAIN.items()), NFKD(), Replace(Regex(r"[^\n -~]"), ""),
                     Replace(Regex(unknown), "")])


def copy_merged(path, folder, dtype=torch.float32, key="checkpoint"):
    """Writes the Hugging Face model at `path` and its tokenizer into a folder; an adapter is merged, in float32, into
    the weights of its base model.

    path: a folder, or hf:owner/name; key: the setting that names it, for errors
    """
    net, _ = open_transformer(path, key, None)
    net.to(dtype).save_pretrained(folder)
    load_huggingface_tokenizer(path, key).save(folder)
