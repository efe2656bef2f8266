"""Small random Hugging Face models of many families, each with a tokenizer that is trained on the spot."""

import functools
import json
import os
import random
import shutil

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import TEXT

WEIGHTS = "model.safetensors"
RECURRENT_FAMILIES = ("qwen3_5", "qwen3_next", "lfm2", "mamba2")
CAUSAL_FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma3", "mistral", "gemma4", *RECURRENT_FAMILIES)
DIFFUSION_FAMILIES = {  # {model_type of a published folder: the family of transformers that it is}
    "llama both ways": "llama", "llada": "llama", "a2d-qwen3": "qwen3", "Dream": "qwen2", "sdar": "qwen3"}
FILL_FAMILIES = ("bert", "distilbert", "roberta", "modernbert", "electra")
CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n"
                 "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}")
TOKENIZERS = {"gpt2": "bytes", "qwen2": "padded", "qwen3": "chat", "modernbert": "square"} | dict.fromkeys(
    ("roberta", "roberta_reward"), "angle") | dict.fromkeys(RECURRENT_FAMILIES, "padded") | dict.fromkeys(
    ("llama", "llama_reward", "gemma3", "gemma4", "mistral"), "start")  # of all others words


def training_text():
    """Lines that a tokenizer learns from: the prose of the tests, sums and numbers."""
    sums = [f"{a}+{b}={a + b}" for a in range(5, 13) for b in range(5, 13)]
    return [*TEXT.splitlines(), *sums, "user assistant system What is the sum ?"]


def byte_pairs(special, post=None):
    """A byte-level tokenizer of 256 bytes, a few merges and these special tokens; post: what it adds to a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=list(special), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(training_text(), trainer)
    if post:
        ids = [(token, tokenizer.token_to_id(token)) for token in post.replace("$A", "").split()]
        tokenizer.post_processor = processors.TemplateProcessing(single=post, pair=f"{post} $B", special_tokens=ids)
    return tokenizer


def word_pieces():
    """A tokenizer of BERT's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(training_text(), trainers.WordPieceTrainer(
        vocab_size=130, special_tokens=special, show_progress=False))
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]",
                                                             special_tokens=ids)
    return tokenizer


@functools.cache  # judges and generators of one test process share the tokenizer of their kind
def tokenizer_of(kind):
    """A transformers tokenizer.

    kind: bytes (no pad token), padded, masked (a token for masks that it does not name as such), chat (with a chat
    template and <|im_end|>), start (a start token before each text, no pad token), words (BERT's), angle (RoBERTa's),
    square (ModernBERT's)
    """
    from transformers import PreTrainedTokenizerFast
    end, framed = "<|endoftext|>", {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
                                    "pad_token": "[PAD]", "mask_token": "[MASK]"}
    angle = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>",
             "mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"}
    build = {"bytes": lambda: (byte_pairs([end]), {"bos_token": end, "eos_token": end}),
             "padded": lambda: (byte_pairs([end, "<|pad|>"]), {"eos_token": end, "pad_token": "<|pad|>"}),
             "chat": lambda: (byte_pairs([end, "<|im_start|>", "<|im_end|>"]), {"eos_token": end, "pad_token": end}),
             "masked": lambda: (byte_pairs([end, "<|mask|>"]), {"eos_token": end}),  # config.json names the mask
             "start": lambda: (byte_pairs(["<s>", "</s>"], "<s> $A"), {"bos_token": "<s>", "eos_token": "</s>"}),
             "words": lambda: (word_pieces(), framed),
             "angle": lambda: (byte_pairs(dict.fromkeys(angle.values()), "<s> $A </s>"), angle),
             "square": lambda: (byte_pairs(framed.values(), "[CLS] $A [SEP]"), framed)}
    tokenizer, names = build[kind]()
    out = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if kind == "chat":
        out.chat_template = CHAT_TEMPLATE
    return out


def kinds(even, odd, n_layer):
    """The kinds of n_layer layers, in turns."""
    return [odd if i % 2 else even for i in range(n_layer)]


