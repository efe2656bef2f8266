"""Small random Hugging Face models of many families, each with a tokenizer that is trained on the spot."""

import functools
import json
import os
import random
import shutil
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from tests.tiny import TEXT


class Family(NamedTuple):
    """What the tests must know of a family; its small model is a row of `architecture`."""
    tokenizer: str    # a key of TOKENIZERS
    keeps: str = ""   # what the layers of a causal model keep: "all tokens", a "window" of them, or a "state"


CAUSAL = {
    "gpt2": Family("padded", "all tokens"),
    "llama": Family("start", "all tokens"),
    "qwen2": Family("padded", "all tokens"),
    "qwen3": Family("chat", "all tokens"),
    "gemma3": Family("start", "window"),
    "mistral": Family("start", "window"),
    "gemma4": Family("start", "window"),
    "qwen3_5": Family("padded", "state"),
    "qwen3_next": Family("padded", "state"),
    "lfm2": Family("padded", "state"),
    "mamba2": Family("padded", "state"),
}
FILL = {
    "bert": Family("words"),
    "distilbert": Family("words"),
    "roberta": Family("angle"),
    "modernbert": Family("words"),
    "electra": Family("words"),
}
SCORING = {
    "llama_reward": Family("start"),
    "bert_reward": Family("words"),
    "roberta_reward": Family("angle"),
    "electra_judge": Family("words"),
}
REFUSED = {"openai": Family("padded")}  # its forward takes no cache
FAMILIES = CAUSAL | FILL | SCORING | REFUSED
CAUSAL_FAMILIES, FILL_FAMILIES = tuple(CAUSAL), tuple(FILL)
RECURRENT_FAMILIES = tuple(name for name, family in CAUSAL.items() if family.keeps == "state")
DIFFUSION_FAMILIES = {  # {model_type of a published folder: the family of transformers that it is}
    "llama both ways": "llama", "llada": "llama", "a2d-qwen3": "qwen3", "Dream": "qwen2", "sdar": "qwen3"}
END = "<|endoftext|>"
CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n"
                 "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}")
TOKENIZERS = {  # {kind: (names of special tokens, special tokens without a name, what stands around a text)}
    "padded": ({"eos": END, "pad": "<|pad|>"}, [], "$A"),
    "chat": ({"eos": END, "pad": END}, ["<|im_start|>", "<|im_end|>"], "$A"),
    "masked": ({"eos": END}, ["<|mask|>"], "$A"),  # config.json names the mask
    "start": ({"bos": "<s>", "eos": "</s>"}, [], "<s> $A"),
    "angle": ({"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>", "cls": "<s>",
               "sep": "</s>"}, [], "<s> $A </s>"),
    "words": ({"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}, [],
              "[CLS] $A [SEP]")}


@functools.cache  # judges and generators of one test process share the tokenizer of their kind
def tokenizer_of(kind):
    """A tokenizer of transformers, one of TOKENIZERS: BERT's of words, or a byte-level one with a few merges."""
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast
    names, others, frame = TOKENIZERS[kind]
    size, made = (130, BertWordPieceTokenizer()) if kind == "words" else (290, ByteLevelBPETokenizer())
    special = list(dict.fromkeys([*names.values(), *others]))
    sums = [f"{a}+{b}={a + b}" for a in range(5, 13) for b in range(5, 13)]
    made.train_from_iterator([*TEXT.splitlines(), *sums, "user assistant system What is the sum ?"], size, 0,
                             special_tokens=special, show_progress=False)
    ids = [(token, made.token_to_id(token)) for token in special]
    made.post_processor = processors.TemplateProcessing(single=frame, pair=f"{frame} $B", special_tokens=ids)
    out = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **{f"{x}_token": y for x, y in names.items()})
    if kind == "chat":
        out.chat_template = CHAT_TEMPLATE
    return out


