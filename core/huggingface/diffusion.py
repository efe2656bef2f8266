"""Published diffusion language models as transformers' own classes that read in both directions: none of the code that
comes with them is run.

Three values of a config.json describe such a model. is_causal=False: every token reads every other one.
shifted_logits=True: the state of a token predicts the next one, as in the causal model that it was made from.
attention_block=B: a token reads the tokens of its own block of B and of the blocks before it.
"""

from dataclasses import dataclass, field

import torch

LEFT_OUT = ("model_type", "architectures", "auto_map", "transformers_version")
LLADA_SETTINGS = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
                  "n_layers": "num_hidden_layers", "mlp_hidden_size": "intermediate_size",
                  "max_sequence_length": "max_position_embeddings", "weight_tying": "tie_word_embeddings",
                  "embedding_size": "vocab_size", "vocab_size": None}  # there are as many rows as embedding_size says
LLADA_MUST_BE = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True,
                 "alibi": False, "include_bias": False, "include_qkv_bias": False, "attention_layer_norm": False,
                 "scale_logits": False, "input_emb_norm": False}
LLADA_LAYER = {"attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "q_proj": "self_attn.q_proj",
               "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
               "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj"}
LLADA_NAMES = {r"^model\.transformer\.wte\.": "model.embed_tokens.", r"^model\.transformer\.ln_f\.": "model.norm.",
               r"^model\.transformer\.ff_out\.": "lm_head."}
LLADA_NAMES |= {rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\.": rf"model.layers.\1.{ours}."
                for theirs, ours in LLADA_LAYER.items()}


@dataclass(frozen=True)
class Published:
    """The way to open the folders of one model_type with a class of transformers."""
    config: str                                   # a class of configs of transformers
    settings: dict = field(default_factory=dict)  # {name in their config.json: name in that class, None: left out}
    must_be: dict = field(default_factory=dict)   # {name: value} that they must have, if they name it at all
    names: dict = field(default_factory=dict)     # {regular expression: replacement} of the names of weights
    shifted: bool = False                         # shifted_logits
    block: str | None = None                      # the setting of theirs that is attention_block; without it: 4
    tokenizer: str | None = None                  # the class of transformers, where theirs needs code


PUBLISHED = {
    "llada": Published("LlamaConfig", LLADA_SETTINGS, LLADA_MUST_BE, LLADA_NAMES),        # arXiv 2502.09992
    "Dream": Published("Qwen2Config", shifted=True, tokenizer="Qwen2Tokenizer"),          # arXiv 2508.15487
    "sdar": Published("Qwen3Config", block="block_size"),                                 # arXiv 2510.06303
    "a2d-llama": Published("LlamaConfig"),                                                # of the library dllm
    "a2d-qwen2": Published("Qwen2Config"),
    "a2d-qwen3": Published("Qwen3Config")}


def reads_both_ways(config):
    """Tells whether a config is that of a causal class of transformers whose tokens read those behind them too."""
    from transformers.models.auto import modeling_auto as known
    fills, writes = known.MODEL_FOR_MASKED_LM_MAPPING_NAMES, known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    causal = getattr(config, "is_causal", True)
    return causal is False and config.model_type in writes and config.model_type not in fills


def block_mask(padding, length, block):
    """(B, 1, length, length) bool: True where the token of a row reads that of a column, in blocks that are counted
    from the first token behind the padding. Padding reads itself, so that no row is empty.

    padding: (B,) number of leading columns without a token
    """
    column = torch.arange(length, device=padding.device)                             # (T,)
    number = (column - padding[:, None]).div(block, rounding_mode="floor")           # (B, T)
    reads = number[:, :, None] >= number[:, None]                                    # (B, T, T)
    real = (column >= padding[:, None])[:, None]                                     # (B, 1, T)
    itself = torch.eye(length, dtype=torch.bool, device=padding.device)
    return (reads & real | itself)[:, None]


def as_known(values, named):
    """The config of transformers for the values of a config.json of a row of PUBLISHED. Raises ValueError for a variant
    that has another shape."""
    import transformers
    row = PUBLISHED[values["model_type"]]
    for name, wanted in row.must_be.items():
        if values.get(name, wanted) != wanted:
            raise ValueError(f"{named}: {name}={values[name]!r} in its config.json is not the {values['model_type']} "
                             f"that is known here, which has {wanted!r}; use another model")
    renamed = {row.settings.get(name, name): x for name, x in values.items() if name not in LEFT_OUT}
    config = getattr(transformers, row.config)(**{name: x for name, x in renamed.items() if name and x is not None})
    config.is_causal = False
    if row.shifted:
        config.shifted_logits = True
    if row.block:
        config.attention_block = values.get(row.block, 4)
    return config


def check_block(config, named):
    """Raises ValueError for blocks that cannot be. named: the setting and the path"""
    block, attention = getattr(config, "attention_block", None), getattr(config, "_attn_implementation", None)
    if block is not None and (type(block) is not int or block < 1 or attention not in (None, "sdpa")):
        raise ValueError(f"{named}: attention_block={block!r} in its config.json must be a number of tokens, with "
                         "attn_implementation='sdpa' or none")
    if type(getattr(config, "shifted_logits", False)) is not bool:
        raise ValueError(f"{named}: shifted_logits in its config.json must be true or false")
