"""Wrong inputs of a user: what is run, how it ends, and what its one line must name; and bugs, which keep a traceback.

A row is (script, arguments, exit code, words): the key or file and a word of the remedy, never a sentence. Names in
braces stand for files of a test's folder: {text} and {prompts} are prepared data sets, {judge}, {generator} and
{causal} model files, {out} a folder that is not there, and the names of FILES files with these contents.
"""

import json

TRAIN, PRETRAIN, SAMPLE, EXPORT = "grpo/train_grpo.py", "core/pretrain.py", "core/sample.py", "core/export.py"
SUMS = "--dataset={prompts} --generator_checkpoint={causal} --task_type=general --max_new_tokens=6"
FILL = "--dataset={text} --generator_checkpoint={generator} --judge_checkpoint={judge} --block_size=32"
LEARN = "--dataset={text} --block_size=32 --n_layer=1 --n_embd=16 --n_head=2"
OWN = "--generator_checkpoint={llama} --reward_functions=exact_match --dataset="


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


MANY = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(60)]
FILES = {
    "no_answer.jsonl": lines({"prompt": "1+1="}, {"answer": "2"}),
    "cut.jsonl": lines(*MANY) + '{"prompt": "1+1=',
    "latin.jsonl": b'{"prompt": "\xff"}',
    "split.jsonl": lines({"prompt": "a", "split": "holdout"}),
    "trained.jsonl": lines(*({"prompt": str(n), "answer": "b", "split": "train"} for n in range(3))),
    "shared.json": '{"conversations": [{"from": "human", "value": "a"}]}',
    "columns.json": '{"prompt": {"0": "a"}, "answer": {"0": "b"}}',
    "lists.json": '{"version": 1, "turns": []}',
    "null.json": '{"prompts": ["a", "b", null]}',
    "number.json": '["a", 5]',
    "hollow.json": '{"train": ["a", ""], "val": ["b"]}',
    "hollow.jsonl": '"a"\n"b"\n""\n',
    "alone.json": '{"prompts": "my prompts.txt"}',
    "image.jsonl": lines({"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]}),
    "alpaca.jsonl": lines({"instruction": "Add.", "input": [1, 2], "output": "3"}),
    "dict.jsonl": lines(*MANY, {"prompt": "a", "answer": {"value": 1}}),
    "semicolons.csv": "prompt;answer\na, b;c\n",
    "columns.csv": "id,query\n1,a\n",
    "text.jsonl": lines({"messages": "a"}),
    "empty.jsonl": lines(*MANY, {"prompt": "a", "answer": [[]]}),
    "ragged.csv": "prompt,answer\na,b\nc,d,e\n",
    "twice.csv": "prompt,prompt\na,b\n",
    "cell.csv": "prompt,answer\na,b\n,4\n",
    "parts.jsonl": lines({"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": "a"}]}),
    "rows.jsonl.gz": b"\x1f\x8b",
    "system.jsonl": lines({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}),
    "long.jsonl": lines(*MANY, {"prompt": "a" * 700, "split": "val", "answer": "b"}),
    "no_completion.jsonl": lines(*MANY, {"prompt": "1+1"}),
    "cut.safetensors": b"\x10\0\0\0",
    "theirs.py": "seed = 1\nlora_r = 8\nbf16 = True\n",
    **{f"{name}.py": "from dataclasses import replace\nfrom grpo import losses\n\n"
       "def mine(r, low, high, logp, advantage, beta=1.0): return r * beta * advantage\n"
       "losses.SURROGATES['mine'] = mine\n"
       f"losses.OBJECTIVES['mine'] = replace(losses.OBJECTIVES['grpo'], {row})\n" for name, row in (
           ("extra", "surrogate='mine', constants={'zz': 1}"), ("worded", "surrogate='mine', constants={'beta': 'x'}"),
           ("lacking", "surrogate='sigmoid_gate'"), ("unbound", "clip_low=None"))},
    **{f"{name}.py": "from dataclasses import replace\nfrom grpo import losses\n\n"
       f"def mine(r, low, high, logp, advantage): return {term}\nlosses.SURROGATES['mine'] = mine\n"
       "losses.OBJECTIVES['mine'] = replace(losses.OBJECTIVES['grpo'], surrogate='mine')\n" for name, term in (
           ("summed", "(r * advantage).sum()"), ("silenced", "None"), ("bounded", "r * advantage * round(high)"),
           ("constant", "r.detach() * advantage"))},
    **{f"kl_{name}.py": "from grpo.losses import KL_ESTIMATORS, OBJECTIVES\nfrom dataclasses import replace\n"
       f"KL_ESTIMATORS['mine'] = {function}\nkl_estimator = 'mine'\n" for name, function in (
           ("summed", "lambda logp, ref_logp: (logp - ref_logp).sum()"), ("number", "lambda logp, ref_logp: 1.0"),
           ("silenced", "lambda logp, ref_logp, ratio: None"), ("nan", "lambda logp, ref_logp: logp.log()"),
           ("constant", "lambda logp, ref_logp, ratio: ref_logp"), ("raises", "lambda logp, ref_logp: logp[9]"),
           ("deaf", "lambda logp: logp"), ("value", "3"), ("mirrored", "lambda ratio, logp, ref_logp: ratio * logp"),
           ("vocabulary", "None"))},
    "of_row.py": "from dataclasses import replace\nfrom grpo.losses import OBJECTIVES\n"
                 "OBJECTIVES['mine'] = replace(OBJECTIVES['grpo'], kl_estimator='zzz')\nobjective = 'mine'\n",
    **{f"order_{name}.py": f"import torch\nfrom core.fill_in import UNMASK_ORDERS\nUNMASK_ORDERS['mine'] = {function}\n"
       "unmask_order = 'mine'\n" for name, function in (
           ("summed", "lambda noise: noise.sum()"), ("number", "lambda noise: 1.0"), ("silenced", "lambda noise: None"),
           ("nan", "lambda noise: noise * float('nan')"), ("raises", "lambda noise: noise[9]"),
           ("deaf", "lambda: 1"), ("value", "3"), ("wide", "lambda logp, ids: logp"),
           ("lost", "lambda logp, ids: -torch.inf * ids - torch.inf"), ("right", "lambda logp, ids: ids"))},
    "typo.py": "seed = 1\nn_layerz = 4\n",
    "raises.py": "seed = 1\n\nbatch_size = 1 // 0\n",
    "silent.py": "seed = 1\nclass Error(Exception):\n    def __str__(self):\n        raise KeyError\nraise Error\n",
    "half_pair.jsonl": lines(*MANY, {"prompt": "1+1", "answer": "\ud800"}),
    "mine/thesis.tex": "mine",
    "state/state.pt": b"",
    "before/state.pt": b"",
    "before/config.json": '{"reward_normalisation": "group", "advantage": "leave_one_out"}',
    "damaged/metrics.jsonl": b'{"step": 1}\n{"step": \xff}\n',
    "plain/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}, {"step": 1, "loss": 0.5}),
    "ended/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}, {"step": 9, "eval/x": 0.6}),
    **{f"{name}/metrics.jsonl": lines({"step": step, "eval/x": 0.5}) for name, step in (("early", 5), ("late", 9))},
    **{f"{name}/config.json": '{"seed": 7}' for name in ("early", "late")},
    "short/metrics.jsonl": '{"step": 0, "eval/x": 0.5}\n',
    "stepless/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}, {"eval/x": 0.6}),
    "worded/metrics.jsonl": lines({"step": "a", "eval/x": 0.5}),
    "texts/metrics.jsonl": lines({"step": 0, "eval/x": "a"}),
    "started/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}),
    "odd_end/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}),
    "odd_settings/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}),
    "started/config.json": '{"starts": 5}',
    "odd_end/config.json": '{"starts": [{"end": {"ended": "finished"}}]}',
    "odd_settings/config.json": '{"starts": [{"settings": {"seed": 1}}]}',
    "sampled/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}),
    "sampled/samples.jsonl": lines({"step": 0, "problem": "a", "group": [1]}),
    "unsampled/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}),
    "unsampled/samples.jsonl": lines({"step": 0, "problem": "a", "group": [{"text": "a", "reward": "b"}]}),
    "valued/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}),
    "valued/samples.jsonl": lines({"step": 0, "problem": "a", "group": [{"text": "a", "reward": 1, "rewards": None}]}),
    **{f"turned_{i}/metrics.jsonl": lines({"step": 0, "eval/x": 0.5}) for i in range(3)},
    **{f"turned_{i}/samples.jsonl": lines({"step": 0, "problem": "a", "group": [{
        "text": "a", "reward": 1, "turns": turns}]}) for i, turns in enumerate(({}, [["a", None]], [["a", 5, 1.0]]))},
    "nested.py": "if True:\n    learning_rate: 1e-4\n",
    "annotated.py": "learning_rate: 1e-4\nbatch_size = 1\n",
    "masks.py": "from core.data import mask\n@mask\ndef broken(rng, tokens, count, newline):\n    return 1 / 0\n"
                "@mask\ndef whole(rng, tokens, count, newline):\n    return [1] * len(tokens)\n",
    "losses.py": "def loss(logp, *others):\n    return logp\n\ndef broken(logp, *others):\n    return los\n",
}

