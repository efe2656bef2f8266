"""The settings of grpo/train_grpo.py, in the order of the data flow, and the rules about several of them.

A new setting is a line of GRPOConfig, with its comment after it or in indented lines right below it. If it has an
effect only with another setting, `features` names it too; if it excludes another setting, a row of
`conflicts_of_...` does.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from core.config import OF_CHAT_TEMPLATE, OF_TOKENIZER, PROMPT_TEMPLATES, READ_AGAIN, RunConfig
from core.files import lies_in
from core.fill_in import UNMASK_ORDERS, check_order, depends_on_policy
from core.settings.setting import (
    Count, Fraction, Name, Natural, NotNegative, Positive, Share, Steps, Temperature, check_value)
from grpo.losses import (
    ADVANTAGES, AVERAGES, KL_ESTIMATORS, OBJECTIVES, RATIOS, SURROGATES, check_estimator, check_row)
from grpo.reference import REFERENCE_MODES
from grpo.reward_functions.presets import PRESET_TEMPLATE, PRESETS

TABLES_OF_A_ROW = {  # {field of an objective: the table that must have its value}
    "advantage": ADVANTAGES,
    "average": AVERAGES,
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "kl_estimator": KL_ESTIMATORS}
# http://host:port/path, without a name or password, which config.json would keep
ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[\w./-]*)?")


@dataclass(frozen=True)
class GRPOConfig(RunConfig):
    """The settings of grpo/train_grpo.py and their defaults."""

    # Model
    generator_checkpoint: Name | None = None
        # the model that is trained: a file of this project, a folder in Hugging Face format, or hf:owner/name
    lora_rank: Annotated[int, "[0, 1e5]"] = 0  # rank of a LoRA adapter; only the adapter is trained; 0: no adapter
    lora_init_from: Name | None = None  # the folder of an adapter to start from
    lora_alpha: Positive | None = None  # the adapter's output is scaled by lora_alpha / lora_rank; None: by 2
    lora_targets: str = "all-linear"
        # layers with an adapter: all but the output layer, or names of layers, as in q_proj,v_proj
    load_in_4bit: bool = False  # hold the weights that are not trained in 4 bits (CUDA, CPU)

    # Data
    dataset: Name = "char_diffusion"
        # a folder (a name in data/ or a path), a .jsonl, .json, .csv or .parquet file of prompts, or hf:owner/name
    template: Annotated[str | None, PROMPT_TEMPLATES] = None
        # how prompts are rendered: plain, chat, math, code, model (the tokenizer's chat template), model_math or
        # model_code (the chat template with the rules of a task); None: the template of task_type
    chat_template_kwargs: dict | None = None
        # arguments of the tokenizer's chat template, such as {'enable_thinking': False}
    system_prompt: str | None = None  # the first message of every prompt
    prompt_format: str | None = None  # the text around every prompt, as in 'Question: {prompt}'
    response_prefix: str = ""  # the text that every answer begins with
    max_prompt_length: Annotated[int | float, "[1, 1e6] or a share in (0, 1)"] = 512
        # tokens; longer training prompts are left out, validation prompts refused. Or a share such as 0.9: training
        # prompts above that percentile of their lengths are left out
    block_size: Annotated[int, "[2, 1e6]"] = 128  # tokens per text, for running text
    masks: dict | None = None
        # how text is masked: {name: weight} of random, in_lines, span, line or your @mask functions; None: random and
        # span, 1.0 each
    mask_low: Share = 0.2  # smallest masked share of a text; drawn for each text
    mask_high: Share = 0.5  # largest masked share of a text

    # Rewards: python grpo/rewards.py lists them
    task_type: Annotated[str, PRESETS] = "fill_in"
        # a preset of rewards: fill_in (the judge), math, code, general, reasoning; math, code and reasoning have a
        # template too
    reward_functions: tuple[str, ...] = ()  # names of rewards; (): the rewards of task_type
    reward_file: Name | None = None
        # your Python file of reward functions (as in TRL), @environment classes, @mask functions
    reward_weights: tuple[float, ...] = ()  # one for each reward; (): all 1.0
    reward_settings: dict | None = None  # {keyword-only parameter of a reward: value}, such as {'length_max': 80}
    success_reward: Name | None = None
        # a completion is correct if this reward is at its maximum; None: the preset's, or the first
    reward_workers: Annotated[int, "[0, 1e3]"] = 2
        # processes for slow rewards, such as code execution; 0: the training process, without a timeout
    slow_rewards: tuple[str, ...] = ()
        # rewards that run in reward_workers although they lack @reward(slow=True), such as functions written for TRL
    reward_timeout: Annotated[float, "(0, 1e6]"] = 30.0
        # seconds for the slow rewards of a step, after which they are skipped, and for each method of an environment
    reward_model_checkpoint: Name | None = None  # the Hugging Face classifier that gives the reward reward_model
    judge_checkpoint: Name | None = None  # the model of the reward `judge`
    gold_judge_checkpoint: Name | None = None  # a second judge: logged, never trained against
    credit_window: Natural | None = None
        # per-token reward: mean judge score within this window; None: one reward per completion
    overlong_buffer: Natural = 0  # over the last N tokens before max_new_tokens the reward falls by up to 1; 0: off
    environment: Name | None = None  # the class of reward_file that answers each turn of a completion (docs/rewards.md)
    max_turns: Count = 8  # maximum number of turns in an episode

    # Sampling: problems, and a group of completions of each
    batch_size: Count = 16  # problems per micro-batch on each rank
    group_size: Annotated[int, "[1, 1e5]"] = 8  # completions per problem; 1 is allowed only for pure distillation
    max_new_tokens: Count = 128  # maximum number of tokens in a completion
    stop_sequences: tuple[str, ...] = ()  # texts that end a completion, besides the end tokens
    temperature: Temperature = 0.8  # sampling temperature; scoring uses the same
    top_p: Share = 0.95  # nucleus sampling; 1.0 turns it off
    top_k: Natural = 0  # sample from the k most likely tokens; 0 turns it off
    min_p: Fraction = 0.0  # min-p: drop tokens below min_p times the top probability
    sample_rows: Annotated[int, "[1, 1e9]"] | None = None
        # completions sampled in parallel; None: one batch on a CPU, all of an iteration on a GPU
    unmask_steps: Count = 1  # masked-fill models: number of denoising passes (per block, for prompts)
    block_length: Count | None = None  # prompts: block length for semi-autoregressive decoding; None: one block
    unmask_order: Annotated[str, UNMASK_ORDERS] = "random"
        # prompts: random, left_to_right, or confidence (its log-probabilities are estimates)
    fill_estimator: Literal["trajectory", "one_step"] = "trajectory"
        # log-probabilities: trajectory (exact) or one_step (as if all tokens were drawn in one pass)
    sampler: Literal["local", "ray", "vllm"] = "local"
        # where sampling runs: local (this process), ray (worker processes), vllm (a server)
    ray_workers: Annotated[int, "[1, 1e4]"] = 1  # worker processes of each rank, which share its problems
    vllm_url: str | None = None
        # the address of the server, such as http://localhost:8000, without a password; a server's key is read from
        # VLLM_API_KEY in the environment
    max_staleness: Annotated[int, "[0, 100]"] = 0  # iterations that sampling may run ahead of training

    # The objective
    objective: Annotated[str, OBJECTIVES] = "grpo"  # the loss, such as grpo, dr_grpo, dapo (docs/algorithm.md)
    advantage: Annotated[str | None, ADVANTAGES] = None
        # how rewards are compared, such as group_std, leave_one_out or gdpo; None: the objective's own
    train_pass_k: Count = 1  # 1: maximize the mean reward; k: pass@k, so hard problems count more
    clip_low: NotNegative | None = None  # the ratio is at least 1 - clip_low; None: the objective's own
    clip_high: NotNegative | None = None  # the ratio is at most 1 + clip_high; None: the objective's own
    ratio_to: Literal["policy", "sampler"] = "policy"
        # the denominator of the ratio: the policy at the start of the iteration, or the sampler
    mask_truncated: bool = False  # leave completions that hit max_new_tokens out of the loss
    zero_std: Literal["keep", "drop", "resample"] = "keep"
        # groups with equal rewards: keep, drop, or resample (other problems)
    entropy_bonus: NotNegative = 0.0  # weight of the entropy bonus

    # The KL penalty to a reference
    kl_beta: NotNegative = 0.1  # weight of the KL penalty to the reference
    kl_estimator: Annotated[str | None, KL_ESTIMATORS] = None
        # exact (over the vocabulary), k2, k3; None: exact for fill-in and with a teacher, else k3
    kl_in_reward: bool = False  # KL as a part of the reward (k1) instead of the loss
    kl_target: Positive | None = None  # kl_beta is adapted to reach this mean_kl; None: kl_beta stays
    reference_checkpoint: Name | None = None  # the reference of the KL penalty; None: the generator at step 0
    reference_mode: Annotated[str, REFERENCE_MODES] = "static"
        # static: the initial model; ema: a moving average of the policy; periodic: a copy of it every
        # reference_update_freq iterations; none
    ema_alpha: Annotated[float, "[0, 1]"] = 0.99  # share of the reference that stays after each iteration
    reference_update_freq: Steps = 500  # iterations between two copies of the policy
    ref_offload: bool = False  # keep the reference on the CPU while it is not used

    # On-policy distillation
    teacher_checkpoint: Name | None = None  # teacher for on-policy distillation; replaces the reference
    distill_beta: Positive = 1.0  # weight of the KL to the teacher

    # Optimizer steps
    ppo_epochs: Count = 1  # passes over each iteration's completions
    minibatches: Count = 1  # optimizer steps per pass
    gradient_accumulation_steps: Count = 1  # micro-batches per optimizer step
    micro_batch_tokens: Annotated[int, "[1, 1e12]"] | None = None
        # tokens per forward pass; None: the tokens of batch_size problems
    grad_checkpoint: bool = False  # recompute activations in the backward pass: less memory, slower
    max_iters: Natural = 200  # optimizer steps of the run; 0: it evaluates and ends
    optimizer: Literal["adamw", "muon"] = "adamw"  # adamw, or muon (Muon for weight matrices, AdamW for the rest)
    learning_rate: Positive = 1e-5  # the peak learning rate
    min_lr: NotNegative | None = None  # the learning rate from lr_decay_iters on; None: a tenth of learning_rate
    warmup_iters: Natural = 10  # steps of linear warmup
    lr_decay_iters: Steps | None = None  # the step at which cosine decay ends; None: max_iters
    weight_decay: NotNegative = 0.1  # applied to matrices and embeddings only
    beta1: Fraction = 0.9  # AdamW's decay of the mean gradient
    beta2: Fraction = 0.95  # AdamW's decay of the mean squared gradient
    grad_clip: Annotated[float, "[0, inf)"] = 1.0  # largest gradient norm; 0.0 turns clipping off
    max_bad_steps: Steps = 5
        # consecutive steps with a non-finite number or no reward at all before the run stops

    # Evaluation
    eval_problems: Count = 128  # number of validation problems
    eval_completions: Annotated[int, "[2, 1e5]"] = 4  # completions per validation problem; also the k of pass@k
    eval_interval: Steps = 50  # steps between two evaluations
    sample_interval: Steps | None = None  # steps between two sets of samples for people to read; None: eval_interval
    train_samples: Natural = 0
        # training groups (of rank 0) for samples.jsonl, from the first iteration after each set of samples; 0: none

    # The run
    out_dir: Name = "out-grpo"  # the folder for all files of the run
    resume: Literal[True, False, "auto"] = False
        # True: continue from out_dir/state.pt, with the saved settings if no config file is named; auto: the same if
        # there is a state.pt
    save_interval: Steps | None = None  # steps between two checkpoints; None: eval_interval
    keep_best: Name | None = None
        # a held-out metric such as eval/gold_judge: the best model by it is also kept, as a whole run in out_dir/best,
        # which takes the space of another checkpoint. The highest wins, or the lowest of a metric such as
        # eval/truncated. Choose one that you neither train on nor report
    log_interval: Steps | None = None  # steps between two console lines; None: a tenth of eval_interval
    report_to: tuple[str, ...] = ()  # trackers: wandb, tensorboard, trackio
    wandb_log: bool = False  # the same as wandb in report_to
    wandb_project: str = "nano-grpo"  # the project of the run in wandb and trackio
    wandb_run_name: str | None = None  # the run's name in wandb and trackio; None: they choose one
    dry_run: bool = False  # check what is there and print the plan; train nothing
    doctor: bool = False  # take a step; report problems, remedies, time and memory; write nothing
    seed: Annotated[int, "[0, 1e18]"] = 1337  # of data order, sampling and new weights
    device: str = "auto"  # auto (cuda, else mps for Hugging Face models, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        # float32 or bfloat16; auto: bfloat16 on GPUs that support it
    compile: bool = False  # torch.compile of the layers: a minute or two at the start, then faster; for long runs
    parallel: Literal["ddp", "fsdp"] = "ddp"
        # several processes: ddp (each holds whole models) or fsdp (each holds a shard)

    def features(self):
        yield from super().features()
        yield (self.template in OF_TOKENIZER or self.task_type in PRESET_TEMPLATE, OF_CHAT_TEMPLATE,
               "chat_template_kwargs")
        yield (self.reward_functions or self.task_type != "fill_in",
               "reward_functions or a task_type other than fill_in",
               "reward_weights reward_settings success_reward train_pass_k reward_workers reward_timeout slow_rewards")
        yield self.reward_workers > 0, "reward_workers above 0", "slow_rewards"
        yield "reward_model" in self.reward_functions, "'reward_model' in reward_functions", "reward_model_checkpoint"
        yield self.judge_checkpoint is not None, "judge_checkpoint", "gold_judge_checkpoint credit_window"
        yield self.environment is not None, "environment", "max_turns"
        yield (self.unmask_steps > 1 or self.block_length is not None, "unmask_steps above 1 or block_length",
               "unmask_order")
        yield self.sampler == "ray", "sampler='ray'", "ray_workers"
        yield self.sampler == "vllm", "sampler='vllm'", "vllm_url"
        has_kl = self.kl_beta or self.teacher_checkpoint is not None
        yield has_kl, "kl_beta above 0 or teacher_checkpoint", "kl_estimator kl_in_reward ref_offload"
        yield has_kl, "kl_beta above 0", "kl_target reference_checkpoint"  # a conflict with a teacher, below
        yield self.reference_mode == "ema", "reference_mode='ema'", "ema_alpha"
        yield self.reference_mode == "periodic", "reference_mode='periodic'", "reference_update_freq"
        yield self.teacher_checkpoint is not None, "teacher_checkpoint", "distill_beta"

    def conflicts(self):
        yield from super().conflicts()
        yield from conflicts_of_sampling(self)
        yield from conflicts_of_the_kl(self)
        yield from conflicts_of_rewards(self)
        yield from conflicts_of_steps(self)

    def __post_init__(self, origin):
        if self.objective not in OBJECTIVES:
            for name in OBJECTIVES:
                if name.lower() == str(self.objective).lower():
                    vars(self)["objective"] = name
        # A config file may have added the row. Conflicts read it, so it is checked before them
        if self.objective in OBJECTIVES:
            row = vars(OBJECTIVES[self.objective])
            for key, table in TABLES_OF_A_ROW.items():
                check_value(key, row[key], table, f"the row of objective={self.objective!r}")
        super().__post_init__(origin)
        if self.sample_interval is None:
            vars(self)["sample_interval"] = self.eval_interval
        check_row(self.objective)
        check_order(self.unmask_order)
        check_estimator(self.objective_row.kl_estimator or "k3")

    @property
    def problems(self):
        """Distinct problems per iteration and rank."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def steps_of_an_iteration(self):
        return self.ppo_epochs * self.minibatches

    def evaluations(self, steps):
        both = math.lcm(self.eval_interval, self.sample_interval)
        return super().evaluations(steps) + steps // self.sample_interval - steps // both

    @property
    def baseline(self):
        """The name of the advantage in ADVANTAGES: from the setting, else leave_one_out for pass@k, else the
        objective's own."""
        if self.advantage is not None:
            return self.advantage
        if self.train_pass_k > 1:
            return "leave_one_out"
        return OBJECTIVES[self.objective].advantage

    @property
    def objective_row(self):
        """The objective's row of OBJECTIVES, with the settings that override parts of it."""
        given = {
            "advantage": self.baseline,
            "entropy_bonus": self.entropy_bonus}
        for key in ("clip_low", "clip_high", "kl_estimator"):
            value = vars(self)[key]
            if value is not None:
                given[key] = value
        return replace(OBJECTIVES[self.objective], **given)

    @property
    def kl_weight(self):
        """The weight of the KL: distill_beta if it is to a teacher, else kl_beta."""
        if self.teacher_checkpoint is not None:
            return self.distill_beta
        return self.kl_beta

    def kl_estimator_of(self, policy):
        """The kl_estimator of the settings or the objective, else the default of the run. KL in the reward needs an
        estimate from samples; a teacher teaches more with its whole distribution."""
        estimator = self.objective_row.kl_estimator
        if estimator is not None:
            return estimator
        if self.kl_in_reward:
            return "k3"
        if self.teacher_checkpoint is not None:
            return "exact"
        return policy.kl_estimator

    @property
    def reward_names(self):
        """The names of the rewards; none if only a teacher teaches."""
        if self.reward_functions or self.teacher_checkpoint is not None:
            return tuple(self.reward_functions)
        return PRESETS[self.task_type]

    @property
    def rewarded(self):
        """False if only a teacher teaches: no reward has a weight."""
        if self.teacher_checkpoint is None:
            return True
        weighted = not self.reward_weights or any(self.reward_weights)
        return bool(self.reward_functions) and weighted

    @property
    def reference_adapter(self):
        """True if the reference needs an adapter of its own: the run starts from an adapter, or the reference moves."""
        has_kl = self.kl_beta > 0 and self.reference_mode != "none"
        if not has_kl or self.reference_checkpoint is not None:
            return False
        return self.lora_init_from is not None or self.reference_mode != "static"

    def for_evaluation(self, seed):
        """Settings for sampling in evaluation."""
        rows = self.sample_rows or self.batch_size * self.group_size
        return self.varied(
            group_size=self.eval_completions,
            sample_rows=rows,
            fill_estimator="trajectory",
            seed=seed)


