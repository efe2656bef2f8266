"""The settings of GRPO training: names, defaults, checks."""

from dataclasses import replace

import pytest

from core.config import UsageError, load_config
from core.supervised.config import PretrainConfig
from grpo.advantages import ADVANTAGES
from grpo.grpo_config import GRPOConfig
from grpo.objectives import OBJECTIVES, baseline_of


def load(*argv):
    return load_config(GRPOConfig, list(argv))[0]


@pytest.mark.parametrize("argument, message", [
    ("--grup_size=4", "unknown key grup_size; did you mean group_size"),
    ("--kl_beta=None", "kl_beta=None must be float"), ("--num_iterations=1", "did you mean max_iters or ppo_epochs"),
    *((f"--{theirs}=1", f"did you mean {ours}") for theirs, ours in {
        "kl_coef": "kl_beta", "num_generations": "group_size"}.items())])
def test_a_key_of_another_project_is_translated(argument, message):
    with pytest.raises(UsageError, match=message) as error:
        load(argument)
    assert "\n" not in str(error.value)


def test_an_evaluation_alone_is_not_resumed():
    assert load("--max_iters=0").max_iters == 0
    with pytest.raises(ValueError, match="max_iters=0 evaluates a model, and resume=True has nothing to go on with"):
        load("--max_iters=0", "--resume=True")
    with pytest.raises(ValueError, match="max_iters=0 must be at least 1"):
        load_config(PretrainConfig, ["--max_iters=0"])


def test_a_config_can_add_an_objective_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delitem(OBJECTIVES, "mine", raising=False)  # and so once more at the end
    path = tmp_path / "c.py"
    path.write_text("from grpo import objectives\n\nobjectives.OBJECTIVES['mine'] = objectives.OBJECTIVES['dapo']\n"
                    "objective = 'mine'\n")
    assert baseline_of(load(str(path))) == OBJECTIVES["dapo"].advantage


@pytest.mark.parametrize("part, choices", [
    ("advantage", "group_std, "), ("average", "sum, sequence, token, constant$"), ("ratio", "token, sequence$"),
    ("surrogate", "clip, detached_ratio, probability_mask$")])
def test_a_wrong_word_in_the_row_of_the_objective_is_refused_with_its_choices(monkeypatch, part, choices):
    monkeypatch.setitem(OBJECTIVES, "mine", replace(OBJECTIVES["grpo"], **{part: "completion"}))
    with pytest.raises(ValueError, match=f"^{part}='completion' is not one of {choices}"):
        load("--objective=mine")