SETTINGS = [
    (TRAIN, "--keep_best=eval/entropy", 1, "keep_best='eval/entropy' metric"),
    (TRAIN, f"{SUMS} --keep_best=eval/nothing", 1, "keep_best='eval/nothing' eval/mean_reward"),
    (TRAIN, "--kl_estimator=k1", 1, "kl_estimator k3 gradient kl_in_reward=True"),
    (TRAIN, "--objective=PPO", 1, "objective grpo ppo_epochs"),
    (TRAIN, "--doctor=true", 2, "doctor True"),
    *((TRAIN, f"--{names.split()[0]}=5", 2, names) for names in (
        "kl_coef kl_beta", "max_grad_norm grad_clip", "num_iterations max_iters", "rollout_batch_size batch_size",
        "num_generations group_size", "model_path generator_checkpoint", "output_dir out_dir", "grop_size group_size",
        "actor_rollout_ref.rollout.n group_size", "minibatch_size minibatches", "dataset_path dataset",
        "checkpoint_freq save_interval", "num_epochs max_iters steps", "clip_range clip_low clip_high",
        "hf_model_name generator_checkpoint hf", "prompt_template prompt_format {prompt}",
        "print_sample_every sample_interval", "use_custom_chat_template template model",
        "list_rewards grpo/rewards.py", "gpus torchrun", "init_from generator_checkpoint resume=True",
        "eval_only max_iters 0", "config .py", "save_total_limit kept docs/coming_from.md",
        "nobody_knows docs/coming_from.md --help=all")),
    (TRAIN, "{theirs.py} --beta=0.1 --trainer.logger=wandb", 2, "theirs.py lora_r lora_rank bf16 dtype beta kl_beta "
     "trainer.logger report_to"),
    (TRAIN, " ".join(f"--actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu.{n}=1" for n in range(40)) + " --beta=1",
     2, "beta kl_beta docs/coming_from.md"),
    (TRAIN, "--stop_sequences=a,b", 2, "stop_sequences='a,b' ('a',"),
    (PRETRAIN, "--n_layers=4", 2, "n_layers n_layer"),
    (PRETRAIN, "n_layer=4", 2, "n_layer=4 --key=value"),
    (TRAIN, "data.train_files=a.parquet algorithm.adv_estimator=grpo rollout.n=4", 2,
     "data.train_files=a.parquet --key=value dataset adv_estimator advantage rollout.n group_size"),
    (TRAIN, "--beta 0.1 --num-generations 8", 2, "0.1 --key=value beta kl_beta group_size"),
    *((TRAIN, f"{{{name}.py}} --objective=mine", 1, f"{name}.py {words} objective='mine'") for name, words in (
        ("extra", "4 'zz'"), ("worded", "4 constants 'x'"))),
    *((TRAIN, f"{{{name}.py}} --objective=mine", 1, "constants objective='mine'") for name in ("lacking", "unbound")),
    *((TRAIN, f"{{{name}.py}} --objective=mine", 1, f"{name}.py 4 objective='mine'") for name in (
        "summed", "silenced", "bounded", "constant")),
    *((TRAIN, f"{{kl_{name}.py}}", 1, f"kl_{name}.py 3 kl_estimator='mine'") for name in (
        "summed", "number", "silenced", "nan", "constant", "raises", "deaf", "mirrored")),
    (TRAIN, "{kl_value.py}", 1, "kl_estimator='mine' callable"),
    (TRAIN, "{kl_vocabulary.py} --kl_in_reward=True", 1, "kl_estimator='mine' kl_in_reward k3"),
    (TRAIN, "{kl_summed.py} --kl_estimator=zzz", 1, "kl_estimator='zzz' exact k3 mine"),
    (TRAIN, "{of_row.py}", 1, "kl_estimator='zzz' k3"),
    *((TRAIN, f"{{order_{name}.py}} --unmask_steps=2", 1, f"order_{name}.py 3 unmask_order='mine'") for name in (
        "summed", "number", "silenced", "nan", "raises", "deaf", "wide", "lost")),
    (TRAIN, "{order_value.py} --unmask_steps=2", 1, "unmask_order='mine' callable"),
    (TRAIN, "{order_right.py} --unmask_steps=2 --unmask_order=zzz", 1, "unmask_order='zzz' confidence mine"),
    *((TRAIN, f"{order} --unmask_steps=2 {more}", 1, f"{more.strip('-').split('=')[0]} unmask_order= policy")
      for order in ("--unmask_order=confidence", "{order_right.py}")
      for more in ("--kl_in_reward=True", "--ratio_to=sampler")),
    (SAMPLE, "{order_summed.py}", 1, "order_summed.py 3 unmask_order='mine'"),
    (PRETRAIN, "--n_layer=four", 2, "n_layer='four' whole number"),
    (PRETRAIN, f"--learning_rate=1{'0' * 400}", 1, "learning_rate=inf (0, 1e9]"),
    (PRETRAIN, "--masks={'random':{1,2}}", 1, "masks lists"),
    (PRETRAIN, "{typo.py}", 2, "typo.py n_layer"),
    *((PRETRAIN, f"{{{name}.py}}", 2, f"{name}.py learning_rate =") for name in ("annotated", "nested")),
    (TRAIN, "custom_reward_function.path=my.py", 2, "custom_reward_function.path --key=value reward_file"),
    (PRETRAIN, "{raises.py}", 1, "raises.py line 3 ZeroDivisionError"),
    (PRETRAIN, "{silent.py}", 1, "silent.py line 5 Error correct"),
    (PRETRAIN, "config/gone.py", 1, "config/gone.py path"),
    (PRETRAIN, "--min_lr=1.0", 1, "min_lr learning_rate"),
    *((PRETRAIN, f"--max_prompt_length={value}", 1, "max_prompt_length share [1, (0,")
      for value in ("0", "0.0", "-1", "-0.5", "1.0", "1.5", "512.0", "1e9", "1e400", "2000000")),
    *((PRETRAIN, f"--max_prompt_length={value}", 2, "max_prompt_length whole share")
      for value in ("nan", "half", "90%", "True", "None", "[0.9]", "'0.9'")),
    (PRETRAIN, "--mask_low=0.9", 1, "mask_low=0.9 mask_high 0.6"),
    (PRETRAIN, "--dtype=float16", 1, "dtype bfloat16"),
    (PRETRAIN, "--device=tpu", 1, "device cpu"),
    (PRETRAIN, "--report_to=wanb", 1, "report_to wandb"),
    (PRETRAIN, "--out_dir={folder}/mine", 1, "out_dir thesis.tex new"),
    (PRETRAIN, f"{LEARN} --resume=True --out_dir={{folder}}/resumed", 1, "state.pt resume"),
    *((script, "--resume=True --out_dir={folder}/resumed", 1, "{folder}/resumed state.pt out_dir=FOLDER config")
      for script in (TRAIN, PRETRAIN)),
    (PRETRAIN, "--resume=True --out_dir={folder}/mine", 1, "{folder}/mine state.pt out_dir=FOLDER"),
    (TRAIN, "--resume=True --out_dir={folder}/state", 1, "{folder}/state config.json out_dir=FOLDER"),
    *((TRAIN, f"--resume={how} --out_dir={{folder}}/before", 1,
       "before/config.json reward_normalisation='group' advantage='leave_one_out' delete") for how in ("True", "auto")),
    (TRAIN, "--resume=auto", 1, "generator_checkpoint config/grpo_example.py"),
    (TRAIN, "--dataset={prompts}", 1, "generator_checkpoint config/grpo_example.py"),
    (TRAIN, "--generator_checkpoint={causal} --dataset={text}", 1, "causal.safetensors vocabulary"),
    # Settings of the example, which a command without a config takes
    (TRAIN, "--min_lr=1e-3", 1, "min_lr learning_rate"),
    (TRAIN, "--learning_rate=5e-6 --min_lr=1e-5", 1, "min_lr=1e-05 learning_rate"),
    (TRAIN, "--judge_checkpoint=None", 1, "gold_judge_checkpoint judge_checkpoint"),
    (TRAIN, "--advantage=max_rl", 1, "credit_window=2 max_rl"),
    (TRAIN, "--advantage=gdpo", 1, "credit_window=2 gdpo"),
    (TRAIN, "--environment=X", 1, "environment reward_functions"),
]

