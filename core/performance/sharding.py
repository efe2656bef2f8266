"""Shards models: each rank keeps one part of every weight (PyTorch's FSDP2).

In training, each layer is gathered while it is computed, and its gradient is summed over the ranks and sharded again.
These are collective operations, so all ranks must call the model equally often (`micro_batches`). For sampling and
evaluation, all ranks gather whole models (`gathered`).
"""

import warnings
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

from core.distributed import is_sharded


def has_parts(model):
    """True for a model or layer that `shard` has sharded."""
    return hasattr(model, "unshard")


def shard(model, dist):
    """Shards a model that is whole on every rank: each rank keeps one part of each weight, in the weight's precision.
    If dist.dtype is bfloat16, weights are gathered in bfloat16 and gradients are summed in float32.

    model: a core.model.Model, or a transformers model that takes token ids
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    if any(map(has_parts, model.modules())):
        return  # a reference may be the policy's model with another adapter
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # no code writes to the view
    # All ranks must shard the same weights, even if a rank has loaded different ones. The weights are still on the CPU,
    # where the default process group communicates
    for p in model.parameters():
        torch.distributed.broadcast(p.data, src=0)
    if dist.dtype == torch.bfloat16:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    else:
        precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    for part in (*layers_of(model), model):
        fully_shard(part, mesh=dist.mesh, mp_policy=precision)
        part.set_gradient_divide_factor(1.0)  # losses are already normalised: see Distributed
        part.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)  # all ranks must reduce the same gradients, even idle ones
    # FSDP treats the first module that is called as the root: it must be the model, not a layer. A frozen model is
    # called only while it is gathered, so its `states` need not gather it
    first_call = model
    if any(p.requires_grad for p in model.parameters()):
        register_fsdp_forward_method(model, "states")
        first_call = model.states
    with torch.no_grad(), dist.autocast():
        first_call(one_token(dist))
    if dist.shards is None:
        dist.shards = Shards(dist)
    dist.shards.models.append(model)
    reshard(model)


def layers_of(model):
    """Returns the layers of a model, which training gathers one at a time: its largest ModuleList."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]

    def size(part):
        return sum(p.numel() for p in part.parameters())

    return max(lists, key=size)


def one_token(dist):
    """Returns a text of one token, (1, 1)."""
    return torch.zeros(1, 1, dtype=torch.long, device=dist.device)


def touch(states, unused, model):
    """Adds 0 times the unused states of a prompt to the states of its completions.

    FSDP gathers a layer for the backward pass when a gradient reaches the layer's output. Completions use the keys and
    values of a prompt, but not the output of the last layer. Without this term, the last layer would still be sharded
    in the prompt's backward pass.
    """
    if not has_parts(model):
        return states
    return states + 0 * unused.flatten()[0]


def reshard(model):
    """Shards a gathered model again, for training."""
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)  # the output layer reads after `states` has returned
    model.reset_iter_state()


class Shards:
    """The sharded models of a run, and the collective operations on them."""

    def __init__(self, dist):
        self.dist = dist
        self.models = []
        self.idle = 0.0  # the loss of the idle calls in the current micro-batch

    @contextmanager
    def gathered(self):
        """Within the block, every sharded model is whole on every rank, without gradients. All ranks must enter it."""
        try:
            for model in self.models:
                model.set_reshard_after_forward(False)
                for part in filter(has_parts, model.modules()):
                    part.unshard()
            yield
        finally:
            for model in self.models:
                reshard(model)

    def micro_batches(self, parts, policy, rollouts):
        """Yields the micro-batches of an optimizer step, and makes every rank call a sharded model equally often.

        policy: policy.calls(rollouts) is the number of model calls for the rollouts
        A rank that needs fewer model calls than another rank for its part makes additional idle calls. Their loss of 0
        is added to the loss of the part in `backward`. A rank without parts left makes only idle calls.
        """
        rounds = self.dist.agree(len(parts))
        if rounds == 0:
            return
        calls = torch.zeros(rounds, dtype=torch.long)
        for i, part in enumerate(parts):
            selected, _ = rollouts.select(part)
            calls[i] = policy.calls(selected)
        calls = calls.to(self.dist.device)
        missing = self.dist.largest(calls) - calls                                   # (rounds,)
        for i, times in enumerate(missing.tolist()):
            self.idle = self.idle_loss(policy.model, times)
            if i < len(parts):
                yield parts[i]
            else:
                self.idle.backward()

    def idle_loss(self, model, times):
        """Calls a model `times` times, so that this rank joins the gathers of the other ranks. Returns the loss, 0."""
        loss = 0.0
        with self.dist.autocast():
            for _ in range(times):
                loss = loss + 0 * model.states(one_token(self.dist)).flatten()[0]
        return loss


@torch.no_grad()
def gathered_state(state, wanted=True):
    """Replaces the sharded tensors in `state`, nested dicts and lists, by whole tensors on the CPU. All ranks must call
    it; ranks with wanted=False get None instead of the tensors."""
    found = {}  # by storage: tied weights stay one tensor, also in the file

    def gather(x):
        if not is_sharded(x):
            return x
        storage = x.to_local().untyped_storage()._cdata
        if storage not in found:
            full = x.detach().full_tensor()
            found[storage] = full.cpu() if wanted else None
        return found[storage]

    return tree_map(gather, state)


@torch.no_grad()
def shard_like(x, own):
    """Shards the whole tensor x in the same way as `own`. Returns x unchanged if `own` is whole or x is sharded."""
    if not is_sharded(own) or is_sharded(x):
        return x
    from torch.distributed.tensor import distribute_tensor
    x = x.detach().to(own.device)
    return distribute_tensor(x, own.device_mesh, own.placements, src_data_rank=None)


def weights_of(net):
    """Returns the same {name: tensor} as net.state_dict(), which would reshard a gathered model."""
    tensors = {}
    for name, part in net.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        part._save_to_state_dict(tensors, prefix, keep_vars=False)
    return tensors


def shard_state(saved, optimizer):
    """Shards the whole tensors in an optimizer's state_dict in place, in the same way as the parameters."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    for number, p in enumerate(parameters):
        state = saved["state"].get(number, {})
        for name, x in state.items():
            if x.shape == p.shape:
                state[name] = shard_like(x, p)
            else:
                state[name] = x.clone()  # without the clone, x would keep the file mapped
