"""The settings of GRPO training: names, defaults, checks."""

import dataclasses
import json
from dataclasses import replace

import pytest

from core.config import load_config
from grpo.grpo_config import GRPOConfig
from grpo.losses import ADVANTAGES, OBJECTIVES, baseline_of


def load(arguments):
    return load_config(GRPOConfig, arguments.split())[0]


def test_a_config_can_add_an_objective_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delitem(OBJECTIVES, "mine", raising=False)  # and so once more at the end
    path = tmp_path / "c.py"
    path.write_text("from grpo import losses\n\nlosses.OBJECTIVES['mine'] = losses.OBJECTIVES['dapo']\n"
                    "objective = 'mine'\n")
    assert baseline_of(load(str(path))) == OBJECTIVES["dapo"].advantage


@pytest.mark.parametrize("part", ["advantage", "average", "ratio", "surrogate"])
def test_a_wrong_word_in_the_row_of_an_objective_is_refused(monkeypatch, part):
    monkeypatch.setitem(OBJECTIVES, "mine", replace(OBJECTIVES["grpo"], **{part: "completion"}))
    with pytest.raises(ValueError, match=f"^{part}='completion' "):
        load("--objective=mine")


PASSES, MATH = "--unmask_steps=2", "--reward_functions=math_number"
TAUGHT = "--teacher_checkpoint=t --kl_beta=0.0"
REFUSED = {  # {arguments: the setting that is named}; every number has a range (tests/core/settings/test_ranges.py)
    "--kl_estimator=k1": "kl_estimator", "--objective=ppo": "objective", "--advantage=z": "advantage",
    "--mask_low=0.9": "mask_high", "--max_iters=0 --resume=True": "resume", "--reference_mode=none": "kl_beta",
    "--overlong_buffer=200": "overlong_buffer", "--minibatches=17": "minibatches", "--stop_sequences=('',)": "stop_sequences",
    f"{PASSES} --fill_estimator=guess": "fill_estimator", f"{PASSES} --fill_estimator=agrpo": "top_p",
    f"{PASSES} --fill_estimator=agrpo --top_p=1.0 --kl_in_reward=True": "kl_in_reward",
    f"{MATH} --reward_weights=('a',)": "reward_weights", f"{MATH} --reward_weights=(1e999,)": "reward_weights",
    f"{MATH} --reward_weights=(-1e999,)": "^reward_weights",
    "--parallel=fsdp --optimizer=muon": "optimizer", "--parallel=fsdp --ref_offload=True": "ref_offload",
    "--learning_rate=1e-5 --min_lr=1e-4": "min_lr",
    "--kl_in_reward=True --kl_estimator=exact": "kl_estimator", "--kl_beta=0.0 --kl_target=0.1": "kl_target",
    f"{MATH} --train_pass_k=9 --advantage=leave_one_out": "train_pass_k",
    f"{MATH} --train_pass_k=2 --judge_checkpoint=j --advantage=leave_one_out --credit_window=3": "credit_window",
    f"{MATH} --train_pass_k=2 --kl_in_reward=True": "kl_in_reward", f"{MATH} --train_pass_k=2 --overlong_buffer=10": "overlong_buffer",
    "--advantage=max_rl --kl_in_reward=True": "kl_in_reward", "--advantage=max_rl --overlong_buffer=10": "overlong_buffer",
    "--advantage=max_rl --judge_checkpoint=j --credit_window=3": "credit_window",
    f"{MATH} --advantage=max_rl --reward_normalisation=group": "reward_normalisation",
    "--objective=reinforce++ --zero_std=drop": "zero_std", "--advantage=step --zero_std=resample": "zero_std",
    "--kl_in_reward=True --zero_std=drop": "zero_std", f"{TAUGHT} --zero_std=drop": "^zero_std",
    "--lora_rank=4 --reference_mode=ema": "reference_mode", "--lora_init_from=x --reference_mode=ema": "reference_mode",
    "--lora_rank=4 --ref_offload=True": "ref_offload", "--lora_init_from=x --lora_rank=4": "lora_rank",
    "--load_in_4bit=True": "load_in_4bit", "--lora_rank=4 --generator_checkpoint=out-grpo/model": "generator_checkpoint",
    "--distill_beta=0.5": "distill_beta", "--group_size=1": "^group_size", "--teacher_checkpoint=t": "kl_beta",
    f"{TAUGHT} --reference_checkpoint=r": "reference_checkpoint", f"{TAUGHT} --reference_mode=ema": "reference_mode",
    f"{TAUGHT} --kl_target=0.1": "kl_target", f"{TAUGHT} --task_type=math": "task_type",
    f"{PASSES} --unmask_order=confidence --kl_in_reward=True": "kl_in_reward",
    f"{PASSES} --unmask_order=confidence --ppo_epochs=2 --ratio_to=sampler": "ratio_to", f"{TAUGHT} --kl_in_reward=True": "advantage",
    f"{TAUGHT} --teacher_checkpoint=out-grpo/model.safetensors": "teacher_checkpoint",
    "--sampler=ray --judge_checkpoint=out-grpo/../out-grpo/model.safetensors": "judge_checkpoint",
    f"{TAUGHT} --group_size=1 --reward_functions=('judge',)": "group_size",
    f"{TAUGHT} --group_size=1 --kl_in_reward=True --advantage=group_mean": "group_size",
    **{f"{MATH} --train_pass_k=2 --advantage={name}": "advantage" for name in ADVANTAGES if name != "leave_one_out"}}


