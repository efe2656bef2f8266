"""Every setting of GRPO training, in the order of the data flow."""

from dataclasses import dataclass

from core.pretrain_config import check_masks, mask_weights
from core.prompts import TEMPLATES
from grpo.advantages import ADVANTAGES
from grpo.fill_views import FILL_ESTIMATORS
from grpo.objectives import KL_ESTIMATORS, OBJECTIVES
from grpo.reference import REFERENCES
from grpo.rewards import PRESETS


@dataclass(frozen=True)
class GRPOConfig:
    """The settings of grpo/train_grpo.py and their defaults."""

    # data
    dataset: str = "char_diffusion"           # a folder under data/, or a folder of your own
    dataset_recipe: str | None = None         # the prepare.py that builds the dataset if it is missing
    block_size: int = 128                     # tokens per text
    mask_random: float = 1.0                  # weights of the ways to hide tokens (core/masking.py)
    mask_span: float = 1.0
    mask_line: float = 0.0
    mask_low: float = 0.2                     # the hidden share of a text is drawn between these
    mask_high: float = 0.5
    # prompts, for a causal generator
    template: str = "plain"                   # how a prompt is put to the model: plain, chat, math, code
    system_prompt: str | None = None
    response_prefix: str = ""                 # what every answer begins with
    max_prompt_length: int = 512              # longer prompts are dropped, as those beyond the 90th percentile are
    max_new_tokens: int = 128                 # of a completion
    stop_sequences: tuple = ()                # texts that end a completion, beside the stop token
    # models
    generator_checkpoint: str | None = None   # what is trained
    generator_recipe: str | None = None       # the config that builds it if it is missing
    reference_checkpoint: str | None = None   # None: the generator at step 0
    judge_checkpoint: str | None = None       # the reward
    judge_recipe: str | None = None
    gold_judge_checkpoint: str | None = None  # a second judge: logged, never trained against
    gold_judge_recipe: str | None = None
    # sampling
    batch_size: int = 16                      # distinct problems per micro-batch and rank
    group_size: int = 8                       # completions per problem
    temperature: float = 0.8
    top_p: float = 0.95                       # the nucleus; 1.0 for all
    top_k: int = 0                            # the likeliest tokens; 0 for all
    min_p: float = 0.0                        # at least so many times as likely as the likeliest
    unmask_steps: int = 1                     # fill-in: passes in which hidden tokens are drawn, in random order
    fill_estimator: str = "trajectory"        # ... and how their log-probability is had (grpo/fill_views.py)
    shared_prompt: bool = True                # a group's prompt is read once; False repeats it, to check or compare
    # rewards: python grpo/rewards.py lists them
    task_type: str = "fill_in"                # a preset of rewards: fill_in (the judge), math, code, general, reasoning
    reward_functions: tuple = ()              # names; () takes the preset's
    reward_weights: tuple = ()                # () weighs all 1.0
    reward_file: str | None = None            # a Python file of yours that defines more with @reward
    reward_workers: int = 0                   # processes for slow rewards; 0 runs them here
    reward_timeout: float = 30.0              # seconds for a step's slow rewards in workers; what is late is skipped
    success_reward: str | None = None         # right is what gets the most of this reward; None: the preset's or first
    train_pass_k: int = 1                     # 1: be right each time; k: once in k tries, so hard problems count more
    length_min: int = 20                      # of length_penalty, in characters
    length_max: int = 500
    sandbox_seconds: float = 5.0              # of code_execution, per completion
    sandbox_megabytes: int = 256
    # objective
    objective: str = "grpo"                   # a row of OBJECTIVES (grpo/objectives.py)
    advantage: str | None = None              # None: the objective's own; else a name in ADVANTAGES
    credit_window: int | None = None          # a token answers for the text this near to it; None: for all of it
    kl_beta: float = 0.1                      # weight of the KL penalty to the reference
    kl_estimator: str | None = None           # exact (over the vocabulary), k2, k3; None: exact for fill-in, else k3
    kl_importance: bool = False               # whether k2 and k3 are weighed by the ratio to the policy that sampled
    kl_in_reward: bool = False                # KL as a part of the reward (k1) instead of the loss
    kl_target: float | None = None            # moves kl_beta towards this mean_kl; None: kl_beta stays
    entropy_bonus: float = 0.0                # weight of the entropy, which the loss then raises
    mask_truncated: bool = False              # whether completions that ran out of room are left out of the loss
    overlong_buffer: int = 0                  # the last so many of max_new_tokens cost reward; 0: none do
    overlong_penalty: float = 1.0             # ... up to this much
    zero_std: str = "keep"                    # groups of equal rewards: keep, drop, or resample other problems
    max_resamples: int = 3                    # rounds of it
    clip_low: float | None = None             # the ratio is clipped to 1 - clip_low .. 1 + clip_high;
    clip_high: float | None = None            # None: the objective's own
    clip_cap: float | None = None             # the most that an unclipped ratio counts, where the advantage is negative
    # reference
    reference_mode: str = "static"            # none, static, ema, periodic
    ema_alpha: float = 0.99                   # ema: how much of the reference stays, after each iteration
    reference_update_freq: int = 500          # periodic: iterations between two copies of the policy
    ref_offload: bool = False                 # whether the reference waits on the CPU
    # optimization
    ppo_epochs: int = 1                       # passes over each iteration's rollouts
    minibatches: int = 1                      # ... each cut into so many optimizer steps
    max_kl_to_old: float | None = None        # ends an iteration whose policy has moved so far; None: never
    grad_checkpoint: bool = False             # activations are computed again in the backward pass: less memory, slower
    gradient_accumulation_steps: int = 1
    max_iters: int = 200
    optimizer: str = "adamw"                  # or "muon" for the matrices of the blocks, AdamW for the rest
    learning_rate: float = 1e-5
    min_lr: float = 1e-6
    warmup_iters: int = 10
    lr_decay_iters: int | None = None         # None: max_iters
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    max_bad_steps: int = 5                    # non-finite steps in a row before the run stops
    # evaluation, logging, checkpoints
    eval_problems: int = 128                  # fixed validation texts or prompts
    eval_completions: int = 4                 # ... completed this often each
    pass_k: int = 4                           # causal: pass@k, for a k of at most eval_completions
    log_interval: int = 10
    eval_interval: int = 50
    sample_interval: int = 50
    save_interval: int = 50
    keep_checkpoints: int = 0                 # numbered models to keep beside the latest
    out_dir: str = "out-grpo"
    resume: bool = False                      # go on from out_dir/state.pt, bit for bit
    dry_run: bool = False                     # check everything, print the plan, train nothing
    seed: int = 1337
    # system
    device: str = "auto"
    dtype: str = "auto"                       # float32, bfloat16; auto: bfloat16 on CUDA
    compile: bool = False
    wandb_log: bool = False
    wandb_project: str = "nano-grpo"
    wandb_run_name: str | None = None

    def __post_init__(self):
        check_masks(self)
        check_choices(self)
        check_numbers(self)
        check_objective(self)
        check_reference(self)
        if not all(isinstance(s, str) and s for s in self.stop_sequences):
            raise ValueError(f"stop_sequences={self.stop_sequences!r} must be texts that are not empty")

    @property
    def masks(self):
        return mask_weights(self)


