"""Every setting of GRPO training, in the order of the data flow."""

import os
from dataclasses import dataclass, replace

from core.config import RunConfig
from core.fill_in_passes import UNMASK_ORDERS
from core.huggingface.settings import LoraConfig
from core.masking import MaskConfig
from core.performance.sharding import check_parallel
from core.settings.ranges import check_choices, check_ranges
from grpo.advantages import ADVANTAGES
from grpo.environments import EnvironmentConfig, check_environment
from grpo.kl import KL_ESTIMATORS, REFERENCES
from grpo.objectives import AVERAGES, OBJECTIVES, RATIOS, SURROGATES, baseline_of
from grpo.policies.fill_views import AS_DRAWN, FILL_ESTIMATORS, READ_PASSES
from grpo.reward_functions.settings import RewardConfig
from grpo.samplers.settings import SamplerConfig, check_sampler
from grpo.sandbox.settings import SandboxConfig

CHOICES = {"objective": OBJECTIVES, "advantage": ADVANTAGES, "reference_mode": REFERENCES,
           "kl_estimator": ("exact", *KL_ESTIMATORS), "zero_std": ("keep", "drop", "resample"),
           "fill_estimator": FILL_ESTIMATORS, "unmask_order": UNMASK_ORDERS}
ROW = {"advantage": ADVANTAGES, "average": AVERAGES, "ratio": RATIOS, "surrogate": SURROGATES}  # of OBJECTIVES
RANGES = {
    "max_new_tokens": "[1, 1e6]",
    "batch_size": "[1, 1e6]", "group_size": "[1, 1e5]", "temperature": "[1e-6, 1e3]", "top_p": "(0, 1]",
    "top_k": "[0, 1e9]", "min_p": "[0, 1)", "unmask_steps": "[1, 1e6]", "block_length": "[1, 1e6]",
    "passes_read": "[1, 1e6]",
    "credit_window": "[0, 1e9]", "distill_beta": "(0, 1e6]", "kl_beta": "[0, 1e6]", "kl_target": "(0, 1e6]",
    "entropy_bonus": "[0, 1e6]", "overlong_buffer": "[0, 1e6]",
    "clip_low": "[0, 1e9]", "clip_high": "[0, 1e9]",
    "ema_alpha": "[0, 1]", "reference_update_freq": "[1, 1e12]",
    "ppo_epochs": "[1, 1e6]", "minibatches": "[1, 1e6]", "micro_batch_tokens": "[1, 1e12]",
    "eval_problems": "[1, 1e6]", "eval_completions": "[2, 1e5]", "pass_k": "[1, 1e5]", "sample_interval": "[1, 1e12]"}
TEACHER_NEEDS = {"kl_beta": 0.0, "kl_target": None, "reference_checkpoint": None, "reference_mode": "static"}
ROOMS = (RunConfig, MaskConfig, LoraConfig, SamplerConfig, RewardConfig, SandboxConfig, EnvironmentConfig)


