"""Golden runs: a few steps of every kind of training, whose metrics and weights are recorded as numbers.

python tests/golden/golden.py                     # runs all and compares them with golden.json
python tests/golden/golden.py main_job ray        # these alone
python tests/golden/golden.py --record [NAME...]  # writes golden.json anew; say in the commit why a number changed
python tests/golden/golden.py --device=cuda --dtype=bfloat16 [NAME...]  # on a GPU, those of one process, at once

A run is compared exactly on a machine with the recorded processor and packages, elsewhere to 1e-5 (norms of gradients:
1e-4).
In bfloat16 other tokens are drawn here and there: entropies and KLs are compared, to .05.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the last bits of numpy's norms and products depend on its threads
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)
PATH = os.path.join(ROOT, "tests", "golden", "golden.json")
ELSEWHERE, IN_BFLOAT16 = 1e-5, 0.05  # of a number, or of 1 if that is larger
SMALL = ("--max_iters=3", "--warmup_iters=0", "--learning_rate=3e-5", "--min_lr=3e-6", "--batch_size=3",
         "--group_size=4", "--device=cpu", "--dtype=float32", "--eval_problems=3", "--eval_completions=2",
         "--eval_interval=3", "--sample_interval=3", "--save_interval=3", "--log_interval=1")
LLAMA = ("--generator_checkpoint=FOLDER/llama", "--dataset=FOLDER/sums.jsonl", "--reward_functions=length_penalty",
         "--reward_settings={'length_min': 1, 'length_max': 12}", "--max_new_tokens=8", "--temperature=1.0",
         "--top_p=1.0", "--kl_beta=0.05", *SMALL)
PRETRAINED = "data/arithmetic/pretrained/generator.safetensors"
JOBS = {
    "main_job": ("config/grpo_example.py", *SMALL),
    "arithmetic": ("config/grpo_arithmetic.py", *SMALL),
    "countdown_with_kl": ("config/grpo_countdown.py", "--kl_beta=0.05", *SMALL),
    "sudoku_in_passes": ("config/grpo_sudoku.py", *SMALL),
    "any_order": ("config/grpo_any_order.py", *SMALL),
    "guess": ("config/grpo_guess.py", *SMALL),
    "epochs_and_minibatches": (
        "config/grpo_arithmetic.py", *SMALL, "--ppo_epochs=2", "--minibatches=2", "--max_iters=8"),
    "llama": LLAMA,
    "llama_lora": (*LLAMA, "--lora_rank=4"),
    "teacher": ("config/distill_arithmetic.py", *SMALL, f"--teacher_checkpoint={PRETRAINED}",
                "--generator_checkpoint=FOLDER/student.safetensors"),
    "two_ranks": ("config/grpo_arithmetic.py", *SMALL),
    "ray": ("config/grpo_arithmetic.py", *SMALL, "--sampler=ray", "--ray_workers=1", "--max_staleness=1"),
}
OF_THE_CLOCK = ("time/", "tokens_per_second")   # metrics that no run repeats
OF_DISTRIBUTIONS = ("entropy", "eval/entropy", "mean_kl", "eval/kl")  # metrics that one token hardly changes
OF_ROUNDING = ("ratio_", "mismatch", "kl_to_old")  # metrics of rounding alone, compared where they are exact


def machine():
    """What the last bits of a run depend on: the processor and the packages."""
    import torch
    with open("/proc/cpuinfo") as f:
        first = f.read().split("\n\n")[0].split("\n")
    names = "vendor_id", "cpu family", "model", "stepping", "cache size", "flags"
    about = [line for line in first if line.startswith(names)]
    packages = torch.__version__, torch.backends.cpu.get_cpu_capability()
    return hashlib.sha256(repr((about, packages)).encode()).hexdigest()[:16]


def run(name, folder, settings=()):
    """The numbers of a run: {"metrics": [{name: number} of each line], "weights": {tensor: three numbers}}."""
    if name.startswith("llama"):
        from tests.families import model_folder, write_sums
        model_folder(os.path.join(folder, "llama"), "llama")
        write_sums(os.path.join(folder, "sums.jsonl"))
    if name == "teacher":
        write_student(os.path.join(folder, "student.safetensors"))
    out = os.path.join(folder, "out")
    own = [part.replace("FOLDER", folder) for part in JOBS[name]]
    argv = ["grpo/train_grpo.py", *own, *settings, f"--out_dir={out}"]
    if name == "two_ranks":
        argv = ["tests/ranks.py", "2", *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    with open(os.path.join(out, "metrics.jsonl")) as f:
        lines = [json.loads(line) for line in f]
    metrics = [{key: x for key, x in line.items() if not key.startswith(OF_THE_CLOCK)} for line in lines]
    return {"metrics": metrics, "weights": weights_of(out)}


def write_student(path):
    """A model like the teacher, whose weights are a tenth smaller."""
    import torch
    from core.models import load_model, load_tokenizer, save_model
    model, _ = load_model(PRETRAINED)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    save_model(path, model, load_tokenizer(PRETRAINED))


def weights_of(out):
    """{tensor: its mean, its norm, its product with fixed noise of norm 1} of the model that a run left."""
    import numpy
    from safetensors.numpy import load_file
    path = os.path.join(out, "model.safetensors")
    if not os.path.exists(path):
        path = next(p for name in ("model.safetensors", "adapter_model.safetensors")
                    if os.path.exists(p := os.path.join(out, "model", name)))
    found = {}
    for name, x in sorted(load_file(path).items()):
        x = x.astype(numpy.float64).ravel()
        noise = numpy.random.default_rng(0).standard_normal(len(x))
        found[name] = [float(x.mean()), float(numpy.linalg.norm(x)), float(x @ noise / numpy.linalg.norm(noise))]
    return found


def differences(expected, found, limit, where=""):
    """Lines that name what differs; limit: 0 for exactly."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        keys = [key for key in expected if limit == 0 or not key.startswith(OF_ROUNDING)]
        lines = []
        for key in keys:
            more = 10 if key == "grad_norm" else 1  # a norm of gradients that cancel
            lines += differences(expected[key], found[key], more * limit, f"{where}/{key}")
        return lines
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, limit, f"{where}/{i}")]
    numbers = all(isinstance(x, (int, float)) for x in (expected, found))
    if expected == found or (numbers and math.isclose(expected, found, rel_tol=limit, abs_tol=limit)):
        return []
    return [f"{where}: {expected} was recorded, {found} was found"]


