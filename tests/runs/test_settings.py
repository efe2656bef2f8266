"""Settings: config files and arguments, features and conflicts, one line and an exit code for a mistake."""

import dataclasses
import itertools
import json
import random
import re
from typing import Annotated, Literal

import pytest

from core.config import load_config
from core.errors import Mistake, UsageError
from core.export import ExportConfig
from core.sample import SampleConfig
from core.settings.help import help_lines, page_of
from core.settings.other_names import answer_to
from core.settings.setting import Settings, settings_of
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from grpo.tools.check_loss import CheckConfig
from tests.tiny import all_settings

JUDGE = "--mode=sequence_scorer"
# What users of TRL and of verl type, and a word of the answer; without one there is no such setting here
TYPED = """
model_name_or_path generator_checkpoint, dataset_name dataset, reward_funcs reward_functions, output_dir out_dir,
num_generations group_size, max_completion_length max_new_tokens, per_device_train_batch_size batch_size,
generation_batch_size batch_size, steps_per_generation minibatches, num_iterations ppo_epochs, max_steps max_iters,
num_train_epochs max_iters, beta kl_beta, epsilon clip_low, epsilon_high clip_high, loss_type objective,
importance_sampling_level gspo, scale_rewards advantage, multi_objective_aggregation gdpo,
reward_normalisation gdpo,
mask_truncated_completions mask_truncated, sync_ref_model ema, ref_model_mixup_alpha ema_alpha,
ref_model_sync_steps reference_update_freq, use_vllm vllm, vllm_mode vllm, vllm_server_base_url vllm_url,
vllm_gpu_memory_utilization, vllm_importance_sampling_correction ratio_to, vllm_importance_sampling_mode ratio_to,
eval_dataset dataset, eval_strategy eval_interval, eval_steps eval_interval, per_device_eval_batch_size sample_rows,
logging_steps log_interval, log_completions sample_interval, save_steps save_interval, save_total_limit,
load_best_model_at_end, push_to_hub, run_name wandb_run_name, logging_dir out_dir, resume_from_checkpoint resume,
lr_scheduler_type min_lr, warmup_steps warmup_iters, warmup_ratio warmup_iters, optim optimizer, adam_beta1 beta1,
adam_beta2 beta2, adam_epsilon, max_grad_norm grad_clip, bf16 dtype, fp16 dtype, torch_compile compile,
gradient_checkpointing grad_checkpoint, deepspeed fsdp, fsdp fsdp, use_liger_kernel, dataloader_num_workers,
remove_unused_columns, use_peft lora_rank, lora_r lora_rank, lora_target_modules lora_targets, lora_dropout, delta,
repetition_penalty repetition, top_entropy_quantile, off_policy_mask_threshold, use_adaptive_entropy entropy_bonus,
entropy_coef entropy_bonus, environment_factory environment, num-generations group_size,

data.train_files dataset, data.val_files dataset, data.train_batch_size batch_size,
data.max_response_length max_new_tokens, actor.policy_loss.dro_beta dro, critic.optim.weight_decay critic,
data.max_prompt_length max_prompt_length, val_kwargs.temperature evaluation,
actor_rollout_ref.model.path generator_checkpoint,
actor_rollout_ref.rollout.n group_size, actor_rollout_ref.rollout.val_kwargs.n eval_completions,
actor_rollout_ref.rollout.temperature temperature, actor_rollout_ref.rollout.name sampler,
actor_rollout_ref.rollout.tensor_model_parallel_size, actor_rollout_ref.rollout.gpu_memory_utilization,
actor_rollout_ref.actor.optim.lr learning_rate, actor_rollout_ref.actor.optim.lr_warmup_steps_ratio warmup_iters,
actor_rollout_ref.actor.ppo_mini_batch_size minibatches, actor_rollout_ref.actor.clip_ratio clip_low,
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu micro_batch_tokens, actor_rollout_ref.actor.clip_ratio_c,
actor_rollout_ref.actor.ppo_max_token_len_per_gpu micro_batch_tokens,
actor_rollout_ref.actor.clip_ratio_low clip_low, actor_rollout_ref.actor.clip_ratio_high clip_high,
actor_rollout_ref.actor.entropy_coeff entropy_bonus, actor_rollout_ref.actor.use_kl_loss kl_beta,
actor_rollout_ref.actor.kl_loss_coef kl_beta, actor_rollout_ref.actor.kl_loss_type kl_estimator,
actor_rollout_ref.actor.loss_agg_mode objective, algorithm.adv_estimator advantage,
algorithm.use_kl_in_reward kl_in_reward, algorithm.kl_ctrl.kl_coef kl_beta, algorithm.filter_groups.enable zero_std,
custom_reward_function.path reward_file, custom_reward_function.name reward_functions,
reward_model.enable reward_model_checkpoint, reward_model.model.path reward_model_checkpoint,
reward_model.overlong_buffer.len overlong_buffer, trainer.total_epochs max_iters, trainer.n_gpus_per_node torchrun,
trainer.total_training_steps max_iters, trainer.nnodes torchrun, trainer.save_freq save_interval,
trainer.test_freq eval_interval, trainer.project_name wandb_project, trainer.experiment_name wandb_run_name,
trainer.logger report_to, trainer.default_local_dir out_dir, trainer.resume_mode resume, trainer.critic_warmup,

init_from generator_checkpoint, decay_lr min_lr, eval_iters eval_problems
"""