DATA_AND_MODELS = [
    (TRAIN, "--dataset={no_answer.jsonl} --generator_checkpoint={causal} --reward_functions=exact_match", 1,
     "no_answer.jsonl 2 prompt"),
    *((TRAIN, f"{OWN}{{{name}}}", 1, f"{name} {words}") for name, words in (
        ("half_pair.jsonl", "line 61 pair"), ("cut.jsonl", "line 61"), ("latin.jsonl", "UTF-8"), ("split.jsonl", "val"),
        ("null.json", "prompts, record 3 None leave"), ("number.json", "record 2 5 leave"),
        ("hollow.json", "train, record 2 text"), ("hollow.jsonl", "line 3 text"), ("alone.json", "prompts list [ ]"),
        ("long.jsonl", "max_prompt_length"), ("trained.jsonl", "split val"), ("shared.json", "conversations messages"),
        ("columns.json", "record orient"), ("lists.json", "version turns prompt"), ("image.jsonl", "messages text"),
        ("alpaca.jsonl", "1 instruction input"), ("dict.jsonl", "61 answer list"), ("semicolons.csv", "commas"),
        ("columns.csv", "id, query prompt"), ("text.jsonl", "messages role"), ("empty.jsonl", "61 answer list"),
        ("cell.csv", "line 3 cell prompt"), ("parts.jsonl", "1 role"),
        ("ragged.csv", "line 3 quotes"), ("twice.csv", "columns rename"), ("rows.jsonl.gz", "dataset unpacked"))),
    (TRAIN, f"{OWN}{{system.jsonl}} --system_prompt=a", 1, "system.jsonl system_prompt"),
    (TRAIN, f"{OWN}gone.parquet", 1, "gone.parquet path"),
    (TRAIN, f"{OWN}gone", 1, "gone/meta.json prepare.py"),
    (TRAIN, f"{SUMS} --prompt_format=Question", 1, "prompt_format {prompt}"),
    (TRAIN, f"{FILL} --block_size=100000", 1, "train.bin block_size"),
    (TRAIN, f"{FILL} --masks={{'lines':1.0}}", 1, "masks line"),
    (TRAIN, f"{FILL} --masks={{'line':'1'}}", 1, "masks weights"),
    (TRAIN, f"{FILL} --masks={{'broken':1.0}} --reward_file={{masks.py}}", 1, "masks.py 4 ZeroDivisionError broken"),
    (TRAIN, f"{FILL} --masks={{'whole':1.0}} --reward_file={{masks.py}}", 1, "masks.py 5 whole bool"),
    (TRAIN, f"{FILL} --generator_checkpoint={{causal}}", 1, "generator_checkpoint vocabulary"),
    (TRAIN, f"{FILL} --generator_checkpoint={{judge}}", 1, "generator_checkpoint sequence_scorer masked_fill"),
    (TRAIN, f"{FILL} --judge_checkpoint=gone.safetensors", 1, "judge_checkpoint hub"),
    (TRAIN, f"{FILL} --judge_checkpoint={{cut.safetensors}}", 1, "judge_checkpoint copy"),
    (PRETRAIN, f"{LEARN} --init_from={{generator}}", 1, "init_from tied"),
    (PRETRAIN, f"{LEARN} --tied=False --init_from={{generator}} --lora_rank=4", 1, "lora_rank init_from"),
    (PRETRAIN, f"{LEARN} --mode=sequence_scorer", 1, "fill_checkpoints generators"),
    *((PRETRAIN, f"{LEARN} --mode=sequence_scorer --fill_checkpoints=['{{generator}}'] {more}", 1, words)
      for more, words in (
        ("--teacher_checkpoint={generator}", "teacher_checkpoint sequence_scorer"),
        ("--teacher_checkpoint={cls}", "teacher_checkpoint judge_head"),
        ("--teacher_checkpoint={judge} --judge_head=cls", "teacher_checkpoint judge_head"),
        ("--block_size=40", "fill_checkpoints block_size"),
        ("--mode=masked_fill", "fill_checkpoints mode"),
        ("--teacher_checkpoint=out/judge --out_dir=out", "teacher_checkpoint out_dir"),
        ("--teacher_checkpoint=out/best/judge --out_dir=out", "teacher_checkpoint out_dir"),
        ("--keep_best=mean_score/0", "keep_best='mean_score/0' metric"))),
    (PRETRAIN, "--init_from={llama} --dataset={text} --block_size=32", 1, "dataset vocabulary --tokenizer"),
    (PRETRAIN, "--init_from={llama} --dataset={no_completion.jsonl} --block_size=64", 1, "no_completion.jsonl 61"),
    (SAMPLE, "--checkpoint={generator} --text=____", 1, "--text _"),
    (SAMPLE, "--checkpoint={judge} --text=a_b", 1, "checkpoint generator"),
    (EXPORT, "--checkpoint={causal} --out={folder}", 1, "out another"),
    *((f"data/{name}/prepare.py", f"{arguments} --out={{out}}", 1, words) for name, arguments, words in (
        ("countdown", "--target_largest=0", "target_largest=0 1"),
        ("countdown", "--smallest=50 --largest=50 --target_largest=1", "target_largest=1 smallest=50 raise"),
        ("countdown", "--smallest=9 --largest=8", "smallest=9 largest=8"),
        *((name, "--problems=1000000000", "problems=1000000000") for name in (
            "arithmetic", "calculator", "code", "countdown", "smollm2")),
        *((name, "--digits=100000", "digits=100000") for name in ("arithmetic", "smollm2")),
        ("arithmetic", "--terms=100000000", "terms=100000000"),
        ("equations", "--largest=10000", "largest=10000 copies lower"),
        ("guess", "--fewest=1000 --most=2000 --largest=1000000", "largest=1000000 most=2000 lower"),
        ("sudoku", "--prompts=1000000000", "prompts=1000000000"))),
]

