"""Every setting of GRPO training, in the order of the data flow."""

import os
from dataclasses import dataclass, replace

from core.config import RunConfig
from core.fill_in import UNMASK_ORDERS
from core.huggingface.settings import LoraConfig
from core.masking import MaskConfig
from core.performance.sharding import PARALLEL
from core.settings.ranges import check_choices, check_ranges
from grpo.advantages import ADVANTAGES
from grpo.environments import EnvironmentConfig
from grpo.kl import KL_ESTIMATORS, REFERENCES
from grpo.objectives import AVERAGES, OBJECTIVES, RATIOS, SURROGATES, baseline_of
from grpo.policies.fill_views import AS_DRAWN, FILL_ESTIMATORS, READ_PASSES
from grpo.reward_functions.settings import RewardConfig
from grpo.samplers.settings import SamplerConfig, check_sampler
from grpo.sandbox.settings import SandboxConfig

CHOICES = {"objective": OBJECTIVES, "parallel": PARALLEL, "advantage": ADVANTAGES, "reference_mode": REFERENCES,
           "kl_estimator": ("exact", *KL_ESTIMATORS), "zero_std": ("keep", "drop", "resample"),
           "fill_estimator": FILL_ESTIMATORS, "unmask_order": UNMASK_ORDERS}
ROW = {"advantage": ADVANTAGES, "average": AVERAGES, "ratio": RATIOS, "surrogate": SURROGATES}  # of OBJECTIVES
RANGES = {
    "max_new_tokens": "[1, 1e6]", "batch_size": "[1, 1e6]", "group_size": "[1, 1e5]", "temperature": "[1e-6, 1e3]",
    "top_p": "(0, 1]", "top_k": "[0, 1e9]", "min_p": "[0, 1)", "unmask_steps": "[1, 1e6]", "block_length": "[1, 1e6]",
    "passes_read": "[1, 1e6]", "credit_window": "[0, 1e9]", "distill_beta": "(0, 1e6]", "kl_beta": "[0, 1e6]",
    "kl_target": "(0, 1e6]", "entropy_bonus": "[0, 1e6]", "overlong_buffer": "[0, 1e6]", "clip_low": "[0, 1e9]",
    "clip_high": "[0, 1e9]", "ema_alpha": "[0, 1]", "reference_update_freq": "[1, 1e12]",
    "ppo_epochs": "[1, 1e6]", "minibatches": "[1, 1e6]", "micro_batch_tokens": "[1, 1e12]",
    "eval_problems": "[1, 1e6]", "eval_completions": "[2, 1e5]", "pass_k": "[1, 1e5]", "sample_interval": "[1, 1e12]"}


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
    dry_run: bool = False                     # print the plan, or what a run would build first; train nothing
    doctor: bool = False                      # take one step, say what is wrong and what to change; write no out_dir
    # system
    parallel: str = "ddp"                     # several processes: ddp, each has the whole models; fsdp, each a part of
                                              # their weights (docs/scaling.md)

    def __post_init__(self):
        for room in GRPOConfig.__bases__:
            room.__post_init__(self)
        check_ranges(self, RANGES)
        check_choices(self, CHOICES)
        check_choices(OBJECTIVES[self.objective], ROW)
        self.check_base("generator_checkpoint")
        check_sizes(self)
        check_together(self)
        check_files(self)
        check_sampler(self)

    @property
    def scores_as_drawn(self):
        """True if training scores tokens in the texts that they were drawn from; else it has estimates."""
        return self.fill_estimator in AS_DRAWN

    def for_evaluation(self, seed):
        """The settings with which evaluations sample, whatever trains."""
        return replace(self, group_size=self.eval_completions, fill_estimator="trajectory",
                       passes_read=GRPOConfig.passes_read, train_pass_k=1, seed=seed)


def taught_alone(c):
    """True if a teacher alone teaches: no reward has a weight."""
    weighted = c.reward_functions and (not c.reward_weights or any(c.reward_weights))
    return c.teacher_checkpoint is not None and not weighted


