"""Run by test_sharding.py, alone or under torchrun, where every model is sharded: gradients, five steps, resume.

python tests/grpo/shard_worker.py DATASET PROMPTS MODELS OUT BATCH_SIZE [OTHER]
MODELS: a folder with models in Hugging Face format; OTHER: the OUT of a run on another number of ranks
"""

import os
import sys
from dataclasses import replace

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))

import torch

from core.checkpoint_manager import CheckpointManager
from core.distributed import Distributed
from core.huggingface.settings import LoraConfig
from core.models import load_model, load_tokenizer
from core.performance.sharding import gathered, has_parts, is_sharded, shard_all, whole
from core.prompts import PromptConsumer
from core.training_step import build_optimizers
from grpo.grpo_training_step import grpo_training_step
from grpo.kl import choose_estimator
from grpo.policies.causal import CausalPolicy
from grpo.reference import REFERENCES
from grpo.reward_functions.judge import Judge
from grpo.rewards import Rewards, Scored
from grpo.scoring import with_reference
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

dataset, prompts, models, out, batch_size, other = (*sys.argv[1:], None)[:6]
dist = Distributed("cpu", "float32")
result = {}


def fill(c):
    """A fill-in policy, its reference and a judge."""
    policy, scorer = fill_policy(seed=1, scale=3.0, n_layer=2), judge(n_layer=2)
    data = consumer(dataset, c, rank=dist.rank, world=dist.world)
    return policy, policy.frozen(), data, Rewards(c, Judge(scorer, TOKENIZER, reads_ids=True)), [scorer]


def causal(c):
    """A causal policy whose prompts and completions have many lengths, so that ranks call it unequally often."""
    policy, data = causal_policy(seed=1, scale=3.0, n_layer=2), prompt_consumer(prompts, c, rank=dist.rank,
                                                                              world=dist.world)
    policy.model.grad_checkpoint = c.grad_checkpoint
    return policy, policy.frozen(), data, Rewards(c), []


class Moving(LoraConfig):
    """Of a run whose reference moves: it has an adapter of its own."""

    reference_adapter = True


def huggingface(family, adapter=LoraConfig()):
    """A policy of a transformers model, whole or with an adapter."""
    def make(c):
        path = os.path.join(models, family)
        model, tokenizer = load_model(path, adapter=adapter)[0], load_tokenizer(path)
        data = PromptConsumer(os.path.join(models, "sums.jsonl"), c.batch_size, c.seed, dist.rank, dist.world,
                              tokenizer=tokenizer)
        policy = CausalPolicy(model, tokenizer, grad_checkpoint=c.grad_checkpoint)
        if adapter.lora_rank:
            torch.manual_seed(3)
            with torch.no_grad():  # a new adapter changes nothing, and half of its gradient is 0
                for p in policy.weights().values():
                    p.add_(0.1 * torch.randn_like(p))
        return policy, policy.frozen(), data, Rewards(c), []
    return make


def setup(make, c):
    """(policy, reference, data, rewards, optimizers), sharded on several ranks."""
    policy, reference, data, rewards, others = make(c)
    shard_all([policy.model, reference.model, *others], c, dist)
    assert has_parts(policy.model) == (dist.world > 1) == all(map(is_sharded, policy.parameters()))
    return policy, reference, data, rewards, build_optimizers(policy, c)


def halved(policy, reference, data, rewards, others):
    """The same in bfloat16."""
    for part in (policy, reference, *[rewards.judge] * bool(others)):
        part.dtype = torch.bfloat16
    return policy, reference, data, rewards, others


