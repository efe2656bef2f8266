"""Wrong inputs of a user: what is run, how it ends, and what its one line must name.

A row is (script, arguments, exit code, words): the key or file and a word of the remedy, never a sentence. Names in
braces stand for files of a test's folder: {text} and {prompts} are prepared data sets, {judge}, {generator} and
{causal} model files, {out} a folder that is not there, and the names of FILES files with these contents.
"""

import json

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

HUGGINGFACE = []

REWARDS = []

SAMPLERS_AND_TOOLS = []

ROWS = [*SETTINGS, *DATA_AND_MODELS, *ALGORITHM, *HUGGINGFACE, *REWARDS, *SAMPLERS_AND_TOOLS]
