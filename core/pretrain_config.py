"""Every setting of supervised training: a generator, a judge, or a language model."""

from dataclasses import dataclass

from core.masking import MASKS
from core.model import JUDGE_HEADS, MASKED_FILL, MODES


@dataclass(frozen=True)
class PretrainConfig:
    """The settings of core/pretrain.py with their defaults; values that cannot work are refused."""

    # data
    dataset: str = "char_diffusion"        # a folder under data/, or a folder of your own
    block_size: int = 128                  # tokens per window
    mask_random: float = 1.0               # weights of the ways to hide tokens (core/masking.py)
    mask_span: float = 1.0
    mask_line: float = 0.0
    mask_low: float = 0.1                  # the hidden share of a window is drawn between these
    mask_high: float = 0.6
    # model
    mode: str = MASKED_FILL                # language_model, masked_fill or sequence_scorer
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0
    tied: bool = True                      # one matrix for reading and writing tokens
    init_from: str | None = None           # start from this checkpoint's weights; a judge takes any trunk of its size
    init_recipe: str | None = None         # the config that builds init_from if it is missing
    # judge (mode='sequence_scorer')
    judge_head: str = "realness"           # per position: is this the true token? or "cls": regress the replaced share
    fill_checkpoints: tuple = ()           # generators whose fills the judge learns from, each equally often
    fill_temperature_low: float = 0.7      # each text is filled at a temperature drawn between these
    fill_temperature_high: float = 1.0
    clean_share: float = 0.1               # texts shown as they are
    # training
    batch_size: int = 64                   # windows per micro-batch and rank
    gradient_accumulation_steps: int = 1
    max_iters: int = 2000
    optimizer: str = "muon"                # for the matrices; "adamw" for everything
    learning_rate: float = 3e-3
    min_lr: float = 1e-4
    warmup_iters: int = 50
    lr_decay_iters: int | None = None      # None: max_iters
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    max_bad_steps: int = 10                # non-finite steps in a row before the run stops
    # evaluation, logging, checkpoints
    log_interval: int = 50
    eval_interval: int = 500
    eval_batches: int = 8
    save_interval: int = 500
    keep_checkpoints: int = 0              # numbered models to keep beside the latest
    out_dir: str = "out-pretrain"
    export: str | None = None              # where the final model is also written, in float16, to be shipped or used
    resume: bool = False                   # go on from out_dir/state.pt, bit for bit
    seed: int = 1337
    # system
    device: str = "auto"
    dtype: str = "auto"                    # float32, bfloat16; auto: bfloat16 on CUDA
    compile: bool = False                  # torch.compile
    wandb_log: bool = False
    wandb_project: str = "nano-grpo"
    wandb_run_name: str | None = None

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is not one of {', '.join(MODES)}")
        if self.judge_head not in JUDGE_HEADS:
            raise ValueError(f"judge_head={self.judge_head!r} is not one of {', '.join(JUDGE_HEADS)}")
        check_masks(self)
        for key in ("block_size", "batch_size", "gradient_accumulation_steps", "max_iters", "eval_batches",
                    "log_interval", "eval_interval", "save_interval", "n_layer", "n_head", "n_embd", "max_bad_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    @property
    def masks(self):
        return mask_weights(self)


def mask_weights(config):
    """{way to mask: weight}, of those that have one."""
    return {name: weight for name in MASKS if (weight := getattr(config, f"mask_{name}")) > 0}


def check_masks(config):
    """Raises ValueError unless the mask settings can hide something."""
    if not 0 < config.mask_low <= config.mask_high <= 1:
        raise ValueError(f"mask_low={config.mask_low} and mask_high={config.mask_high} must be 0 < low <= high <= 1: "
                         "a batch without masks has nothing to fill in")
    if not mask_weights(config):
        raise ValueError("mask_random, mask_span and mask_line are all 0: a batch without masks has nothing to fill in")
