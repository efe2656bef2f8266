"""Maps settings of TRL, verl, transformers and nanoGPT to ours; docs/coming_from.md explains more.
with_settings_of_today translates settings of earlier versions of this project.

A line of TABLE: names | our settings, optionally with a value | the difference or, without such a setting, what to do.
Names with dots are verl's: their last part would be ambiguous.
A line of VALUES: values that our setting does not have | what to do instead.
"""

import difflib

from core.errors import Mistake, one_line

TABLE = """
model model_path model_name model_name_or_path model.path | generator_checkpoint init_from |
hf_model hf_model_name | generator_checkpoint init_from | as in hf:Qwen/Qwen3-0.6B
init_from | generator_checkpoint | 'resume' is resume=True
generator_checkpoint | init_from |
model_revision trust_remote_code | | download another revision and name its folder; code of a model is never run
attn_implementation use_remove_padding | | there is one way, and nothing to set
reward_model_path reward_model.path reward_model.model.path | reward_model_checkpoint |
reward_model.enable | reward_model_checkpoint | and the reward reward_model
ref_model ref.model.path | reference_checkpoint |
teacher_model teacher_model_name_or_path | teacher_checkpoint |

dataset_name dataset_path data_path train_dataset train_files | dataset |
dataset_config dataset_config_name | dataset | as in hf:owner/name:subset
eval_dataset dataset_test_split dataset_train_split | dataset | a record's "split" is train or val
val_files | dataset | hf:FOLDER with train.parquet and test.parquet
data_seed | seed |
shuffle_dataset shuffle | | seed gives the order of the data
filter_overlong_prompts truncation | max_prompt_length | longer training prompts are left out
prompt_key reward_fn_key | | rename the field: docs/rewards.md
dataloader_num_workers dataloader_pin_memory dataloader_drop_last | | no processes load data
remove_unused_columns | | rewards get every field
apply_chat_template chat_template_path | template=model |
use_chat_template use_custom_chat_template custom_chat_template chat_template | template | model is the tokenizer's own
prompt_template | prompt_format template | prompt_format is a text with {prompt}, template a chat template
reward_funcs custom_reward_function.name | reward_functions | a function of your own is in reward_file
list_rewards | | python grpo/rewards.py lists them
custom_reward_function.path | reward_file | with the adapter of docs/coming_from.md
tools environment_factory | environment | with an adapter: docs/rewards.md
max_tool_calling_iterations max_assistant_turns | max_turns |

per_device_train_batch_size rollout_batch_size | batch_size | it counts problems, each with group_size completions
train_batch_size gen_batch_size | batch_size gradient_accumulation_steps | prompts: their product times the ranks
generation_batch_size | batch_size gradient_accumulation_steps | completions: their product times group_size and ranks
per_device_eval_batch_size val_batch_size | sample_rows | completions sampled at once
num_generations rollout.n | group_size |
num_generations_eval val_kwargs.n | eval_completions |
max_completion_length max_response_length response_length max_tokens | max_new_tokens |
max_seq_length max_length | block_size | for prompts max_prompt_length and max_new_tokens
steps_per_generation | minibatches | TRL's number divided by gradient_accumulation_steps
ppo_mini_batch_size minibatch_size mini_batch_size | minibatches | a count: prompts of an iteration divided by yours
num_iterations | max_iters ppo_epochs | TRL's is ppo_epochs
ppo_micro_batch_size ppo_micro_batch_size_per_gpu | micro_batch_tokens | tokens, not completions
log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu | micro_batch_tokens | tokens, not completions
ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu use_dynamic_bsz | micro_batch_tokens |

generation_kwargs | temperature top_p top_k min_p |
repetition_penalty | | sampling and scoring share one distribution; the reward repetition punishes repeats
use_vllm | sampler=vllm |
rollout.name | sampler | vllm is a server
vllm_mode | sampler=vllm vllm_url | only with a server, which you start
vllm_server_base_url vllm_server_host vllm_server_port | vllm_url |
vllm_gpu_memory_utilization gpu_memory_utilization vllm_max_model_length | | an option of the server: vllm serve
vllm_tensor_parallel_size tensor_model_parallel_size enforce_eager | | an option of the server: vllm serve
vllm_importance_sampling_correction vllm_importance_sampling_mode | ratio_to=sampler | it clips, without weights
vllm_importance_sampling_cap vllm_importance_sampling_clip_max | ratio_to=sampler | it clips, without weights
rollout_is tis_imp_ratio_cap | ratio_to=sampler | it clips, without weights

loss_type | objective |
loss_agg_mode | objective | token-mean is dapo or bnpo, seq-mean-token-mean grpo
importance_sampling_level | objective=gspo | for sequence; its clip_low and clip_high are smaller
sapo_temperature_pos sapo_temperature_neg | objective=sapo | they are constants of its row: docs/getting_started.md
dro_beta | objective=dro | it is a constant of its row: docs/getting_started.md
vespo_k_pos vespo_k_neg | | a config can add an objective: docs/getting_started.md
policy_loss.loss_mode | objective |
vespo_lambda_pos vespo_lambda_neg | | a config can add an objective: docs/getting_started.md
scale_rewards | advantage | group is group_std, none group_mean, batch batch_std
adv_estimator | advantage | grpo is group_std, rloo leave_one_out, reinforce_plus_plus step
norm_adv_by_std_in_grpo | advantage | True is group_std, False group_mean
multi_objective_aggregation | advantage=gdpo | for normalize_then_sum
reward_normalisation reward_normalization | advantage=gdpo | for group; none is the default
epsilon clip_ratio clip_range cliprange clip_eps clip_epsilon | clip_low clip_high |
clip_ratio_low | clip_low |
epsilon_high clip_ratio_high | clip_high | of cispo one less: the bound is 1 + clip_high
delta clip_ratio_c | | clip_high bounds positive advantages only, as in PPO
entropy_coef entropy_coeff | entropy_bonus |
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target | | entropy_bonus is constant
top_entropy_quantile off_policy_mask_threshold | | every sampled token is trained
mask_truncated_completions | mask_truncated |
overlong_buffer.len overlong_buffer_cfg.len | overlong_buffer |
overlong_buffer.enable overlong_buffer_cfg.enable | overlong_buffer | 0 is False
overlong_buffer.penalty_factor overlong_buffer_cfg.penalty_factor | | the penalty of overlong_buffer is at most 1
filter_groups.enable | zero_std=resample |
filter_groups.metric filter_groups.max_num_gen_batches | | zero_std=resample compares rewards
beta kl_coef kl_loss_coef | kl_beta |
use_kl_loss | kl_beta | 0.0 is False
kl_loss_type kl_penalty | kl_estimator | low_var_kl is k3, mse k2
use_kl_in_reward | kl_in_reward |
target_kl | kl_target |
sync_ref_model | reference_mode=ema |
ref_model_mixup_alpha | ema_alpha | one minus TRL's number
ref_model_sync_steps | reference_update_freq | with reference_mode=periodic
critic_warmup critic | | GRPO has no critic
val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k val_kwargs.do_sample | | evaluation samples as training does
disable_dropout | | models are in eval mode

lr | learning_rate |
lr_scheduler_type lr_scheduler_kwargs warmup_style | min_lr lr_decay_iters | a cosine falls to min_lr
decay_lr | min_lr | equal to learning_rate for False
warmup_steps num_warmup_steps lr_warmup_steps | warmup_iters |
warmup_ratio lr_warmup_steps_ratio | warmup_iters | steps: the ratio times max_iters
max_steps total_training_steps | max_iters | optimizer steps
num_train_epochs total_epochs num_epochs epochs | max_iters | optimizer steps, not epochs
optim | optimizer | adamw or muon
adam_beta1 | beta1 |
adam_beta2 | beta2 |
adam_epsilon optim_args | | epsilon is 1e-8
max_grad_norm | grad_clip |
bf16 fp16 torch_dtype model_dtype | dtype | bfloat16 or float32
tf32 cast_lm_head_to_fp32 bf16_full_eval | | dtype decides; log-probabilities are float32
gradient_checkpointing enable_gradient_checkpointing activation_checkpointing | grad_checkpoint |
gradient_checkpointing_kwargs | grad_checkpoint |
torch_compile use_torch_compile | compile |
use_liger_kernel | | logits are computed in parts, at sampled positions only
use_peft lora_r | lora_rank |
lora_target_modules target_modules peft_config | lora_rank lora_targets |
lora_dropout | | adapters have no dropout
load_in_8bit | load_in_4bit |
use_cpu no_cuda | device | cpu
deepspeed fsdp fsdp_config actor.strategy | parallel=fsdp |
param_offload optimizer_offload | ref_offload | nothing else is offloaded
n_gpus_per_node nnodes gpus n_gpus num_gpus num_processes world_size | | torchrun starts the processes: docs/scaling.md

eval_steps test_freq | eval_interval |
eval_strategy do_eval eval_on_start val_before_train | eval_interval | also before the first step
eval_iters | eval_batches eval_problems |
eval_batches | eval_problems |
eval_only val_only | max_iters | 0: it evaluates and ends
logging_steps logging_strategy logging_first_step | log_interval | metrics.jsonl has every step
log_completions num_completions_to_print log_val_generations | sample_interval | samples stay in out_dir
print_sample_every | sample_interval |
save_steps save_freq save_strategy checkpoint_freq checkpoint_interval always_save_checkpoint | save_interval |
save_total_limit save_only_model max_actor_ckpt_to_keep | | the latest model and state are kept
load_best_model_at_end metric_for_best_model greater_is_better | keep_best | the best and the last model are kept
output_dir default_local_dir logging_dir | out_dir |
push_to_hub hub_model_id hub_token | | hf upload, after the run: docs/huggingface.md
resume_from_checkpoint resume_mode | resume |
logger | report_to |
config config_file config_path config_name | | a config file is named without --config=: its name ends in .py
run_name experiment_name | wandb_run_name | with report_to
project project_name | wandb_project | with report_to
disable_tqdm | | the bar is on a terminal only
"""

