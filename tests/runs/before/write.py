"""Writes the folders of runs beside it with the code of commit a00647e1, and what that code measured as they went on.

git worktree add ../a00647e1 a00647e1 && python tests/runs/before/write.py ../a00647e1

Of a folder that a run wrote stay its state, settings and metrics; names of places and of the machine go.
RUN-expected.jsonl has the metrics of the further steps of that commit's own resume.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
LEFT_OUT = ("system", "torch threads", "settings")  # of a start: the machine, and what is there already
OF_THE_CLOCK = ("time/", "tokens_per_second")       # metrics that no run repeats
SIZE = ("--block_size=32", "--device=cpu", "--learning_rate=0.02", "--min_lr=0.01", "--lr_decay_iters=9",
        "--warmup_iters=0", "--batch_size=4", "--eval_interval=4", "--log_interval=1")
GRPO = ("grpo/train_grpo.py", *SIZE, "--group_size=4", "--max_new_tokens=5", "--temperature=1.0", "--top_p=1.0",
        "--eval_problems=4", "--eval_completions=2", "--sample_interval=4", "--generator_checkpoint=writer.safetensors",
        "--dataset=sums.jsonl")
LENGTH = ("--reward_functions=length_penalty", "--reward_settings={'length_min': 1, 'length_max': 6}")
RUNS = {  # {folder: (steps, steps of the whole run, command)}
    "iterations": (2, 5, (*GRPO, *LENGTH, "--kl_beta=0.05", "--reference_mode=ema", "--ema_alpha=0.8")),
    "within": (3, 8, (*GRPO, *LENGTH, "--kl_beta=0.0", "--ppo_epochs=2", "--minibatches=2", "--optimizer=muon")),
    "judge": (3, 6, (
        *GRPO, "--generator_checkpoint=filler.safetensors", "--judge_checkpoint=judge.safetensors", "--dataset=text",
        "--kl_beta=0.05", "--ppo_epochs=2", "--batch_size=2")),
    "passes": (3, 6, (
        *GRPO, "--generator_checkpoint=filler.safetensors", "--judge_checkpoint=judge.safetensors", "--dataset=text",
        "--kl_beta=0.05", "--minibatches=2", "--ppo_epochs=2", "--batch_size=2", "--unmask_steps=3")),
    "several_rewards": (2, 5, (
        *GRPO, "--reward_functions=('length_penalty', 'json_valid')", "--reward_weights=(1.0, 0.5)", LENGTH[1],
        "--kl_beta=0.0", "--reward_normalisation=group")),
    "pretraining": (2, 5, (
        "core/pretrain.py", *SIZE, "--dataset=text", "--mode=masked_fill", "--n_layer=1", "--n_head=1", "--n_embd=4",
        "--eval_batches=1")),
}


def write_inputs(commit, folder):
    """The models and data that the runs read, by the code in the folder `commit`."""
    sys.path.insert(0, commit)
    import torch
    from core.data_folder import write_dataset
    from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPT, GPTConfig
    from core.models import save_model
    from core.tokenizer import CharTokenizer
    drawn = random.Random(0)
    with open(os.path.join(folder, "sums.jsonl"), "w") as f:
        for _ in range(24):
            a, b = drawn.randrange(5, 99), drawn.randrange(5, 99)
            f.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    words = "the old oak saw seven wise owls watch a lazy dog".split()
    text = "".join(" ".join(drawn.choices(words, k=6)) + "\n" for _ in range(48))
    tokenizer = CharTokenizer("\n abdefghlnostuvwy")
    cut = len(text) * 3 // 4
    parts = {"train": tokenizer.encode(text[:cut]), "val": tokenizer.encode(text[cut:])}
    write_dataset(os.path.join(folder, "text"), parts, tokenizer)
    modes = {"filler": MASKED_FILL, "judge": SEQUENCE_SCORER, "writer": LANGUAGE_MODEL}
    for seed, (name, mode) in enumerate(modes.items()):
        torch.manual_seed(seed)
        if mode == LANGUAGE_MODEL:
            tokenizer = CharTokenizer("0123456789+=", stop=True)
        net = GPT(GPTConfig(mode=mode, vocab_size=tokenizer.vocab_size, base_vocab_size=tokenizer.base_vocab_size,
                            n_layer=1, n_head=1, n_embd=4, block_size=33))
        with torch.no_grad():
            for p in net.parameters():
                if p.dim() == 2:
                    p.mul_(4.0)  # far from uniform
        save_model(os.path.join(folder, f"{name}.safetensors"), net, tokenizer)


def train(commit, folder, command, *settings):
    script, *rest = command
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, os.path.join(commit, script), *rest, *settings], cwd=folder, env=environment,
                   check=True)


def metrics_of(folder):
    """The records of a run without what the clock measured."""
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        records = [json.loads(line) for line in f]
    return [{key: x for key, x in record.items() if not key.startswith(OF_THE_CLOCK)} for record in records]


def write_records(path, records):
    with open(path, "w") as f:
        f.writelines(json.dumps(record) + "\n" for record in records)


def keep(commit, run, place):
    """Copies what stays of the folder of a run."""
    os.makedirs(place, exist_ok=True)
    shutil.copy(os.path.join(run, "state.pt"), place)
    write_records(os.path.join(place, "metrics.jsonl"), metrics_of(run))
    with open(os.path.join(run, "config.json")) as f:
        saved = json.load(f)
    for start in saved["starts"]:
        for key in LEFT_OUT:
            del start[key]
        start["command"] = start["command"].replace(commit + os.sep, "")
    with open(os.path.join(place, "config.json"), "w") as f:
        json.dump(saved, f, indent=1)


def main(commit):
    commit = os.path.abspath(commit)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(commit, folder)
        shutil.copytree(folder, HERE, dirs_exist_ok=True)
        for name, (steps, whole, command) in RUNS.items():
            run = os.path.join(folder, name)
            train(commit, folder, command, f"--out_dir={name}", f"--max_iters={steps}")
            keep(commit, run, os.path.join(HERE, name))
            train(commit, folder, command[:1], "--resume=True", f"--out_dir={name}", f"--max_iters={whole}")
            further = [record for record in metrics_of(run) if record["step"] > steps]
            write_records(os.path.join(HERE, f"{name}-expected.jsonl"), further)


if __name__ == "__main__":
    main(sys.argv[1])