def trained(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def flat(tensors):
    return torch.cat([whole(x.detach()).flatten() for x in tensors])


def steered(policy):
    """The trained weights whose gradient is more than rounding: all but GPT-2's bias of the keys, which changes no
    attention, because it adds the same number to all scores of a query. AdamW makes whole steps of its rounding."""
    found = []
    for name, p in policy.model.named_parameters():
        if p.requires_grad:
            p = flat([p])
            found.append(torch.cat((p[:len(p) // 3], p[2 * len(p) // 3:])) if name.endswith("c_attn.bias") else p)
    return torch.cat(found)


class Keep:
    """Before the optimizers: keeps the gradient of the last step."""

    def __init__(self, policy):
        self.policy, self.param_groups = policy, []

    def step(self):
        self.gradient = flat([p.grad for p in trained(self.policy)])

    def zero_grad(self, set_to_none):
        """The optimizers do that."""


def steps(parts, c, first, last, rewards=None, keep=()):
    """Steps of training with numbers from first to last. Returns the metrics of the last one."""
    policy, reference, data, own, optimizers = parts
    for step in range(first, last):
        metrics = grpo_training_step(policy, reference, rewards or own, step_problems(data, c, step),
                                     [*keep, *optimizers], step, c, dist)
        assert metrics["skipped_steps"] == 0
        if reference is not None:
            REFERENCES[c.reference_mode](reference, policy, step + 1, c)
    return metrics


def checkpoints(folder, policy):
    return CheckpointManager(folder, policy.save, suffix=policy.suffix, identity=policy.identity(),
                             writes=dist.is_main)


def load(make, c, folder):
    """As `setup`, gone on from the state in a folder."""
    parts = setup(make, c)
    state = checkpoints(folder, parts[0]).load(parts[0].weights(), parts[-1])
    parts[0].load_weights(state["model"])
    del state
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as f:
            assert folder not in f.read(), "the file may be deleted now, and its room on the disk is free"
    return parts


SIZE = {"batch_size": int(batch_size), "learning_rate": 1e-3, "min_lr": 1e-3, "parallel": "fsdp", "optimizer": "adamw",
        "grad_clip": 1.0}
FILL = config(**SIZE, kl_beta=0.1)
PROMPTS = prompt_config(**SIZE, kl_beta=0.1, length_min=1, length_max=6)
MOVES = {"reference_mode": "periodic", "reference_update_freq": 2}
OURS = {"fill": (fill, FILL), "causal": (causal, PROMPTS)}
KINDS = OURS | {"gpt2": (huggingface("gpt2"), PROMPTS), "lora": (huggingface("llama", LoraConfig(4)), PROMPTS)}
SHORT = {"llama": (huggingface("llama"), replace(PROMPTS, grad_checkpoint=True, seed=2)),  # no draw hangs on rounding
         "tokens": (causal, replace(PROMPTS, micro_batch_tokens=30, grad_checkpoint=True)),
         "ema": (fill, replace(FILL, reference_mode="ema", ema_alpha=0.5)),
         "periodic lora": (huggingface("llama", Moving(4)), replace(PROMPTS, **MOVES))}  # three steps, no resume
for name, (make, c) in (OURS if dist.world == 4 else KINDS | SHORT).items():
    parts = setup(make, c)
    policy, reference, *_, optimizers = parts
    start, keep = steered(policy), Keep(policy)
    metrics = steps(parts, c, 0, 1, keep=[keep])
    result[f"{name}/gradient"] = keep.gradient
    result[f"{name}/metrics"] = torch.tensor([metrics[key] for key in (
        "loss", "mean_kl", "mean_reward", "entropy", "grad_norm", "mismatch_max")])
    result[f"{name}/mean_kl"] = torch.tensor([steps(parts, c, 1, 3)["mean_kl"]])
    numbers = [*policy.parameters(), *(state["exp_avg"] for state in optimizers[0].state.values())]
    result[f"{name}/share/{dist.rank}"] = sum((x.to_local() if is_sharded(x) else x).numel() for x in numbers)
    if name in KINDS:
        folder = f"{out}-{name}"
        os.makedirs(folder, exist_ok=True)
        checkpoints(folder, policy).save(3, policy.weights(), optimizers, {})
        dist.barrier()
        steps(parts, c, 3, 5)
        resumed = load(make, c, folder)
        steps(resumed, c, 3, 5)
        assert torch.equal(flat(trained(resumed[0])), flat(trained(policy))), "a resumed run is the same run"
        if other:  # goes on from what another number of ranks has saved
            resumed = load(make, c, f"{other}-{name}")
            steps(resumed, c, 3, 5)
            result[f"{name}/other"] = steered(resumed[0]) - start
    result[f"{name}/way"] = steered(policy) - start
    with gathered(dist):
        assert not any(map(is_sharded, policy.parameters())), "whole"
        if dist.rank == dist.world - 1:  # one rank reads alone
            rollouts = policy.sample(step_problems(parts[2], c, 99)(), 99, c)
            rollouts = with_reference(rollouts, reference, choose_estimator(c, policy), c)
            result[f"{name}/texts"], result[f"{name}/rewards"] = rollouts.texts.completions, parts[3](rollouts).reward
    assert all(map(is_sharded, policy.parameters())) == (dist.world > 1)
    dist.sharded.clear()

# Groups that differ on rank 1 alone: the others have nothing to train on
c = replace(PROMPTS, kl_beta=0.0, zero_std="drop")
for share in (c.batch_size,) if dist.world > 1 else (4, 2):  # problems of a rank
    policy, _, data, _, optimizers = setup(causal, c)
    keep, first = Keep(policy), dist.rank * c.batch_size

    def of_rank_1(rollouts):
        reward = torch.arange(float(rollouts.group_size)).repeat(rollouts.problems, 1)  # (P, G)
        number = first + torch.arange(len(reward))[:, None]                          # (P, 1)
        return Scored(reward * ((number >= share) & (number < 2 * share)))

    steps((policy, None, data, None, optimizers), c, 0, 1, of_rank_1, [keep])
    result[f"alone/{share}"] = keep.gradient
    dist.sharded.clear()
# In bfloat16 weights are put together and computed with in bfloat16; parts, gradients and momentum stay in float32
dist.dtype = torch.bfloat16
for name in ("fill", "lora") if dist.world < 4 else ():
    make, c = KINDS[name]
    parts = setup(lambda c: halved(*make(c)), c)
    policy, *_, optimizers = parts
    with policy.autocast():
        logits = policy.model.project(policy.model.states(torch.arange(10)[None]))   # (1, 10, V)
    (logits.log_softmax(-1)[..., 5].sum() / dist.world).backward()
    result[f"bfloat16/{name}/gradient"] = flat([p.grad for p in trained(policy)])
    optimizers[0].zero_grad()
    metrics = steps(parts, c, 0, 1)
    result[f"bfloat16/{name}/metrics"] = torch.tensor([metrics[key] for key in ("mean_kl", "mismatch_max")])
    moments = [x for state in optimizers[0].state.values() for x in state.values()]
    assert all(x.dtype == torch.float32 for x in [*policy.parameters(), *moments])
    with gathered(dist):
        assert {p.dtype for p in policy.parameters()} == {torch.bfloat16 if dist.world > 1 else torch.float32}
    dist.sharded.clear()
torch.save(result, f"{out}-{dist.rank}.pt")
dist.close()
