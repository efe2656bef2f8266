"""GRPO from Python: one call of grpo_training_step is one optimizer step. Here a reward for vowels; it takes seconds.

    python docs/from_python.py

Steps that share rollouts (ppo_epochs, minibatches) are handed the same buffer: DataBuffer(config.seed, dist.rank) of
grpo/rollout.py. The phases of a step are functions too: collect_rollouts, with_advantage, train_on_rollouts. A whole
run, with evaluation and checkpoints, is grpo.GRPOTrainer(...).run().
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from core.distributed import Distributed
from core.models import load_model, load_tokenizer
from core.optim import build_optimizers
from grpo import GRPOConfig, grpo_training_step
from grpo.policies.fill import FillPolicy
from grpo.rewards import Scored

path = "data/char_diffusion/pretrained/generator.safetensors"
model, tokenizer, dist = load_model(path)[0], load_tokenizer(path), Distributed("cpu")
config = GRPOConfig(temperature=1.0, top_p=1.0, batch_size=4, learning_rate=3e-4)
policy = FillPolicy(model, tokenizer)
reference, optimizers = policy.frozen(), build_optimizers(policy, config)

text = torch.tensor(tokenizer.encode("The quick brown fox jumps over the lazy dog. "))
mask = torch.rand(4, len(text)) < 0.3
problems = {"input": text.where(~mask, tokenizer.mask_token_id).numpy(), "target": text.repeat(4, 1).numpy(),
            "mask": mask.numpy(), "number": range(4)}


def vowels(rollouts):
    """The share of vowels among the sampled tokens: (problems, group_size)."""
    share = torch.isin(rollouts.target, torch.tensor(tokenizer.encode("aeiou"))).float() * rollouts.mask
    return Scored(rollouts.by_problem(share.sum(1) / rollouts.mask.sum(1)))


for step in range(20):
    metrics = grpo_training_step(policy, reference, vowels, lambda round: problems, optimizers, step, config, dist)
    print(step, round(metrics["mean_reward"], 3), round(metrics["mean_kl"], 3))