def architecture(family, tokenizer, n_layer=2, n_embd=32, longest=128):
    """(class, config) of a small model; the model's vocabulary has ids behind the tokenizer's, as Qwen's has."""
    import transformers as t
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vocabulary, heads = {"vocab_size": len(tokenizer) + 6 * (family in ("qwen2", "qwen3"))}, 2
    modern = {"hidden_size": n_embd, "num_hidden_layers": n_layer, "num_attention_heads": heads,
              "intermediate_size": 2 * n_embd, "max_position_embeddings": longest}
    shared_heads = modern | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    causal = vocabulary | shared_heads | ids
    without_heads = {k: v for k, v in causal.items() if k != "head_dim"}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8, "layer_types": kinds("linear_attention", "full_attention", n_layer)}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
               "shared_expert_intermediate_size": 16}
    frame = vocabulary | modern | {"pad_token_id": ids["pad_token_id"], "type_vocab_size": 2}
    electra = frame | {"embedding_size": n_embd // 2}
    roberta = frame | ids | {"type_vocab_size": 1, "max_position_embeddings": longest + 2}
    build = {
        "gpt2": lambda: (t.GPT2LMHeadModel, t.GPT2Config(**vocabulary, **ids, n_embd=n_embd, n_layer=n_layer,
                                                         n_head=heads, n_positions=longest)),
        "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**causal)),
        "qwen2": lambda: (t.Qwen2ForCausalLM, t.Qwen2Config(**without_heads)),
        "qwen3": lambda: (t.Qwen3ForCausalLM, t.Qwen3Config(**causal, tie_word_embeddings=True)),
        "gemma3": lambda: (t.Gemma3ForCausalLM, t.Gemma3TextConfig(
            **causal, sliding_window=8, query_pre_attn_scalar=8,
            layer_types=kinds("sliding_attention", "full_attention", n_layer))),
        "mistral": lambda: (t.MistralForCausalLM, t.MistralConfig(**causal, sliding_window=8)),
        "gemma4": lambda: (t.Gemma4ForCausalLM, t.Gemma4TextConfig(  # the upper half reads the keys of the lower half
            **causal | {"num_hidden_layers": 2 * n_layer}, global_head_dim=8, sliding_window=8,
            num_kv_shared_layers=n_layer, layer_types=kinds("sliding_attention", "full_attention", 2 * n_layer),
            hidden_size_per_layer_input=4, vocab_size_per_layer_input=len(tokenizer), final_logit_softcapping=30.0)),
        "qwen3_5": lambda: (t.Qwen3_5ForCausalLM, t.Qwen3_5TextConfig(**causal, **delta)),
        "qwen3_next": lambda: (t.Qwen3NextForCausalLM, t.Qwen3NextConfig(**causal, **delta, **mixture)),
        "lfm2": lambda: (t.Lfm2ForCausalLM, t.Lfm2Config(
            **without_heads, layer_types=kinds("conv", "full_attention", n_layer))),
        "mamba2": lambda: (t.Mamba2ForCausalLM, t.Mamba2Config(
            **vocabulary, **ids, hidden_size=n_embd, num_hidden_layers=n_layer, num_heads=4, head_dim=n_embd // 2,
            state_size=8, n_groups=1, chunk_size=8)),
        "bert": lambda: (t.BertForMaskedLM, t.BertConfig(**frame)),
        "distilbert": lambda: (t.DistilBertForMaskedLM, t.DistilBertConfig(
            **vocabulary, pad_token_id=ids["pad_token_id"], dim=n_embd, n_layers=n_layer, n_heads=heads,
            hidden_dim=2 * n_embd, max_position_embeddings=longest)),
        "roberta": lambda: (t.RobertaForMaskedLM, t.RobertaConfig(**roberta)),
        "roberta_reward": lambda: (t.RobertaForSequenceClassification, t.RobertaConfig(**roberta, num_labels=1)),
        "modernbert": lambda: (t.ModernBertForMaskedLM, t.ModernBertConfig(
            **vocabulary, **modern, **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
                                       for name in ("pad", "cls", "sep")},
            bos_token_id=None, eos_token_id=None, local_attention=8, global_attn_every_n_layers=2)),
        "electra": lambda: (t.ElectraForMaskedLM, t.ElectraConfig(**electra)),
        "electra_judge": lambda: (t.ElectraForPreTraining, t.ElectraConfig(**electra)),
        "bert_reward": lambda: (t.BertForSequenceClassification, t.BertConfig(**frame, num_labels=1)),
        "llama_reward": lambda: (t.LlamaForSequenceClassification, t.LlamaConfig(**causal, num_labels=1))}
    return build[family]()


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

    shape: n_layer, n_embd, longest
    """
    if family in DIFFUSION_FAMILIES:
        return diffusion_folder(str(path), family, seed, scale, **shape)
    tokenizer = tokenizer_of(TOKENIZERS.get(family, "words"))
    kind, config = architecture(family, tokenizer, **shape)
    model = randomise(kind(config), seed, scale)
    if family in ("gemma4", "qwen3_next"):  # whose layers would amplify rounding
        randomise(model.model.layers, seed, scale / 2)
    if family == "qwen3":  # ends that generation_config alone declares
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    model.save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return str(path)


LLADA_LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm", "self_attn.q_proj": "q_proj",
               "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj", "self_attn.o_proj": "attn_out",
               "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out"}
LLADA_TOP = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}


def name_in_llada(name):
    """The name of a weight of transformers' Llama in a published LLaDA folder."""
    name = name.removesuffix(".weight")
    if name in LLADA_TOP:
        return f"model.transformer.{LLADA_TOP[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"model.transformer.blocks.{layer}.{LLADA_LAYER[rest]}.weight"


