"""Config files and --key=value."""

import dataclasses
import json

import pytest

from core.config import SYNONYMS, UsageError, describe, load_config, save_config
from core.pretrain_config import PretrainConfig
from grpo.grpo_config import GRPOConfig


def load(*argv, cls=GRPOConfig):
    return load_config(cls, list(argv))[0]


def test_later_arguments_win_and_arithmetic_is_allowed(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("_half = 0.5\nkl_beta = _half / 2\ngroup_size = 4 * 3\nlearning_rate = 1\n")
    c = load("--group_size=6", str(path), "--seed=7")
    assert (c.kl_beta, c.group_size, c.learning_rate, c.seed) == (0.25, 12, 1.0, 7)
    assert type(c.learning_rate) is float
    assert load(str(path), "--group_size=6").group_size == 6


def test_literals_and_bare_words():
    c = load("--out_dir=a=b", "--generator_checkpoint=x.safetensors", "--kl_beta=1e-3", "--compile=True",
             "--dataset=123")
    assert (c.out_dir, c.generator_checkpoint, c.kl_beta, c.compile, c.dataset) == (
        "a=b", "x.safetensors", 1e-3, True, "123")
    assert load("--generator_checkpoint=None").generator_checkpoint is None
    fills = load("--fill_checkpoints=['a', 'b']", cls=PretrainConfig).fill_checkpoints
    assert fills == ("a", "b")


@pytest.mark.parametrize("argument, message", [
    ("--grup_size=4", "unknown key grup_size; did you mean group_size"),
    ("--zzz=4", "unknown key zzz; --help"),
    ("--group_size=four", "group_size='four' must be int"),
    ("--group_size=4.5", "group_size=4.5 must be int"),
    ("--compile=1", "compile=1 must be bool"),
    ("--kl_beta=None", "kl_beta=None must be float"),
    ("--group_size", "write --key=value"),
    ("group_size=4", "expected a config file"),
    *((f"--{theirs}=1", f"did you mean {ours}") for theirs, ours in SYNONYMS.items())])
def test_a_mistake_is_named(argument, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")) as error:
        load(argument)
    assert "\n" not in str(error.value)


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    (tmp_path / "c.py").write_text("import os\n")
    with pytest.raises(UsageError, match="c.py: unknown key os"):
        load(str(tmp_path / "c.py"))
    with pytest.raises(FileNotFoundError, match="gone.py does not exist"):
        load("gone.py")


@pytest.mark.parametrize("argument, message", [
    ("--group_size=1", "group_size=1 must be at least 2"), ("--kl_estimator=k1", "k1.*refused"),
    ("--objective=ppo", "grpo, dr_grpo, dapo"), ("--advantage=z", "group_std"), ("--top_p=0.0", "top_p"),
    ("--temperature=0.0", "temperature"), ("--mask_low=0.0", "without masks"), ("--mask_low=0.9", "mask_high"),
    ("--max_iters=0", "max_iters"), ("--kl_beta=-1.0", "negative"), ("--reference_mode=none", "set kl_beta=0.0"),
    ("--reference_mode=often", "none, static, ema, periodic"), ("--zero_std=never", "keep, drop, resample"),
    ("--clip_cap=1.1", "above 1 . clip_high"), ("--ema_alpha=1.5", "ema_alpha"), ("--ppo_epochs=0", "ppo_epochs"),
    ("--overlong_buffer=200", "less than max_new_tokens"), ("--fill_estimator=guess", "trajectory, one_step"),
    ("--fill_estimator=coupled", "set top_p=1.0"), ("--clip_low=-0.1", "clip_low"), ("--kl_target=0.0", "kl_target")])
def test_values_are_checked_before_anything_starts(argument, message):
    with pytest.raises(ValueError, match=message):
        load(argument)
    with pytest.raises(ValueError, match="without masks"):
        load("--mask_random=0.0", "--mask_span=0.0")


@pytest.mark.parametrize("arguments, message", [
    (["--objective=cispo", "--clip_cap=9.0"], "no unclipped branch"),
    (["--kl_in_reward=True", "--kl_estimator=exact"], "use kl_estimator='k3'"),
    (["--kl_importance=True", "--kl_estimator=exact"], "use kl_estimator='k3'"),
    (["--kl_beta=0.0", "--kl_target=0.1"], "set kl_beta above 0"),
    (["--fill_estimator=coupled", "--top_p=1.0", "--kl_in_reward=True"], "fill_estimator='trajectory'"),
    (["--train_pass_k=2"], "advantage='group_mean'")])
def test_settings_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(*arguments)


def test_the_difference_from_the_defaults_is_shown_with_its_origin(tmp_path):
    (tmp_path / "c.py").write_text("kl_beta = 0.5\nseed = 1337\n")
    config, origin = load_config(GRPOConfig, [str(tmp_path / "c.py"), "--group_size=3"])
    lines = describe(config, origin)
    assert len(lines) == 2 and any("kl_beta = 0.5" in x and "default 0.1" in x and "c.py" in x for x in lines)
    save_config(config, tmp_path / "c.json")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["kl_beta"] == 0.5 and saved["group_size"] == 3 and saved["reward_functions"] == []
    assert set(saved) == {f.name for f in dataclasses.fields(GRPOConfig)}


def test_canonical_defaults():
    c = GRPOConfig()
    assert (c.group_size, c.kl_beta, c.learning_rate, c.min_lr, c.temperature, c.top_p, c.batch_size) == (
        8, 0.1, 1e-5, 1e-6, 0.8, 0.95, 16)
    assert (c.gradient_accumulation_steps, c.weight_decay, c.beta1, c.beta2, c.grad_clip, c.seed, c.device,
            c.out_dir) == (1, 0.1, 0.9, 0.95, 1.0, 1337, "auto", "out-grpo")
