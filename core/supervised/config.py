"""Every setting of supervised training: a generator, a judge, or a language model."""

from core.config import MaskConfig, RunConfig
from core.model import JUDGE_HEADS, MASKED_FILL, MODES, SEQUENCE_SCORER, GPTConfig
from core.settings.setting import Settings, setting


class PretrainConfig(MaskConfig, RunConfig):
    """The settings of core/pretrain.py with their defaults; values that cannot work are refused."""

    rooms = RunConfig.rooms | {"core.supervised.config:JudgeTrainingConfig": f"mode={SEQUENCE_SCORER} fill_checkpoints"}

    excludes = (("max_iters=0", "", "it must be at least 1"),)

    mask_low: float = setting(0.1, "smallest masked share of a text; drawn for each text", "(0, 1]")
    mask_high: float = setting(0.6, "largest masked share of a text", "(0, 1]")
    mode: str = setting(
        MASKED_FILL, "language_model, masked_fill or sequence_scorer; a Hugging Face model has its own", MODES)
    n_layer: int = setting(4, "blocks of the transformer", "[1, 1e3]")
    n_head: int = setting(4, "attention heads of a block", "[1, 1e3]")
    n_embd: int = setting(128, "width of the hidden states; a multiple of 2 * n_head", "[2, 65536]")
    dropout: float = setting(0.0, "while training; 0.0: none", "[0, 1)")
    tied: bool = setting(True, "one matrix for reading and writing tokens")
    init_from: str | None = setting(
        None, "weights to start from; a judge takes any trunk of its size; a Hugging Face model is fine-tuned as it is")
    eval_batches: int = setting(8, "validation batches of an evaluation", "[1, 1e6]")
    out_dir: str = setting("out-pretrain", "the folder of everything that the run writes")
    dry_run: bool = setting(False, "check everything and print the plan; train nothing")
    export: str | None = setting(None, "where the final model is also written, in float16, to be shipped or used")

    def __post_init__(self):
        super().__post_init__()
        self.shape()  # raises Mistake for one that cannot be

    def shape(self, vocab_size=100, base_vocab_size=97):
        """The GPTConfig of a new model."""
        longest = self.block_size + (self.mode == SEQUENCE_SCORER)  # a judge may read CLS before the text
        return GPTConfig(self.mode, vocab_size, base_vocab_size, longest, self.n_layer, self.n_head, self.n_embd,
                         self.dropout, self.tied, self.judge_head)


class JudgeTrainingConfig(Settings):
    """The training of a judge."""

    excludes = (("fill_temperature_low>fill_temperature_high", "", "it must be at most fill_temperature_high"),)

    judge_head: str = setting(
        "realness", "per position: is this the true token? cls: regress the replaced share of the text", JUDGE_HEADS)
    fill_checkpoints: tuple[str, ...] = setting((), "generators whose fills the judge learns from, each equally often")
    fill_temperature_low: float = setting(
        0.7, "lowest temperature at which a text is filled; drawn for each text", "[1e-6, 1e3]")
    fill_temperature_high: float = setting(1.0, "highest temperature at which a text is filled", "[1e-6, 1e3]")
    clean_share: float = setting(0.1, "share of the texts that no generator has changed", "[0, 1]")