TAUGHT = "--teacher_checkpoint=t --kl_beta=0.0"
SUCCESS = "--reward_functions=math_number"
PASSES = "--unmask_steps=2"
FILL = "--dataset={text} --generator_checkpoint={generator} --judge_checkpoint={judge} --block_size=32"
ALGORITHM = [(TRAIN, arguments, 1, words) for arguments, words in {
    "--objective=ppo": "objective grpo",
    "--objective=sapo --clip_high=0.2": "clip_high=0.2 sapo",
    "--advantage=z": "advantage group_std",
    "--advantage=normalize_then_sum": "advantage gdpo",
    "--reference_mode=none": "kl_beta reference_mode",
    "--group_size=1": "group_size compared",
    "--minibatches=17": "minibatches batch_size",
    "--max_iters=0 --resume=True": "resume max_iters",
    "--overlong_buffer=200": "overlong_buffer max_new_tokens",
    "--parallel=fsdp --optimizer=muon": "parallel='fsdp' optimizer='muon' leave",
    "--ema_alpha=0.5": "ema_alpha=0.5 reference_mode='ema'",
    "--kl_in_reward=True --kl_estimator=exact": "kl_estimator k3",
    f"{SUCCESS} --train_pass_k=2 --advantage=group_std": "train_pass_k leave_one_out",
    f"{SUCCESS} --train_pass_k=2 --advantage=gdpo": "train_pass_k leave_one_out",
    f"{PASSES} --fill_estimator=one_step --top_p=0.9": "top_p fill_estimator",
    "--teacher_checkpoint=t": "kl_beta kl_beta=0.0",
    f"{TAUGHT} --task_type=math": "task_type reward_functions",
    "--teacher_checkpoint=out-grpo/model.safetensors --kl_beta=0.0 --out_dir=out-grpo": "teacher_checkpoint out_dir",
    "--generator_checkpoint=None": "generator_checkpoint config/grpo_example.py",
    "--dataset={text} --generator_checkpoint={judge}": "generator_checkpoint judge.safetensors sequence_scorer",
    "--dataset={text} --generator_checkpoint={causal}": "causal.safetensors vocabulary",
    f"{SUMS} --unmask_steps=2": "unmask_steps=2 masked-fill language",
    f"{SUMS} --max_new_tokens=500": "max_new_tokens lower max_prompt_length",
    f"{SUMS} --task_type=math": "max_new_tokens max_prompt_length template 'math'",
    f"{SUMS} --reference_checkpoint={{generator}}": "reference_checkpoint masked_fill language_model",
    f"{SUMS} --resume=True": "resume out_dir",
    f"{FILL} --mask_truncated=True": "mask_truncated=True prompts running",
    f"{FILL} --block_size=40": "judge.safetensors block_size lower",
    f"{FILL} --judge_checkpoint={{generator}}": "judge_checkpoint masked_fill sequence_scorer",
}.items()]