# Conflicts in the form of Settings.conflicts: (condition, the settings, the reason and the remedy)

def conflicts_of_sampling(c):
    """Conflicts of how completions are written, and where."""
    uses_ray = c.sampler == "ray"
    uses_vllm = c.sampler == "vllm"
    truncating = names(top_p=c.top_p < 1, top_k=c.top_k, min_p=c.min_p)
    of_samples = names(kl_in_reward=c.kl_in_reward, ratio_to=c.ratio_to == "sampler")

    generator_is_moved = lies_in(c.generator_checkpoint, c.out_dir)
    yield generator_is_moved and (c.has_adapter or uses_ray), "generator_checkpoint out_dir", READ_AGAIN
    yield uses_ray and lies_in(c.judge_checkpoint, c.out_dir), "judge_checkpoint out_dir", READ_AGAIN
    yield lies_in(c.teacher_checkpoint, c.out_dir), "teacher_checkpoint out_dir", READ_AGAIN

    yield "" in c.stop_sequences, "stop_sequences", "has a text that is empty; leave that out"
    yield (c.fill_estimator == "one_step" and (truncating or of_samples), f"fill_estimator {truncating} {of_samples}",
           "one_step estimates log-probabilities of the whole distribution, not of what was sampled; leave it out, or "
           "set top_p=1.0, top_k=0, min_p=0.0, kl_in_reward=False, ratio_to='policy'")
    yield (depends_on_policy(c.unmask_order) and of_samples, f"unmask_order {of_samples}",
           "the order depends on the policy, but log-probabilities are only of the tokens; set another order")

    yield (uses_vllm and c.vllm_url is None, "sampler",
           "needs the address of the server; set vllm_url, as in http://localhost:8000")
    yield (c.vllm_url is not None and not ADDRESS.fullmatch(c.vllm_url), "vllm_url",
           "must be an address such as http://localhost:8000, without a password; a server's key is read from "
           "VLLM_API_KEY in the environment")
    yield (uses_vllm and not 0.01 <= c.temperature <= 2, "temperature sampler",
           "a vLLM server draws at temperatures of 0.01 to 2; set one of these")
    yield (uses_vllm and truncating, f"sampler {truncating}",
           "a vLLM server does not tell which tokens could have been drawn; set top_p=1.0, top_k=0, min_p=0.0")

    has_environment = c.environment is not None
    has_its_reward = "environment" in c.reward_functions
    yield (has_its_reward and not has_environment, "reward_functions",
           "names the reward 'environment', which needs an environment; set environment to a class of reward_file")
    yield (has_environment and not has_its_reward, "environment",
           "needs its reward; add 'environment' to reward_functions")
    of_one_turn = names(overlong_buffer=c.overlong_buffer, response_prefix=c.response_prefix, sampler=uses_vllm)
    yield (has_environment and of_one_turn, f"environment {of_one_turn}",
           "an episode has answers of an environment and several of the policy, so it can have no overlong_buffer, "
           "response_prefix or vLLM server; leave them out")


