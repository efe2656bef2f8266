"""TRL's side of the comparison of learning: its GRPOTrainer with the settings of a config of this project."""

import tempfile
import time

from core.distributed import Distributed
from core.prompts import OF_CONSUMER, as_messages
from core.settings.optional import quiet_transformers, require
from grpo.benchmarks.learning_tools import NEEDS
from grpo.benchmarks.peer_trl import ROWS, turns_of
from grpo.build import build_data
from grpo.reward_functions.registry import load_reward_file


def trl_steps(config, turn):
    """Trains in turns (grpo/benchmarks/side.py)."""
    trl = require("trl", *NEEDS)
    datasets = require("datasets", *NEEDS)
    transformers = quiet_transformers(config.generator_checkpoint, "generator_checkpoint")
    datasets.disable_progress_bars()
    optional = {}
    if config.environment is None:
        optional["reward_funcs"] = reward_of(config)
    else:
        optional["environment_factory"] = load_reward_file(config.environment_file)[config.environment]
    if config.lora_rank:
        peft = require("peft", *NEEDS)
        optional["peft_config"] = peft.LoraConfig(
            r=config.lora_rank, lora_alpha=config.alpha, target_modules=config.targets, task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            config.generator_checkpoint, args=settings_of(trl, config, folder),
            train_dataset=datasets.Dataset.from_list(records_of(config)),
            processing_class=transformers.AutoTokenizer.from_pretrained(config.generator_checkpoint),
            callbacks=[in_turns_with(transformers, turn)], **optional)
        trainer.train()


def settings_of(trl, config, folder):
    """The trl.GRPOConfig that does what a GRPOConfig of this project says, as fast as TRL can on two cores."""
    rows = config.batch_size * config.group_size
    at_once = min(ROWS, rows)
    bfloat16 = config.dtype == "bfloat16"
    return trl.GRPOConfig(
        folder, per_device_train_batch_size=at_once, gradient_accumulation_steps=rows // at_once,
        num_generations=config.group_size, max_completion_length=config.max_new_tokens,
        max_tool_calling_iterations=config.max_turns - 1, beta=config.kl_beta,
        temperature=config.temperature, top_p=config.top_p, num_iterations=1, loss_type=config.objective,
        learning_rate=config.learning_rate, lr_scheduler_type="constant", adam_beta1=config.beta1,
        adam_beta2=config.beta2, weight_decay=config.weight_decay, max_grad_norm=config.grad_clip, max_steps=10**6,
        use_cpu=True, bf16=bfloat16, model_init_kwargs={"dtype": "bfloat16" if bfloat16 else "float32"},
        seed=config.seed, shuffle_dataset=False, report_to="none", save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, logging_steps=1, optim="adamw_torch_fused")


def records_of(config):
    """The problems of all steps in the order in which this project draws them, with messages as prompts."""
    with Distributed(config.device, config.dtype) as dist:
        data = build_data(config, dist)
    drawn = [record for step in range(config.max_iters) for record in data.problems("train", step)["record"]]
    columns = [{key: value for key, value in record.items() if key not in OF_CONSUMER} for record in drawn]
    return [record | {"prompt": as_messages(record["prompt"])} for record in columns]


def reward_of(config):
    """The reward of a config as TRL calls it, with messages in place of texts."""
    name, = config.reward_functions
    reward = load_reward_file(config.reward_file)[name]

    def of_messages(prompts, completions, **columns):
        return reward(prompts, [messages[0]["content"] for messages in completions], **columns)
    return of_messages


def in_turns_with(transformers, turn):
    """A callback that waits for the turn when TRL has logged the reward of a step."""
    class EachLog(turns_of(transformers, turn)):
        def on_log(self, args, state, control, logs, **_):
            if "reward" in logs:
                self.wait({"seconds": time.perf_counter() - self.start, "reward": logs["reward"]}, control)
    return EachLog()