VALUES = """
advantage=normalize_then_sum | it is gdpo
kl_estimator=k1 kl_estimator=kl | its gradient does not contain the reference; leave it out and set kl_in_reward=True
kl_estimator=low_var_kl | it is k3
kl_estimator=mse | it is k2
kl_estimator=full | it is exact
objective=ppo objective=vanilla | it is grpo with ppo_epochs above 1, with the mean of the group in the critic's place
objective=reinforce objective=vpg | it is plain
objective=reinforce_plus_plus | it is reinforce++
objective=reinforce_plus_plus_baseline | it is reinforce++_baseline
"""


def with_settings_of_today(saved, path, say=None):
    """Translates the settings in a run's config.json, possibly from an earlier version, to current settings. Raises
    Mistake if there is no equivalent. say: a function that prints a line about each replaced setting"""
    today = {"template": "plain"} | saved  # a run without the setting had plain prompts
    normalisation = today.get("reward_normalisation")
    if normalisation in ("none", "group"):
        del today["reward_normalisation"]
    if normalisation == "group":
        advantage = today.get("advantage")
        if advantage not in (None, "batch_std", "gdpo"):
            shown = one_line(advantage, 100, repr)
            raise Mistake(f"{path}: reward_normalisation='group' with advantage={shown} is no longer possible; delete "
                          "one of the two there, or set --advantage=gdpo")
        today["advantage"] = "gdpo"
        if say is not None:
            say(f"{path}: reward_normalisation='group' is now advantage='gdpo'")
    return today