TOGETHER = (  # (when, what some settings then have to be, why)
    (lambda c: c.max_iters == 0, {"resume": False}, "max_iters=0 evaluates a model and trains nothing"),
    (lambda c: c.group_size == 1 and (not taught_alone(c) or c.kl_in_reward or c.overlong_buffer), {"group_size": 2},
     "a reward is compared with those of other completions; with teacher_checkpoint alone there may be one"),
    (lambda c: c.train_pass_k > 1 and baseline_of(c) != "leave_one_out", {"advantage": "leave_one_out"},
     "train_pass_k is the gradient of pass@k with leave-one-out advantages only"),
    (lambda c: c.train_pass_k > 1, {"kl_in_reward": False, "overlong_buffer": 0, "credit_window": None},
     "train_pass_k weights whole completions by a factor that is meant for their success"),
    (lambda c: baseline_of(c) == "max_rl",
     {"kl_in_reward": False, "overlong_buffer": 0, "credit_window": None, "reward_normalisation": "none"},
     "advantage='max_rl' divides by the share of a group's completions that are right"),
    (lambda c: baseline_of(c) == "step" or c.kl_in_reward or taught_alone(c), {"zero_std": "keep"},
     "with advantage='step', kl_in_reward or a teacher alone, groups of equal rewards teach too"),
    (lambda c: c.unmask_order == "confidence", {"kl_in_reward": False, "ratio_to": "policy"},
     "unmask_order='confidence' leaves out the probability of its order"),
    (lambda c: c.reward_normalisation == "group" and c.advantage == "group_std", {"advantage": None},
     "reward_normalisation='group' divides by the group's standard deviation already"),
    (lambda c: c.fill_estimator != "trajectory", {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "kl_in_reward": False},
     "fill_estimator estimates log-probabilities of the whole distribution, not of what was sampled"),
    (lambda c: c.fill_estimator not in READ_PASSES, {"passes_read": 2},
     f"passes_read is for fill_estimator={' and '.join(map(repr, READ_PASSES))}"),
    (lambda c: c.kl_in_reward and c.kl_estimator == "exact", {"kl_estimator": "k3"},
     "kl_in_reward is of samples, and kl_estimator='exact' a sum over the vocabulary"),
    (lambda c: c.parallel == "fsdp",
     {"optimizer": "adamw", "ref_offload": False, "compile": False, "load_in_4bit": False},
     "parallel='fsdp' cuts every weight, and Muon needs whole matrices"),
    (lambda c: c.environment is None, {"environment_file": None, "max_turns": 8},
     "environment_file and max_turns are for environments, and environment is not set"),
    (lambda c: c.environment is not None, {"overlong_buffer": 0, "response_prefix": ""},
     "an episode has answers of an environment and several of the policy"),
    # the reference and the teacher
    (lambda c: c.reference_mode == "none", {"kl_beta": 0.0, "reference_checkpoint": None},
     "reference_mode='none' leaves the KL penalty without a reference"),
    (lambda c: c.kl_beta == 0 and c.teacher_checkpoint is None,
     {"kl_target": None, "kl_in_reward": False, "reference_checkpoint": None},
     "kl_beta=0.0 builds no reference (with a tiny one the KL is logged and changes almost nothing)"),
    (lambda c: c.has_adapter and c.reference_mode == "ema" and c.kl_beta > 0, {"reference_mode": "periodic"},
     "the average of two adapters' matrices is not the average of what they add to the weights"),
    (lambda c: c.has_adapter and c.reference_checkpoint is None and c.teacher_checkpoint is None,
     {"ref_offload": False}, "the reference of an adapter is the policy's own weights without it"),
    (lambda c: c.teacher_checkpoint is None, {"distill_beta": 1.0}, "distill_beta is the weight of teacher_checkpoint"),
    (lambda c: c.teacher_checkpoint is not None,
     {"kl_beta": 0.0, "kl_target": None, "reference_checkpoint": None, "reference_mode": "static"},
     "the teacher takes the place of the reference, and distill_beta that of kl_beta"),
    (lambda c: c.teacher_checkpoint is not None and not c.reward_functions, {"task_type": "fill_in"},
     "with teacher_checkpoint the rewards are those of reward_functions, or none"),
    (lambda c: taught_alone(c) and c.kl_in_reward and baseline_of(c) not in ("leave_one_out", "group_mean"),
     {"advantage": "leave_one_out"}, "a standard deviation of kl_in_reward alone leaves distill_beta without effect"))


def check_together(c):
    """Raises ValueError for settings that do not go together (TOGETHER)."""
    for applies, needed, why in TOGETHER:
        for key, value in needed.items():
            if getattr(c, key) != value and applies(c):
                raise ValueError(f"{key}={getattr(c, key)!r} cannot be: {why}; set {key}={value!r}")


def check_sizes(c):
    """Raises ValueError if a setting does not fit another one."""
    problems = c.batch_size * c.gradient_accumulation_steps
    for key, most, what in (("train_pass_k", c.group_size, "group_size"),
                            ("minibatches", problems, "batch_size * gradient_accumulation_steps"),
                            ("overlong_buffer", c.max_new_tokens - 1, "max_new_tokens - 1")):
        if getattr(c, key) > most:
            raise ValueError(f"{key}={getattr(c, key)} must be at most {what}={most}")
    if not all(c.stop_sequences):
        raise ValueError(f"stop_sequences={c.stop_sequences!r} must be texts that are not empty")
    if ("environment" in c.reward_functions) != (c.environment is not None):
        raise ValueError(f"environment={c.environment!r} and reward_functions={c.reward_functions}: an environment and "
                         "the reward 'environment' go together; set both or neither")


def check_files(c):
    """Raises ValueError if a model that is read again, by Ray's workers or in a resumed run, lies in out_dir."""
    keys = ["teacher_checkpoint"]
    if c.sampler == "ray":
        keys += ["generator_checkpoint", "judge_checkpoint"]
    for key in keys:
        path = getattr(c, key) and os.path.realpath(getattr(c, key))
        if path and os.path.dirname(path) == os.path.realpath(c.out_dir):
            raise ValueError(f"{key}={getattr(c, key)} is in out_dir={c.out_dir}, whose files a new run sets aside; "
                             "move it, or choose another out_dir")