def diffusion_folder(path, model_type, seed=0, scale=12.0, **shape):
    """Writes a small random diffusion language model as such folders are published: with a config.json in their words
    that asks for code of its own, and their names of weights. Returns the folder."""
    family, tokenizer = DIFFUSION_FAMILIES[model_type], tokenizer_of("masked")
    kind, config = architecture(family, tokenizer, **shape)
    model = randomise(kind(config), seed, scale)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    values = config.to_dict() | {"mask_token_id": tokenizer.convert_tokens_to_ids("<|mask|>"), "rope_theta": 5000.0}
    for name in ("rope_parameters", "transformers_version", "architectures", "dtype", "is_causal"):
        values.pop(name, None)
    if model_type == "llama both ways":
        values |= {"architectures": ["LlamaForCausalLM"], "is_causal": False}
    else:
        values |= {"model_type": model_type, "architectures": ["ItsModel"],
                   "auto_map": {"AutoModel": "modeling.Model", "AutoConfig": "conf.Config"}}
    if model_type == "llada":
        theirs = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
                  "num_hidden_layers": "n_layers", "intermediate_size": "mlp_hidden_size",
                  "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying"}
        known = ("model_type", "architectures", "auto_map", "vocab_size", "rms_norm_eps", "rope_theta",
                 "mask_token_id", "eos_token_id")
        values = {theirs.get(name, name): x for name, x in values.items() if name in theirs or name in known}
        values |= {"embedding_size": values["vocab_size"], "vocab_size": values["vocab_size"] - 1,
                   "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "mlp_ratio": 4}
        weights = {name_in_llada(name): x for name, x in weights.items()}
    if model_type == "sdar":
        values |= {"block_size": 4}
    if values.get("tie_word_embeddings"):
        del weights["lm_head.weight"]
    os.makedirs(path)
    save_file(weights, os.path.join(path, WEIGHTS), metadata={"format": "pt"})
    json.dump(values, open(os.path.join(path, "config.json"), "w"))
    tokenizer.save_pretrained(path)
    return path


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
    from core.data_folder import write_dataset
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
    made = {}

    def of(family):
        if family not in made:
            made[family] = model_folder(os.path.join(str(root), family), family, **settings)
        return made[family]
    return of


# What spoils the folder of a model


def change_folder(folder, change):
    """Changes the folder of a model: {JSON file: {key: value}}, where None removes one, or a function of its path."""
    if callable(change):
        change(folder)
        return
    for name, values in change.items():
        file = os.path.join(folder, name)
        values = json.load(open(file)) | values
        json.dump({key: value for key, value in values.items() if value is not None}, open(file, "w"))


def spoiled(path, folder, **changes):
    """A copy of a model's folder with other values in config.json; None removes one."""
    shutil.copytree(folder, path)
    change_folder(path, {"config.json": changes})
    return str(path)


def cut_short(folder):
    file = os.path.join(folder, WEIGHTS)
    os.truncate(file, os.path.getsize(file) // 2)


def pickled(folder):
    torch.save(load_file(os.path.join(folder, WEIGHTS)), os.path.join(folder, "pytorch_model.bin"))
    os.remove(os.path.join(folder, WEIGHTS))


def without_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        os.remove(os.path.join(folder, name))


def with_few_rows(folder):
    """Its weights are those of a model that reads fewer tokens than its tokenizer has."""
    import transformers
    config = transformers.LlamaConfig.from_pretrained(folder)
    config.vocab_size = 200
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def with_nan(folder):
    weights = load_file(os.path.join(folder, WEIGHTS))
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, os.path.join(folder, WEIGHTS), metadata={"format": "pt"})


def with_index(name):
    """An index says that the weights are in a file of this name."""
    def change(folder):
        weights = load_file(os.path.join(folder, WEIGHTS))
        os.remove(os.path.join(folder, WEIGHTS))
        save_file(weights, os.path.join(folder, name), metadata={"format": "pt"})
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": dict.fromkeys(weights, name)}, f)
    return change


def as_adapter(folder):
    """It holds a random adapter of a model beside it."""
    base = shutil.copytree(folder, f"{folder}-base")
    shutil.rmtree(folder)
    adapter_folder(folder, base)


def as_orphan(folder):
    """It holds an adapter whose base model is not there."""
    as_adapter(folder)
    shutil.rmtree(f"{folder}-base")
