"""The commonest names of settings in TRL, verl and nanoGPT; docs/coming_from.md has more, and says what differs."""

OTHER_NAMES = {  # {name there, without its groups: the settings here}
    "model_path": "generator_checkpoint init_from",
    "model_name_or_path": "generator_checkpoint init_from",
    "ref_model": "reference_checkpoint",
    "teacher_model": "teacher_checkpoint",
    "dataset_name": "dataset", "train_dataset": "dataset", "train_files": "dataset",
    "reward_funcs": "reward_functions",
    "lora_r": "lora_rank", "target_modules": "lora_targets",
    "num_generations": "group_size", "n": "group_size", "n_samples_per_prompt": "group_size",
    "max_completion_length": "max_new_tokens", "max_response_length": "max_new_tokens",
    "use_vllm": "sampler", "vllm_server_base_url": "vllm_url",
    "beta": "kl_beta", "kl_coef": "kl_beta", "kl_loss_coef": "kl_beta",
    "loss_type": "objective",
    "scale_rewards": "advantage", "adv_estimator": "advantage",
    "epsilon": "clip_low clip_high", "epsilon_high": "clip_high",
    "clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high",
    "entropy_coef": "entropy_bonus", "entropy_coeff": "entropy_bonus",
    "mask_truncated_completions": "mask_truncated",
    "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size", "rollout_batch_size": "batch_size",
    "num_iterations": "max_iters ppo_epochs", "max_steps": "max_iters",
    "lr": "learning_rate", "warmup_steps": "warmup_iters", "max_grad_norm": "grad_clip",
    "gradient_checkpointing": "grad_checkpoint",
    "output_dir": "out_dir", "resume_from_checkpoint": "resume",
    "save_steps": "save_interval", "eval_steps": "eval_interval", "logging_steps": "log_interval"}


def settings_of(name, known):
    """The settings among `known` for a name of another project, with or without its groups: actor.clip_ratio_low."""
    return [setting for setting in OTHER_NAMES.get(name.rpartition(".")[2], "").split() if setting in known]