# Folders in Hugging Face format: {name: (family of tests/families.py, what spoils it, as change_folder takes it)}
FOLDERS = {
    "reward": ("bert_reward", {}),
    "deep": ("llama", {"config.json": {"num_hidden_layers": 3}}),
    "unknown": ("llama", {"config.json": {"model_type": "\x1b[2J\n"}}),
    "coded": ("llama", {"config.json": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}}),
    "ends": ("llama", {"config.json": {"eos_token_id": 50256}}),
    "typed": ("llama", {"config.json": {"dtype": "save"}}),
    "sequential": ("llada", {"config.json": {"block_type": "sequential"}}),
    "eager": ("sdar", {"config.json": {"attn_implementation": "eager"}}),
    "endless": ("sdar", {"config.json": {"block_size": -1}}),
    "halved": ("sdar", {"config.json": {"block_size": 4.0}}),
    "flat": ("llada", {"config.json": {"n_layers": 0}}),
    "layerless": ("llama", {"config.json": {"num_hidden_layers": 0}}),
    "short": ("llada", {"config.json": {"max_sequence_length": 0}}),
    "ended": ("sdar", {"config.json": {"mask_token_id": 0, "eos_token_id": 0}}),
    "unmasked": ("a2d-qwen3", {"config.json": {"mask_token_id": None}}),
    "tied": ("qwen3", {}),
    "cut": ("llama", {"model.safetensors": b"\x10\0\0\0"}),
    "pickle": ("llama", {"model.safetensors": None, "pytorch_model.bin": b"a"}),
    "mute": ("llama", {"tokenizer.json": None, "tokenizer_config.json": None}),
    "merged": ("llama", {"tokenizer.json": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}}),
    "indexed": ("llama", {"model.safetensors.index.json": {"weight_map": {"a": "weights.bin"}}}),
    "adapter": ("llama", {"adapter_config.json": {"base_model_name_or_path": "{folder}/../llama"}}),
    "orphan": ("llama", {"adapter_config.json": {"base_model_name_or_path": "/gone"}}),
    "forgets": ("openai", {}),
}
LORA = f"{SUMS} --generator_checkpoint={{llama}}"
HUGGINGFACE = [(SAMPLE, f"--text=a --checkpoint={{{name}}}", 1, f"checkpoint={{{name}}} {words}") for name, words in {
    "reward": "reward_model_checkpoint",
    "deep": "layers.2 complete",
    "unknown": "copy",
    "coded": "code",
    "ends": "50256 tokenizer",
    "typed": "copy",
    "sequential": "block_type='sequential'",
    "eager": "attention_block sdpa",
    "endless": "block_size=-1 copy",
    "halved": "block_size=4.0 copy",
    "flat": "n_layers=0 copy",
    "layerless": "num_hidden_layers=0 copy",
    "short": "max_sequence_length=0 copy",
    "ended": "mask_token_id config.json",
    "unmasked": "mask_token",
    "cut": "copy",
    "pickle": "safetensors",
    "mute": "tokenizer copy",
    "merged": "tokenizer copy",
    "indexed": "weights.bin save_pretrained",
    "orphan": "base_model_name_or_path",
    "forgets": "OpenAIGPTModel past_key_values docs/huggingface.md",
}.items()] + [(TRAIN, arguments, 1, words) for arguments, words in {
    f"{SUMS} --lora_rank=4": "lora_rank Hugging",
    f"{LORA} --lora_rank=4 --lora_targets=q_proj,v_prj": "lora_targets v_prj",
    f"{LORA} --lora_init_from={{folder}}": "lora_init_from adapter_config.json",
    f"{LORA} --lora_rank=4 --reference_mode=ema": "reference_mode periodic",
    f"{SUMS} --generator_checkpoint={{adapter}} --lora_rank=4": "generator_checkpoint lora_init_from",
    f"{SUMS} --generator_checkpoint={{tied}} --lora_rank=4 --lora_targets=lm_head": "lora_targets tied",
}.items()]