def load(*argv):
    return load_config(PretrainConfig, [str(argument) for argument in argv])[0]


@pytest.mark.parametrize("arguments, min_lr", [
    (["--learning_rate=5e-6"], 5e-7), (["--learning_rate=5e-4"], 1e-4), (["--learning_rate=1e-4"], 1e-4),
    (["--learning_rate=5e-6", "--min_lr=1e-6"], 1e-6), (["--learning_rate=5e-6", "--min_lr=None"], None),
    (["--learning_rate=5e-6", "--min_lr=1e-5"], Mistake), (["--min_lr=1e-2"], Mistake)], ids=str)
def test_a_learning_rate_below_the_min_lr_of_a_file_makes_that_a_tenth_and_says_so(tmp_path, arguments, min_lr):
    path = tmp_path / "c.py"
    path.write_text("learning_rate = 1e-3\nmin_lr = 1e-4\n")
    argv = [str(path), *arguments]
    if min_lr is Mistake:
        with pytest.raises(Mistake, match="min_lr"):
            load(*argv)
        return
    c, origin = load_config(PretrainConfig, argv)
    assert c.min_lr == min_lr
    assert ("0.0001" in origin["min_lr"] and str(path) in origin["min_lr"]) == (min_lr == 5e-7)


def test_later_arguments_win_and_a_config_file_may_compute(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("_half = 0.5\ndropout = _half / 2\nn_layer = 4 * 3\nlearning_rate = 1\n")
    c = load("--n_layer=6", path, "--seed=7")
    assert (c.dropout, c.n_layer, c.learning_rate, c.seed) == (0.25, 12, 1.0, 7)
    assert type(c.learning_rate) is float and load(path, "--n_layer=6").n_layer == 6


@pytest.mark.parametrize("folder, named", [("mine", ["--out_dir=mine"]), ("out-pretrain", [])])
def test_a_folder_alone_resumes_with_the_settings_of_its_run(tmp_path, monkeypatch, folder, named):
    monkeypatch.chdir(tmp_path)
    first = PretrainConfig(n_layer=2, seed=7, out_dir="where it was", mode="sequence_scorer", fill_checkpoints=("a",),
                           report_to=("wandb",), wandb_project="p")
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps(dataclasses.asdict(first) | {"starts": []}))
    command = ["--resume=True", *named, "--seed=9"]
    assert load(*command) == dataclasses.replace(first, resume=True, seed=9, out_dir=folder)
    assert load("--resume=auto", *command[1:]).fill_checkpoints == load(*command[1:]).fill_checkpoints == ()


@pytest.mark.parametrize("cls", [GRPOConfig, PretrainConfig])
@pytest.mark.parametrize("length", [0.9, 1e-05, 1, 512])
def test_a_share_or_a_count_stays_what_it_was_from_the_command_line_to_a_resumed_run(tmp_path, cls, length):
    first, _ = load_config(cls, [f"--max_prompt_length={length}"])
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(first)))
    resumed, _ = load_config(cls, ["--resume=True", f"--out_dir={tmp_path}"])
    for config in (first, resumed):
        assert (config.max_prompt_length, type(config.max_prompt_length)) == (length, type(length))
    assert type(cls().max_prompt_length) is int and cls().max_prompt_length == 512


@pytest.mark.parametrize("cls", [GRPOConfig, PretrainConfig, SampleConfig, ExportConfig, CheckConfig])
def test_help_shows_the_page_and_only_with_all_what_belongs_to_another_setting(cls):
    own, every = (re.findall(r"(?m)^  --(\w+)=", "\n".join(help_lines(cls, every))) for every in (False, True))
    switched = {key for _, _, keys in cls.features(object.__new__(cls)) for key in keys.split()}
    assert every == [*settings_of(cls)] == [key for _, key, _ in page_of(cls)]
    assert own == [key for key in every if key not in switched]
    assert not [key for _, key, why in page_of(cls) if not why], "settings without a comment"


