"""Run by test_sharding.py: trains small models on one rank, and sharded on two and four, in processes of its own.

python tests/exactness/shard_worker.py DATASET PROMPTS FOLDER
FOLDER holds models in Hugging Face format and sums.jsonl, and gets what the ranks found, RANKS-RANK.pt
"""

import os
import socket
import sys
from dataclasses import replace

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))

import torch
import torch.distributed.fsdp  # noqa: F401

from core.checkpoint_manager import CheckpointManager
from core.distributed import Distributed, is_sharded
from core.models import load_model, load_tokenizer
from core.optim import build_optimizers
from core.performance.decode import can_decode
from core.performance.sharding import gathered_state, has_parts
from core.prompts import PromptConsumer
from grpo.build import shard_models
from grpo.grpo_training_step import grpo_training_step
from grpo.policies.causal import CausalPolicy
from grpo.reference import move_reference
from grpo.reward_functions.judge import Judge
from grpo.rewards import Rewards
from grpo.sampling_settings import SamplingSettings
from tests.tiny import (
    TOKENIZER,
    causal_policy,
    config,
    consumer,
    fill_policy,
    judge,
    prompt_config,
    prompt_consumer,
    step_problems,
)

DATASET, PROMPTS, FOLDER = sys.argv[1:]
PROBLEMS = 8  # of a step, on all ranks together


def fill(c, dist):
    """A fill-in policy, its data and rewards, and the model of its judge."""
    scorer = judge(n_layer=2)
    data = consumer(DATASET, c, rank=dist.rank, world=dist.world)
    rewards = Rewards(c, Judge(scorer, TOKENIZER, reads_ids=True, dtype=dist.dtype))
    return fill_policy(seed=1, scale=3.0, n_layer=2, dtype=dist.dtype), data, rewards, scorer


def causal(c, dist):
    """A causal policy whose prompts and completions have many lengths, so that ranks call it unequally often."""
    policy = causal_policy(seed=1, scale=3.0, n_layer=2)
    policy.model.grad_checkpoint = True
    return policy, prompt_consumer(PROMPTS, c, rank=dist.rank, world=dist.world), Rewards(c), None


def huggingface(family):
    """The same with a transformers model: whole, or with an adapter."""
    def make(c, dist):
        path = os.path.join(FOLDER, family)
        model, tokenizer = load_model(path, adapter=c)[0], load_tokenizer(path)
        data = PromptConsumer(os.path.join(FOLDER, "sums.jsonl"), c.batch_size, c.seed, dist.rank, dist.world,
                              tokenizer=tokenizer)
        policy = CausalPolicy(model, tokenizer, dist.dtype, grad_checkpoint=True)
        torch.manual_seed(3)
        with torch.no_grad():  # a new adapter changes nothing, and half of its gradient is 0
            for p in policy.weights().values() if c.has_adapter else ():
                p.add_(0.1 * torch.randn_like(p))
        return policy, data, Rewards(c), None
    return make


SIZE = {"learning_rate": 1e-3, "min_lr": 1e-3, "parallel": "fsdp", "optimizer": "adamw", "grad_clip": 1.0,
        "kl_beta": 0.1}
SUMS = prompt_config(**SIZE, reward_settings={"length_min": 1, "length_max": 6})
LORA = {"lora_rank": 4, "reference_mode": "periodic", "reference_update_freq": 2}
KINDS = {"fill": (fill, config(**SIZE, reference_mode="ema", ema_alpha=0.5)),
         "causal": (causal, replace(SUMS, micro_batch_tokens=30)),
         "qwen3": (huggingface("qwen3"), SUMS),  # its embeddings are tied
         "lora": (huggingface("llama"), replace(SUMS, **LORA))}
ON = {1: tuple(KINDS), 2: tuple(KINDS), 4: ("fill",)}  # {ranks: kinds}


