"""The public names of GRPO, each imported at its first use."""

import importlib
import sys
import types

HOME = {"GRPOConfig": "grpo.grpo_config", "GRPOTrainer": "grpo.grpo_trainer",
        "grpo_training_step": "grpo.grpo_training_step"}
__all__ = list(HOME)


def __getattr__(name):
    if name not in HOME:
        raise AttributeError(f"the package grpo has no {name}")
    module = importlib.import_module(HOME[name])
    return getattr(module, name)


class Package(types.ModuleType):
    """A module type that keeps grpo_training_step the function: importing the module of the same name would replace
    the function by the module."""

    def __setattr__(self, name, value):
        if name not in HOME:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = Package