def test_help_begins_with_model_data_and_rewards_and_shows_the_switches():
    headings = [heading.split(":")[0] for heading, _ in itertools.groupby(page_of(GRPOConfig), lambda row: row[0])]
    assert headings == ["Model", "Data", "Rewards", "Sampling", "The objective", "The KL penalty to a reference",
                        "On-policy distillation", "Optimizer steps", "Evaluation", "The run"]
    own = {line.split("=")[0].strip(" -") for line in help_lines(GRPOConfig, False) if line.startswith("  --")}
    assert own > {"lora_rank", "lora_init_from", "teacher_checkpoint", "environment", "judge_checkpoint", "clip_low",
                  "overlong_buffer", "zero_std", "ratio_to", "block_length", "fill_estimator", "kl_beta", "sampler"}


def test_a_setting_that_two_scripts_share_has_one_type():
    known, other = settings_of(GRPOConfig), settings_of(PretrainConfig)
    shared = known.keys() & other.keys()
    different = {key for key in shared if known[key] != other[key]}
    # GRPO's template is by default that of the task, no step at all is an evaluation, and block_size is not always used
    assert different == {"template", "max_iters", "block_size"} and len(shared) > 30


def test_names_of_trl_and_verl_are_answered_all_in_one_error():
    typed = [name.split() for name in TYPED.split(",")]
    known = all_settings(GRPOConfig)
    for name, *words in typed:
        answer = answer_to(name, known)
        assert answer and {*words} <= {*re.findall(r"\w+", answer)}, (name, answer)
    with pytest.raises(UsageError) as found:
        load_config(GRPOConfig, [f"--{name}=1" for name, *_ in typed])
    assert all(f" {name} (" in str(found.value) for name, *_ in typed)
    assert answer_to("enable", known) == answer_to("profiler.path", known) == ""


@pytest.mark.parametrize("key", ["reward_functions", "report_to", "stop_sequences"])
def test_names_with_commas_are_a_tuple_of_them_and_texts_are_not(key):
    for text, names in {"a": ("a",), "a,b": ("a", "b"), "a, b-1": ("a", "b-1"), "('a,b',)": ("a,b",)}.items():
        if key == "stop_sequences" and "," in text and "(" not in text:
            with pytest.raises(UsageError):
                load_config(GRPOConfig, [f"--{key}={text}"])
        else:
            assert getattr(load_config(GRPOConfig, [f"--{key}={text}"])[0], key) == names
    for text in ("a,", ",a", "a,,b", "a b"):
        with pytest.raises(UsageError):
            load_config(GRPOConfig, [f"--{key}={text}"])
    weighted, _ = load_config(GRPOConfig, ["--reward_functions=a,b", "--reward_weights=1,0.5"])
    assert weighted.reward_weights == (1.0, 0.5)


@dataclasses.dataclass(frozen=True)
class House(Settings):
    # Ground
    metres: Annotated[int, "[1, 9]"] = 5  # its height
    garden: Literal["none", "zen", "wild"] = "none"  # its style
    trees: Annotated[int, "[0, 9]"] = 3
        # trees in the garden, of any kind:
        # oaks too
    pond: bool = bool(  # only some have # one
        0)  # whether the garden has one, "#1"
    # or none

    # Below
    cellar: Annotated[float, "(0, 9]"] | None = None  # metres; None: no cellar
    cellars: tuple[str, ...] = ()  # what they are for

    def features(self):
        yield self.garden != "none", "garden", "trees pond"

    def conflicts(self):
        yield self.garden == "zen" and self.pond, "pond garden", "there is no water; leave pond out"
        yield ((self.cellar or 0) > self.metres, "cellar", f"is more than the {self.metres} of the house (metres)")


HOUSES = [  # values, those of them that the error begins with, and a word of the remedy
    ({"trees": 8}, "trees", "garden"), ({"garden": "zen", "trees": 10}, "trees", "9"),
    ({"garden": "tame"}, "garden", "wild"), ({"garden": "zen", "pond": True}, "pond garden", "leave"),
    ({"cellar": 6.0}, "cellar", "metres"), ({"cellar": 6.0, "metres": 5}, "cellar", "5"),
    ({"cellar": 0.0, "trees": 8}, "cellar", "9"), ({"metres": None}, "metres", "must")]
BEGINNING = re.compile(r"(?:\w+=(?:'[^']*'|\([^)]*\)|[^\s,:]+)(?: \([^)]*\))?(?:, |:? ))+")


def settings_named(error, place=""):
    """{setting: its value as text} of those that an error begins with, each with the file that set it."""
    beginning = BEGINNING.match(error.removeprefix("command line: ").removeprefix(f"{place}: "))
    return dict(re.findall(r"(\w+)=('[^']*'|\([^)]*\)|[^\s,:]+)", beginning[0] if beginning else ""))


