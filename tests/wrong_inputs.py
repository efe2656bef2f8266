"""Wrong inputs of a user: what is run, how it ends, and what its one line must name.

A row is (script, arguments, exit code, words): the key or file and a word of the remedy, never a sentence. Names in
braces stand for files of a test's folder: {text} and {prompts} are prepared data sets, {judge}, {generator} and
{causal} model files, {out} a folder that is not there, and the names of FILES files with these contents.
"""

import json

TRAIN, PRETRAIN, SAMPLE, EXPORT = "grpo/train_grpo.py", "core/pretrain.py", "core/sample.py", "core/export.py"
SUMS = "--dataset={prompts} --generator_checkpoint={causal} --task_type=general --max_new_tokens=6"
FILL = "--dataset={text} --generator_checkpoint={generator} --judge_checkpoint={judge} --block_size=32"
LEARN = "--dataset={text} --block_size=32 --n_layer=1 --n_embd=16 --n_head=2"
JUDGE = f"{LEARN} --mode=sequence_scorer"
OWN = "--generator_checkpoint={llama} --reward_functions=exact_match --dataset="


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


MANY = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(60)]
FILES = {
    "no_answer.jsonl": lines({"prompt": "1+1="}, {"answer": "2"}),
    "cut.jsonl": lines(*MANY) + '{"prompt": "1+1=',
    "latin.jsonl": b'{"prompt": "\xff"}',
    "reserved.jsonl": lines({"prompt": "a", "where": 1}),
    "split.jsonl": lines({"prompt": "a", "split": "test"}),
    "empty.jsonl": "",
    "system.jsonl": lines({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}),
    "one_side.jsonl": lines({"prompt": "a", "split": "train", "answer": "b"}),
    "long.jsonl": lines(*MANY, {"prompt": "a" * 700, "split": "val", "answer": "b"}),
    "no_completion.jsonl": lines(*MANY, {"prompt": "1+1"}),
    "text.txt": "some text",
    "meta/meta.json": "{}",
    "cut.safetensors": b"\x10\0\0\0",
    "other.safetensors": b"\x08\0\0\0\0\0\0\0{}      ",
    "typo.py": "seed = 1\nn_layerz = 4\n",
    "broken.py": "seed = 1\n\nbatch_size = 1 // 0\n",
    "no_python.py": b"\xff\xfe",
    "mine/thesis.tex": "mine",
    "damaged/metrics.jsonl": b'{"step": 1}\n{"step": \xff}\n',
    "short/metrics.jsonl": '{"step": 0, "eval/x": 0.5}\n',
    "losses.py": "def loss(logp, *others):\n    return logp\n\ndef broken(logp, *others):\n    return los\n\n"
                 "def short(logp):\n    return logp.sum()\n",
}

SETTINGS = [
    (TRAIN, "--kl_estimator=k1", 1, "kl_estimator k3"),
    (TRAIN, "--kl_coef=0.1", 2, "kl_coef kl_beta"),
    (TRAIN, "--max_grad_norm=1.0", 2, "max_grad_norm grad_clip"),
    (TRAIN, "--num_iterations=5", 2, "num_iterations max_iters"),
    (TRAIN, "--rollout_batch_size=5", 2, "rollout_batch_size batch_size"),
    (TRAIN, "--num_generations=5", 2, "num_generations group_size"),
    (TRAIN, "--model_path=x", 2, "model_path generator_checkpoint"),
    (TRAIN, "--output_dir=x", 2, "output_dir out_dir"),
    (PRETRAIN, "--n_layers=4", 2, "n_layers n_layer"),
    (PRETRAIN, "--zzz=4", 2, "zzz --help=all"),
    (PRETRAIN, "n_layer=4", 2, "n_layer=4 --key=value"),
    (PRETRAIN, "--n_layer=four", 2, "n_layer='four' int"),
    (PRETRAIN, "--fill_checkpoints=a,b", 2, "fill_checkpoints tuple"),
    (PRETRAIN, "{typo.py}", 2, "typo.py n_layer"),
    (PRETRAIN, "{broken.py}", 1, "broken.py line 3 ZeroDivisionError"),
    (PRETRAIN, "{no_python.py}", 1, "no_python.py SyntaxError"),
    (PRETRAIN, "config/gone.py", 1, "config/gone.py path"),
    (PRETRAIN, "--min_lr=1.0", 1, "min_lr learning_rate"),
    (PRETRAIN, "--mask_low=0.9", 1, "mask_low mask_high"),
    (PRETRAIN, "--mode=poet", 1, "mode language_model"),
    (PRETRAIN, "--judge_head=cls", 1, "judge_head mode=sequence_scorer"),
    (PRETRAIN, "--max_iters=0", 1, "max_iters 1"),
    (PRETRAIN, "--dtype=float16", 1, "dtype bfloat16"),
    (PRETRAIN, "--device=tpu", 1, "device cpu"),
    (PRETRAIN, "--report_to=wanb", 1, "report_to wandb"),
    (PRETRAIN, "--out_dir={folder}/mine", 1, "out_dir thesis.tex new"),
    (PRETRAIN, f"{LEARN} --out_dir={{text.txt}}/deep", 1, "out_dir text.txt"),
    (PRETRAIN, f"{LEARN} --resume=True", 1, "state.pt resume"),
]