def compare(name, folder, settings=()):
    """What differs between a run, perhaps with other settings, and its record: lines."""
    with open(PATH) as f:
        golden = json.load(f)
    expected, found = golden["runs"][name], run(name, folder, settings)
    if "--dtype=bfloat16" in settings:
        kept = [[{key: x for key, x in line.items() if key in OF_DISTRIBUTIONS} for line in numbers["metrics"]]
                for numbers in (expected, found)]
        return differences(*kept, IN_BFLOAT16, name)
    limit = 0 if golden["machine"] == machine() and not settings else ELSEWHERE
    return differences(expected, found, limit, name)


def differences_of(name, settings):
    """compare() in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(name, folder, settings)


def write(golden):
    """One line for each run."""
    runs = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in golden["runs"].items()]
    with open(PATH, "w") as f:
        f.write(f'{{"machine": {json.dumps(golden["machine"])}, "runs": {{\n' + ",\n".join(runs) + "\n}}\n")


def main(argv):
    settings = [argument for argument in argv if argument.startswith(("--device=", "--dtype="))]
    of_one_process = [name for name in JOBS if name not in ("two_ranks", "ray")]
    names = [name for name in argv if not name.startswith("--")] or (of_one_process if settings else list(JOBS))
    failed = []
    golden = {"machine": machine(), "runs": {}}
    if os.path.exists(PATH):
        with open(PATH) as f:
            golden["runs"] = json.load(f)["runs"]
    if "--record" in argv:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                golden["runs"][name] = run(name, folder)
            write(golden)
            print(f"{name}: recorded", flush=True)
        return
    with ThreadPoolExecutor(len(names) if settings else 1) as pool:  # on a GPU they fit side by side
        found = pool.map(partial(differences_of, settings=settings), names)
        for name, lines in zip(names, found, strict=True):
            end = f"{name}: {len(lines)} numbers differ" if lines else f"{name}: equal"
            print(*lines[:10], end, sep="\n", flush=True)
            failed += lines
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