TAUGHT = "--teacher_checkpoint=t --kl_beta=0.0"
REFUSED = {  # {arguments: words of the error}; every number has a range (tests/core/settings/test_ranges.py)
    "--kl_estimator=k1": "k1.*refused",
    "--objective=ppo": "grpo, dr_grpo, dapo", "--advantage=z": "group_std", "--mask_low=0.9": "mask_high",
    "--reference_mode=none": "set kl_beta=0.0",
    "--overlong_buffer=200": "less than max_new_tokens",
    "--fill_estimator=guess": "trajectory, agrpo", "--passes_read=3": "is for fill_estimator='agrpo'",
    "--fill_estimator=agrpo": "set top_p=1.0",
    "--minibatches=17": "minibatches=17 is more than the problems", "--stop_sequences=('',)": "stop_sequences",
    "--reward_weights=('a',)": "reward_weights=.'a',. must be tuple",
    "--reward_weights=(1e999,)": "reward_weights=.inf,. must be finite numbers",
    "--reward_functions=(1,)": "reward_functions=.1,. must be tuple",
    "--kl_in_reward=True --kl_estimator=exact": "use kl_estimator='k3'",
    "--kl_beta=0.0 --kl_target=0.1": "set kl_beta above 0",
    "--fill_estimator=agrpo --top_p=1.0 --kl_in_reward=True": "fill_estimator='trajectory'",
    "--train_pass_k=9 --advantage=leave_one_out": "train_pass_k=9 must be 1 to group_size=8",
    "--train_pass_k=2 --advantage=leave_one_out --credit_window=3": "set credit_window=None",
    "--train_pass_k=2 --kl_in_reward=True": "would multiply the penalty of kl_in_reward too; set kl_in_reward=F",
    "--train_pass_k=2 --overlong_buffer=10": "penalty of overlong_buffer too; set overlong_buffer=0",
    "--advantage=max_rl --kl_in_reward=True": "kl_in_reward changes the rewards that tell it; set kl_in_reward=False",
    "--advantage=max_rl --overlong_buffer=10": "set overlong_buffer=0",
    "--advantage=max_rl --credit_window=3": "set credit_window=None",
    "--objective=reinforce++ --zero_std=drop": "zero_std='drop' leaves out.*they teach too; set zero_std='keep'",
    "--reward_normalisation=group --advantage=group_std": "deviation twice; leave advantage out",
    "--lora_rank=4 --reference_mode=ema": "reference_mode='ema' averages weights.*use reference_mode='static'",
    "--lora_rank=4 --ref_offload=True": "ref_offload=True has nothing to move: with lora_rank=4",
    "--lora_init_from=x --lora_rank=4": "lora_init_from=x has its own rank; leave lora_rank out",
    "--load_in_4bit=True": "set lora_rank=16",
    "--lora_rank=4 --generator_checkpoint=out-grpo/model":
        "generator_checkpoint=out-grpo/model lies in out_dir=out-grpo.*choose another out_dir",
    "--mask_random=0.0 --mask_span=0.0": "without masks",
    "--distill_beta=0.5": "no effect without a teacher; set teacher_checkpoint",
    "--group_size=1": "group_size=1 leaves no other completion.*or teacher_checkpoint",
    "--teacher_checkpoint=t": "kl_beta=0.1 is about a reference.*set kl_beta=0.0; the teacher's weight is distill_beta",
    f"{TAUGHT} --task_type=math": "name the rewards in reward_functions",
    "--kl_in_reward=True --zero_std=drop": "kl_in_reward.*set zero_std='keep'",
    **{f"--unmask_order=confidence {key}": "set unmask_order='random'" for key in
       ("--kl_in_reward=True", "--ratio_to=sampler")},
    f"{TAUGHT} --kl_in_reward=True": "distill_beta without effect.*set advantage='leave_one_out'",
    f"{TAUGHT} --zero_std=drop": "without rewards these are all",
    f"{TAUGHT} --group_size=1 --kl_in_reward=True": "kl_in_reward"}


@pytest.mark.parametrize("arguments", REFUSED)
def test_settings_that_cannot_work_are_refused_in_one_line(arguments):
    with pytest.raises(ValueError, match=REFUSED[arguments]) as error:
        load(*arguments.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arguments", [
    ["--lora_rank=4", "--reference_mode=periodic"], ["--lora_rank=4", "--reference_mode=ema", "--kl_beta=0.0"],
    ["--lora_rank=16", "--load_in_4bit=True"],
    ["--generator_checkpoint=out-grpo/previous/1/model", "--lora_rank=4"],
    [*TAUGHT.split(), "--kl_in_reward=True", "--objective=rloo"],
    [*TAUGHT.split(), "--group_size=1", "--reward_functions=('math_number',)", "--reward_weights=(0.0,)"]])
def test_settings_that_suit_each_other_are_not_refused(arguments):
    assert load(*arguments)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "leave_one_out"])
def test_pass_at_k_is_trained_with_leave_one_out_advantages_only(name):
    assert load("--train_pass_k=2", "--advantage=leave_one_out").train_pass_k == 2
    with pytest.raises(ValueError, match=f"train_pass_k=2 .*'{name}'; set advantage='leave_one_out'$"):
        load("--train_pass_k=2", f"--advantage={name}")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_an_advantage_of_its_own_pass_at_k_takes_leave_one_out(objective):
    assert baseline_of(load("--train_pass_k=2", f"--objective={objective}")) == "leave_one_out"
    assert baseline_of(load(f"--objective={objective}")) == OBJECTIVES[objective].advantage


def test_normalised_rewards_take_the_standard_deviation_of_the_step():
    assert baseline_of(load("--reward_normalisation=group")) == "batch_std"
    assert baseline_of(load("--reward_normalisation=group", "--advantage=group_mean")) == "group_mean"


def test_a_model_of_ray_workers_that_a_new_run_would_set_aside_is_refused(tmp_path):
    (tmp_path / "out" / "mine").mkdir(parents=True)
    path = str(tmp_path / "out" / "mine" / ".." / "model.safetensors")
    with pytest.raises(ValueError, match="generator_checkpoint=.*model.safetensors is in out_dir=.* another folder"):
        GRPOConfig(out_dir=str(tmp_path / "out"), generator_checkpoint=path, sampler="ray")
    GRPOConfig(out_dir=str(tmp_path / "out"), generator_checkpoint=path)