def architecture(family, tokenizer, n_embd=32, longest=128):
    """(class, config) of a small model of two layers; some vocabularies have ids behind the tokenizer's, as Qwen's."""
    import transformers
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"vocab_size": len(tokenizer), "hidden_size": n_embd, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 2 * n_embd, "max_position_embeddings": longest}
    frame = shape | {"pad_token_id": ids["pad_token_id"], "type_vocab_size": 2}
    causal = shape | ids | {"num_key_value_heads": 2, "head_dim": 8}
    more = {"vocab_size": len(tokenizer) + 6}
    one = {"num_labels": 1}
    sliding = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
               "shared_expert_intermediate_size": 16}
    upper = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": sliding["layer_types"] * 2,
             "global_head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": len(tokenizer),
             "final_logit_softcapping": 30.0}  # the upper half reads the keys of the lower half
    roberta = frame | ids | {"type_vocab_size": 1, "max_position_embeddings": longest + 2}
    electra = frame | {"embedding_size": n_embd // 2}
    around = {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id, "bos_token_id": None,
              "eos_token_id": None}
    kind, settings = {
        "gpt2": ("GPT2LMHeadModel", shape | ids),
        "llama": ("LlamaForCausalLM", causal),
        "llama_reward": ("LlamaForSequenceClassification", causal | one),
        "qwen2": ("Qwen2ForCausalLM", causal | more),
        "qwen3": ("Qwen3ForCausalLM", causal | more | {"tie_word_embeddings": True}),
        "gemma3": ("Gemma3ForCausalLM", causal | sliding | {"query_pre_attn_scalar": 8}),
        "mistral": ("MistralForCausalLM", causal | {"sliding_window": 8}),
        "gemma4": ("Gemma4ForCausalLM", causal | sliding | upper),
        "qwen3_5": ("Qwen3_5ForCausalLM", causal | delta),
        "qwen3_next": ("Qwen3NextForCausalLM", causal | delta | experts),
        "lfm2": ("Lfm2ForCausalLM", causal | {"layer_types": ["conv", "full_attention"]}),
        "mamba2": ("Mamba2ForCausalLM", shape | ids | {
            "num_heads": 4, "head_dim": n_embd // 2, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
        "bert": ("BertForMaskedLM", frame),
        "bert_reward": ("BertForSequenceClassification", frame | one),
        "distilbert": ("DistilBertForMaskedLM", frame | {"hidden_dim": 2 * n_embd}),
        "roberta": ("RobertaForMaskedLM", roberta),
        "roberta_reward": ("RobertaForSequenceClassification", roberta | one),
        "modernbert": ("ModernBertForMaskedLM", frame | around | {
            "local_attention": 8, "global_attn_every_n_layers": 2}),
        "openai": ("OpenAIGPTLMHeadModel", shape | ids),
        "electra": ("ElectraForMaskedLM", electra),
        "electra_judge": ("ElectraForPreTraining", electra)}[family]
    kind = getattr(transformers, kind)
    return kind, kind.config_class(**settings)


def randomise(model, seed=0, scale=12.0):
    """Larger weights, and biases and norms that differ, so that distributions are far from uniform and every part of
    the model counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(scale * 0.02 * noise) if p.dim() > 1 else p.add_(0.1 * noise)
    return model.eval()


def model_folder(path, family, seed=0, scale=12.0, **shape):
    """Writes a small random model and its tokenizer in Hugging Face format. Returns the folder as a string.

    shape: n_embd, longest
    """
    published = family in DIFFUSION_FAMILIES
    own = DIFFUSION_FAMILIES.get(family, family)
    tokenizer = tokenizer_of("masked" if published else FAMILIES[own].tokenizer)
    kind, config = architecture(own, tokenizer, **shape)
    model = randomise(kind(config), seed, scale)
    if own in ("gemma4", "qwen3_next"):  # whose layers would amplify rounding
        randomise(model.model.layers, seed, scale / 2)
    if family == "qwen3":  # ends that generation_config alone declares
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    tokenizer.save_pretrained(str(path))
    if published:
        publish(str(path), family, model, tokenizer.convert_tokens_to_ids("<|mask|>"))
    else:
        model.save_pretrained(str(path))
    return str(path)


LLADA_LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.q_proj": "q_proj",
               "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out",
               "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out"}
LLADA_TOP = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
LLADA_SETTINGS = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
                  "num_hidden_layers": "n_layers", "intermediate_size": "mlp_hidden_size",
                  "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying"}


def name_in_llada(name):
    """The name of a weight of transformers' Llama in a published LLaDA folder."""
    name = name.removesuffix(".weight")
    if name in LLADA_TOP:
        return f"model.transformer.{LLADA_TOP[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"model.transformer.blocks.{layer}.{LLADA_LAYER[rest]}.weight"


def publish(path, model_type, model, mask):
    """Writes a diffusion language model as such folders are published: with a config.json in their words that asks for
    code of its own, and their names of weights."""
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    values = model.config.to_dict() | {"mask_token_id": mask, "rope_theta": 5000.0, "model_type": model_type,
                                       "architectures": ["ItsModel"], "auto_map": {"AutoModel": "modeling.Model"}}
    for name in ("rope_parameters", "transformers_version", "dtype", "is_causal"):
        values.pop(name, None)
    if model_type == "llama both ways":
        values |= {"architectures": ["LlamaForCausalLM"], "is_causal": False, "model_type": "llama"}
        del values["auto_map"]
    if model_type == "sdar":
        values |= {"block_size": 4}
    if model_type == "llada":
        known = ("model_type", "architectures", "auto_map", "rms_norm_eps", "rope_theta", "mask_token_id",
                 "eos_token_id")
        values = {theirs: values[name] for name, theirs in LLADA_SETTINGS.items()} | {x: values[x] for x in known} | {
            "embedding_size": len(weights["lm_head.weight"]), "vocab_size": len(weights["lm_head.weight"]) - 1,
            "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "mlp_ratio": 4}
        weights = {name_in_llada(name): x for name, x in weights.items()}
    if values.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    save_file(weights, os.path.join(path, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(values, f)


def base_model(path):
    """transformers' own model of a folder."""
    import transformers
    architecture, = transformers.AutoConfig.from_pretrained(path).architectures
    return getattr(transformers, architecture).from_pretrained(path).eval()


def adapter_folder(path, base, rank=4, **settings):
    """Writes a random LoRA adapter of all linear layers of the model in `base`, with peft. Returns the folder."""
    import peft
    settings = {"lora_alpha": 2 * rank, "target_modules": "all-linear"} | settings
    model = peft.get_peft_model(base_model(base), peft.LoraConfig(r=rank, **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    model.save_pretrained(str(path))
    return str(path)


def write_sums(path, count=60):
    """A JSONL file of sums, prompts of several lengths. Returns its path as a string."""
    pairs = [(a, b) for a in range(5, 13) for b in range(5, 13)]
    random.Random(0).shuffle(pairs)
    with open(path, "w") as f:
        for a, b in pairs[:count]:
            words = ("", "sum: ", "the quick sum of ")[(a + b) % 3]
            f.write(json.dumps({"prompt": f"{words}{a}+{b}=", "answer": str(a + b), "completion": str(a + b)}) + "\n")
    return str(path)


def write_prose(folder, tokenizer):
    """A prepared data set of running text in the tokens of this tokenizer (core's interface)."""
    from core.data import write_dataset
    cut = len(TEXT) * 4 // 5
    write_dataset(str(folder), {"train": tokenizer.encode(TEXT[:cut]), "val": tokenizer.encode(TEXT[cut:])}, tokenizer)
    return str(folder)


def random_ids(tokenizer, *shape, seed=0):
    """Ids of the vocabulary that are not special."""
    excluded = {*tokenizer.stop_token_ids, *tokenizer.banned_token_ids, *tokenizer.backend.all_special_ids}
    allowed = torch.tensor([i for i in range(tokenizer.base_vocab_size) if i not in excluded])
    return allowed[torch.randint(len(allowed), shape, generator=torch.Generator().manual_seed(seed))]


def expect_close(found, expected):
    """Checks that logits are equal up to rounding, in each that of the largest. That of a banned id is -1e9."""
    limit = 1e-5 * float(expected[expected > -1e8].abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=limit, equal_nan=True)


def expect_equal_gradients(net, other, bound=1e-5):
    """Compares the gradients of two transformers models."""
    found, expected = ({name: p.grad for name, p in each.named_parameters() if p.grad is not None}
                       for each in (net, other))
    assert found.keys() == expected.keys() and found
    for name, x in expected.items():
        assert (found[name] - x).norm() <= bound * max(float(x.norm()), 1e-3), name


def folder_maker(root, **settings):
    """family -> the folder below `root` with its model, made when it is first asked for."""
    @functools.cache
    def of(family):
        return model_folder(os.path.join(str(root), family), family, **settings)
    return of


def change_folder(folder, change):
    """Changes the files of a folder, {name: bytes, None to remove it, or {key: value} of JSON, where None removes
    one}. {folder} in JSON stands for the folder."""
    for name, content in change.items():
        path = os.path.join(folder, name)
        if isinstance(content, dict):
            values = json.load(open(path)) if os.path.exists(path) else {}
            kept = {key: value for key, value in (values | content).items() if value is not None}
            content = json.dumps(kept).replace("{folder}", str(folder)).encode()
        if content is None:
            os.remove(path)
        else:
            with open(path, "wb") as f:
                f.write(content)


def spoiled(path, folder, **changes):
    """A copy of a model's folder with other values in config.json; None removes one."""
    shutil.copytree(folder, path)
    change_folder(path, {"config.json": changes})
    return str(path)