@dataclass(frozen=True)
class GRPOConfig(RunConfig, MaskConfig, LoraConfig, SamplerConfig, RewardConfig, SandboxConfig, EnvironmentConfig):
    """The settings of grpo/train_grpo.py and their defaults; those shared with pretraining are in RunConfig."""

    # prompts
    response_prefix: str = ""                 # the text that every answer begins with
    max_new_tokens: int = 128                 # tokens of a completion, at most
    stop_sequences: tuple[str, ...] = ()      # texts that end a completion, besides the end tokens
    # models
    generator_checkpoint: str | None = None   # the model that is trained: a file of this project, a
                                              # folder in Hugging Face format, or hf:owner/name
    reference_checkpoint: str | None = None   # the model that the KL penalty is to; None: the generator at step 0
    teacher_checkpoint: str | None = None     # the model that teaches the generator (on-policy distillation): the KL is
                                              # to it, and the rewards are those of reward_functions, or none
    judge_checkpoint: str | None = None       # the model that gives the reward judge
    gold_judge_checkpoint: str | None = None  # a second judge: logged, never trained against
    reward_model_checkpoint: str | None = None  # the Hugging Face classifier that gives the reward reward_model
    # sampling
    batch_size: int = 16                      # distinct problems per micro-batch and rank
    group_size: int = 8                       # completions per problem; 1 only if a teacher alone teaches
    temperature: float = 0.8                  # of sampling and of scoring
    top_p: float = 0.95                       # sample from the likeliest tokens of this total probability; 1.0: all
    top_k: int = 0                            # sample from the top_k likeliest tokens; 0: all
    min_p: float = 0.0                        # sample from tokens at least this many times as likely as the likeliest
    unmask_steps: int = 1                     # fill-in: passes in which masked tokens are sampled, in random order; of
                                              # prompts, the passes of each block
    block_length: int | None = None           # prompts in any order: masked places of a block; None: one block
    unmask_order: str = "random"              # ... order in a block: random, left_to_right, or confidence, the
                                              # likeliest first, for which log-probabilities are estimates
    fill_estimator: str = "trajectory"        # fill-in: estimator of log-probabilities (grpo/policies/fill_views.py)
    passes_read: int = 2                      # passes of a completion that agrpo and step_merge read
    # objective
    objective: str = "grpo"                   # a row of OBJECTIVES (grpo/objectives.py)
    advantage: str | None = None              # a name in ADVANTAGES (grpo/advantages.py); None: the objective's own,
                                              # with train_pass_k leave_one_out, with reward_normalisation batch_std
    credit_window: int | None = None          # a token's reward is the judge's score of the text at most this many
                                              # positions away; None: of the whole text
    distill_beta: float = 1.0                 # weight of the KL to the teacher
    kl_beta: float = 0.1                      # weight of the KL penalty to the reference
    kl_estimator: str | None = None           # exact (over the vocabulary), k2, k3; None: exact for fill-in and with a
                                              # teacher, else k3
    kl_in_reward: bool = False                # KL as a part of the reward (k1) instead of the loss
    kl_target: float | None = None            # kl_beta is adapted to reach this mean_kl; None: kl_beta stays
    entropy_bonus: float = 0.0                # weight of the entropy, which the loss then raises
    mask_truncated: bool = False              # leave completions that ran out of max_new_tokens out of the loss
    overlong_buffer: int = 0                  # tokens before max_new_tokens in which length costs up to 1 of the
                                              # reward; 0: none
    zero_std: str = "keep"                    # groups of equal rewards: keep, drop, or resample other problems
    clip_low: float | None = None             # the ratio is at least 1 - clip_low; None: the objective's own
    clip_high: float | None = None            # the ratio is at most 1 + clip_high; None: the objective's own
    # reference
    reference_mode: str = "static"            # none, static, ema, periodic
    ema_alpha: float = 0.99                   # ema: share of the reference that stays after each iteration
    reference_update_freq: int = 500          # periodic: iterations between two copies of the policy
    ref_offload: bool = False                 # keep the reference on the CPU while it is not used
    # optimization
    ppo_epochs: int = 1                       # passes over each iteration's rollouts
    minibatches: int = 1                      # optimizer steps in each of these passes
    micro_batch_tokens: int | None = None     # tokens read at a time in training and by the reference, of problems of
                                              # like size, at least one problem with its group; None: batch_size
                                              # problems at a time
    grad_checkpoint: bool = False             # activations are computed again in the backward pass: less memory, slower
    max_iters: int = 200                      # optimizer steps of the run; 0: it evaluates and ends
    optimizer: str = "adamw"                  # "adamw"; "muon": Muon for the matrices of the blocks, AdamW for the rest
    learning_rate: float = 1e-5
    warmup_iters: int = 10
    max_bad_steps: int = 5
    # evaluation, logging, checkpoints
    eval_problems: int = 128                  # fixed validation texts or prompts
    eval_completions: int = 4                 # completions of each, at least 2
    pass_k: int = 4                           # of prompts: pass@k, for a k of at most eval_completions
    log_interval: int = 10
    eval_interval: int = 50
    sample_interval: int = 50                 # steps between two sets of samples for people to read
    save_interval: int = 50
    out_dir: str = "out-grpo"
    dry_run: bool = False                     # check what is there, print the plan, train nothing
    doctor: bool = False                      # take one step, say what is wrong and what to change; write no out_dir
    # system
    parallel: str = "ddp"                     # several processes: ddp, each has the whole models; fsdp, each a part of
                                              # their weights (docs/scaling.md)

    def __post_init__(self):
        if self.kl_estimator == "k1":
            raise ValueError("kl_estimator='k1' is refused: the gradient of mean(logp - ref_logp) does not contain the "
                             "reference; use kl_estimator='exact' or 'k3', or kl_in_reward=True, where k1 belongs")
        for room in ROOMS:
            room.__post_init__(self)
        check_ranges(self, RANGES)
        check_choices(self, CHOICES)
        self.check_base("generator_checkpoint")
        check_sizes(self)
        check_objective(self)
        check_teacher(self)
        check_reference(self)
        check_files(self)
        check_sampler(self)
        check_environment(self)
        check_parallel(self)
        if not all(self.stop_sequences):
            raise ValueError(f"stop_sequences={self.stop_sequences!r} must be texts that are not empty")

    @property
    def scores_as_drawn(self):
        """True if training scores tokens in the texts that they were drawn from; else it has estimates."""
        return self.fill_estimator in AS_DRAWN

    def for_evaluation(self, seed):
        """The settings with which evaluations sample, whatever trains."""
        return replace(self, group_size=self.eval_completions, fill_estimator="trajectory",
                       passes_read=GRPOConfig.passes_read, train_pass_k=1, seed=seed)


