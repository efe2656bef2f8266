"""Converts a causal generator of ours, with its tokenizer, to a Qwen3 folder that gives equal logits.

Qwen3's gated network is our squared relu if both of its inputs come from the same matrix: silu(s h) * h / s differs
from relu(h) ** 2 by at most 0.48 / s ** 2. With relu itself it would be equal, but vLLM's Qwen3 knows silu alone.
"""

import re

import torch

from core.huggingface.files import refuse
from core.model import LANGUAGE_MODEL
from core.settings.optional import require
from core.tokenizer import PLAIN, CharTokenizer

STOP_NAME = "<|endoftext|>"  # the stop token of a CharTokenizer has no text of its own
SHARPNESS = 4096.0  # s of the gated network: a power of two, which changes no digit of the weights


def write_generator(model, tokenizer, folder, dtype=torch.float32):
    """Writes a causal generator of ours and its tokenizer into a folder, in Hugging Face's format."""
    transformers = require("transformers", "the export to Hugging Face's format")
    transformers.logging.disable_progress_bar()  # sampler='vllm' writes a folder at every sync
    can_be = model.mode == LANGUAGE_MODEL and isinstance(tokenizer, CharTokenizer)
    refuse(f"a model of mode {model.mode} with a tokenizer of kind {tokenizer.description()['kind']}",
           (not can_be, f"is not exported; use one of mode {LANGUAGE_MODEL} with --tokenizer=char"))
    stop = tokenizer.stop_token_id
    net = transformers.Qwen3ForCausalLM(qwen3_config(model, stop))
    net.load_state_dict(qwen3_weights(model))
    net.generation_config = transformers.GenerationConfig(eos_token_id=stop, pad_token_id=stop)
    net.to(dtype).save_pretrained(folder)
    as_fast_tokenizer(tokenizer, model.longest_input).save_pretrained(folder)


def qwen3_config(model, stop_token_id):
    """The shape of the model in transformers' words, without the ids behind the base vocabulary."""
    from transformers import Qwen3Config
    config = model.config
    return Qwen3Config(  # whose rotary positions and activation are those wanted
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
    """{name in Qwen3: tensor} of the model.

    Queries and keys are normalised with the smallest eps of float32 here, and with that of all other norms in Qwen3.
    RMSNorm(s * x, eps) is RMSNorm(x, eps / s ** 2), so a factor on their projections makes up for it.
    """
    embed = model.embed.weight[: model.vocabulary]
    s = (model.norm.eps / torch.finfo(torch.float32).eps) ** 0.5
    out = {"model.embed_tokens.weight": embed,
           "model.norm.weight": model.norm.weight,
           "lm_head.weight": embed if model.config.tied else model.head.weight}
    for i, block in enumerate(model.blocks):
        q, k, v = block.attention.qkv.weight.chunk(3)                                # (C, C) each
        ones = torch.ones(len(q) // model.config.n_head)                             # (D,)
        layer = {"self_attn.q_proj": q * s,
                 "self_attn.k_proj": k * s,
                 "self_attn.v_proj": v,
                 "self_attn.o_proj": block.attention.out.weight,
                 "self_attn.q_norm": ones,
                 "self_attn.k_norm": ones,
                 "mlp.gate_proj": block.up.weight * SHARPNESS,
                 "mlp.up_proj": block.up.weight / SHARPNESS,
                 "mlp.down_proj": block.down.weight,
                 "input_layernorm": block.norm_1.weight,
                 "post_attention_layernorm": block.norm_2.weight}
        out |= {f"model.layers.{i}.{name}.weight": weight for name, weight in layer.items()}
    return {name: weight.detach().float().cpu() for name, weight in out.items()}


def as_fast_tokenizer(tokenizer, longest):
    """transformers' fast tokenizer with the ids of a CharTokenizer: tags are found first, what is left is folded to
    ASCII and cut into characters, and one outside the vocabulary is left out.

    The name of the stop token in a text is read as plain characters, as ours does (split_special_tokens). The Unicode
    tables of the library differ: of characters that came into Unicode lately, a dozen are folded otherwise.
    longest: tokens that fit into the model
    """
    import tokenizers as t
    from tokenizers.normalizers import NFKD, Replace, Sequence
    from transformers import PreTrainedTokenizerFast
    end = None if tokenizer.stop_token_id is None else STOP_NAME
    names = [*tokenizer.pieces, STOP_NAME][: tokenizer.base_vocab_size]
    fast = t.Tokenizer(t.models.BPE({name: i for i, name in enumerate(names)}, []))
    unknown = t.Regex(f"[^{''.join(map(re.escape, tokenizer.characters))}]")
    fast.normalizer = Sequence([*(Replace(c, text) for c, text in PLAIN.items()), NFKD(), Replace(unknown, "")])
    fast.decoder = t.decoders.Fuse()
    fast.add_tokens([t.AddedToken(tag, normalized=False) for tag in tokenizer.tags])
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=end, pad_token=end, model_max_length=longest,
                                   split_special_tokens=True, clean_up_tokenization_spaces=False)