@pytest.mark.parametrize("arguments", REFUSED)
def test_settings_that_cannot_work_are_refused_in_one_line(arguments):
    with pytest.raises(ValueError, match=REFUSED[arguments]) as error:
        load(arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arguments", [
    "--max_iters=0", "--lora_rank=4 --reference_mode=periodic", "--lora_rank=4 --reference_mode=ema --kl_beta=0.0",
    "--lora_rank=4 --ref_offload=True --reference_checkpoint=other", "--ref_offload=True",
    "--lora_rank=16 --load_in_4bit=True", "--generator_checkpoint=out-grpo/model",
    "--generator_checkpoint=out-grpo/previous/1/model --lora_rank=4", f"{TAUGHT} --group_size=1",
    f"{TAUGHT} --kl_in_reward=True --objective=rloo", f"{TAUGHT} --lora_rank=4 --ref_offload=True",
    f"{TAUGHT} --kl_in_reward=True --reward_functions=('math_number',)",
    f"{TAUGHT} --group_size=1 --reward_functions=('math_number',) --reward_weights=(0.0,)"])
def test_settings_that_suit_each_other_are_not_refused(arguments):
    assert load(arguments)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_an_advantage_of_its_own_pass_at_k_takes_leave_one_out(objective):
    assert baseline_of(load(f"{MATH} --train_pass_k=2 --objective={objective}")) == "leave_one_out"
    assert baseline_of(load(f"--objective={objective}")) == OBJECTIVES[objective].advantage


def test_normalised_rewards_take_the_standard_deviation_of_the_step():
    assert baseline_of(load(f"{MATH} --reward_normalisation=group")) == "batch_std"
    assert baseline_of(load(f"{MATH} --reward_normalisation=group --advantage=group_mean")) == "group_mean"


def test_canonical_defaults():
    c = GRPOConfig()
    assert (c.group_size, c.kl_beta, c.learning_rate, c.min_lr, c.temperature, c.top_p, c.batch_size) == (
        8, 0.1, 1e-5, None, 0.8, 0.95, 16)
    assert (c.gradient_accumulation_steps, c.weight_decay, c.beta1, c.beta2, c.grad_clip, c.seed, c.device,
            c.out_dir) == (1, 0.1, 0.9, 0.95, 1.0, 1337, "auto", "out-grpo")
    assert (c.optimizer, c.max_iters, c.warmup_iters, c.max_bad_steps, c.log_interval, c.eval_interval,
            c.save_interval, c.mask_low, c.mask_high) == ("adamw", 200, 10, 5, 5, 50, 50, 0.2, 0.5)


def test_other_rewards_on_the_command_line_forget_the_weights_and_the_success_reward_of_the_file(tmp_path):
    config = "config/grpo_arithmetic.py"
    assert load(config).reward_weights and load(config).success_reward
    assert load(f"{config} --reward_functions=exact_match") == replace(
        load(config), reward_functions=("exact_match",), reward_weights=(), success_reward=None)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(load(config))))
    resumed = load(f"--resume=True --out_dir={tmp_path} --reward_functions=exact_match")
    assert (resumed.reward_weights, resumed.max_iters) == ((), load(config).max_iters)
    own = load(f"{config} --reward_weights=(2.0,) --reward_functions=exact_match")
    assert (own.reward_weights, own.success_reward) == ((2.0,), None)