def check_choices(c):
    """Raises ValueError if a name is in no table."""
    tables = {"template": TEMPLATES, "task_type": PRESETS, "objective": OBJECTIVES, "advantage": (None, *ADVANTAGES),
              "reference_mode": REFERENCES, "fill_estimator": FILL_ESTIMATORS, "zero_std": ("keep", "drop", "resample")}
    if c.kl_estimator == "k1":
        raise ValueError("kl_estimator='k1' is refused: the gradient of mean(logp - ref_logp) does not contain the "
                         "reference; use kl_estimator='exact' or 'k3', or kl_in_reward=True, where k1 belongs")
    for key, table in (tables | {"kl_estimator": (None, "exact", *KL_ESTIMATORS)}).items():
        if getattr(c, key) not in table:
            raise ValueError(f"{key}={getattr(c, key)!r} is not one of {', '.join(name for name in table if name)}")


def check_numbers(c):
    """Raises ValueError if a number is out of its range."""
    if c.group_size < 2:
        raise ValueError(f"group_size={c.group_size} must be at least 2: a group is compared with itself")
    if c.temperature <= 0 or not 0 < c.top_p <= 1 or c.top_k < 0 or not 0 <= c.min_p < 1:
        raise ValueError(f"temperature={c.temperature} must be above 0, top_p={c.top_p} in (0, 1], "
                         f"top_k={c.top_k} 0 or more, min_p={c.min_p} in [0, 1)")
    for key in ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "eval_problems",
                "eval_completions", "log_interval", "eval_interval", "sample_interval", "save_interval",
                "max_bad_steps", "max_prompt_length", "max_new_tokens", "pass_k", "ppo_epochs", "minibatches",
                "reference_update_freq", "unmask_steps"):
        if getattr(c, key) < 1:
            raise ValueError(f"{key}={getattr(c, key)} must be at least 1")
    for key in ("seed", "kl_beta", "clip_low", "clip_high", "entropy_bonus", "overlong_buffer", "overlong_penalty",
                "max_resamples"):
        if getattr(c, key) is not None and getattr(c, key) < 0:
            raise ValueError(f"{key}={getattr(c, key)} must not be negative")
    for key in ("kl_target", "max_kl_to_old"):
        if getattr(c, key) is not None and getattr(c, key) <= 0:
            raise ValueError(f"{key}={getattr(c, key)} must be above 0, or None")
    if c.credit_window is not None and c.credit_window < 0:
        raise ValueError(f"credit_window={c.credit_window} must be None, or 0 or more positions")
    if not 1 <= c.train_pass_k <= c.group_size:
        raise ValueError(f"train_pass_k={c.train_pass_k} must be 1 to group_size={c.group_size}")
    if c.minibatches > c.batch_size * c.gradient_accumulation_steps:
        raise ValueError(f"minibatches={c.minibatches} is more than the problems of an iteration, batch_size * "
                         f"gradient_accumulation_steps={c.batch_size * c.gradient_accumulation_steps}")
    if not 0 <= c.ema_alpha <= 1:
        raise ValueError(f"ema_alpha={c.ema_alpha} must lie in 0..1")
    if c.overlong_buffer and c.overlong_buffer >= c.max_new_tokens:
        raise ValueError(f"overlong_buffer={c.overlong_buffer} must be less than max_new_tokens={c.max_new_tokens}")


