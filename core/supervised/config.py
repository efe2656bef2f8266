"""Every setting of supervised training: a generator, a judge, or a language model."""

from dataclasses import dataclass

from core.config import RunConfig
from core.huggingface.settings import LoraConfig
from core.masking import MaskConfig
from core.model import MASKED_FILL, SEQUENCE_SCORER, GPTConfig
from core.settings.ranges import check_ranges

RANGES = {"fill_temperature_low": "[1e-6, 1e3]", "fill_temperature_high": "[1e-6, 1e3]", "clean_share": "[0, 1]",
          "eval_batches": "[1, 1e6]", "max_iters": "[1, 1e12]"}  # of PretrainConfig, besides those of its bases


@dataclass(frozen=True)
class PretrainConfig(RunConfig, MaskConfig, LoraConfig):
    """The settings of core/pretrain.py with their defaults; values that cannot work are refused."""

    # data
    mask_low: float = 0.1
    mask_high: float = 0.6
    # model
    mode: str = MASKED_FILL                # language_model, masked_fill or sequence_scorer; a Hugging Face model has
                                           # its own, and its own shape
    n_layer: int = 4                       # blocks of the transformer
    n_head: int = 4                        # attention heads of a block
    n_embd: int = 128                      # width of the hidden states; a multiple of 2 * n_head
    dropout: float = 0.0                   # while training; 0.0: none
    tied: bool = True                      # one matrix for reading and writing tokens
    init_from: str | None = None           # start from this checkpoint's weights; a judge takes any trunk of its size;
                                           # a folder in Hugging Face format, or hf:owner/name, is fine-tuned as it is
    # judge (mode='sequence_scorer')
    judge_head: str = "realness"           # per position: is this the true token? "cls": regress the replaced share of
                                           # the text
    fill_checkpoints: tuple[str, ...] = ()  # generators whose fills the judge learns from, each equally often
    fill_temperature_low: float = 0.7      # lowest temperature at which a text is filled; drawn for each text
    fill_temperature_high: float = 1.0     # highest temperature at which a text is filled
    clean_share: float = 0.1               # share of the texts that no generator has changed
    # evaluation, logging, checkpoints
    eval_batches: int = 8                  # validation batches of an evaluation
    out_dir: str = "out-pretrain"
    dry_run: bool = False                  # print the plan, or what a run would build first; train nothing
    export: str | None = None              # where the final model is also written, in float16, to be shipped or used

    def __post_init__(self):
        MaskConfig.__post_init__(self)
        RunConfig.__post_init__(self)
        LoraConfig.__post_init__(self)
        self.check_base("init_from")
        check_ranges(self, RANGES)
        self.shape()  # raises ValueError for one that cannot be
        if self.judge_head != "realness" and self.mode != SEQUENCE_SCORER:
            raise ValueError(f"judge_head={self.judge_head!r} is for new judges: set mode='sequence_scorer'")
        if self.fill_temperature_low > self.fill_temperature_high:
            raise ValueError(f"fill_temperature_low={self.fill_temperature_low} is above fill_temperature_high")

    def shape(self, vocab_size=100, base_vocab_size=97):
        """The GPTConfig of a new model."""
        longest = self.block_size + (self.mode == SEQUENCE_SCORER)  # a judge may read CLS before the text
        return GPTConfig(self.mode, vocab_size, base_vocab_size, longest, self.n_layer, self.n_head, self.n_embd,
                         self.dropout, self.tied, self.judge_head)