def test_a_page_of_settings_is_a_plain_dataclass_with_features_and_conflicts():
    assert dataclasses.asdict(House()) == {"metres": 5, "garden": "none", "trees": 3, "pond": False, "cellar": None,
                                           "cellars": ()}
    assert House(trees=3) == House(), "the default of a feature that is off may be written out"
    assert type(House(garden="wild")) is House and House(garden="wild", trees=4).trees == 4
    assert [*page_of(House)] == [
        ("Ground", "metres", "its height"), ("Ground", "garden", "its style"),
        ("Ground", "trees", "trees in the garden, of any kind: oaks too"),
        ("Ground", "pond", 'whether the garden has one, "#1" or none'), ("Below", "cellar", "metres; None: no cellar"),
        ("Below", "cellars", "what they are for")]
    assert not hasattr(House(), "roof")


@dataclasses.dataclass(frozen=True)
class Tower(House):
    """Has rooms:
    one: above the other
    """

    # Above
    floors: Annotated[int, "[1, 99]"] = 20  # of the tower
    metres: Annotated[int, "[1, 999]"] = 70  # from the ground to the roof


def test_a_class_with_more_settings_has_its_own_and_those_of_its_base(capsys):
    assert page_of(Tower)[0] == ("Above", "metres", "from the ground to the roof")
    assert page_of(Tower)[1:] == [*page_of(House)[1:], ("Above", "floors", "of the tower")]
    assert load_config(Tower, ["--floors=3", "--metres=300"])[0] == Tower(floors=3, metres=300)
    with pytest.raises(SystemExit):
        load_config(Tower, ["--help"])
    assert "--floors=20" in capsys.readouterr().out


def test_a_resumed_run_keeps_no_setting_of_a_feature_that_the_command_turns_off(tmp_path):
    first = dataclasses.asdict(GRPOConfig(reference_mode="ema", ema_alpha=0.5, kl_estimator="k2", unmask_steps=2))
    (tmp_path / "config.json").write_text(json.dumps(first | {"learning_rate": "none", "group_size": 0}))
    command = ["--resume=True", f"--out_dir={tmp_path}", "--learning_rate=1e-3", "--group_size=2"]
    resumed, _ = load_config(GRPOConfig, [*command, "--kl_beta=0.0", "--reference_mode=static", "--unmask_steps=1"])
    assert (resumed.ema_alpha, resumed.kl_estimator, resumed.unmask_order) == (0.99, None, "random")
    assert (resumed.learning_rate, resumed.group_size) == (1e-3, 2), "of two values only the later is checked"
    with pytest.raises(Mistake, match="kl_estimator='k3'"):
        load_config(GRPOConfig, [*command, "--kl_beta=0.0", "--kl_estimator=k3"])


@pytest.mark.parametrize("values, keys, remedy", HOUSES)
def test_an_error_names_what_was_set_and_the_file_that_set_it(tmp_path, values, keys, remedy):
    path = tmp_path / "my.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in values.items()))
    argv = [f"--{key}={value}" for key, value in values.items()]
    expected = {key: repr(values[key]) for key in keys.split()}
    for make in (lambda: House(**values), lambda: load_config(House, argv), lambda: load_config(House, [str(path)])):
        with pytest.raises(Mistake) as found:
            make()
        error = str(found.value)
        assert settings_named(error, path) == expected and re.search(rf"\b{remedy}\b", error), error
    assert error.count(str(path)) == (len(expected) if "(" + str(path) in error else 1), "of the file"


KEYS = settings_of(GRPOConfig)


def value_of(key, rng):
    """A random value of a setting, in the words of a command line."""
    kinds, allowed = KEYS[key]
    if bool in kinds and allowed is None:
        return rng.choice(["True", "False"])
    if allowed is not None and not isinstance(allowed, str):
        return str(rng.choice([*allowed]))
    if int in kinds or float in kinds:
        return rng.choice(["0", "1", "2", "3", "0.5", "300"])
    return str(getattr(GRPOConfig, key)) if dict in kinds else rng.choice(["environment", "a", "out-grpo"])


def test_errors_name_only_what_was_typed_and_two_mistakes_always_the_same_first():
    rng, words = random.Random(7), set()
    for _ in range(1500):
        typed = {key: value_of(key, rng) for key in rng.sample([*KEYS], rng.randint(1, 5))}
        argv = [f"--{key}={value}" for key, value in typed.items()]
        errors = []
        for order in (argv, argv[::-1]):
            try:
                load_config(GRPOConfig, order)
            except Mistake as mistake:
                errors.append(str(mistake))
        if not errors:
            continue
        assert len({*errors}) == 1, errors
        named = settings_named(errors[0])
        assert named and named.keys() <= typed.keys(), errors[0]
        assert {*re.findall(r"(\w+)=", errors[0])} <= KEYS.keys(), "the remedy names settings"
        assert not re.search(r"!=|[<>@]|baseline|rewarded", errors[0]), "no word of the code"
        words.add(errors[0].split("=")[0])
    assert len(words) > 25, "the lines reach many of the mistakes"
