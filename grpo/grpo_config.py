"""The settings of GRPO training that are always there, in the order of the data flow; grpo/rooms.py has the others."""

from core.config import PROMPT_TEMPLATES, MaskConfig, RunConfig
from core.errors import Mistake
from core.settings.setting import check_value, setting
from grpo.losses import ADVANTAGES, AVERAGES, OBJECTIVES, RATIOS, SURROGATES, baseline_of, check_row
from grpo.reference import REFERENCES
from grpo.reward_functions.settings import PRESETS
from grpo.rooms import ROOMS

ROW = {"advantage": ADVANTAGES, "average": AVERAGES, "ratio": RATIOS, "surrogate": SURROGATES}  # of OBJECTIVES


class GRPOConfig(MaskConfig, RunConfig):
    """The settings of grpo/train_grpo.py and their defaults; those shared with pretraining are in RunConfig."""

    rooms = ROOMS | RunConfig.rooms
    excludes = (
        ("stop_sequences=", "", "they must be texts that are not empty"),
        ("minibatches>problems", "", "it must be at most batch_size * gradient_accumulation_steps"),
        ("resume", "max_iters=0", "it evaluates a model and trains nothing"),
        ("rewarded kl_in_reward overlong_buffer", "group_size=1",
         "a reward is compared with those of other completions; with teacher_checkpoint alone there may be one"),
        ("optimizer=muon ref_offload compile load_in_4bit", "parallel=fsdp",
         "FSDP2 cuts every weight, which this needs whole; leave it out, and set optimizer='adamw'"),
        ("kl_beta reference_checkpoint", "reference_mode=none",
         "the KL penalty would have no reference; set kl_beta=0.0"),
        ("kl_in_reward overlong_buffer credit_window!=None reward_normalisation=group", "baseline=max_rl",
         "advantage='max_rl' divides by the share of a group's completions that are right"))

    template: str | None = setting(
        None, "how prompts are rendered: plain, chat, math, code, model (the tokenizer's chat template), or that with "
        "the rules of a task, model_math, model_code; None: as task_type says", PROMPT_TEMPLATES)
    response_prefix: str = setting("", "the text that every answer begins with")
    max_new_tokens: int = setting(128, "the most tokens of a completion", "[1, 1e6]")
    stop_sequences: tuple[str, ...] = setting((), "texts that end a completion, besides the end tokens")
    generator_checkpoint: str | None = setting(
        None, "the model that is trained: a file of this project, a folder in Hugging Face format, or hf:owner/name")
    judge_checkpoint: str | None = setting(None, "the model behind the reward `judge`")
    task_type: str = setting(
        "fill_in", "a preset of rewards: fill_in (the judge), math, code, general, reasoning; math, code and reasoning "
        "have a template too", PRESETS)
    reward_functions: tuple[str, ...] = setting((), "names of rewards; (): those of task_type")
    reward_file: str | None = setting(
        None, "your Python file of reward functions (as in TRL), @environment classes, @mask functions")
    batch_size: int = setting(16, "problems per micro-batch on each rank", "[1, 1e6]")
    group_size: int = setting(8, "completions per problem; 1 is allowed only for pure distillation", "[1, 1e5]")
    temperature: float = setting(0.8, "sampling temperature; scoring uses the same", "[1e-6, 1e3]")
    top_p: float = setting(0.95, "nucleus sampling; 1.0 turns it off", "(0, 1]")
    top_k: int = setting(0, "sample from the k likeliest tokens; 0 turns it off", "[0, 1e9]")
    min_p: float = setting(0.0, "min-p: drop tokens below min_p times the top probability", "[0, 1)")
    sample_rows: int | None = setting(
        None, "completions sampled in parallel; None: one batch on a CPU, all of an iteration on a GPU", "[1, 1e9]")
    unmask_steps: int = setting(
        1, "masked-fill models: number of denoising passes (per block, for prompts)", "[1, 1e6]")
    sampler: str = setting(
        "local", "who samples: local (this process), ray (worker processes), vllm (a server)",
        ("local", "ray", "vllm"))
    max_staleness: int = setting(0, "iterations that sampling may run ahead of training", "[0, 100]")
    objective: str = setting("grpo", "the loss, such as grpo, dr_grpo, dapo (docs/algorithm.md)", OBJECTIVES)
    advantage: str | None = setting(
        None, "how rewards are compared, such as group_std or leave_one_out; None: the objective's own", ADVANTAGES)
    kl_beta: float = setting(0.1, "weight of the KL penalty to the reference", "[0, 1e6]")
    reference_mode: str = setting(
        "static", "static: the initial model; ema: a moving average; periodic: a copy now and then; none", REFERENCES)
    ppo_epochs: int = setting(1, "passes over each iteration's completions", "[1, 1e6]")
    minibatches: int = setting(1, "optimizer steps per pass", "[1, 1e6]")
    micro_batch_tokens: int | None = setting(
        None, "tokens per forward pass; None: those of batch_size problems", "[1, 1e12]")
    grad_checkpoint: bool = setting(False, "recompute activations in the backward pass: less memory, slower")
    max_iters: int = setting(200, "optimizer steps of the run; 0: it evaluates and ends", "[0, 1e12]")
    optimizer: str = setting(
        "adamw", "adamw, or muon (Muon for weight matrices, AdamW for the rest)", ("adamw", "muon"))
    learning_rate: float = setting(1e-5, "the peak learning rate", "(0, 1e3]")
    warmup_iters: int = setting(10, "steps of linear warmup", "[0, 1e12]")
    eval_problems: int = setting(128, "number of validation problems", "[1, 1e6]")
    eval_completions: int = setting(4, "completions per validation problem; also the k of pass@k", "[2, 1e5]")
    eval_interval: int = setting(50, "steps between two evaluations", "[1, 1e12]")
    sample_interval: int | None = setting(
        None, "steps between two sets of samples for people to read; None: eval_interval", "[1, 1e12]")
    out_dir: str = setting("out-grpo", "the folder of everything that the run writes")
    dry_run: bool = setting(False, "check everything and print the plan; train nothing")
    doctor: bool = setting(False, "take one step, report problems and their remedies; write no out_dir")
    parallel: str = setting(
        "ddp", "several processes: ddp (each holds whole models) or fsdp (each holds a shard)",
        ("ddp", "fsdp"))

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            in_lower_case = {name.lower(): name for name in OBJECTIVES}
            vars(self)["objective"] = in_lower_case.get(str(self.objective).lower(), self.objective)
        for part, table in ROW.items():
            check_value(part, getattr(OBJECTIVES.get(self.objective), part, None), table)
        super().__post_init__()
        check_row(self.objective)
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        given = [f"{key}={value}" for key, value in bounds.items() if value is not None]
        if given and OBJECTIVES[self.objective].clip_low is None:
            raise Mistake(f"{given[0]} cannot be with objective={self.objective!r}, which clips nothing; leave it out")

    @property
    def problems(self):
        """Distinct problems per iteration and rank."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def baseline(self):
        """A name in ADVANTAGES: what the rewards are compared with."""
        return baseline_of(self)

    @property
    def rewarded(self):
        """False if a teacher alone teaches: no reward has a weight."""
        weighted = self.reward_functions and (not self.reward_weights or any(self.reward_weights))
        return self.teacher_checkpoint is None or bool(weighted)

    def for_evaluation(self, seed):
        """Settings for sampling in evaluation."""
        rows = self.sample_rows or self.batch_size * self.group_size
        return self.varied(group_size=self.eval_completions, sample_rows=rows, fill_estimator="trajectory", seed=seed)
