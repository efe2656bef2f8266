"""Sharding: each rank keeps one part of every weight (PyTorch's FSDP2).

In training a layer is gathered while it is computed, and its gradient is summed over ranks and sharded again. All ranks
take part in that, so each must call the model equally often (`micro_batches`). To sample or to evaluate, all ranks
gather the models at once (`gathered`).
"""

import warnings
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

from core.distributed import is_sharded


def has_parts(model):
    """True for a model, or a layer of one, that `shard` has sharded."""
    return hasattr(model, "unshard")


def shard(model, dist):
    """Shards a model that is whole on every rank: each keeps one part of each weight, in the precision of the weight.
    With dist.dtype bfloat16, weights are gathered in bfloat16 and gradients are summed in float32.

    model: a core.model.Model, or a transformers model that reads token ids
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    if any(map(has_parts, model.modules())):
        return  # a reference may be the policy's model with another adapter
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing changes it in place
    # All ranks must keep parts of the same weights, even if one has loaded others. The weights are still on the CPU,
    # where the default group exchanges
    for p in model.parameters():
        torch.distributed.broadcast(p.data, src=0)
    if dist.dtype == torch.bfloat16:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    else:
        precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    for part in (*layers_of(model), model):
        fully_shard(part, mesh=dist.mesh, mp_policy=precision)
        part.set_gradient_divide_factor(1.0)  # a loss carries its normalisation: see Distributed
        part.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)  # the ranks must agree on what they sum, and one may have no work
    # The first call tells FSDP that the model is the root, and not the layer that training happens to call first. A
    # frozen model is only called when it is gathered, so its `states` need not gather it
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
    """The modules of a model that are gathered one at a time in training: the largest of its lists of modules."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]

    def size(part):
        return sum(p.numel() for p in part.parameters())

    return max(lists, key=size)


def one_token(dist):
    """The shortest text, (1, 1)."""
    return torch.zeros(1, 1, dtype=torch.long, device=dist.device)


def touch(states, unused, model):
    """Adds 0 times the unused states of a prompt to the states of its completions.

    FSDP gathers a layer for its backward pass when a gradient reaches the layer's output. Completions read the keys and
    values of a prompt, but not the output of its last layer: without this, its weights would still be sharded then.
    """
    if not has_parts(model):
        return states
    return states + 0 * unused.flatten()[0]


def reshard(model):
    """Returns to one part on each rank, as training needs."""
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)  # the output layer reads after `states` has returned
    model.reset_iter_state()


class Shards:
    """The sharded models of a run: what every rank must do with them at the same time."""

    def __init__(self, dist):
        self.dist = dist
        self.models = []
        self.idle = 0.0  # the loss of the idle calls of the present micro-batch

    @contextmanager
    def gathered(self):
        """In the block, every sharded model is whole on every rank, without gradients. All ranks must enter it."""
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

        policy: calls(rollouts) is the number of times that its model is called for them
        A rank that calls the model less often for its part than another rank adds idle calls, whose loss of 0 is added
        to that of the part in `backward`. A rank that has no parts left makes idle calls only.
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
        """The loss, 0, of `times` calls of a model: this rank takes part in gathering the model for the others."""
        loss = 0.0
        with self.dist.autocast():
            for _ in range(times):
                loss = loss + 0 * model.states(one_token(self.dist)).flatten()[0]
        return loss


@torch.no_grad()
def gathered_state(state, wanted=True):
    """Replaces the sharded tensors in `state`, nested dicts and lists, by whole ones on the CPU. All ranks must call
    it; one for which `wanted` is False gets None in their place."""
    found = {}  # by storage: tied weights stay one tensor, in the file too

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
    """Shards the whole tensor x as `own` is sharded. If `own` is not, or x already is, it returns x itself."""
    if not is_sharded(own) or is_sharded(x):
        return x
    from torch.distributed.tensor import distribute_tensor
    x = x.detach().to(own.device)
    return distribute_tensor(x, own.device_mesh, own.placements, src_data_rank=None)


def weights_of(net):
    """{name: tensor} of net.state_dict(). Of the parts of the model, because a call of state_dict would reshard a model
    that is gathered at the time."""
    tensors = {}
    for name, part in net.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        part._save_to_state_dict(tensors, prefix, keep_vars=False)
    return tensors


def shard_state(saved, optimizer):
    """Shards the whole tensors in an optimizer's state_dict, in place, as its parameters are sharded."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    for number, p in enumerate(parameters):
        state = saved["state"].get(number, {})
        for name, x in state.items():
            if x.shape == p.shape:
                state[name] = shard_like(x, p)
            else:
                state[name] = x.clone()  # x itself would keep the file mapped