# Packages that are too old: (module, the version that it pretends, script, arguments, words)
VERSIONS = [
    ("torch", "2.10.0+cpu", TRAIN, SUMS, "torch 2.11 2.10.0+cpu requirements.txt"),
    ("torch", "2.9.1", PRETRAIN, LEARN, "torch 2.11 2.9.1 requirements.txt"),
    ("torch", "2.11.0.dev20260101", TRAIN, f"{SUMS} --parallel=fsdp --optimizer=adamw", "parallel='fsdp' 2.13"),
    ("transformers", "5.16.2", TRAIN, LORA, "generator_checkpoint={llama} transformers 5.17 requirements-hf.txt"),
    ("peft", "0.18.1", TRAIN, f"{LORA} --lora_rank=4", "lora_rank=4 peft 0.19 requirements-hf.txt"),
    ("peft", "0.18.1", SAMPLE, "--text=a --checkpoint={adapter}", "checkpoint={adapter} peft 0.19 requirements-hf.txt"),
]

RECORDS = "--dataset={%s.jsonl} --generator_checkpoint={causal} --reward_functions=%s"
MINE = SUMS + " --reward_file={rewards.py} --max_iters=1"
# Names of a run's own metrics
TAKEN = "step", "lr", "time/train", "eval/x", "skipped/x", "entropy", "sampled_accuracy", "pg_loss"
EPISODES = SUMS + " --reward_functions=environment --reward_file={rewards.py} --environment="
FILES |= {
    "half.jsonl": "".join(json.dumps({"prompt": f"{n}-9:"} | ({"answer": "1"} if n != 2 else {})) + "\n"
                          for n in range(40)),
    "spoiled.jsonl": "".join(json.dumps({"prompt": f"{n}-9:", "numbers": "12", "target": 3, "tests": " "}) + "\n"
                             for n in range(40)),
    "task.jsonl": lines(*({"prompt": f"{n}-9:", "numbers": [1, 2], "target": 3} for n in range(40))),
    "verl.py": "def compute_score(data_source, solution_str, ground_truth, extra_info=None): pass\n",
    "broken.py": "import package_that_nobody_has\n",
    "ranged.py": "from grpo.rewards import reward\n\n@reward(0, 'a')\ndef one(completions): return []\n",
    "logs.py": "".join(f"def logs_{i}(completions, log_metric):\n    log_metric({name!r}, 1.0)\n"
                       "    return [0.0] * len(completions)\n" for i, name in enumerate(TAKEN)),
    "rewards.py": """from grpo.environments import environment
def one(completions): return [1.0]
def raises(completions): return completions[99]
class Error(Exception):
    def __str__(self): raise KeyError
def silent(completions): raise Error
def logs(completions, log_metric): log_metric("a", "b")
def calls_ours(completions): return length_penalty()
def length_penalty(completions): return [0.0 for _ in completions]
class Base:
    def reset(self, record): pass
    def step(self, text): return None, 1.0
@environment
class Ends(Base): pass
@environment
class Gone(Base):
    def reset(self, record): record["gone"]
@environment
class Prompted(Base):
    def reset(self, record): return "a prompt"
@environment
class Wordy(Base):
    def step(self, text): return "a", "b"
@environment
class Vast(Base):
    def step(self, text): return "a", 10**400
@environment
class Mute(Base):
    def step(self, text): return Error(), 1.0
class Hidden:
    def __repr__(self): raise Error
@environment
class Hiding(Base):
    def step(self, text): return Hidden(), 1.0
class Half:
    def reset(self, record): pass
@environment
class Stepless(Half): pass
@environment
class Upper(Half):
    def Step(self, text): return None, 1.0
@environment
class Twisted(Half):
    def setp(self, text): return None, 1.0
@environment
class Value(Half):
    step = "a text"
@environment
class Deaf(Half):
    def step(self): return None, 1.0
@environment
class Greedy(Half):
    def step(self, text, more): return None, 1.0
@environment
class Later(Half):
    async def step(self, text): return None, 1.0
@environment
class Bit(Half):
    def step(self, text): yield None, 1.0
@environment
class Closing(Base):
    def close(self, why): pass
@environment
class Closed(Base):
    close = True
@environment
class Leaving(Base):
    async def close(self): pass
@environment
class Resetless:
    def restet(self, record): pass
@environment
class Alone(Base):
    def reset(self): pass
@environment
class Waits(Base):
    async def reset(self, record): pass
@environment
class Unmeasured(Base):
    metrics = ("wins",)
@environment
class Counted(Base):
    metrics, wins = "wins", 3
@environment
class Worded(Base):
    metrics, wins = ("wins",), ("1", "2")
@environment
class Endless(Base):
    metrics, wins = ("wins",), (float("inf"), 1)
@environment
class Numbered(Base):
    metrics = (1,)
@environment
class Taken(Base):
    metrics, turns = ("turns",), (1, 1)
@environment
class Fails(Base):
    metrics = ("wins",)
    def step(self, text): self.wins = 1, int(text)
"""}
REWARDS = [
    (TRAIN, f"{SUMS} --reward_functions=exact", 1, "reward_functions 'exact' exact_match reward_file"),
    (TRAIN, f"{SUMS} --reward_functions=repetition,zzz", 1, "reward_functions 'zzz' repetition reward_file"),
    (TRAIN, f"{MINE} --reward_functions=rises", 1, "reward_functions 'rises' raises rewards.py"),
    (TRAIN, RECORDS % ("half", "compute_score") + " --reward_file={verl.py}", 1,
     "half.jsonl compute_score 'data_source' verl docs/coming_from.md"),
    (TRAIN, f"{SUMS} --reward_functions=contains --reward_weights=(1.0,2.0)", 1, "reward_weights (1.0, contains"),
    (TRAIN, SUMS + " --reward_settings={'least':1}", 1, "reward_settings 'least' length_penalty"),
    *((TRAIN, f"{SUMS} --reward_settings={{'length_min':{value}}}", 1, "reward_settings length_min length_penalty 20")
      for value in ("'a'", "None", "1e400", "[1]")),
    (TRAIN, f"{MINE} --reward_functions=one --slow_rewards=noe", 1, "slow_rewards 'noe' one"),
    (TRAIN, f"{MINE} --reward_functions=one --slow_rewards=repetition", 1, "slow_rewards 'repetition' one"),
    (TRAIN, f"{SUMS} --reward_functions=diversity_bonus --slow_rewards=diversity_bonus", 1,
     "slow_rewards diversity_bonus"),
    (TRAIN, f"{MINE} --reward_functions=one --slow_rewards=one --reward_workers=0", 1, "slow_rewards reward_workers"),
    (TRAIN, f"{SUMS} --reward_functions=judge", 1, "judge_checkpoint reward_functions"),
    (TRAIN, f"{SUMS} --reward_functions=reward_model", 1, "reward_model_checkpoint"),
    (TRAIN, "--dataset={text} --generator_checkpoint={generator} --block_size=32", 1, "judge_checkpoint"),
    *((TRAIN, f"{FILL} --credit_window=2 --reward_functions={more}", 1, "credit_window=2 judge")
      for more in ("('judge','repetition')", "judge --reward_weights=(2.0,)")),
    (TRAIN, RECORDS % ("half", "exact_match"), 1, "half.jsonl 3 exact_match 'answer'"),
    (TRAIN, RECORDS % ("spoiled", "countdown"), 1, "spoiled.jsonl 1 countdown numbers"),
    (TRAIN, RECORDS % ("spoiled", "code_execution"), 1, "spoiled.jsonl 1 code_execution tests"),
    (TRAIN, f"{SUMS} --reward_file=none.py", 1, "reward_file=none.py path"),
    (TRAIN, SUMS + " --reward_file={broken.py}", 1, "broken.py 1 package_that_nobody_has"),
    (TRAIN, SUMS + " --reward_file={ranged.py}", 1, "ranged.py 3 ValueError"),
    (TRAIN, f"{MINE} --reward_functions=length_penalty", 1, "length_penalty another name"),
    (TRAIN, f"{MINE} --reward_functions=one", 1, "one rewards.py 2 list"),
    (TRAIN, f"{MINE} --reward_functions=raises", 1, "raises rewards.py 3 IndexError"),
    (TRAIN, f"{MINE} --reward_functions=silent", 1, "silent rewards.py 6 Error"),
    (TRAIN, f"{MINE} --reward_functions=logs", 1, "logs rewards.py 7 TypeError"),
    *((TRAIN, f"{SUMS} --reward_file={{logs.py}} --max_iters=1 --reward_functions=('exact_match','logs_{i}')", 1,
       f"log_metric {name} another") for i, name in enumerate(TAKEN)),
    (TRAIN, f"{MINE} --reward_functions=calls_ours", 1, "calls_ours rewards.py 8 TypeError"),
    (TRAIN, f"{SUMS} --max_turns=3", 1, "max_turns environment"),
    (TRAIN, f"{EPISODES}Nobody", 1, "environment='Nobody' rewards.py Gone"),
    (TRAIN, f"{EPISODES}Gone", 1, "environment='Gone' rewards.py 17 KeyError"),
    (TRAIN, f"{EPISODES}Prompted", 1, "environment='Prompted' reset None"),
    *((TRAIN, f"{EPISODES}{name} --max_iters=1", 1, f"environment='{name}' step number")
      for name in ("Wordy", "Vast", "Mute", "Hiding")),
    *((TRAIN, f"{EPISODES}{name} --max_iters=1", 1, f"environment='{name}' rewards.py {words}") for name, words in (
        ("Stepless", "36 step text"), ("Upper", "41 step rename Step"), ("Twisted", "44 step rename setp"),
        ("Value", "36 step text"), ("Deaf", "50 step text"), ("Greedy", "53 step 'more' text"),
        ("Later", "56 step async"), ("Bit", "59 step yield"), ("Closing", "62 close 'why'"), ("Closed", "11 close"),
        ("Leaving", "68 close async"), ("Resetless", "71 reset rename restet"), ("Alone", "74 reset record"),
        ("Waits", "77 reset async"), ("Unmeasured", "11 'wins' reset"), ("Counted", "11 'wins' sum, count"),
        ("Worded", "11 'wins' sum, count"), ("Endless", "11 'wins' finite"), ("Numbered", "11 1 metrics"),
        ("Taken", "11 turns another"), ("Fails", "99 'wins' reset"))),
]

