"""Every setting of GRPO training, in the order of the data flow."""

from dataclasses import dataclass

from core.pretrain_config import check_masks, mask_weights
from core.prompts import TEMPLATES
from grpo.advantages import ADVANTAGES
from grpo.objectives import KL_ESTIMATORS, OBJECTIVES
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
    objective: str = "grpo"                   # a row of OBJECTIVES: grpo, dr_grpo, plain
    advantage: str | None = None              # None: the objective's own; else a name in ADVANTAGES
    credit_window: int | None = None          # a token answers for the text this near to it; None: for all of it
    kl_beta: float = 0.1                      # weight of the KL penalty to the reference
    kl_estimator: str | None = None           # exact (over the vocabulary), k2, k3; None: exact for fill-in, else k3
    mask_truncated: bool = False              # whether completions that ran out of room are left out of the loss
    clip_low: float = 0.2                     # the ratio is clipped to 1 - clip_low .. 1 + clip_high
    clip_high: float = 0.2
    # optimization
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
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size} must be at least 2: a group is compared with itself")
        if self.temperature <= 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ValueError(f"temperature={self.temperature} must be above 0, top_p={self.top_p} in (0, 1], "
                             f"top_k={self.top_k} 0 or more, min_p={self.min_p} in [0, 1)")
        for key, table in (("template", TEMPLATES), ("task_type", PRESETS)):
            if getattr(self, key) not in table:
                raise ValueError(f"{key}={getattr(self, key)!r} is not one of {', '.join(table)}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        if self.advantage is not None and self.advantage not in ADVANTAGES:
            raise ValueError(f"advantage={self.advantage!r} is not one of {', '.join(ADVANTAGES)}")
        if self.kl_estimator == "k1":
            raise ValueError("kl_estimator='k1' is refused: the gradient of mean(logp - ref_logp) does not contain the "
                             "reference; use kl_estimator='exact' or 'k3'")
        if self.kl_estimator not in (None, "exact", *KL_ESTIMATORS):
            raise ValueError(f"kl_estimator={self.kl_estimator!r} is not one of exact, {', '.join(KL_ESTIMATORS)}")
        if self.kl_beta < 0:
            raise ValueError(f"kl_beta={self.kl_beta} must not be negative")
        if not 1 <= self.train_pass_k <= self.group_size:
            raise ValueError(f"train_pass_k={self.train_pass_k} must be 1 to group_size={self.group_size}")
        advantage = self.advantage or OBJECTIVES[self.objective].advantage
        if self.train_pass_k > 1 and (advantage == "group_std" or self.credit_window is not None):
            raise ValueError(f"train_pass_k={self.train_pass_k} makes some groups count more, which advantage="
                             "'group_std' undoes and credit_window does not know; set advantage='group_mean' and "
                             "credit_window=None")
        if not all(isinstance(s, str) and s for s in self.stop_sequences):
            raise ValueError(f"stop_sequences={self.stop_sequences!r} must be texts that are not empty")
        for key in ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "eval_problems",
                    "eval_completions", "log_interval", "eval_interval", "sample_interval", "save_interval",
                    "max_bad_steps", "max_prompt_length", "max_new_tokens", "pass_k"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.credit_window is not None and self.credit_window < 0:
            raise ValueError(f"credit_window={self.credit_window} must be None, or 0 or more positions")

    @property
    def masks(self):
        return mask_weights(self)
