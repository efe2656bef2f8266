"""The settings of supervised training of a generator, a judge or a language model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from core.config import OF_CHAT_TEMPLATE, OF_TOKENIZER, PROMPT_TEMPLATES, READ_AGAIN, RunConfig
from core.files import lies_in
from core.model import JUDGE_HEADS, MASKED_FILL, MODES, SEQUENCE_SCORER, GPTConfig
from core.settings.setting import Count, Fraction, Name, Natural, NotNegative, Positive, Share, Steps, Temperature


@dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """The settings of core/pretrain.py and their defaults."""

    # Model
    mode: Annotated[str, MODES] = MASKED_FILL
        # language_model, masked_fill or sequence_scorer; a Hugging Face model has its own
    n_layer: Annotated[int, "[1, 1e3]"] = 4  # blocks of the transformer
    n_head: Annotated[int, "[1, 1e3]"] = 4  # attention heads of a block
    n_embd: Annotated[int, "[2, 65536]"] = 128  # width of the hidden states; a multiple of 2 * n_head
    dropout: Fraction = 0.0  # while training; 0.0: none
    tied: bool = True  # the token embedding is also the output layer
    init_from: Name | None = None
        # the model to start from; a judge may start from any model of its size, without the output layer; a Hugging
        # Face model is fine-tuned as it is
    lora_rank: Annotated[int, "[0, 1e5]"] = 0  # rank of a LoRA adapter; only the adapter is trained; 0: no adapter
    lora_init_from: Name | None = None  # the folder of an adapter to start from
    lora_alpha: Positive | None = None  # the adapter's output is scaled by lora_alpha / lora_rank; None: by 2
    lora_targets: str = "all-linear"
        # layers with an adapter: all but the output layer, or names of layers, as in q_proj,v_proj
    load_in_4bit: bool = False  # hold the weights that are not trained in 4 bits (CUDA, CPU)

    # Data
    dataset: Name = "char_diffusion"
        # a folder (a name in data/ or a path), a .jsonl, .json, .csv or .parquet file of prompts, or hf:owner/name
    block_size: Annotated[int, "[2, 1e5]"] = 128  # tokens per text
    masks: dict | None = None
        # how text is masked: {name: weight} of random, in_lines, span, line or your @mask functions; None: random and
        # span, 1.0 each
    mask_low: Share = 0.1  # smallest masked share of a text; drawn for each text
    mask_high: Share = 0.6  # largest masked share of a text
    template: Annotated[str, PROMPT_TEMPLATES] = "plain"
        # how prompts are rendered: plain, chat, math, code, model (the tokenizer's chat template), or that with the
        # rules of a task, model_math, model_code
    chat_template_kwargs: dict | None = None
        # arguments of the tokenizer's chat template, such as {'enable_thinking': False}
    system_prompt: str | None = None  # the first message of every prompt
    prompt_format: str | None = None  # the text around every prompt, as in 'Question: {prompt}'
    max_prompt_length: Annotated[int | float, "[1, 1e6] or a share in (0, 1)"] = 512
        # tokens; longer training prompts are left out, validation prompts refused. Or a share such as 0.9: training
        # prompts above that percentile of their lengths are left out

    # Training of a judge
    judge_head: Annotated[str, JUDGE_HEADS] = "realness"
        # realness: at each position, is this the true token? cls: what share of the text was replaced?
    fill_checkpoints: tuple[str, ...] = ()  # generators whose fills the judge learns from, each equally often
    fill_temperature_low: Temperature = 0.7  # lowest temperature at which a text is filled; drawn for each text
    fill_temperature_high: Temperature = 1.0  # highest temperature at which a text is filled
    clean_share: Annotated[float, "[0, 1]"] = 0.1  # share of the texts that are left unchanged
    teacher_checkpoint: Name | None = None
        # a judge to learn from: its log-odds replace the true or false labels as targets

    # Optimizer steps
    batch_size: Count = 64  # texts per micro-batch on each rank
    gradient_accumulation_steps: Count = 1  # micro-batches per optimizer step
    max_iters: Steps = 2000  # optimizer steps of the run
    optimizer: Literal["adamw", "muon"] = "muon"  # adamw, or muon (Muon for weight matrices, AdamW for the rest)
    learning_rate: Positive = 3e-3  # the peak learning rate
    min_lr: NotNegative | None = None  # the learning rate from lr_decay_iters on; None: a tenth of learning_rate
    warmup_iters: Natural = 50  # steps of linear warmup
    lr_decay_iters: Steps | None = None  # the step at which cosine decay ends; None: max_iters
    weight_decay: NotNegative = 0.1  # applied to matrices and embeddings only
    beta1: Fraction = 0.9  # AdamW's decay of the mean gradient
    beta2: Fraction = 0.95  # AdamW's decay of the mean squared gradient
    grad_clip: Annotated[float, "[0, inf)"] = 1.0  # largest gradient norm; 0.0 turns clipping off
    max_bad_steps: Steps = 5  # consecutive steps with NaN or infinity before the run stops

    # Evaluation
    eval_batches: Count = 8  # validation batches of an evaluation
    eval_interval: Steps = 500  # steps between two evaluations

    # The run
    out_dir: Name = "out-pretrain"  # the folder of everything that the run writes
    export: Name | None = None  # a file, or folder in Hugging Face format, for a float16 copy of the final model
    resume: Literal[True, False, "auto"] = False
        # True: continue from out_dir/state.pt, without a config file with its saved settings; auto: only if there is
        # one
    save_interval: Steps | None = None  # steps between two checkpoints; None: eval_interval
    keep_best: Name | None = None
        # a validation metric such as val_loss: the best model by it is kept too, as a whole run in out_dir/best, which
        # takes the space of another checkpoint
    log_interval: Steps | None = None  # steps between two console lines; None: a tenth of eval_interval
    report_to: tuple[str, ...] = ()  # trackers: wandb, tensorboard, trackio
    wandb_log: bool = False  # the same as wandb in report_to
    wandb_project: str = "nano-grpo"  # the project of the run in wandb and trackio
    wandb_run_name: str | None = None  # the run's name in wandb and trackio; None: they choose one
    dry_run: bool = False  # check what is there and print the plan; train nothing
    seed: Annotated[int, "[0, 1e18]"] = 1337  # of data order, sampling and new weights
    device: str = "auto"  # auto (cuda, else mps for Hugging Face models, else cpu), cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        # float32 or bfloat16; auto: bfloat16 on GPUs that support it
    compile: bool = False  # torch.compile: half a minute at the start, then faster; for long runs

    def features(self):
        yield from super().features()
        yield self.template in OF_TOKENIZER, OF_CHAT_TEMPLATE, "chat_template_kwargs"
        yield (self.mode == SEQUENCE_SCORER or self.fill_checkpoints, f"mode={SEQUENCE_SCORER!r}",
               "judge_head fill_temperature_low fill_temperature_high clean_share teacher_checkpoint")

    def conflicts(self):
        yield from super().conflicts()
        yield self.has_adapter and lies_in(self.init_from, self.out_dir), "init_from out_dir", READ_AGAIN
        yield lies_in(self.teacher_checkpoint, self.out_dir), "teacher_checkpoint out_dir", READ_AGAIN
        yield (self.teacher_checkpoint is not None and self.judge_head == "cls", "teacher_checkpoint judge_head",
               "a teacher gives a probability for each token, and a cls judge has one number for a text; leave one out")
        yield (self.fill_temperature_low > self.fill_temperature_high, "fill_temperature_low fill_temperature_high",
               f"the low one must be at most the high one, and {self.fill_temperature_low:g} is above "
               f"{self.fill_temperature_high:g}; change one")
        yield (self.n_embd % (2 * self.n_head), "n_embd n_head",
               f"n_embd must be a multiple of 2 * n_head (rotary pairs), and {self.n_embd} is not one of "
               f"{2 * self.n_head}; change one")

    def shape(self, vocab_size, base_vocab_size):
        """The GPTConfig of a new model."""
        longest = self.block_size
        if self.mode == SEQUENCE_SCORER:
            longest += 1  # it may read CLS before the text
        return GPTConfig(
            self.mode,
            vocab_size,
            base_vocab_size,
            longest,
            self.n_layer,
            self.n_head,
            self.n_embd,
            self.dropout,
            self.tied,
            self.judge_head)
