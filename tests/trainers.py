"""Trainers of tiny policies, and the records of their runs, which several tests share."""

import functools
import os

from core.logger import Logger
from grpo.build import FILL_IN, Models, build_reference, fill_in_evaluation
from grpo.evaluation.prompts import PromptEvaluation
from grpo.grpo_trainer import GRPOTrainer
from grpo.reward_functions.judge import Judge
from grpo.rewards import Rewards
from tests.tiny import (
    TOKENIZER, causal_policy, config, consumer, fill_policy, judge, one_process, prompt_consumer, read_records, rewards)

RARELY = {"eval_interval": 100, "sample_interval": 100}
EVALUATED = {"eval_problems": 4, "eval_completions": 2, "grad_clip": 1.0, "learning_rate": 1e-3, "min_lr": 1e-4,
             "lr_decay_iters": 6, "log_interval": 1, "eval_interval": 3, "sample_interval": 3, "save_interval": 3}


def no_evaluation(policy, temperature):
    return {"kl": 0.0}, []


no_evaluation.columns = ("loss",)


def trainer(dataset, out_dir, reward=None, policy=None, resume=False, evaluates=False, logger=Logger, **settings):
    """A trainer of a fill-in policy, with its evaluation or without one. reward: a rewards object; None: a judge"""
    c = config(**{"dataset": dataset, "out_dir": str(out_dir)} | (EVALUATED if evaluates else RARELY) | settings)
    dist, policy, evaluation = one_process(), policy or fill_policy(seed=1, scale=3.0), no_evaluation
    reference, scoring = build_reference(c, policy, dist), reward or rewards(c, judge())
    if evaluates:
        models = Models(FILL_IN, policy, reference, Judge(judge(), TOKENIZER, reads_ids=True), None)
        evaluation = fill_in_evaluation(c, models, dist, scoring)
    t = GRPOTrainer(policy, reference, scoring, consumer(dataset, c), evaluation, c,
                    logger(c.out_dir, c.max_iters, evaluation.columns), dist)
    if resume:
        t.resume()
    return t


evaluated_trainer = functools.partial(trainer, evaluates=True)


def prompt_trainer(prompts, out_dir, evaluates=True, logger=Logger, **settings):
    """A trainer of a causal policy, with its evaluation or without one."""
    settings = {"out_dir": str(out_dir), "max_new_tokens": 5, "task_type": "general"} | (
        EVALUATED if evaluates else RARELY) | settings
    if not {"reward_functions", "teacher_checkpoint"} & settings.keys():
        settings["reward_settings"] = {"length_min": 1, "length_max": 6}
    c = config(**settings)
    dist, policy = one_process(), causal_policy(seed=1, scale=3.0)
    data, scoring, reference = prompt_consumer(prompts, c), Rewards(c), build_reference(c, policy, dist)
    evaluation = PromptEvaluation(data, reference, scoring, c, dist) if evaluates else no_evaluation
    return GRPOTrainer(policy, reference, scoring, data, evaluation, c,
                       logger(c.out_dir, c.max_iters, evaluation.columns), dist)


def run(t, resume=False):
    """The trainer at the end of its run."""
    if resume:
        t.resume()
    t.run()
    return t


def records(out_dir):
    return read_records(os.path.join(out_dir, "metrics.jsonl"))


def training_records(out_dir):
    return [record for record in records(out_dir) if "loss" in record]


def logged_keys(out_dir):
    return {key for record in records(out_dir) for key in record} - {"step"}