VLLM = f"{SUMS} --sampler=vllm --vllm_url=http://127.0.0.1:1"
REPORT, CHECK_LOSS = "grpo/tools/report.py", "grpo/tools/check_loss.py"
SAMPLERS_AND_TOOLS = [
    (TRAIN, f"{SUMS} --ray_workers=2", 1, "ray_workers=2 sampler='ray'"),
    (TRAIN, f"{SUMS} --vllm_url=http://x", 1, "vllm_url='http://x' sampler='vllm'"),
    (TRAIN, f"{SUMS} --sampler=vllm", 1, "sampler='vllm' vllm_url http"),
    (TRAIN, f"{VLLM} --top_p=1.0 --vllm_url=localhost:8000", 1, "vllm_url= http"),
    (TRAIN, f"{VLLM} --top_p=1.0 --vllm_url=http://name:password@x", 1, "vllm_url= VLLM_API_KEY"),
    (TRAIN, f"{VLLM} --top_p=1.0 --vllm_url=http://{'xn--.' * 500}", 1, "vllm_url correct"),
    (TRAIN, f"{VLLM} --top_p=0.9", 1, "top_p=0.9 top_p=1.0"),
    (TRAIN, f"{VLLM} --top_p=1.0 --temperature=3.0", 1, "temperature=3.0 0.01"),
    (TRAIN, f"{VLLM} --top_p=1.0 --environment=Guess --reward_functions=environment", 1, "sampler='vllm' environment"),
    (REPORT, "", 2, "seeds FOLDER"),
    (REPORT, "seeds --picture=a.png", 2, "seeds FOLDER"),
    (REPORT, "seeds {folder}/late --against {folder}/early --picture=a.png", 2, "--against --picture"),
    (REPORT, "html {folder}/late --picture=a.png", 2, "html FOLDER"),
    (REPORT, "seeds {folder}/ended --picture={out}.foo", 1, "out.foo .png"),
    (REPORT, "seeds {folder}/damaged", 1, "damaged/metrics.jsonl line 2"),
    (REPORT, "seeds {folder}/short", 1, "short finished"),
    (REPORT, "seeds {folder}/plain", 1, "plain/config.json"),
    (REPORT, "seeds {folder}/late --against", 2, "--against FOLDER"),
    (REPORT, "seeds --against {folder}/late", 1, "7 seeds"),
    (REPORT, "seeds {folder}/late --against {folder}/early", 1, "5 9 step"),
    (REPORT, "seeds {folder}/late {folder}/early --against {folder}/late", 1, "early seed 7"),
    (REPORT, "seeds {folder}/late --against {folder}/odd_end", 1, "odd_end/config.json starts delete"),
    (REPORT, "seeds {folder}/late --agains {folder}/late", 2, "--against FOLDER"),
    *((REPORT, f"{kind} {{folder}}/{name}", 1, f"{name}/{words} delete") for kind in ("html", "seeds")
      for name, words in (("stepless", "metrics.jsonl 2 step"), ("worded", "metrics.jsonl 1 step"),
                          ("texts", "metrics.jsonl 0 eval/x number"))),
    (REPORT, "html {folder}/started", 1, "started/config.json starts delete"),
    (REPORT, "html {folder}/odd_end", 1, "odd_end/config.json starts delete"),
    (REPORT, "html {folder}/odd_settings", 1, "odd_settings/config.json starts delete"),
    *((REPORT, f"html {{folder}}/{name}", 1, f"{name}/samples.jsonl 0 delete")
      for name in ("sampled", "unsampled", "valued", "turned_0", "turned_1", "turned_2")),
    (CHECK_LOSS, "{out}.py:loss", 1, "out.py"),
    (CHECK_LOSS, "{losses.py}:other", 2, "losses.py:other FUNCTION"),
    (CHECK_LOSS, "{losses.py}:loss", 1, "losses.py line 1 scalar"),
    (CHECK_LOSS, "{losses.py}:broken", 1, "losses.py line 5 los"),
    (CHECK_LOSS, "{losses.py}:loss --objective=dro --clip_low=0.2", 2, "dro --clip_low"),
    ("bench/gpu.py", "--mini=True", 2, "PART machine scratch"),
    ("bench/gpu.py", "machine speed --mini=True", 2, "PART machine scratch"),
    ("bench/gpu.py", "training --shapes=9B", 1, "shapes= 9B 0.5B"),
    ("bench/gpu.py", "machine --mini=True --out={out}/none/found.jsonl", 1, "none/found.jsonl"),
    ("bench/bench.py", "peer --cases=T_mixed --batching=True", 1, "batching=True cases='T_mixed'"),
]

