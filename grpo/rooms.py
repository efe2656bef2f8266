"""Rooms: optional features of GRPO training, and the setting that opens each. A config has their settings only then.

A new room is a class of settings and one line here: where it is, and what opens it (core/settings/setting.py).
"""

from core.fill_in import UNMASK_ORDERS
from core.settings.setting import READ_AGAIN, Settings, setting
from grpo.losses import KL_ESTIMATORS

ROOMS = {
    "grpo.rooms:ReferenceConfig": "kl_beta teacher_checkpoint",
    "grpo.rooms:TeacherConfig": "teacher_checkpoint",
    "grpo.rooms:EmaConfig": "reference_mode=ema",
    "grpo.rooms:PeriodicConfig": "reference_mode=periodic",
    "grpo.rooms:JudgeConfig": "judge_checkpoint",
    "grpo.rooms:PassesConfig": "unmask_steps!=1 block_length fill_estimator",
    "grpo.rooms:RatioConfig": "clip_low!=None clip_high!=None ratio_to",
    "grpo.rooms:ShapingConfig": "overlong_buffer mask_truncated zero_std entropy_bonus",
    "grpo.reward_functions.settings:RewardConfig": "reward_functions task_type!=fill_in",
    "grpo.rooms:EnvironmentConfig": "environment reward_functions=environment",
    "grpo.samplers.settings:RayConfig": "sampler=ray",
    "grpo.samplers.settings:VllmConfig": "sampler=vllm",
}


class ReferenceConfig(Settings):
    """The KL penalty."""

    excludes = (
        ("kl_estimator=exact", "kl_in_reward", "the KL in the reward is of samples; set kl_estimator='k3'"),
        ("kl_in_reward", "rewarded=False baseline!=leave_one_out baseline!=group_mean",
         "a standard deviation of kl_in_reward alone hides distill_beta; set advantage='leave_one_out'"))

    reference_checkpoint: str | None = setting(
        None, "the model that the KL penalty is to; None: the generator at step 0")
    kl_estimator: str | None = setting(
        None, "exact (over the vocabulary), k2, k3; None: exact for fill-in and with a teacher, else k3",
        ("exact", *KL_ESTIMATORS))
    kl_in_reward: bool = setting(False, "KL as a part of the reward (k1) instead of the loss")
    kl_target: float | None = setting(None, "kl_beta is adapted to reach this mean_kl; None: kl_beta stays", "(0, 1e6]")
    ref_offload: bool = setting(False, "keep the reference on the CPU while it is not used")


class TeacherConfig(Settings):
    """On-policy distillation."""

    excludes = (
        ("teacher_checkpoint@out_dir", "", READ_AGAIN),
        ("kl_beta kl_target reference_checkpoint reference_mode!=static", "teacher_checkpoint",
         "the teacher takes the place of the reference, and distill_beta that of kl_beta; set kl_beta=0.0"),
        ("task_type!=fill_in", "rewarded=False", "with a teacher the rewards are reward_functions, or none"))

    teacher_checkpoint: str | None = setting(None, "teacher for on-policy distillation; replaces the reference")
    distill_beta: float = setting(1.0, "weight of the KL to the teacher", "(0, 1e6]")


class EmaConfig(Settings):
    """A reference that follows the policy."""

    ema_alpha: float = setting(0.99, "share of the reference that stays after each iteration", "[0, 1]")


class PeriodicConfig(Settings):
    """A reference that becomes the policy from time to time."""

    reference_update_freq: int = setting(500, "iterations between two copies of the policy", "[1, 1e12]")


class JudgeConfig(Settings):
    """The judge of filled-in text."""

    gold_judge_checkpoint: str | None = setting(None, "a second judge: logged, never trained against")
    credit_window: int | None = setting(
        None, "per-token reward: mean judge score within this window; None: one reward per completion", "[0, 1e9]")


class PassesConfig(Settings):
    """Several denoising passes."""

    excludes = (
        ("kl_in_reward ratio_to=sampler", "unmask_order=confidence",
         "log-probabilities leave out that of the order"),
        ("top_p<1 top_k min_p kl_in_reward ratio_to=sampler", "fill_estimator!=trajectory",
         "fill_estimator estimates log-probabilities of the whole distribution, not of what was sampled"))

    block_length: int | None = setting(
        None, "of prompts: block length for semi-autoregressive decoding; None: one block", "[1, 1e6]")
    unmask_order: str = setting(
        "random", "of prompts: random, left_to_right, or confidence, for which log-probabilities are estimates",
        UNMASK_ORDERS)
    fill_estimator: str = setting(
        "trajectory", "log-probabilities: trajectory, exact; one_step, as if all tokens were drawn in one pass",
        ("trajectory", "one_step"))


class RatioConfig(Settings):
    """The importance ratio, where it is not the objective's own."""

    clip_low: float | None = setting(None, "the ratio is at least 1 - clip_low; None: the objective's own", "[0, 1e9]")
    clip_high: float | None = setting(None, "the ratio is at most 1 + clip_high; None: the objective's own", "[0, 1e9]")
    ratio_to: str = setting(
        "policy", "the denominator of the ratio: the policy at the start of the iteration, or the sampler",
        ("policy", "sampler"))


class ShapingConfig(Settings):
    """Changes of rewards and losses beyond the objective."""

    excludes = (
        ("overlong_buffer>max_new_tokens", "", "it must be at most max_new_tokens"),
        ("baseline=step kl_in_reward rewarded=False", "zero_std!=keep",
         "with advantage='step', kl_in_reward or a teacher alone, groups of equal rewards teach too"),)

    overlong_buffer: int = setting(
        0, "over the last N tokens before max_new_tokens the reward falls by up to 1; 0: off", "[0, 1e6]")
    mask_truncated: bool = setting(False, "leave completions that hit max_new_tokens out of the loss")
    zero_std: str = setting(
        "keep", "groups with equal rewards: keep, drop, or resample (other problems)", ("keep", "drop", "resample"))
    entropy_bonus: float = setting(0.0, "weight of the entropy bonus", "[0, 1e6]")


class EnvironmentConfig(Settings):
    """Several turns (docs/rewards.md)."""

    excludes = (
        ("environment=None", "reward_functions=environment", "the reward environment needs one"),
        ("reward_functions!=environment", "environment", "add the reward environment"),
        ("overlong_buffer response_prefix sampler=vllm", "environment",
         "an episode has answers of an environment and several of the policy"),)

    environment: str | None = setting(None, "the class of reward_file that answers each turn of a completion")
    max_turns: int = setting(8, "the most turns of an episode", "[1, 1e6]")
