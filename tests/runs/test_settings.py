"""Settings: config files and arguments, rooms that open with a value, one line and an exit code for a mistake."""

import dataclasses
import json
import re

import pytest

from core.config import load_config
from core.errors import Mistake, UsageError
from core.settings.help import help_lines
from core.settings.other_names import answer_to
from core.settings.setting import Settings, setting
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from tests.tiny import all_settings

JUDGE = "--mode=sequence_scorer"
# What users of TRL and of verl type, and a word of the answer; without one there is no such setting here
TYPED = """
model_name_or_path generator_checkpoint, dataset_name dataset, reward_funcs reward_functions, output_dir out_dir,
num_generations group_size, max_completion_length max_new_tokens, per_device_train_batch_size batch_size,
generation_batch_size batch_size, steps_per_generation minibatches, num_iterations ppo_epochs, max_steps max_iters,
num_train_epochs max_iters, beta kl_beta, epsilon clip_low, epsilon_high clip_high, loss_type objective,
importance_sampling_level gspo, scale_rewards advantage, multi_objective_aggregation reward_normalisation,
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


def test_help_shows_every_setting_and_with_all_those_of_the_rooms():
    own, every = ({line.split("=")[0].strip(" -") for line in help_lines(GRPOConfig, rooms) if line.startswith("  --")}
                  for rooms in (False, True))
    assert own == {f.name for f in dataclasses.fields(GRPOConfig)} and every == all_settings(GRPOConfig)


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


class Garden(Settings):
    excludes = (("pond lake=deep", "garden=zen house", "there is no water"),)

    trees: int = setting(3, "trees in the garden", "[0, 9]")
    pond: bool = setting(False, "whether it has one")


class Cellar(Settings):
    excludes = (("depth>house", "", "the house would fall"),)
    depth: float = setting(2.0, "metres", "(0, 9]")


class House(Settings):
    rooms = {f"{__name__}:Garden": "garden!=none", f"{__name__}:Cellar": "cellars=wine cellars=cheese"}

    house: int = setting(5, "metres", "[1, 9]")
    garden: str = setting("none", "its style", ("none", "zen", "wild"))
    cellars: tuple[str, ...] = setting((), "what they are for")


def test_a_room_has_its_settings_only_while_it_is_open():
    closed, both = House(), House(garden="wild", cellars=("wine", "coal"), trees=4)
    assert dataclasses.asdict(closed) == {"house": 5, "garden": "none", "cellars": ()}
    assert dataclasses.asdict(both) == {"house": 5, "garden": "wild", "cellars": ("wine", "coal"), "trees": 4,
                                        "pond": False, "depth": 2.0}
    assert isinstance(both, House) and isinstance(both, Garden) and not isinstance(closed, Garden)
    assert closed.trees == 3, "a closed room's settings read as their defaults"
    assert House(trees=3) == closed and not hasattr(closed, "roof")
    for values in ({"trees": 8}, {"garden": "zen", "trees": 10}, {"garden": "zen", "pond": True},
                   {"cellars": ("cheese",), "depth": 6.0}):
        with pytest.raises(Mistake, match=f"^{[*values][-1]}="):
            House(**values)
