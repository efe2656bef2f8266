"""Plays a GPU that computes nothing, and lists what would be launched on it: operations, bytes and FLOPs by line.

with FakeGPU() as gpu: ...    # torch.cuda.is_available() is True; a tensor on "cuda" has a shape, but no numbers
with gpu.recording(): ...     # gpu.launches: a Launch for each operation on such tensors

An operation is one of PyTorch's, below autograd and autocast: an addition, a product, a sort. Most are one kernel; a
sort or a product over a long dimension is several. Views launch nothing. What returns to the CPU is zeros.
Below Python these are FakeTensors of the CPU, because a build without CUDA has no backward pass on its devices. So
autocast casts what its list for CPUs names, which for softmax, exp, pow and sums is shorter than CUDA's: models that
call these in bfloat16 would launch a cast more. Attention is taken as on CUDA: the flash kernel without a mask, the
memory-efficient one with a mask, which it needs as numbers. Norms of torch (F.rms_norm) are one kernel.
"""

import contextlib
import sys
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.device import gpu_logits_at_once, ids_on
from core.errors import ROOT
from core.performance.decode import Decoder

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
IS = {Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # what a tensor of the GPU says of itself
MEMORY = 80 * 2**30  # bytes of the GPU
BELOW = FakeTensor.device.fget
DEVICE_BELOW = torch.ops.prim.device.default
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
LOOKUPS = {"embedding", "index", "index_select", "gather", "searchsorted"}  # they read a few places of their table
PLACED = {"scatter_", "index_put_", "index_copy_", "index_fill_", "scatter_add_"}  # they write a few places
OVERWRITTEN = {"copy_", "fill_", "zero_"}  # they do not read what they write
RANDOM = {"aten::normal_", "aten::uniform_"}  # only weights are drawn by torch
FREE = ("empty", "new_empty", "detach", "alias", "lift_fresh", "scalar_tensor", "set_", "resize_")
PACKAGES = ("transformers/models", "transformers/integrations", "transformers/activations", "peft/tuners")


class Launch(NamedTuple):
    """An operation on the GPU."""
    name: str
    kind: str        # elementwise (all but the next), products, attention, head: those on logits or their weights
    line: str        # of core/, grpo/ or the model; "backward of" and "again" for the backward pass and checkpoints
    bytes: int       # read and written; an expanded tensor counts once
    flops: int       # of products and attention
    logits: int      # numbers in the largest logits that it reads or writes whole; 0 for a product


def backward(loss, *args, **settings):
    """Tensor.backward. Through the real one a mode would not see the calls of checkpoints, which compute again."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


@torch.no_grad()
def apply(module, function, recurse=True):
    """nn.Module._apply, which cannot exchange such weights. Tied ones stay tied."""
    new = {}  # {id of a tensor: the tensor, which keeps its id, and its replacement}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is None:
                    continue
                if id(x) not in new:
                    y = function(x)
                    if y is not x and isinstance(x, nn.Parameter):
                        y = nn.Parameter(y, x.requires_grad)
                    new[id(x)] = x, y
                tensors[name] = new[id(x)][1]
    return module


def bytes_of(x):
    """Bytes of the numbers that a tensor has in memory: an expanded dimension adds none."""
    count = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


class FakeGPU(TorchFunctionMode):
    """The mode that answers what Python asks (.device, .to, device=...)."""

    def __init__(self, vocabulary=None):
        """vocabulary: the size by which logits are known"""
        super().__init__()
        self.vocabulary = vocabulary
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.recorder = Recorder(self)
        self.launches = []
        self.is_recording = False
        self.inside = 0  # depth of calls below Python, where the tensors are the CPU's

    @contextlib.contextmanager
    def recording(self):
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    @contextlib.contextmanager
    def below(self):
        """Within, tensors are those of the CPU, and new ones have no numbers."""
        self.inside += 1
        try:
            with self.fake:
                yield
        finally:
            self.inside -= 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        out = self.call(func, args, kwargs)
        if self.is_recording and isinstance(out, Tensor) and out.grad_fn is not None:
            name_nodes(out.grad_fn, self.recorder.place())
        return out

    def call(self, func, args, kwargs):
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        there = isinstance(first, FakeTensor)
        if there and func in IS:
            return IS[func]
        if there and name in ("tolist", "cpu", "numpy"):
            return getattr(torch.zeros(first.shape, dtype=first.dtype), name)()
        if isinstance(first, Tensor) and name in ("to", "cuda"):
            return self.moved(first, *(args[1:] if name == "to" else ("cuda",)), **kwargs)
        if there and func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if there and func in (F.rms_norm, torch.rms_norm):
            return rms_norm(*args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        kwargs["device"] = CPU
        if torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        with self.below():
            return func(*args, **kwargs)

    def moved(self, x, *args, copy=False, **kwargs):
        """x.to(...)"""
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype, *args[1:]
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if isinstance(x, FakeTensor) and device is not None and device.type == "cpu":
            x = torch.zeros(x.shape, dtype=x.dtype)
        elif not isinstance(x, FakeTensor) and device is not None and device.type == "cuda":
            with self.below():
                x = self.fake.from_tensor(x)
        return x.to(dtype=dtype or x.dtype, copy=copy, memory_format=layout or torch.preserve_format)

    def device_of(self, x):
        """FakeTensor.device"""
        return BELOW(x) if self.inside else CUDA

    def patches(self):
        """Pairs of a module or class and {name: what takes its place}."""
        autocast, enabled, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
        return [
            (FakeTensor, {"device": property(self.device_of)}),
            (Tensor, {"backward": backward}),
            (nn.Module, {"_apply": apply}),
            (torch, {"autocast": lambda device_type, *args, **settings: autocast("cpu", *args, **settings),
                     "is_autocast_enabled": lambda device_type="cpu": enabled("cpu"),
                     "get_autocast_dtype": lambda device_type: dtype("cpu")}),
            (checkpoint, {"_infer_device_type": lambda *args: "cpu"}),
            (torch.cuda, {"is_available": lambda: True, "set_device": lambda device: None, "device_count": lambda: 1,
                          "is_bf16_supported": lambda including_emulation=True: True,
                          "mem_get_info": lambda device=None: (MEMORY, MEMORY),
                          "max_memory_allocated": lambda device=None: 0,
                          "synchronize": lambda device=None: None,
                          "get_device_capability": lambda device=None: (9, 0)}),
            (Decoder, {"captured": lambda decoder, step: step})]

    def __enter__(self):
        with contextlib.suppress(ImportError):  # later it would look for a library of CUDA
            import bitsandbytes  # noqa: F401
        self.stack = contextlib.ExitStack()
        for where, new in self.patches():
            self.stack.enter_context(mock.patch.multiple(where, **new))
        checks = checkpoint._allowed_determinism_checks_to_fns  # it compares devices, inside and outside of this mode
        self.stack.enter_context(mock.patch.dict(checks, default=checks["none"]))
        for cached in (ids_on, gpu_logits_at_once):  # they must not hand this GPU's tensors to another
            cached.cache_clear()
            self.stack.callback(cached.cache_clear)
        self.stack.enter_context(self.recorder)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.stack.close()


class Recorder(TorchDispatchMode):
    """Sees every operation below autograd and autocast."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is DEVICE_BELOW:
            return CPU
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = any(isinstance(x, FakeTensor) for x in tensors)
        made = not tensors and torch._C._current_autograd_node() is not None  # by a backward pass in C++
        if not there and not made:
            return func(*args, **kwargs)  # also of the CPU, unless the block is `below`
        if func._schema.name in RANDOM:
            return args[0]
        with self.gpu.below():
            out = func(*args, **kwargs)
            if self.gpu.is_recording:
                self.record(func, args, tensors, [x for x in tree_leaves(out) if isinstance(x, Tensor)])
        return out

    def record(self, func, args, tensors, results):
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(FREE):
            return
        changes = func._schema.is_mutable
        storages = {x.untyped_storage()._cdata for x in tensors}
        new = [x for x in results if x.untyped_storage()._cdata not in storages]
        if not new and not changes:
            return  # a view
        if not any(x.numel() for x in (new or results or tensors[:1])):
            return
        read, written = list(map(bytes_of, tensors)), sum(map(bytes_of, new))
        if name.endswith("_like") or name.startswith("new_"):
            read = []
        elif name in LOOKUPS:
            read[0] = written
        elif name in PLACED:
            read[0] = written = read[-1]
        elif changes:
            written += read[0]
            read[0] *= name not in OVERWRITTEN
        read_or_written = [*tensors, *new]
        if name in LOOKUPS or name in PLACED:
            read_or_written = read_or_written[1:]
        sizes = [self.logits_in(x) for x in read_or_written]
        kind = "elementwise"
        if "scaled_dot_product" in name:
            kind = "attention"
        elif any(sizes) or any(self.gpu.vocabulary in x.shape for x in read_or_written):
            kind = "head"
        elif name in PRODUCTS:
            kind = "products"
        logits = 0 if name in PRODUCTS else max(sizes, default=0)
        flops = flops_of(name, tensors, results)
        self.gpu.launches.append(Launch(name, kind, self.place(), sum(read) + written, flops, logits))

    def logits_in(self, x):
        """The numbers of a tensor if they are logits, perhaps in blocks. A vocabulary has a large prime factor."""
        vocabulary = self.gpu.vocabulary
        is_weight = not x.dim() or x.shape[0] == vocabulary
        return 0 if vocabulary is None or is_weight or x.numel() % vocabulary else x.numel()

    def place(self):
        """The line of core/, grpo/ or the model that launches now."""
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code is backward.__code__:
                node = torch._C._current_autograd_node()
                return "backward of " + (node.metadata.get("line", node.name()) if node else "the loss")
            path = code.co_filename
            if path.startswith(ROOT) and path.removeprefix(f"{ROOT}/").startswith(("core/", "grpo/")):
                return self.when(f"{path.removeprefix(f'{ROOT}/')}:{frame.f_lineno}")
            for package in PACKAGES:
                if package in path:
                    return self.when(f"{path[path.index(package):]}:{frame.f_lineno}")
            frame = frame.f_back
        return "other"

    def when(self, line):
        """Says if a line runs in a backward pass: there a checkpoint computes it again."""
        return line if torch._C._current_autograd_node() is None else f"again {line}"


def name_nodes(node, line):
    """Notes the line that made this node of the graph, and those before it that are not yet named."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node is not None and "line" not in node.metadata:
            node.metadata["line"] = line
            nodes += [before for before, _ in node.next_functions]


def flops_of(name, tensors, results):
    """Multiplications and additions of a product or of attention."""
    if name in PRODUCTS:
        a, b = tensors[-2:]
        return 2 * a.numel() * b.shape[-1]
    if "scaled_dot_product" in name:
        q, k = tensors[1:3] if "backward" in name else tensors[:2]
        products = 5 if "backward" in name else 2
        return 2 * products * q.numel() * k.shape[2]
    return 0


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention as CUDA computes it."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if attn_mask.dtype == torch.bool:
        outside = attn_mask.new_full((), -torch.inf, dtype=q.dtype)
        attn_mask = torch.where(attn_mask, 0.0, outside)
    L = k.shape[2]
    if L % 16:  # rows of the mask must be aligned
        attn_mask = F.pad(attn_mask, (0, -L % 16))[..., :L]
    attn_mask = attn_mask.expand(*q.shape[:3], L)
    needs_gradient = any(x.requires_grad for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """F.rms_norm, one kernel on CUDA."""
    return FusedNorm.apply(x, weight)


class FusedNorm(torch.autograd.Function):
    """A norm as one kernel that reads and writes a tensor like x, and one that computes both gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * x, None if weight is None else torch.zeros_like(weight)
