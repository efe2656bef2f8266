"""The names that users of GRPO import, each loaded when it is asked for."""

import importlib
import sys
import types

HOME = {"GRPOConfig": "grpo.grpo_config", "GRPOTrainer": "grpo.grpo_trainer",
        "grpo_training_step": "grpo.grpo_training_step"}
__all__ = list(HOME)


def __getattr__(name):
    if name not in HOME:
        raise AttributeError(f"the package grpo has no {name}")
    return getattr(importlib.import_module(HOME[name]), name)


class Package(types.ModuleType):
    def __setattr__(self, name, value):
        if name not in HOME:  # Python would put the module of this name in the place of the function
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = Package
