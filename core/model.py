"""One transformer for three tasks: write the next token, fill in masked tokens, or score a text.

Shapes: B texts of T tokens; L tokens, including those in a cache; M columns whose states are wanted; states of C
numbers, in H heads of D = C / H.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core.distributions import at_least_float32
from core.errors import Mistake, others
from core.settings.setting import check_values

LANGUAGE_MODEL = "language_model"    # causal: the state at position t predicts token t + 1
MASKED_FILL = "masked_fill"          # bidirectional: the state at position t predicts token t
SEQUENCE_SCORER = "sequence_scorer"  # bidirectional: how real the text looks, per position or as a whole
MODES = (LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER)
JUDGE_HEADS = ("realness", "cls")
BACKEND = "inductor"  # of torch.compile; tests set one that needs no C++ compiler


@dataclass(frozen=True)
class GPTConfig:
    """The size and the task of a model, stored in its file."""
    mode: Annotated[str, MODES] = LANGUAGE_MODEL
    vocab_size: Annotated[int, "[1, 1e7]"] = 100       # ids it can read: the base vocabulary, then special tokens
    base_vocab_size: Annotated[int, "[1, 1e7]"] = 97   # ids below it can be written: a special token is never sampled
    block_size: Annotated[int, "[1, 100001]"] = 128    # longest input, the CLS token of a judge included
    n_layer: Annotated[int, "[1, 1e3]"] = 4            # blocks
    n_head: Annotated[int, "[1, 1e3]"] = 4             # attention heads of a block
    n_embd: Annotated[int, "[2, 65536]"] = 128         # width of the states
    dropout: Annotated[float, "[0, 1)"] = 0.0          # while training
    tied: bool = True                                  # one matrix for reading and writing tokens
    judge_head: Annotated[str, JUDGE_HEADS] = "realness"  # SEQUENCE_SCORER only: per position, or cls: at position 0

    def __post_init__(self):
        check_values(self)
        pairs = 2 * self.n_head
        if self.n_embd % pairs:
            raise Mistake(f"n_embd={self.n_embd} must be a multiple of 2 * n_head={pairs}, for rotary pairs")
        if self.base_vocab_size > self.vocab_size:
            raise Mistake(f"base_vocab_size={self.base_vocab_size} must be at most vocab_size={self.vocab_size}")


def rotary_table(length: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of RoPE (arXiv 2104.09864) for `rotate`, (length, head_size) each."""
    exponent = torch.arange(0, head_size, 2).float() / head_size                     # (D/2,)
    frequency = 10000.0 ** -exponent
    angle = torch.arange(length).float()[:, None] * frequency                        # (length, D/2)
    cos = angle.cos()
    sin = angle.sin()
    both = torch.cat((-sin, sin), 1)                                                 # (length, D)
    return cos.repeat(1, 2), both


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (..., D) by its position: the pair (x[i], x[i + D/2]) is one complex number."""
    half = x.shape[-1] // 2
    other = x.roll(half, -1)                                                         # (..., D)
    turned = x * cos
    return turned.addcmul_(other, sin)  # in place, to save a tensor


class SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2 (arXiv 2109.08668). F.relu(x).square() computes the same, but its backward pass makes more tensors:
    on a CPU a training step takes 4 % longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        h = F.relu(x)
        if not ctx.needs_input_grad[0]:
            return h.mul_(h)  # in place, to save a tensor; with a gradient h is kept
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        h, = ctx.saved_tensors
        return (gradient * h).mul_(2)


def attend(
        q: Tensor,            # (B, H, T, D)
        k: Tensor,            # (B, H, L, D)
        v: Tensor,
        mask: Tensor | None,  # from attention_mask
        causal: bool,
        dropout: float) -> Tensor:
    """Computes attention in the precision of its inputs. Returns (B, H, T, D)."""
    is_causal = causal and mask is None and q.shape[2] > 1
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)


def attention_mask(
        before: int,             # columns in the cache
        T: int,                  # new columns
        padding: Tensor | None,  # (B,) number of leading columns without a token
        device: torch.device,
        causal: bool = True) -> Tensor | None:
    """Marks the columns that each new position reads, among L = before + T columns.

    Returns (1 or B, 1, 1 or T, L) bool, or None where `attend` needs no mask: its own causal mask is faster. Every
    position of a language model reads itself, even a padded one, because a softmax over nothing is NaN.
    """
    if padding is None and (before == 0 or T == 1 or not causal):
        return None
    column = torch.arange(before + T, device=device)                                 # (L,)
    if padding is None:
        padding = column.new_zeros(1)
    is_token = column >= padding[:, None, None, None]                                # (B, 1, 1, L)
    if not causal:
        return is_token
    own = column[before:, None]                                                      # (T, 1)
    is_past = column <= own                                                          # (T, L)
    return (is_past & is_token) | (column == own)                                    # (B, 1, T, L)


class Attention(nn.Module):
    """Self-attention: each position reads all others; in a language model, only itself and those before it."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.causal = config.mode == LANGUAGE_MODEL
        C = config.n_embd
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.out = nn.Linear(C, C, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple:
        """Computes queries, keys and values, (B, H, T, D) each, of x (B, T, C)."""
        B, T, C = x.shape
        D = C // self.n_head
        qkv = self.qkv(x).view(B, T, 3, self.n_head, D)
        qk = qkv[:, :, :2]                                                           # (B, T, 2, H, D)
        v = qkv[:, :, 2].transpose(1, 2)                                             # (B, H, T, D)
        qk = F.rms_norm(qk, [D])  # bounded logits: a high learning rate stays stable
        qk = rotate(qk, cos[:, None, None], sin[:, None, None])
        q, k = qk.permute(2, 0, 3, 1, 4)                                             # (B, H, T, D) each
        if x.device.type == "cpu":  # its bfloat16 kernel is slower than the float32 one
            v = at_least_float32(v)
        return q.to(v.dtype), k.to(v.dtype), v


class Block(nn.Module):
    """One layer: attention, then a small network on each position, both added to x."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        self.norm_1 = nn.RMSNorm(C, eps=1e-5)
        self.attention = Attention(config)
        self.norm_2 = nn.RMSNorm(C, eps=1e-5)
        self.up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(4 * C, C, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple:
        """Computes the queries, keys and values."""
        h = self.norm_1(x)                                                           # (B, T, C)
        return self.attention.project(h, cos, sin)

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """Computes the rest of the block after attention. y: (B, H, T, D) the output of attention"""
        y = y.transpose(1, 2).reshape(x.shape)                                       # (B, T, C)
        x = x + self.drop(self.attention.out(y))
        h = self.up(self.norm_2(x))                                                  # (B, T, 4C)
        h = SquaredReLU.apply(h)
        return x + self.drop(self.down(h))

    def forward(
            self,
            x: Tensor,  # (B, T, C)
            cos: Tensor,
            sin: Tensor,
            mask: Tensor | None,
            read: Callable) -> Tensor:
        """Returns (B, T, C). read: `attend`, or the attention of a cache, which also reads earlier tokens"""
        q, k, v = self.before(x, cos, sin)                                           # (B, H, T, D) each
        dropout = self.drop.p if self.training else 0.0
        y = read(q, k, v, mask, self.attention.causal, dropout)                      # (B, H, T, D)
        return self.after(x, y)


class Model(nn.Module):
    """The interface of our and of Hugging Face models. Other code uses nothing else of a model.

    mode: one of MODES; judge_head: one of JUDGE_HEADS, for a SEQUENCE_SCORER
    longest_input: tokens that fit into one row; vocabulary: number of tokens that it can write, the width of its logits
    layers: the modules between the embedding and the output layer
    suffix: file suffix of a saved model, empty for a folder
    reads_columns: True if it can read through a core.cache.RowCache
    states, project, weights, load_weights, identity: as in GPT; new_cache, if core.cache.Cache does not suit it
    """

    grad_checkpoint = False  # True: the backward pass recomputes activations instead of keeping them

    def forward(
            self,
            tokens: Tensor,
            position: Tensor | None = None,
            past: Any = None,
            padding: Tensor | None = None) -> Tensor:
        """Returns float32 logits (B, M or T, vocabulary); of a scorer (B, M or T) for realness and (B,) for cls."""
        h = self.states(tokens, position, past, padding)
        if self.mode == SEQUENCE_SCORER and self.judge_head == "cls":
            h = h[:, 0]
        return self.project(h)

    def parameters_by_kind(self) -> dict[str, list]:
        """Groups the trained parameters for the optimizers: {"matrices": of the layers, "vectors": such as norm scales,
        "embeddings": all others, with the output layer}."""
        kinds = {"matrices": [], "embeddings": [], "vectors": []}
        in_layers = set(self.layers.parameters())
        for p in self.parameters():
            if p.dim() < 2:
                kind = "vectors"
            elif p.dim() == 2 and p in in_layers:  # Muon takes no convolutions and no stacks of experts
                kind = "matrices"
            else:
                kind = "embeddings"
            if p.requires_grad:
                kinds[kind].append(p)
        return kinds

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def frozen(self) -> "Model":
        """Returns a frozen copy of this model."""
        return freeze(copy.deepcopy(self))


class GPT(Model):
    """A transformer: tokens in, logits out; the meaning of a logit depends on config.mode.

    LANGUAGE_MODEL, MASKED_FILL: logits over the base vocabulary, so that a special token has probability exactly 0.
    SEQUENCE_SCORER, realness:   one logit per position, log-odds that the token there is the true token.
    SEQUENCE_SCORER, cls:        one logit per text, read at position 0, where the caller puts the CLS token.
    """

    suffix = ".safetensors"
    reads_columns = True

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.mode = config.mode
        self.judge_head = config.judge_head
        self.longest_input = config.block_size
        self.vocabulary = config.base_vocab_size
        C = config.n_embd
        self.embed = nn.Embedding(config.vocab_size, C)
        self.drop = nn.Dropout(config.dropout)
        blocks = [Block(config) for _ in range(config.n_layer)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(C, eps=1e-5)
        if self.mode == SEQUENCE_SCORER:
            self.head = nn.Linear(C, 1, bias=False)
        elif not config.tied:
            self.head = nn.Linear(C, self.vocabulary, bias=False)
        cos, sin = rotary_table(config.block_size, C // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            std = 0.02
            if name.endswith(("out.weight", "down.weight")):  # their outputs are added to x, 2 n_layer times
                std /= (2 * config.n_layer) ** 0.5
            if p.dim() == 2:
                nn.init.normal_(p, std=std)

    def states(
            self,
            tokens: Tensor,
            position: Tensor | None = None,
            past: Any = None,
            padding: Tensor | None = None) -> Tensor:
        """Computes the final hidden states.

        tokens: (B, T) ids below vocab_size
        position: (B, M) columns of tokens whose states are wanted, or None for all
        past: a Cache of the tokens that these rows read before; the new tokens are added to it
        padding: (B,) number of leading columns of past and tokens that hold no token, or None
        Returns (B, M or T, C)
        """
        T = tokens.shape[1]
        before = past.length if past else 0
        end = before + T
        if end > self.longest_input:
            raise Mistake(f"an input of {end} tokens does not fit a model with block_size={self.longest_input}")
        if past:
            mask = past.mask(T, padding, tokens.device)
        else:
            causal = self.mode == LANGUAGE_MODEL
            mask = attention_mask(0, T, padding, tokens.device, causal)
        column = getattr(past, "column", slice(before, end))  # rows of a RowCache are at different columns, (B, 1)
        cos = self.cos[column]                                                       # (T, D) or (B, 1, D)
        sin = self.sin[column]
        x = self.drop(self.embed(tokens))                                            # (B, T, C)
        computes_again = self.grad_checkpoint and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            read = past.layer(i) if past else attend
            if computes_again:
                x = checkpoint(block, x, cos, sin, mask, read, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask, read)
        if past:
            past.length += T
        if position is not None:
            x = x.take_along_dim(position[..., None], 1)                             # (B, M, C)
        return self.norm(x)

    def project(self, h: Tensor) -> Tensor:
        """Computes float32 logits of states (..., C): (..., base_vocab_size); for a scorer, one per state, (...)."""
        if self.mode == SEQUENCE_SCORER:
            return at_least_float32(self.head(h).squeeze(-1))
        if self.config.tied:
            weight = self.embed.weight[: self.vocabulary]
        else:
            weight = self.head.weight
        kind = h.device.type
        dtype = h.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        # Autocast would cast the weight once for all calls and sum their gradients in its own precision. With a cast in
        # each call, the gradients are summed in float32.
        with torch.autocast(kind, enabled=False):
            h = h.to(dtype)
            weight = weight.to(dtype)
            logits = F.linear(h, weight)
        return at_least_float32(logits)

    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks

    def compile_layers(self) -> None:
        """Compiles the layers, except their attention."""
        for block in self.blocks:
            block.before = partial(run_compiled, Block.before, block)
            block.after = partial(run_compiled, Block.after, block)

    def weights(self) -> dict[str, Tensor]:
        """Returns {name: tensor} of the trained weights, sharing memory with the model."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def load_weights(self, weights: dict) -> None:
        self.load_state_dict(weights)

    def identity(self) -> dict:
        """Returns values that a saved state must match to fit this model, besides names and shapes of its weights."""
        return {}


def run_compiled(function: Callable, block: Block, x: Tensor, *inputs) -> Any:
    """Calls a method of Block, compiled if x has more than one token. In token-by-token decoding the shapes change too
    often to compile, and weights are packed instead."""
    if x.shape[1] > 1:
        function = compiled(function)
    return function(block, x, *inputs)


@cache
def compiled(function: Callable) -> Callable:
    """Compiles a function once for the layers of all models, so that a policy and its reference compute alike.

    Nothing runs uncompiled, with other rounding: code that cannot be compiled is an error, and so is more than
    recompile_limit programs. Sizes are symbols, so each kind of call needs one program.
    """
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.specialize_float = True  # otherwise each epsilon of a norm is an input of the program
    # Otherwise sizes that happen to be equal, such as 64 rows and heads of 64 numbers, would become one constant
    torch.fx.experimental._config.use_duck_shape = False
    options = None
    if BACKEND == "inductor":
        # Otherwise a fused kernel keeps digits that bfloat16 rounds away between separate ones: the policy, which has a
        # gradient and so programs of its own, would differ from its reference, and the first KL would not be 0
        options = {"emulate_precision_casts": True}
    return torch.compile(
        function,
        fullgraph=True,
        dynamic=True,
        backend=BACKEND,
        options=options)


@torch.no_grad()
def try_compiled(function: Callable, *inputs: Any) -> None:
    """Calls a compiled function. Raises Mistake if it cannot be compiled: dynamo may not be able to trace the model, or
    the machine may lack a compiler. Otherwise the first step of the run would end in the traceback of a library."""
    with others("compile=True fails with this model on this machine", "set compile=False, or install a C++ compiler "
                "and, for a GPU, triton", quiet=True, ours_too=True):
        function(*inputs)


def freeze(model: nn.Module) -> nn.Module:
    """Turns off a model's gradients and dropout, for a reference or a judge. Returns the model."""
    return model.requires_grad_(False).eval()
