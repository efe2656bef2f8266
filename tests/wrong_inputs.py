"""Wrong inputs of a user: what is run, how it ends, and what its one line must name.

A row is (script, arguments, exit code, words): the key or file and a word of the remedy, never a sentence. Names in
braces stand for files of a test's folder: {text} and {prompts} are prepared data sets, {judge}, {generator} and
{causal} model files, {out} a folder that is not there, and the names of FILES files with these contents.
"""

import json

TRAIN, PRETRAIN, SAMPLE = "grpo/train_grpo.py", "core/pretrain.py", "core/sample.py"
SUMS = "--dataset={prompts} --generator_checkpoint={causal} --task_type=general --max_new_tokens=6"

FILES = {
    "damaged/metrics.jsonl": b'{"step": 1}\n{"step": \xff}\n',
    "short/metrics.jsonl": '{"step": 0, "eval/x": 0.5}\n',
    "losses.py": "def loss(logp, *others):\n    return logp\n\ndef broken(logp, *others):\n    return los\n\n"
                 "def short(logp):\n    return logp.sum()\n",
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

HUGGINGFACE = []

RECORDS = "--dataset={%s.jsonl} --generator_checkpoint={causal} --reward_functions=%s"
MINE = SUMS + " --reward_file={rewards.py} --max_iters=1"
EPISODES = SUMS + " --reward_functions=environment --reward_file={rewards.py} --environment="
FILES |= {
    "half.jsonl": "".join(json.dumps({"prompt": f"{n}-9:"} | ({"answer": "1"} if n != 2 else {})) + "\n"
                          for n in range(40)),
    "spoiled.jsonl": "".join(json.dumps({"prompt": f"{n}-9:", "numbers": "12", "target": 3, "tests": " "}) + "\n"
                             for n in range(40)),
    "broken.py": "import package_that_nobody_has\n",
    "rewards.py": """from grpo.environments import environment
def one(completions): return [1.0]
def raises(completions): return completions[99]
def length_penalty(completions): return [0.0 for _ in completions]
class Base:
    def reset(self, record): pass
    def step(self, text): return None, 1.0
@environment
class Gone(Base):
    def reset(self, record): record["gone"]
@environment
class Prompted(Base):
    def reset(self, record): return "a prompt"
@environment
class Wordy(Base):
    def step(self, text): return "a", "b"
"""}
REWARDS = [
    (TRAIN, f"{SUMS} --reward_functions=exact", 1, "reward_functions 'exact' exact_match reward_file"),
    (TRAIN, f"{SUMS} --reward_functions=contains --reward_weights=(1.0,2.0)", 1, "reward_weights (1.0, contains"),
    (TRAIN, SUMS + " --reward_settings={'least':1}", 1, "reward_settings 'least' length_penalty"),
    (TRAIN, f"{SUMS} --reward_functions=judge", 1, "judge_checkpoint reward_functions"),
    (TRAIN, f"{SUMS} --reward_functions=reward_model", 1, "reward_model_checkpoint"),
    (TRAIN, "--dataset={text} --generator_checkpoint={generator} --block_size=32", 1, "judge_checkpoint"),
    (TRAIN, "--dataset={text} --generator_checkpoint={generator} --judge_checkpoint={judge} --block_size=32 "
     "--credit_window=2 --reward_functions=('judge','repetition')", 1, "credit_window=2 judge"),
    (TRAIN, RECORDS % ("half", "exact_match"), 1, "half.jsonl 3 exact_match 'answer'"),
    (TRAIN, RECORDS % ("spoiled", "countdown"), 1, "spoiled.jsonl 1 countdown numbers"),
    (TRAIN, RECORDS % ("spoiled", "code_execution"), 1, "spoiled.jsonl 1 code_execution tests"),
    (TRAIN, f"{SUMS} --reward_file=none.py", 1, "none.py"),
    (TRAIN, SUMS + " --reward_file={broken.py}", 1, "broken.py 1 package_that_nobody_has"),
    (TRAIN, f"{MINE} --reward_functions=length_penalty", 1, "length_penalty another name"),
    (TRAIN, f"{MINE} --reward_functions=one", 1, "one rewards.py 2 list"),
    (TRAIN, f"{MINE} --reward_functions=raises", 1, "raises rewards.py 3 IndexError"),
    (TRAIN, f"{SUMS} --max_turns=3", 1, "max_turns environment"),
    (TRAIN, f"{EPISODES}Nobody", 1, "environment='Nobody' rewards.py Gone"),
    (TRAIN, f"{EPISODES}Gone", 1, "environment='Gone' rewards.py 10 KeyError"),
    (TRAIN, f"{EPISODES}Prompted", 1, "environment='Prompted' reset None"),
    (TRAIN, f"{EPISODES}Wordy --max_iters=1", 1, "environment='Wordy' step number"),
]

VLLM = f"{SUMS} --sampler=vllm --vllm_url=http://127.0.0.1:1"
REPORT, CHECK_LOSS = "grpo/tools/report.py", "grpo/tools/check_loss.py"
SAMPLERS_AND_TOOLS = [
    (TRAIN, f"{SUMS} --ray_workers=2", 1, "ray_workers sampler=ray"),
    (TRAIN, f"{SUMS} --sampler=ray --ray_workers=0", 1, "ray_workers 1"),
    (TRAIN, f"{SUMS} --vllm_url=http://x", 1, "vllm_url sampler=vllm"),
    (TRAIN, f"{SUMS} --sampler=vllm", 1, "vllm_url=None http://"),
    (TRAIN, f"{VLLM} --top_p=1.0 --vllm_url=localhost:8000", 1, "vllm_url= http://"),
    (TRAIN, f"{VLLM} --top_p=1.0 --vllm_url=http://name:password@x", 1, "vllm_url= VLLM_API_KEY"),
    (TRAIN, f"{VLLM} --top_p=0.9", 1, "top_p=0.9 top_p=1.0"),
    (TRAIN, f"{VLLM} --top_p=1.0 --temperature=3.0", 1, "temperature=3.0 0.01"),
    (TRAIN, f"{VLLM} --top_p=1.0 --environment=Guess --reward_functions=environment", 1, "sampler='vllm' environment"),
    (TRAIN, f"{SUMS} --sampler=Ray", 1, "sampler ray"),
    (REPORT, "", 2, "seeds FOLDER"),
    (REPORT, "html a b", 2, "html FOLDER"),
    (REPORT, "html {out}", 1, "metrics.jsonl out_dir"),
    (REPORT, "html {folder}/damaged", 1, "damaged/metrics.jsonl line 2"),
    (REPORT, "seeds {folder}/short", 1, "short finished"),
    (CHECK_LOSS, "", 2, "FILE.py:FUNCTION"),
    (CHECK_LOSS, "{out}.py:loss", 1, "out.py"),
    (CHECK_LOSS, "{losses.py}:other", 2, "losses.py:other FUNCTION"),
    (CHECK_LOSS, "{losses.py}:loss --objective=ppo", 1, "objective grpo"),
    (CHECK_LOSS, "{losses.py}:loss --beta=1", 2, "beta kl_beta"),
    (CHECK_LOSS, "{losses.py}:loss", 1, "losses.py line 1 scalar"),
    (CHECK_LOSS, "{losses.py}:broken", 1, "losses.py line 5 los"),
    (CHECK_LOSS, "{losses.py}:short", 1, "losses.py line 7 argument"),
    ("grpo/tools/gpu_check.py", "--quick=True", 2, "gpu_check.py settings"),
]

ROWS = [*SETTINGS, *DATA_AND_MODELS, *ALGORITHM, *HUGGINGFACE, *REWARDS, *SAMPLERS_AND_TOOLS]
