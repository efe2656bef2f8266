"""The settings of GRPO training that are always there, in the order of the data flow; grpo/rooms.py has the others."""

from core.config import MaskConfig, RunConfig
from core.settings.setting import check_value, setting
from grpo.losses import ADVANTAGES, AVERAGES, OBJECTIVES, RATIOS, SURROGATES, baseline_of
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

    response_prefix: str = setting("", "the text that every answer begins with")
    max_new_tokens: int = setting(128, "tokens of a completion, at most", "[1, 1e6]")
    stop_sequences: tuple[str, ...] = setting((), "texts that end a completion, besides the end tokens")
    generator_checkpoint: str | None = setting(
        None, "the model that is trained: a file of this project, a folder in Hugging Face format, or hf:owner/name")
    judge_checkpoint: str | None = setting(None, "the model that gives the reward judge")
    task_type: str = setting(
        "fill_in", "a preset of rewards: fill_in (the judge), math, code, general, reasoning", PRESETS)
    reward_functions: tuple[str, ...] = setting((), "names of rewards; (): the preset's")
    reward_file: str | None = setting(
        None, "a Python file of yours with more: rewards as TRL calls them, @environment classes, @mask functions")
    batch_size: int = setting(16, "distinct problems per micro-batch and rank", "[1, 1e6]")
    group_size: int = setting(8, "completions per problem; 1 is allowed only for pure distillation", "[1, 1e5]")
    temperature: float = setting(0.8, "of sampling and of scoring", "[1e-6, 1e3]")
    top_p: float = setting(0.95, "nucleus sampling; 1.0 turns it off", "(0, 1]")
    top_k: int = setting(0, "sample from the top_k likeliest tokens; 0: all", "[0, 1e9]")
    min_p: float = setting(0.0, "min-p: drop tokens below min_p times the top probability", "[0, 1)")
    sample_rows: int | None = setting(
        None, "completions sampled at a time; None: of a batch_size on a CPU, all of an iteration on a GPU", "[1, 1e9]")
    unmask_steps: int = setting(
        1, "masked-fill models: number of denoising passes (per block, for prompts)", "[1, 1e6]")
    sampler: str = setting(
        "local", "who samples: local: this process; ray: Ray's workers, here or in a cluster; vllm: a vLLM server",
        ("local", "ray", "vllm"))
    max_staleness: int = setting(
        0, "iterations sampled ahead while the policy is trained: how much older completions may be", "[0, 100]")
    objective: str = setting("grpo", "a row of OBJECTIVES (grpo/losses.py)", OBJECTIVES)
    advantage: str | None = setting(
        None, "a name in ADVANTAGES (grpo/losses.py); None: what the objective, train_pass_k or "
        "reward_normalisation need", ADVANTAGES)
    kl_beta: float = setting(0.1, "weight of the KL penalty to the reference", "[0, 1e6]")
    reference_mode: str = setting("static", "none, static, ema, periodic", REFERENCES)
    ppo_epochs: int = setting(1, "passes over each iteration's rollouts", "[1, 1e6]")
    minibatches: int = setting(1, "optimizer steps in each of these passes", "[1, 1e6]")
    micro_batch_tokens: int | None = setting(
        None, "tokens read at a time, of at least one problem with its group; None: batch_size problems", "[1, 1e12]")
    grad_checkpoint: bool = setting(
        False, "activations are computed again in the backward pass: less memory, slower")
    max_iters: int = setting(200, "optimizer steps of the run; 0: it evaluates and ends", "[0, 1e12]")
    optimizer: str = setting(
        "adamw", "adamw; muon: Muon for the matrices of the blocks, AdamW for the rest", ("adamw", "muon"))
    learning_rate: float = setting(1e-5, "the highest, reached after warmup_iters", "(0, 1e3]")
    warmup_iters: int = setting(10, "steps in which the learning rate rises linearly", "[0, 1e12]")
    eval_problems: int = setting(128, "fixed validation texts or prompts", "[1, 1e6]")
    eval_completions: int = setting(4, "completions of each, and of prompts the k of pass@k", "[2, 1e5]")
    eval_interval: int = setting(50, "steps between two evaluations", "[1, 1e12]")
    sample_interval: int | None = setting(
        None, "steps between two sets of samples for people to read; None: eval_interval", "[1, 1e12]")
    out_dir: str = setting("out-grpo", "the folder of everything that the run writes")
    dry_run: bool = setting(False, "print the plan, or what a run would build first; train nothing")
    doctor: bool = setting(False, "take one step, say what is wrong and what to change; write no out_dir")
    parallel: str = setting(
        "ddp", "several processes: ddp, each has the whole models; fsdp, each a part of their weights",
        ("ddp", "fsdp"))

    def __post_init__(self):
        for part, table in ROW.items():
            check_value(part, getattr(OBJECTIVES.get(self.objective), part, None), table)
        super().__post_init__()

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
