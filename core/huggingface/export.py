"""Exports one of our causal generators and its tokenizer as a Qwen3 folder with the same logits.

Qwen3's gated network is our squared relu if both of its inputs come from the same matrix: silu(s h) * h / s differs
from relu(h) ** 2 by at most 0.48 / s ** 2. With relu they would be equal, but vLLM's Qwen3 supports only silu.
"""

import re

import torch

from core.errors import Mistake
from core.model import LANGUAGE_MODEL
from core.settings.optional import require
from core.tokenizer import REPLACEMENTS, CharTokenizer

STOP_NAME = "<|endoftext|>"  # the stop token of a CharTokenizer has no text of its own
SHARPNESS = 4096.0  # s of the gated network: a power of two, so that no weight is rounded


def write_generator(model, tokenizer, folder, dtype=torch.float32):
    """Writes one of our causal generators and its tokenizer to a folder in Hugging Face format."""
    transformers = require("transformers", "the export to Hugging Face's format")
    transformers.logging.disable_progress_bar()  # sampler='vllm' writes a folder at every sync
    if model.mode != LANGUAGE_MODEL or not isinstance(tokenizer, CharTokenizer):
        raise Mistake(f"a model of mode {model.mode} with a tokenizer of kind {tokenizer.description()['kind']} is not "
                      f"exported; use one of mode {LANGUAGE_MODEL} with --tokenizer=char")
    stop = tokenizer.stop_token_id
    net = transformers.Qwen3ForCausalLM(qwen3_config(model, stop))
    net.load_state_dict(qwen3_weights(model))
    net.generation_config = transformers.GenerationConfig(eos_token_id=stop, pad_token_id=stop)
    net.to(dtype).save_pretrained(folder)
    as_fast_tokenizer(tokenizer, model.longest_input).save_pretrained(folder)


def qwen3_config(model, stop_token_id):
    """Returns a Qwen3 config with the shape of the model. Rotary positions and the activation are Qwen3's defaults, as
    in our models."""
    from transformers import Qwen3Config
    config = model.config
    return Qwen3Config(
        vocab_size=model.vocabulary,
        hidden_size=config.n_embd,
        intermediate_size=4 * config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
        max_position_embeddings=config.block_size,
        rms_norm_eps=model.norm.eps,
        tie_word_embeddings=config.tied,
        eos_token_id=stop_token_id)


def qwen3_weights(model):
    """Returns the weights of the model under Qwen3's names: {name: tensor}.

    Our models normalise queries and keys with the eps of float32; Qwen3 uses the eps of its other norms. Because
    RMSNorm(s * x, eps) is RMSNorm(x, eps / s ** 2), scaling the query and key projections by s cancels the difference.
    """
    config = model.config
    s = (model.norm.eps / torch.finfo(torch.float32).eps) ** 0.5
    embed = model.embed.weight[: model.vocabulary]
    out = {}
    out["model.embed_tokens.weight"] = embed
    out["model.norm.weight"] = model.norm.weight
    out["lm_head.weight"] = embed if config.tied else model.head.weight
    for i, block in enumerate(model.blocks):
        layer = f"model.layers.{i}"
        q, k, v = block.attention.qkv.weight.chunk(3)                                # (C, C) each
        ones = torch.ones(config.n_embd // config.n_head)                            # (D,)
        out[f"{layer}.self_attn.q_proj.weight"] = q * s
        out[f"{layer}.self_attn.k_proj.weight"] = k * s
        out[f"{layer}.self_attn.v_proj.weight"] = v
        out[f"{layer}.self_attn.o_proj.weight"] = block.attention.out.weight
        out[f"{layer}.self_attn.q_norm.weight"] = ones
        out[f"{layer}.self_attn.k_norm.weight"] = ones
        out[f"{layer}.mlp.gate_proj.weight"] = block.up.weight * SHARPNESS
        out[f"{layer}.mlp.up_proj.weight"] = block.up.weight / SHARPNESS
        out[f"{layer}.mlp.down_proj.weight"] = block.down.weight
        out[f"{layer}.input_layernorm.weight"] = block.norm_1.weight
        out[f"{layer}.post_attention_layernorm.weight"] = block.norm_2.weight
    return out


def as_fast_tokenizer(tokenizer, longest):
    """Builds a fast transformers tokenizer with the ids of a CharTokenizer. It matches tags first, folds the rest to
    ASCII, drops characters outside the vocabulary and splits the text into characters.

    As in CharTokenizer, the name of the stop token in a text is plain characters (split_special_tokens). The library
    has a different version of the Unicode tables, so it folds a dozen of the newest characters differently.
    longest: the longest input of the model, in tokens
    """
    import tokenizers as t
    from tokenizers.normalizers import NFKD, Replace, Sequence
    from transformers import PreTrainedTokenizerFast
    ids = dict(tokenizer.ids)
    end = None
    if tokenizer.stop_token_id is not None:
        end = STOP_NAME
        ids[end] = tokenizer.stop_token_id
    fast = t.Tokenizer(t.models.BPE(ids, []))
    steps = [Replace(character, text) for character, text in REPLACEMENTS.items()]
    unknown = t.Regex(f"[^{re.escape(tokenizer.characters)}]")
    steps += [NFKD(), Replace(unknown, "")]
    fast.normalizer = Sequence(steps)
    fast.decoder = t.decoders.Fuse()
    tags = [t.AddedToken(tag, normalized=False) for tag in tokenizer.tags]
    fast.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token=end,
        pad_token=end,
        model_max_length=longest,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False)