# Variables of torchrun that are set by hand: (variables, words)
RANKS = [({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 torchrun"), ({"RANK": "x"}, "RANK='x' torchrun"),
         ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 RANK LOCAL_RANK MASTER_ADDR MASTER_PORT torchrun"),
         ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE=2 MASTER_ADDR torchrun"),
         ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK=5 WORLD_SIZE=2 torchrun"), ({"RANK": "1"}, "RANK=1 WORLD_SIZE=1"),
         ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1' torchrun"), ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK='1.5' torchrun"),
         ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"},
          "MASTER_PORT='x' torchrun"),
         ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
          "MASTER_PORT=99999 torchrun")]

# Bugs: (script, arguments, the function of ours in whose place stands one with a bug)
BUGS = [
    (PRETRAIN, LEARN, "core.config.checked"),
    (PRETRAIN, f"{LEARN} --max_iters=1", "core.supervised.config.PretrainConfig.shape"),
    (TRAIN, f"{FILL} --masks={{'random':1.0}} --max_iters=1", "core.data.in_lines"),
    (TRAIN, SUMS, "core.tokenizer.CharTokenizer"),
    (TRAIN, f"{SUMS} --generator_checkpoint={{llama}}", "core.huggingface.tokenizer.ids_around"),
    (TRAIN, RECORDS % ("task", "countdown"), "grpo.reward_functions.verify_math.number"),
    (TRAIN, f"{SUMS} --reward_functions=json_valid --max_iters=1", "grpo.reward_functions.text.parses"),
    (TRAIN, f"{EPISODES}Ends --max_iters=1", "grpo.environments.answer_and_reward"),
    (TRAIN, f"{SUMS} --max_iters=1", "grpo.losses.centred"),
    (TRAIN, f"{SUMS} --max_iters=1", "core.checkpoint_manager.shapes"),
    (SAMPLE, "--checkpoint={generator} --text=a_b", "core.models.check_finite"),
    (REPORT, "html {folder}/plain", "grpo.report.page.is_flat"),
]

ROWS = [*SETTINGS, *DATA_AND_MODELS, *ALGORITHM, *HUGGINGFACE, *REWARDS, *SAMPLERS_AND_TOOLS]