def names_elsewhere():
    """Returns {name in another library: (our settings, note)} from TABLE."""
    found = {}
    for line in TABLE.split("\n"):
        if line:
            names, ours, note = line.split("|")
            answer = ours.split(), note.strip()
            found |= dict.fromkeys(names.split(), answer)
    return found


def answer_to_value(key, value):
    """Returns the advice for a value that the setting `key` does not have, or "" if VALUES has no entry."""
    for line in VALUES.split("\n"):
        values, _, answer = line.partition(" | ")
        if f"{key}={value}".lower() in values.split():
            return answer
    return ""


def answer_to(key, known):
    """Returns the advice for a key that is not in `known`, the settings of a script: our equivalent setting, a setting
    with a similar name, what to do instead, or "". Names with dots are matched by the longest suffix in TABLE."""
    table = names_elsewhere()
    parts = key.replace("-", "_").split(".")
    if "critic" in parts:
        parts = ["critic"]
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        ours, note = table.get(name, ([name], ""))
        near = [setting for setting in ours if setting.split("=")[0] in known]
        if near:
            return f"did you mean {', '.join(near)}? {note}".strip()
        if name in table:
            return "no setting of this script" if ours else note
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return f"did you mean {near[0]}?" if near else ""


def wrong_form(argument, argv, known):
    """Returns the error about an argument that is neither a config file nor --key=value, as in `--beta 0.1` or verl's
    `data.train_files=my.parquet`. It covers all keys of the command line that are not in `known`, the settings."""
    keys = {}
    for each in argv:
        if each.startswith("--") or "=" in each:
            keys[each.removeprefix("--").partition("=")[0]] = None
    error = f"{argument}: expected a config file ending in .py, or --key=value"
    if keys.keys() <= known.keys():
        return error
    return f"{error}; {unknown_keys([('command line', keys)], known)}"


def unknown_keys(given, known):
    """Returns the error about all keys that are not in `known`. given: pairs (place, {key: value})"""
    found = {}  # {place: {key: the key with its advice}}
    for place, settings in given:
        for key in settings:
            if key not in known:
                answer = answer_to(key, known)
                found.setdefault(place, {})[key] = f"{key} ({answer})" if answer else key
    parts = []
    for place, answers in found.items():
        word = "unknown key" if len(answers) == 1 else "unknown keys"
        parts.append(f"{place}: {word} {', '.join(answers.values())}")
    parts.append("--help=all lists the keys, docs/coming_from.md has names of TRL and verl")
    return "; ".join(parts)