def check_sizes(c):
    """Raises ValueError if a number does not fit another one."""
    if c.max_iters == 0 and c.resume:
        raise ValueError(f"max_iters=0 evaluates a model, and resume={c.resume} has nothing to go on with; leave "
                         "resume out, and name the model with generator_checkpoint")
    if c.train_pass_k > c.group_size:
        raise ValueError(f"train_pass_k={c.train_pass_k} must be 1 to group_size={c.group_size}")
    if c.minibatches > c.batch_size * c.gradient_accumulation_steps:
        raise ValueError(f"minibatches={c.minibatches} is more than the problems of an iteration, batch_size * "
                         f"gradient_accumulation_steps={c.batch_size * c.gradient_accumulation_steps}")
    if c.overlong_buffer and c.overlong_buffer >= c.max_new_tokens:
        raise ValueError(f"overlong_buffer={c.overlong_buffer} must be less than max_new_tokens={c.max_new_tokens}")


def check_objective(c):
    """Raises ValueError if parts of the loss contradict each other."""
    row, baseline = OBJECTIVES[c.objective], baseline_of(c)
    check_choices(row, ROW)
    if c.train_pass_k > 1 and baseline != "leave_one_out":
        raise ValueError(f"train_pass_k={c.train_pass_k} is the gradient of pass@k only with leave-one-out advantages, "
                         f"not with advantage={c.advantage!r}; set advantage='leave_one_out'")
    for key, off in (("kl_in_reward", False), ("overlong_buffer", 0)):
        if c.train_pass_k > 1 and getattr(c, key) != off:
            raise ValueError(f"train_pass_k={c.train_pass_k} multiplies advantages by a factor that is meant for "
                             f"success, and would multiply the penalty of {key} too; set {key}={off}")
    if c.train_pass_k > 1 and c.credit_window is not None:
        raise ValueError(f"train_pass_k={c.train_pass_k} weights whole completions, credit_window={c.credit_window} "
                         "parts of them; set credit_window=None")
    for key, off in (("kl_in_reward", False), ("overlong_buffer", 0), ("credit_window", None),
                     ("reward_normalisation", "none")):
        if baseline == "max_rl" and getattr(c, key) != off:
            raise ValueError(f"advantage='max_rl' divides by the share of a group's completions that are right, and "
                             f"{key} changes the rewards that tell it; set {key}={off!r}")
    if baseline == "step" and c.zero_std != "keep":
        raise ValueError(f"zero_std={c.zero_std!r} leaves out groups of equal rewards, but with the baseline of the "
                         f"whole step (advantage='step', objective={c.objective!r}) they teach too; set "
                         "zero_std='keep'")
    if c.kl_in_reward and c.zero_std != "keep":
        raise ValueError(f"zero_std={c.zero_std!r} leaves out groups of equal rewards, and with them the KL that "
                         "kl_in_reward puts into their rewards; set zero_std='keep'")
    if c.unmask_order == "confidence" and (c.kl_in_reward or c.ratio_to == "sampler"):
        raise ValueError("unmask_order='confidence' leaves out the probability of its order, which kl_in_reward "
                         "and ratio_to='sampler' need; set unmask_order='random'")
    if c.reward_normalisation == "group" and baseline == "group_std":
        raise ValueError("reward_normalisation='group' with advantage='group_std' would divide by the group's standard "
                         "deviation twice; leave advantage out")
    if c.fill_estimator != "trajectory" and (c.top_p, c.top_k, c.min_p) != (1.0, 0, 0.0):
        raise ValueError(f"fill_estimator={c.fill_estimator!r} scores the whole distribution, not the part of it "
                         "that top_p, top_k and min_p sample from; set top_p=1.0, top_k=0, min_p=0.0")
    if c.passes_read != GRPOConfig.passes_read and c.fill_estimator not in READ_PASSES:
        raise ValueError(f"passes_read={c.passes_read} is for fill_estimator={' and '.join(map(repr, READ_PASSES))}, "
                         f"not for {c.fill_estimator!r}")
    if c.fill_estimator != "trajectory" and c.kl_in_reward:
        raise ValueError("kl_in_reward needs the log-probability of the tokens as they were sampled: use "
                         "fill_estimator='trajectory'")
    if c.kl_estimator == "exact" and c.kl_in_reward:
        raise ValueError("kl_estimator='exact' is a sum over the vocabulary, not over samples; with kl_in_reward use "
                         "kl_estimator='k3'")