DATA_AND_MODELS = [
    (TRAIN, "--dataset={no_answer.jsonl} --generator_checkpoint={causal} --reward_functions=exact_match", 1,
     "no_answer.jsonl 2 prompt"),
    *((TRAIN, f"{OWN}{{{name}}}", 1, f"{name} {words}") for name, words in (
        ("cut.jsonl", "line 61"), ("latin.jsonl", "UTF-8"), ("reserved.jsonl", "where name"), ("split.jsonl", "val"),
        ("empty.jsonl", "prompts"), ("one_side.jsonl", "val"), ("long.jsonl", "max_prompt_length"))),
    (TRAIN, f"{OWN}{{system.jsonl}} --system_prompt=a", 1, "system.jsonl system_prompt"),
    (TRAIN, f"{OWN}gone.parquet", 1, "gone.parquet path"),
    (TRAIN, f"{OWN}{{text.txt}}", 1, "text.txt --input"),
    (TRAIN, f"{OWN}gone", 1, "gone/meta.json prepare.py"),
    (TRAIN, f"{OWN}{{folder}}/meta", 1, "meta.json prepare.py"),
    (TRAIN, f"{SUMS} --prompt_format=Question", 1, "prompt_format {prompt}"),
    (TRAIN, f"{SUMS} --template=model", 1, "template chat"),
    (TRAIN, f"{FILL} --block_size=100000", 1, ".bin block_size"),
    (TRAIN, f"{FILL} --masks={{'lines':1.0}}", 1, "masks line"),
    (TRAIN, f"{FILL} --generator_checkpoint={{causal}}", 1, "generator_checkpoint vocabulary"),
    (TRAIN, f"{FILL} --judge_checkpoint={{generator}}", 1, "judge_checkpoint masked_fill sequence_scorer"),
    (TRAIN, f"{FILL} --generator_checkpoint={{judge}}", 1, "generator_checkpoint sequence_scorer masked_fill"),
    *((TRAIN, f"{FILL} --judge_checkpoint={path}", 1, f"judge_checkpoint {words}") for path, words in (
        ("gone.safetensors", "hf:"), ("{cut.safetensors}", "copy"), ("{other.safetensors}", "folder"),
        ("{folder}", "config.json"))),
    (PRETRAIN, f"{LEARN} --init_from={{generator}}", 1, "init_from tied"),
    (PRETRAIN, f"{LEARN} --tied=False --init_from={{generator}} --lora_rank=4", 1, "lora_rank init_from"),
    (PRETRAIN, JUDGE, 1, "fill_checkpoints generators"),
    (PRETRAIN, f"{JUDGE} --fill_checkpoints={{judge}}", 1, "fill_checkpoints masked_fill"),
    (PRETRAIN, f"{JUDGE} --dataset={{prompts}}", 1, "dataset judge"),
    (PRETRAIN, "--init_from={llama} --dataset={text} --block_size=32", 1, "dataset vocabulary --tokenizer"),
    (PRETRAIN, "--init_from={llama} --dataset={no_completion.jsonl} --block_size=64", 1, "no_completion.jsonl 61"),
    (SAMPLE, "--checkpoint={generator} --text=____", 1, "--text _"),
    (SAMPLE, "--checkpoint={judge} --text=a_b", 1, "checkpoint generator"),
    (SAMPLE, "--checkpoint={causal} --text=" + "a" * 64, 1, "--text 63"),
    (EXPORT, "--checkpoint={causal}", 1, "out --out=FOLDER"),
    (EXPORT, "--checkpoint={causal} --out={folder}", 1, "out another"),
    (EXPORT, "--checkpoint={judge} --out={folder}/new", 1, "sequence_scorer language_model"),
]

ALGORITHM = []

HUGGINGFACE = []

REWARDS = []

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
