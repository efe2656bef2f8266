"""A task with a tool for the comparison of learning: a small Llama with the chat template of Qwen, which has learned to
call a tool that multiplies, half of the time with a wrong number."""

import json
import os
import random
import string
import subprocess
import sys

from core.settings.optional import quiet_transformers, require
from core.settings.user_code import ROOT
from grpo.reward_functions.registry import load_reward_file

NEEDS = "bench.py learning", "-r requirements-peer.txt -r requirements-hf.txt"  # who needs TRL, what pip is to install
TOOL_FILE = os.path.join(ROOT, "data", "calculator", "trl_tools.py")
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = ["<|im_start|>", END, PAD]
TAGS = ["<tool_call>", "</tool_call>"]  # tokens of their own, but a part of the text, as in the tokenizers of Qwen
VOCABULARY = 600  # bytes, and pairs of the text that explains the tool: a prompt has some 220 tokens
EXAMPLES = 10000  # of supervised training
PROBLEMS = 1000
WRONG = 0.5       # share of the examples whose call has a number drawn at random
SUPERVISED = ("--template=model", "--block_size=384", "--max_prompt_length=320", "--optimizer=adamw",
              "--learning_rate=2e-3", "--batch_size=16", "--max_iters=700", "--warmup_iters=20")
GRPO = ("--template=model", "--environment=Multiply", f"--environment_file={TOOL_FILE}", "--max_turns=3",
        "--reward_functions=('environment',)", "--max_new_tokens=64", "--temperature=1.0", "--top_p=1.0",
        "--learning_rate=3e-4", "--kl_beta=0.0", "--dtype=float32")


def tool_task(folder):
    """Makes the model and the problems in a folder. Returns the arguments of grpo/train_grpo.py that train on them."""
    rng = random.Random(0)
    start, examples, problems, out = (os.path.join(folder, name) for name in
                                      ("start", "examples.jsonl", "problems.jsonl", "out"))
    schema = write_start(start)
    write_records(examples, (example(rng) for _ in range(EXAMPLES)))
    write_records(problems, (problem(rng) for _ in range(PROBLEMS)))
    command = (sys.executable, os.path.join(ROOT, "core", "pretrain.py"), f"--init_from={start}",
               f"--dataset={examples}", f"--out_dir={out}", f"--chat_template_kwargs={ {'tools': [schema]} }")
    if subprocess.run([*command, *SUPERVISED], stdout=subprocess.DEVNULL).returncode:
        raise ValueError("the supervised training of the small Llama failed, see above")
    return [f"--generator_checkpoint={out}/model", f"--dataset={problems}", *GRPO]


def write_start(folder):
    """Writes an untrained Llama with its tokenizer. Returns the JSON schema of the tool."""
    templates = require("trl.chat_template_utils", *NEEDS)
    transformers = quiet_transformers("Llama", "model")
    schema = transformers.utils.get_json_schema(load_reward_file(TOOL_FILE)["Multiply"].multiply)
    explained = json.dumps(schema) + templates.qwen3_instruct_2507_chat_template
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(explained), eos_token=END, pad_token=PAD,
        chat_template=templates.qwen3_instruct_2507_chat_template)
    transformers.set_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return schema


def byte_pairs(text):
    """A tokenizer of bytes and of pairs that are frequent in a text; every digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_tokens(TAGS)
    return tokenizer


def problem(rng):
    """A record with a product of two one-digit numbers. The initials of who asks make prompts differ."""
    who = "".join(rng.choices(string.ascii_uppercase, k=2))
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return {"prompt": [{"role": "user", "content": f"{who} asks: what is {a}*{b}?"}], "a": a, "b": b,
            "answer": str(a * b)}


def example(rng):
    """A record of supervised training: a call, half of the time with a wrong number, or what follows its result."""
    record = problem(rng)
    a, b = record["a"], record["b"]
    if rng.random() < WRONG:
        a = rng.randint(2, 9)
    call = f'<tool_call>\n{json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})}\n</tool_call>'
    if rng.random() < 0.5:
        return record | {"completion": call}
    result = str(a * b)
    turns = [{"role": "assistant", "content": call}, {"role": "tool", "name": "multiply", "content": result}]
    return record | {"prompt": record["prompt"] + turns, "completion": result}


def write_records(path, records):
    with open(path, "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