def conflicts_of_rewards(c):
    """Conflicts of rewards, of the settings that change rewards, and of advantages."""
    decides = "objective" if c.advantage is None else "advantage"  # the setting that names the advantage
    has_credits = c.credit_window is not None
    changes = names(kl_in_reward=c.kl_in_reward, overlong_buffer=c.overlong_buffer)
    all_changes = names(kl_in_reward=c.kl_in_reward, overlong_buffer=c.overlong_buffer, credit_window=has_credits)

    yield (not c.rewarded and c.task_type != "fill_in", "task_type teacher_checkpoint",
           "with a teacher rewards are those of reward_functions, or none; leave task_type out")
    yield not all(map(math.isfinite, c.reward_weights)), "reward_weights", "must be finite numbers"
    yield (c.reward_weights and len(c.reward_weights) != len(c.reward_names), "reward_weights",
           f"must have a number for each reward ({', '.join(c.reward_names)}); () gives each the weight 1")

    is_single = c.group_size == 1
    yield (is_single and c.rewarded, "group_size",
           "works only with teacher_checkpoint and no rewards: a reward is compared with the others of its group; "
           "raise it")
    yield (is_single and changes, f"group_size {changes}",
           "a reward is compared with the others of its group; raise group_size")
    yield (c.overlong_buffer > c.max_new_tokens, "overlong_buffer",
           f"is more than the {c.max_new_tokens} tokens of a completion (max_new_tokens); lower it")

    has_pass_k = c.train_pass_k > 1
    yield (c.train_pass_k > c.group_size, "train_pass_k",
           f"is more than the {c.group_size} completions of a problem (group_size); lower it")
    yield (has_pass_k and c.baseline != "leave_one_out", "train_pass_k advantage",
           "the gradient of pass@k needs leave-one-out advantages; set advantage='leave_one_out'")
    yield (has_pass_k and all_changes, f"train_pass_k {all_changes}",
           "train_pass_k weights whole completions by a factor that is meant for their success; leave out what else "
           "changes the reward")
    yield (c.baseline == "max_rl" and all_changes, f"{decides} {all_changes}",
           "max_rl divides by the share of a group's completions that are correct; leave out what else changes the "
           "reward")
    yield (c.baseline == "gdpo" and has_credits, f"{decides} credit_window",
           "gdpo normalises rewards, and the credits of tokens would not be; set another advantage")

    leaves_out = c.zero_std != "keep"
    keep = "so groups of equal rewards teach too; set zero_std='keep'"
    yield (leaves_out and c.baseline == "step", f"zero_std {decides}",
           f"rewards are compared over the whole step, {keep}")
    yield (leaves_out and c.kl_in_reward, "zero_std kl_in_reward",
           f"the KL differs within a group of equal rewards, {keep}")
    yield (leaves_out and not c.rewarded, "zero_std teacher_checkpoint",
           f"the teacher teaches without rewards, {keep}")

    has_weights = tuple(c.reward_weights) not in ((), (1.0,))
    has_others = c.reward_names != ("judge",)
    beside_the_judge = names(
        reward_weights=has_weights,
        reward_functions=has_others and c.reward_functions,
        task_type=has_others and not c.reward_functions)
    yield (has_credits and beside_the_judge, f"credit_window {beside_the_judge}",
           "credit_window divides the judge's score among tokens; use it with the judge as the only reward, without "
           "weights")


