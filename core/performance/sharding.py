"""Sharding: weights cut into one part for each rank (PyTorch's FSDP2), and put together again.

In training a layer is whole on a rank while the rank computes it, and its gradient is summed and cut again. Every rank
must therefore read the model equally often (`micro_batches`). To sample or to evaluate, all ranks put the models
together (`gathered`).
"""

import warnings
from contextlib import contextmanager

import torch

from core.distributed import is_sharded


def has_parts(model):
    """Tells whether `shard` has cut this model, or this layer of one."""
    return hasattr(model, "unshard")


def shard_all(models, dist):
    """Shards the models. A reference may be a model before it, with another adapter."""
    for model in models:
        if not any(map(has_parts, model.modules())):
            shard(model, dist)


def shard(model, dist):
    """Cuts a model, which is whole on every rank, into as many parts as there are ranks.

    model: one of the model interface (core/model.py), or a transformers model that reads token ids
    A rank keeps its part of each weight in the precision of the weight. With dist.dtype bfloat16 the weights are put
    together in bfloat16, and gradients are summed in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing changes it in place
    for p in model.parameters():  # it is on the CPU, whose group of ranks is the first: parts of the same weights
        torch.distributed.broadcast(p.data, src=0)
    types = (torch.bfloat16, torch.float32) if dist.dtype == torch.bfloat16 else (None, None)  # of weights, of sums
    precision = MixedPrecisionPolicy(*types, cast_forward_inputs=False)
    for part in (*layers_of(model), model):
        fully_shard(part, mesh=dist.mesh, mp_policy=precision)
        part.set_gradient_divide_factor(1.0)  # a loss carries its normalisation: see Distributed
        part.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)  # the ranks must agree on what they sum, and one may have no work
    reads = model
    if any(p.requires_grad for p in model.parameters()):  # a frozen one is only called when it is whole
        register_fsdp_forward_method(model, "states")
        reads = model.states
    with torch.no_grad(), dist.autocast():  # the first module that is called counts as the root
        reads(torch.zeros(1, 1, dtype=torch.long, device=dist.device))
    if dist.shards is None:
        dist.shards = Shards(dist)
    dist.shards.models.append(model)
    let_go(model)


def layers_of(model):
    """The modules of a model that are put together one at a time in training."""
    if hasattr(model, "layers"):
        return model.layers
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()))


def anchor(states, unused, model):
    """The states, with a gradient of 0 for the unused states of a prompt: a layer of a sharded model is put together
    for its backward pass when the gradient of its output comes, which the last layer would not have."""
    return states + 0 * unused.flatten()[0] if has_parts(model) else states


def let_go(model):
    """Leaves a rank with its part of a model alone, as training begins with it."""
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)  # the output layer reads after `states` has returned
    model.reset_iter_state()


class Shards:
    """The sharded models of a run: what every rank must do with them at the same time."""

    def __init__(self, dist):
        self.models, self.dist = [], dist
        self.idle = 0.0  # the loss of the idle calls of the present micro-batch

    @contextmanager
    def gathered(self):
        """Within, every sharded model is whole on every rank, without gradients. All ranks must begin it together."""
        try:
            for model in self.models:
                model.set_reshard_after_forward(False)
                for part in filter(has_parts, model.modules()):
                    part.unshard()
            yield
        finally:
            for model in self.models:
                let_go(model)

    def micro_batches(self, parts, policy, rollouts):
        """The micro-batches of an optimizer step, so that every rank reads a sharded model equally often.

        policy: calls(rollouts) is the number of times that its model is called for them
        Yields the parts. A rank that calls the model less often than another one for its part adds idle calls, whose
        loss of 0 goes through `backward` with that of the part; they are all that it does when its parts are at an end.
        """
        own = [policy.calls(rollouts.select(part)[0]) for part in parts]
        rounds = self.dist.agree(len(parts))
        own = torch.tensor(own + [0] * (rounds - len(own)), device=self.dist.device, dtype=torch.long)  # (rounds,)
        missing = (self.dist.largest(own) - own).tolist() if rounds else []
        for number, times in enumerate(missing):
            self.idle = self.idle_loss(policy.model, times)
            if number < len(parts):
                yield parts[number]
            else:
                self.idle.backward()

    def idle_loss(self, model, times):
        """0, with gradients of 0, of `times` calls: every rank takes part in putting a sharded model together."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.dist.device)
        with self.dist.autocast():
            return sum(0 * model.states(token).flatten()[0] for _ in range(times))


@torch.no_grad()
def whole(x, wanted=True):
    """x, which may be a dict or list, with whole tensors on the CPU in the place of sharded ones; all else stays. All
    ranks must call it; those for which `wanted` is False get None."""
    known = {}  # tied weights stay one tensor

    def visit(x):
        if isinstance(x, dict):
            return {key: visit(value) for key, value in x.items()}
        if isinstance(x, list):
            return [visit(value) for value in x]
        if not is_sharded(x):
            return x
        storage = x.to_local().untyped_storage()
        if id(storage) not in known:
            full = x.detach().full_tensor()
            known[id(storage)] = full.cpu() if wanted else None, storage
        return known[id(storage)][0]

    found = visit(x)
    return found if wanted else None


@torch.no_grad()
def cut_like(x, own):
    """This rank's part of the whole tensor x, if `own` is a part of such a tensor; otherwise x itself."""
    if not is_sharded(own) or is_sharded(x):
        return x
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(x.detach().to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def weights_of(net):
    """{name: tensor} as in net.state_dict(), which would cut a sharded model that is whole now."""
    left_out = {f"{name}.{key}" for name, part in net.named_modules() for key in part._non_persistent_buffers_set}
    tensors = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))
    return {name: x.detach() for name, x in tensors.items() if name not in left_out and f".{name}" not in left_out}


def cut_state(saved, optimizer):
    """Cuts the whole tensors of an optimizer's state_dict, in place, as the parameters are cut that they belong to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, p in zip(numbers, parameters, strict=True):
        if is_sharded(p):
            kept = saved["state"].get(number, {})
            kept |= {name: cut_like(x, p) if x.shape == p.shape else x.clone()  # nothing keeps the file mapped
                     for name, x in kept.items() if torch.is_tensor(x)}
