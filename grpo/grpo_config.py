"""Every setting of GRPO training, in the order of the data flow."""

from dataclasses import dataclass

from core.pretrain_config import check_masks, mask_weights
from grpo.advantages import ADVANTAGES
from grpo.objectives import OBJECTIVES


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
    top_p: float = 0.95
    # objective
    objective: str = "grpo"                   # a row of OBJECTIVES: grpo, dr_grpo, plain
    advantage: str | None = None              # None: the objective's own; else a name in ADVANTAGES
    credit_window: int | None = None          # a token answers for the text this near to it; None: for all of it
    kl_beta: float = 0.1                      # weight of the KL penalty to the reference
    kl_estimator: str = "exact"               # over the whole vocabulary, with its gradient
    clip_low: float = 0.2                     # the ratio is clipped to 1 - clip_low .. 1 + clip_high
    clip_high: float = 0.2
    # optimization
    gradient_accumulation_steps: int = 1
    max_iters: int = 200
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
    eval_problems: int = 128                  # fixed validation texts
    eval_completions: int = 4                 # ... completed this often each
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
        if self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature={self.temperature} must be above 0 and top_p={self.top_p} in (0, 1]")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        if self.advantage is not None and self.advantage not in ADVANTAGES:
            raise ValueError(f"advantage={self.advantage!r} is not one of {', '.join(ADVANTAGES)}")
        if self.kl_estimator == "k1":
            raise ValueError("kl_estimator='k1' is refused: the gradient of mean(logp - ref_logp) does not contain the "
                             "reference; use kl_estimator='exact'")
        if self.kl_estimator != "exact":
            raise ValueError(f"kl_estimator={self.kl_estimator!r}: fill-in knows the whole distribution, use 'exact'")
        if self.kl_beta < 0:
            raise ValueError(f"kl_beta={self.kl_beta} must not be negative")
        for key in ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "eval_problems",
                    "eval_completions", "log_interval", "eval_interval", "sample_interval", "save_interval",
                    "max_bad_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.credit_window is not None and self.credit_window < 0:
            raise ValueError(f"credit_window={self.credit_window} must be None, or 0 or more positions")

    @property
    def masks(self):
        return mask_weights(self)

    @property
    def optimizer(self):
        return "adamw"
