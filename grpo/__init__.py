"""What users of GRPO import. Plotting and optional packages are loaded where they are used, not here."""

from grpo.grpo_config import GRPOConfig
from grpo.grpo_trainer import GRPOTrainer
from grpo.grpo_training_step import grpo_training_step

__all__ = ["GRPOConfig", "GRPOTrainer", "grpo_training_step"]
