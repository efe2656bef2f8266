"""The settings of rewards, and the presets of rewards for kinds of tasks."""

from core.settings.setting import Settings, setting

PRESETS = {"fill_in": ("judge",), "math": ("math_format", "math_answer", "math_number"),
           "code": ("code_correctness", "length_penalty"), "general": ("length_penalty",),
           "reasoning": ("math_format", "length_penalty")}
PRESET_TEMPLATE = {"math": "math", "reasoning": "math", "code": "code"}  # of those that have one
PRESET_SUCCESS = {"math": "math_answer", "reasoning": "math_format"}  # the reward that decides what is correct


class RewardConfig(Settings):
    """Rewards other than the judge's: python grpo/rewards.py lists them."""

    excludes = (
        ("reward_model_checkpoint", "reward_functions!=reward_model", "add reward_model to reward_functions"),
        ("train_pass_k>group_size", "", "it must be at most group_size"),
        ("reward_weights=inf reward_weights=-inf reward_weights=nan", "", "they must be finite"),
        ("baseline!=leave_one_out", "train_pass_k!=1",
         "the gradient of pass@k needs leave-one-out advantages; set advantage='leave_one_out'"),
        ("kl_in_reward overlong_buffer credit_window!=None reward_normalisation=group", "train_pass_k!=1",
         "train_pass_k weights whole completions by a factor that is meant for their success"),
        ("advantage=group_std", "reward_normalisation=group", "it divides by the group's standard deviation already"),
        ("credit_window!=None", "reward_normalisation=group", "the credits of tokens would not be normalised"))

    reward_model_checkpoint: str | None = setting(
        None, "the Hugging Face classifier that gives the reward reward_model")
    reward_weights: tuple[float, ...] = setting((), "one for each reward; (): all 1.0")
    reward_normalisation: str = setting(
        "none", "group: each reward is normalised within its group before they are added", ("none", "group"))
    reward_settings: dict | None = setting(
        None, "{keyword-only parameter of a reward: value}, such as {'length_max': 80}")
    success_reward: str | None = setting(
        None, "a completion is correct if this reward is at its maximum; None: the preset's, or the first")
    train_pass_k: int = setting(1, "1: maximize the mean reward; k: pass@k, so hard problems count more", "[1, 1e5]")
    reward_workers: int = setting(
        2, "processes for slow rewards, such as those that run code; 0: the training process, without a timeout",
        "[0, 1e3]")
    reward_timeout: float = setting(
        30.0, "seconds for a step's slow rewards in workers, of which late ones are skipped, and for each method of an "
        "environment", "(0, 1e6]")