def check_objective(c):
    """Raises ValueError if parts of the loss contradict each other."""
    row = OBJECTIVES[c.objective]
    advantage = c.advantage or row.advantage
    if c.train_pass_k > 1 and (advantage == "group_std" or c.credit_window is not None):
        raise ValueError(f"train_pass_k={c.train_pass_k} makes some groups count more, which advantage='group_std' "
                         "undoes and credit_window does not know; set advantage='group_mean' and credit_window=None")
    high = row.clip_high if c.clip_high is None else c.clip_high
    if c.clip_cap is not None and row.surrogate != "clip":
        raise ValueError(f"clip_cap={c.clip_cap} is not for objective={c.objective!r}, which has no unclipped branch")
    if c.clip_cap is not None and c.clip_cap <= 1 + high:
        raise ValueError(f"clip_cap={c.clip_cap} must be above 1 + clip_high={1 + high}")
    if c.fill_estimator != "trajectory" and (c.top_p, c.top_k, c.min_p) != (1.0, 0, 0.0):
        raise ValueError(f"fill_estimator={c.fill_estimator!r} does not score the distribution that was drawn from, so "
                         "what top_p, top_k and min_p keep of it means nothing here; set top_p=1.0, top_k=0, min_p=0.0")
    if c.fill_estimator != "trajectory" and c.kl_in_reward:
        raise ValueError("kl_in_reward needs the probability of what was sampled: use fill_estimator='trajectory'")
    if c.kl_estimator == "exact" and (c.kl_in_reward or c.kl_importance):
        raise ValueError("kl_estimator='exact' is a sum over the vocabulary, not over samples; with kl_in_reward or "
                         "kl_importance use kl_estimator='k3'")


def check_reference(c):
    """Raises ValueError if a setting needs a reference that there is not."""
    if c.reference_mode == "none" and (c.kl_beta > 0 or c.reference_checkpoint is not None):
        raise ValueError(f"reference_mode='none' leaves nothing to be near to: set kl_beta=0.0 (now {c.kl_beta}) and "
                         "reference_checkpoint=None")
    for key in ("kl_target", "kl_in_reward", "reference_checkpoint"):
        if c.kl_beta == 0 and getattr(c, key):
            raise ValueError(f"kl_beta=0.0 builds no reference, so {key}={getattr(c, key)!r} has nothing to do; set "
                             "kl_beta above 0 (a tiny one for a KL that is logged and hardly felt)")