def conflicts_of_the_kl(c):
    """Conflicts of the KL, its reference and the teacher."""
    decides = "objective" if c.advantage is None else "advantage"
    of_reference = names(
        kl_beta=c.kl_beta,
        kl_target=c.kl_target is not None,
        reference_checkpoint=c.reference_checkpoint is not None,
        reference_mode=c.reference_mode != "static")
    yield (c.teacher_checkpoint is not None and of_reference, f"teacher_checkpoint {of_reference}",
           "the teacher takes the place of the reference, and distill_beta that of kl_beta; set kl_beta=0.0, and leave "
           "out kl_target, reference_checkpoint and reference_mode")
    yield (c.reference_mode == "none" and c.kl_beta, "reference_mode kl_beta",
           "the KL penalty would have no reference; set kl_beta=0.0")

    estimator = c.objective_row.kl_estimator or "k3"
    divides_by_std = c.baseline not in ("leave_one_out", "group_mean")
    yield (c.kl_in_reward and KL_ESTIMATORS[estimator] is None, "kl_estimator kl_in_reward",
           "the KL in the reward is of samples; set kl_estimator='k3'")
    yield (c.kl_in_reward and not c.rewarded and divides_by_std, f"kl_in_reward teacher_checkpoint {decides}",
           "the KL is the only reward, so a division by its standard deviation would cancel distill_beta; set "
           "advantage='leave_one_out'")

    yield (c.has_adapter and c.reference_mode == "ema" and c.kl_beta, "reference_mode lora_rank lora_init_from",
           "averaging the matrices of two adapters does not average what they add to the weights; set "
           "reference_mode='periodic'")
    is_of_policy = c.reference_checkpoint is None and c.teacher_checkpoint is None
    yield (c.has_adapter and c.ref_offload and is_of_policy, "ref_offload lora_rank lora_init_from",
           "the reference is the policy's own model without the adapter, so it cannot move; set ref_offload=False")


def conflicts_of_steps(c):
    """Conflicts of the optimizer steps and the run."""
    yield (c.minibatches > c.problems, "minibatches",
           f"is more than the {c.problems} problems of an iteration (batch_size * gradient_accumulation_steps); lower "
           "it")
    yield (c.resume and c.max_iters == 0, "resume max_iters",
           "max_iters=0 evaluates a model and trains nothing; leave out one of them")
    whole = names(
        optimizer=c.optimizer == "muon",
        ref_offload=c.ref_offload,
        compile=c.compile,
        load_in_4bit=c.load_in_4bit)
    yield (c.parallel == "fsdp" and whole, f"parallel {whole}",
           "FSDP2 splits every weight, which muon, ref_offload, compile and load_in_4bit need whole; leave them out")
    bounds = names(clip_low=c.clip_low is not None, clip_high=c.clip_high is not None)
    yield (bounds and OBJECTIVES[c.objective].clip_low is None, f"{bounds} objective",
           "this objective clips nothing; leave the bound out")


def names(**is_so):
    """The names with a true value, separated by spaces."""
    return " ".join(name for name, value in is_so.items() if value)