def trained(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def flat(tensors):
    return torch.cat([gathered_state(x.detach()).flatten() for x in tensors])


class Keep:
    """Stands before the optimizers and keeps the gradient of the last step."""

    def __init__(self, policy):
        self.policy, self.param_groups = policy, []

    def step(self):
        self.gradient = flat([p.grad for p in trained(self.policy)])

    def zero_grad(self, set_to_none):
        """The optimizers do that."""


class Run:
    """A policy with its reference, data, rewards and optimizers, sharded on several ranks."""

    def __init__(self, make, c, dist):
        self.c, self.dist = replace(c, batch_size=PROBLEMS // dist.world), dist
        self.policy, self.data, self.rewards, scorer = make(self.c, dist)
        self.reference = self.policy.frozen() if c.kl_beta else None
        shard_models(filter(None, (self.policy.model, self.reference and self.reference.model, scorer)), c, dist)
        assert has_parts(self.policy.model) == (dist.world > 1) == all(map(is_sharded, self.policy.parameters()))
        self.optimizers, self.keep = build_optimizers(self.policy, c), Keep(self.policy)
        for group in self.optimizers[0].param_groups:
            group["eps"] = 1e-4  # with 1e-8, a gradient near 0 is divided by its own size, and shows its rounding

    def steps(self, first, last):
        """Steps of training with numbers from first to last. Returns the metrics of the last one."""
        for step in range(first, last):
            metrics = grpo_training_step(self.policy, self.reference, self.rewards,
                                         step_problems(self.data, self.c, step), [self.keep, *self.optimizers], step,
                                         self.c, self.dist)
            assert metrics["skipped_steps"] == 0
            if self.reference is not None:
                move_reference(self.reference, self.policy, step + 1, self.c)
        return metrics

    def checkpoints(self, folder):
        return CheckpointManager(folder, self.policy.save, suffix=self.policy.suffix,
                                 identity=self.policy.identity(), writes=self.dist.is_main)

    def resumed(self, folder):
        """This new run, after the third step from the state in a folder on."""
        state = self.checkpoints(folder).load(self.policy.weights(), self.optimizers)
        self.policy.load_weights(state["model"])
        self.reference.load_weights(state["reference"])
        self.steps(2, 3)
        return self


def train(name, dist, found):
    """Three steps; the last one again by a run that goes on from the state after two."""
    make, c = KINDS[name]
    run, folder = Run(make, c, dist), f"{FOLDER}/{dist.world}-{name}"
    policy, start = run.policy, flat(trained(run.policy))
    run.steps(0, 1)
    found[f"{name}/gradient"] = run.keep.gradient
    found[f"{name}/mean_kl"] = torch.tensor(run.steps(1, 2)["mean_kl"])
    numbers = [*policy.parameters(), *(state["exp_avg"] for state in run.optimizers[0].state.values())]
    found[f"{name}/share/{dist.rank}"] = sum((x.to_local() if is_sharded(x) else x).numel() for x in numbers)
    os.makedirs(folder, exist_ok=True)
    run.checkpoints(folder).save(2, policy.weights(), run.optimizers, {}, reference=run.reference.weights())
    dist.barrier()
    run.steps(2, 3)
    found[f"{name}/way"] = flat(trained(policy)) - start
    with dist.gathered():
        assert not any(map(is_sharded, policy.parameters())), "whole"
        assert dist.world == 1 or not can_decode(policy.model), "and elsewhere the next time"
        if dist.rank == dist.world - 1:  # one rank reads alone
            rollouts = policy.sample(step_problems(run.data, run.c, 99)(), 99, SamplingSettings.of(run.c))
            found[f"{name}/texts"], found[f"{name}/rewards"] = rollouts.texts.completions, run.rewards(rollouts).reward
    assert all(map(is_sharded, policy.parameters())) == (dist.world > 1)
    again = Run(make, c, dist).resumed(folder)
    assert torch.equal(flat(trained(again.policy)), flat(trained(policy))), "a resumed run is the same run"


def on_rank(rank, world, port):
    """All of it, on one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = {}
    with Distributed("cpu", "float32") as dist:
        for name in ON[world]:
            train(name, dist, found)
            dist.shards = None
        dist.barrier()
    torch.save(found, f"{FOLDER}/{world}-{rank}.pt")


if __name__ == "__main__":
    for world in ON:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.start_processes(on_rank, (world, port), nprocs=world, start_method="fork")
