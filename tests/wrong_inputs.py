"""Wrong inputs of a user: what is run, how it ends, and what its one line must name.

A row is (script, arguments, exit code, words): the key or file and a word of the remedy, never a sentence. Names in
braces stand for files of a test's folder: {text} and {prompts} are prepared data sets, {judge}, {generator} and
{causal} model files, {out} a folder that is not there, and the names of FILES files with these contents.
"""

import json

from tests import families

TRAIN, PRETRAIN, SAMPLE = "grpo/train_grpo.py", "core/pretrain.py", "core/sample.py"
SUMS = "--dataset={prompts} --generator_checkpoint={causal} --task_type=general --max_new_tokens=6"

FILES = {
    "no_answer.jsonl": json.dumps({"prompt": "1+1="}) + "\n" + json.dumps({"answer": "2"}) + "\n",
}

SETTINGS = [
    (TRAIN, "--kl_estimator=k1", 1, "kl_estimator k3"),
    (TRAIN, "--kl_coef=0.1", 2, "kl_coef kl_beta"),
]

DATA_AND_MODELS = [
    (TRAIN, "--dataset={no_answer.jsonl} --generator_checkpoint={causal} --reward_functions=exact_match", 1,
     "no_answer.jsonl 2 prompt"),
]

ALGORITHM = []

# Folders in Hugging Face format: {name: (family of tests/families.py, what spoils it)}
FOLDERS = {
    "llama": ("llama", {}),
    "reward": ("bert_reward", {}),
    "deep": ("llama", {"config.json": {"num_hidden_layers": 3}}),
    "wide": ("llama", {"config.json": {"hidden_size": 64}}),
    "unknown": ("llama", {"config.json": {"model_type": "\x1b[2J\n"}}),
    "coded": ("llama", {"config.json": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}}),
    "bin": ("llama", {"config.json": {"transformers_weights": "adapter_model.bin"}}),
    "ends": ("llama", {"config.json": {"eos_token_id": 50256}}),
    "sequential": ("llada", {"config.json": {"block_type": "sequential"}}),
    "eager": ("sdar", {"config.json": {"attn_implementation": "eager"}}),
    "unmasked": ("a2d-qwen3", {"config.json": {"mask_token_id": None}}),
    "tied": ("qwen3", {}),
    "cut": ("llama", families.cut_short),
    "pickle": ("llama", families.pickled),
    "mute": ("llama", families.without_tokenizer),
    "narrow": ("llama", families.with_few_rows),
    "infinite": ("llama", families.with_nan),
    "outside": ("llama", families.with_index("../outside.safetensors")),
    "indexed": ("llama", families.with_index("weights.bin")),
    "adapter": ("llama", families.as_adapter),
    "orphan": ("llama", families.as_orphan),
}
LORA = f"{SUMS} --generator_checkpoint={{llama}}"
HUGGINGFACE = [(SAMPLE, f"--text=a --checkpoint={{{name}}}", 1, f"checkpoint={{{name}}} {words}") for name, words in {
    "folder": "config.json model.safetensors",
    "reward": "reward_model_checkpoint",
    "deep": "layers.2 complete",
    "wide": "shape complete",
    "unknown": "copy",
    "coded": "code",
    "bin": "adapter_model.bin save_pretrained",
    "ends": "50256 tokenizer",
    "sequential": "block_type='sequential'",
    "eager": "attention_block sdpa",
    "unmasked": "mask_token",
    "cut": "copy",
    "pickle": "safetensors",
    "mute": "tokenizer copy",
    "narrow": "200 tokenizer",
    "infinite": "model.norm.weight finite",
    "outside": "outside.safetensors",
    "indexed": "weights.bin save_pretrained",
    "orphan": "base_model_name_or_path",
}.items()] + [(TRAIN, arguments, 1, words) for arguments, words in {
    f"{SUMS} --lora_rank=4": "lora_rank Hugging",
    f"{LORA} --lora_rank=4 --lora_targets=q_proj,v_prj": "lora_targets v_prj",
    f"{LORA} --lora_init_from={{folder}}": "lora_init_from adapter_config.json",
    f"{LORA} --lora_rank=4 --lora_init_from={{adapter}}": "lora_rank lora_init_from",
    f"{LORA} --lora_rank=4 --reference_mode=ema": "reference_mode periodic",
    f"{SUMS} --generator_checkpoint={{adapter}} --lora_rank=4": "generator_checkpoint lora_init_from",
    f"{SUMS} --generator_checkpoint={{tied}} --lora_rank=4 --lora_targets=lm_head": "lora_targets tied",
    f"{LORA} --judge_checkpoint={{llama}} --reward_functions=judge": "judge_checkpoint sequence_scorer",
}.items()] + [
    (PRETRAIN, "--dataset={prompts} --init_from={llama} --out_dir={out} --export={adapter}", 1,
     "export={adapter} adapter_"),
    (PRETRAIN, "--dataset={prompts} --init_from={llama} --out_dir={out} --lora_rank=2 --export={tied}", 1,
     "export={tied} model.safetensors"),
]

REWARDS = []

SAMPLERS_AND_TOOLS = []

ROWS = [*SETTINGS, *DATA_AND_MODELS, *ALGORITHM, *HUGGINGFACE, *REWARDS, *SAMPLERS_AND_TOOLS]