def check_files(c):
    """Raises ValueError if a model that is read again, by Ray's workers or in a resumed run, lies in out_dir."""
    keys = ["teacher_checkpoint"]
    if c.sampler == "ray":
        keys += ["generator_checkpoint", "judge_checkpoint"]
    for key in keys:
        path = getattr(c, key) and os.path.realpath(getattr(c, key))
        if path and os.path.dirname(path) == os.path.realpath(c.out_dir):
            raise ValueError(f"{key}={getattr(c, key)} is in out_dir={c.out_dir}, whose files a new run sets aside "
                             "and writes anew; move it to another folder, or choose another out_dir")


def check_teacher(c):
    """Raises ValueError if a setting contradicts the teacher, or has no effect without one."""
    if c.teacher_checkpoint is None:
        if c.distill_beta != 1.0:
            raise ValueError(f"distill_beta={c.distill_beta} has no effect without a teacher; set teacher_checkpoint")
        if c.group_size == 1:
            raise ValueError("group_size=1 leaves no other completion to compare a reward with; set group_size to 2 or "
                             "more, or teacher_checkpoint")
        return
    for key, needed in TEACHER_NEEDS.items():
        if getattr(c, key) != needed:
            raise ValueError(f"{key}={getattr(c, key)!r} is about a reference, whose place the teacher takes: set "
                             f"{key}={needed!r}; the teacher's weight is distill_beta")
    if not c.reward_functions and c.task_type != "fill_in":
        raise ValueError(f"task_type={c.task_type!r} is not used with teacher_checkpoint: name the rewards in "
                         "reward_functions, or leave both out for none")
    rewarded = c.reward_functions and (not c.reward_weights or any(c.reward_weights))
    if c.kl_in_reward and not rewarded and baseline_of(c) not in ("leave_one_out", "group_mean"):
        raise ValueError(f"advantage={baseline_of(c)!r} divides by a standard deviation, which leaves distill_beta "
                         "without effect where kl_in_reward is the only reward; set advantage='leave_one_out'")
    if not rewarded and c.zero_std != "keep":
        raise ValueError(f"zero_std={c.zero_std!r} leaves out groups of equal rewards: without rewards these are all; "
                         "set zero_std='keep'")
    if c.group_size == 1 and (rewarded or c.kl_in_reward or c.overlong_buffer):
        raise ValueError("group_size=1 leaves no other completion to compare a reward with; set group_size to 2 or "
                         "more, or no reward_functions of a weight, kl_in_reward and overlong_buffer")


def check_reference(c):
    """Raises ValueError if a setting needs a reference, but the run has none."""
    if c.reference_mode == "none" and (c.kl_beta > 0 or c.reference_checkpoint is not None):
        raise ValueError(f"reference_mode='none' leaves the KL penalty without a reference: set kl_beta=0.0 (now "
                         f"{c.kl_beta}) and reference_checkpoint=None")
    if c.has_adapter and c.reference_mode == "ema" and c.kl_beta > 0:
        raise ValueError("reference_mode='ema' averages weights, and the average of two adapters' matrices is not the "
                         "average of what they add to the weights; use reference_mode='static' or 'periodic'")
    if c.has_adapter and c.ref_offload and c.reference_checkpoint is None and c.teacher_checkpoint is None:
        raise ValueError(f"ref_offload=True has nothing to move: with {c.asked_for} the reference is the policy's own "
                         "weights without the adapter; set ref_offload=False")
    for key in ("kl_target", "kl_in_reward", "reference_checkpoint"):
        if c.kl_beta == 0 and c.teacher_checkpoint is None and getattr(c, key):
            raise ValueError(f"kl_beta=0.0 builds no reference, so {key}={getattr(c, key)!r} has no effect; set "
                             "kl_beta above 0 (with a tiny one the KL is logged and changes almost nothing)")
