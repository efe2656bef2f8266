"""The names that users of GRPO import. The settings and the trainer are loaded when they are asked for."""

import importlib

from grpo.grpo_training_step import grpo_training_step

__all__ = ["GRPOConfig", "GRPOTrainer", "grpo_training_step"]
HOME = {"GRPOConfig": "grpo.grpo_config", "GRPOTrainer": "grpo.grpo_trainer"}


def __getattr__(name):
    if name not in HOME:
        raise AttributeError(f"the package grpo has no {name}")
    return getattr(importlib.import_module(HOME[name]), name)
