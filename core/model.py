"""One transformer for three jobs: write the next token, fill in masked tokens, or score a text."""

import copy
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core.cache import Cache, attend, attention_mask
from core.performance.sharding import weights_of
from core.settings.ranges import check_ranges, shown

LANGUAGE_MODEL = "language_model"    # causal: the state at position t predicts token t + 1
MASKED_FILL = "masked_fill"          # bidirectional: the state at position t predicts token t
SEQUENCE_SCORER = "sequence_scorer"  # bidirectional: how real the text looks, per position or as a whole
MODES = (LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER)
JUDGE_HEADS = ("realness", "cls")
RANGES = {"vocab_size": "[1, 1e7]", "base_vocab_size": "[1, 1e7]", "block_size": "[1, 1e6]", "n_layer": "[1, 1e3]",
          "n_head": "[1, 1e3]", "n_embd": "[2, 65536]", "dropout": "[0, 1)"}  # of GPTConfig
LARGEST_TABLE = 2**25  # numbers in a table of rotary embeddings, which no tensor of a file is as large as


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model, checked, and what it is for; it is stored in the model's file."""

    mode: str = LANGUAGE_MODEL
    vocab_size: int = 100         # ids the model can read: the base vocabulary and the special tokens behind it
    base_vocab_size: int = 97     # ids 0 .. base_vocab_size-1 are those it can write: a special token is never sampled
    block_size: int = 128         # longest input
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0
    tied: bool = True             # one matrix for reading and writing tokens
    judge_head: str = "realness"  # SEQUENCE_SCORER only: "realness" per position, or "cls" read at position 0

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type and (type(value), field.type) != (int, float):
                raise ValueError(f"{field.name}={shown(value)} must be {field.type.__name__}, not "
                                 f"{type(value).__name__}")
        for key, known in (("mode", MODES), ("judge_head", JUDGE_HEADS)):
            if getattr(self, key) not in known:
                raise ValueError(f"{key}={shown(getattr(self, key))} is not one of {', '.join(known)}")
        check_ranges(self, RANGES)
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of 2 * n_head={2 * self.n_head} (rotary pairs)")
        if self.base_vocab_size > self.vocab_size:
            raise ValueError(f"base_vocab_size={self.base_vocab_size} must be at most vocab_size={self.vocab_size}")
        if self.block_size * self.n_embd // self.n_head > LARGEST_TABLE:
            raise ValueError(f"block_size={self.block_size} * n_embd={self.n_embd} / n_head={self.n_head} must be at "
                             f"most {LARGEST_TABLE}")


def freeze(model):
    """The model without gradients and dropout, as a reference or a judge."""
    return model.requires_grad_(False).eval()


def at_least_float32(x):
    """bfloat16 becomes float32; float64, where gradients are checked, stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotary_table(length, head_size, base=10000.0):
    """cos and sin of RoPE (arXiv 2104.09864), each (length, head_size), as `rotate` takes them."""
    frequency = base ** (-torch.arange(0, head_size, 2).float() / head_size)         # (D/2,)
    angle = torch.arange(length).float()[:, None] * frequency                        # (length, D/2)
    return torch.cat((angle.cos(), angle.cos()), 1), torch.cat((-angle.sin(), angle.sin()), 1)


def rotate(x, cos, sin):
    """x: (..., D), turned by its position: the pair (x[i], x[i + D/2]) is one complex number."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)                 # (..., D)


class Attention(nn.Module):
    """Self-attention: each position reads from all others; in a language model, only from itself and those before."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.causal = config.mode == LANGUAGE_MODEL
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def project(self, x, cos, sin):
        """Queries, keys and values (B, H, T, D) of x (B, T, C)."""
        B, T, C = x.shape
        qk, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).split((2, 1), 2)
        qk = F.rms_norm(qk, qk.shape[-1:])  # bounded logits: a high learning rate stays stable
        qk = rotate(qk, cos[:, None, None], sin[:, None, None])                      # (B, T, 2, H, D)
        q, k, v = (z.transpose(1, 2) for z in (*qk.unbind(2), v.squeeze(2)))         # (B, H, T, D) each
        # On a CPU the bfloat16 kernel is slower than the float32 one
        return tuple(at_least_float32(z) if x.device.type == "cpu" else z.to(v.dtype) for z in (q, k, v))

    def forward(self, q, k, v, mask=None, past=None):
        return (past or attend)(q, k, v, mask, self.causal, self.dropout * self.training)  # (B, H, T, D)


class SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2 (arXiv 2109.08668), with a backward pass over fewer tensors than autograd derives."""

    @staticmethod
    def forward(ctx, x):
        h = F.relu(x)
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx, gradient):
        h, = ctx.saved_tensors
        return (gradient * h).mul_(2)


class Block(nn.Module):
    """One layer: attention, then a small network on each position, both added to x."""

    def __init__(self, config):
        super().__init__()
        self.compiled = False
        self.norm_1 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.attention = Attention(config)
        self.norm_2 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def before(self, x, cos, sin):
        return self.attention.project(self.norm_1(x), cos, sin)

    def after(self, x, y):
        x = x + self.drop(self.attention.out(y.transpose(1, 2).reshape(x.shape)))    # (B, T, C)
        h = SquaredReLU.apply(self.up(self.norm_2(x)))                               # (B, T, 4C)
        return x + self.drop(self.down(h))

    def forward(self, x, cos, sin, mask=None, past=None):
        # Token by token, as in generation, the shapes change too often, and weights are packed instead
        part = compiled if self.compiled and x.shape[1] > 1 else lambda function: function
        q, k, v = part(Block.before)(self, x, cos, sin)                              # (B, H, T, D) each
        return part(Block.after)(self, x, self.attention(q, k, v, mask, past))


@cache
def compiled(function):
    """A compiled function: one for the layers of all models, so that a policy and its reference compute alike."""
    torch._dynamo.config.recompile_limit = 64  # beyond it, functions silently run uncompiled and compute otherwise
    return torch.compile(function, dynamic=True)


class GPT(nn.Module):
    """Tokens in, logits out; what a logit means depends on config.mode.

    The model interface, which every kind of model offers to the rest of the code: mode, judge_head, layers, states,
    project, new_cache, longest_input, vocabulary, parameters_by_kind, weights, load_weights, frozen, dimensions,
    suffix, and the settings grad_checkpoint and head_dtype. Nobody else reads its config.

    LANGUAGE_MODEL, MASKED_FILL: logits over the base vocabulary, so that a special token has probability exactly 0.
    SEQUENCE_SCORER, realness:   one logit per position, log-odds that the token there is the true one.
    SEQUENCE_SCORER, cls:        one logit per text, read at position 0, where the caller puts the CLS token.
    """

    suffix = ".safetensors"  # it is saved as a file

    def __init__(self, config):
        super().__init__()
        self.config, self.scores = config, config.mode == SEQUENCE_SCORER
        self.grad_checkpoint = False  # whether the backward pass computes activations again instead of keeping them
        self.head_dtype = None        # of the output layer; None: that of the rest
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        if self.scores or not config.tied:
            self.head = nn.Linear(config.n_embd, 1 if self.scores else config.base_vocab_size, bias=False)
        cos, sin = rotary_table(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.n_layer) ** 0.5 if residual else 0.02)

    def states(self, tokens, position=None, past=None, padding=None):
        """Final hidden states.

        tokens: (B, T) ids below vocab_size
        position: (B, M) columns of tokens whose states are wanted, or None for all
        past: a Cache of the tokens that these rows read before; these are added to it (LANGUAGE_MODEL)
        padding: (B,) number of leading columns of past and tokens that hold no token, or None for none
        Returns (B, M or T, C)
        """
        T, before = tokens.shape[1], past.length if past is not None else 0
        if before + T > self.config.block_size:
            raise ValueError(f"an input of {before + T} tokens does not fit a model with "
                             f"block_size={self.config.block_size}")
        x, here = self.drop(self.embed(tokens)), slice(before, before + T)           # (B, T, C)
        if past is not None:
            mask = past.mask(T, padding, tokens.device)
        else:
            mask = attention_mask(0, T, padding, self.config.mode == LANGUAGE_MODEL, tokens.device)
        again = self.grad_checkpoint and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            inputs = (x, self.cos[here], self.sin[here], mask, past and past.layer(i))
            x = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
        if past is not None:
            past.length += T
        if position is not None:
            x = x.gather(1, position[..., None].expand(-1, -1, x.shape[-1]))         # (B, M, C)
        return self.norm(x)

    def project(self, h):
        """Logits in float32 from states (..., C): (..., base_vocab_size); of a scorer one number per state, (...)."""
        if self.scores:
            return at_least_float32(self.head(h).squeeze(-1))
        weight = self.embed.weight[: self.config.base_vocab_size] if self.config.tied else self.head.weight
        kind = h.device.type
        if not torch.is_autocast_enabled(kind) or not torch.is_grad_enabled() and self.head_dtype is None:
            return at_least_float32(F.linear(h, weight))
        # Autocast would cast the weight once for all calls and add up their gradients in its own precision. Cast here,
        # each call's gradient is added to the others in float32.
        dtype = self.head_dtype or torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return at_least_float32(F.linear(h.to(dtype), weight.to(dtype)))

    def forward(self, tokens, position=None, past=None, padding=None):
        """The arguments of `states`; returns float32 logits (B, M or T, base_vocab_size); of a scorer (B, M or T) for
        realness and (B,) for cls."""
        if self.scores and self.config.judge_head == "cls":
            return self.project(self.states(tokens)[:, 0])
        return self.project(self.states(tokens, position, past, padding))

    new_cache = staticmethod(Cache)  # an empty one, for `states` to fill

    def compile_layers(self):
        """Compiles what a layer computes before and after its attention, when first called with more than a token."""
        for block in self.blocks:
            block.compiled = True

    @property
    def layers(self):
        """The modules between the embedding and the output layer."""
        return self.blocks

    @property
    def mode(self):
        """One of MODES."""
        return self.config.mode

    @property
    def judge_head(self):
        """What a SEQUENCE_SCORER scores: "realness", each position, or "cls", the text."""
        return self.config.judge_head

    @property
    def longest_input(self):
        """Tokens that fit into one row."""
        return self.config.block_size

    @property
    def vocabulary(self):
        """Number of tokens that it can write: the width of its logits."""
        return self.config.base_vocab_size

    def parameters_by_kind(self):
        """{"matrices": those of the blocks, "embeddings": and output layers, "vectors": norms}, for the optimizers."""
        kinds = {"matrices": [], "embeddings": [], "vectors": []}
        for name, p in self.named_parameters():
            kinds["vectors" if p.dim() < 2 else "matrices" if name.startswith("blocks.") else "embeddings"].append(p)
        return kinds

    def num_parameters(self):
        return sum(p.numel() for p in self.parameters())

    def weights(self):
        """{name: tensor} of what training changes, sharing memory with the model."""
        return weights_of(self)

    def load_weights(self, weights):
        """Takes over weights that `weights` gave."""
        self.load_state_dict(weights)

    def frozen(self):
        """A model that stays as this one is now."""
        return freeze(copy.deepcopy(self))

    @property
    def dimensions(self):
        """(number of layers, width of the hidden states, keys and values that a cache holds for a token)."""
        return self.config.n_layer, self.config.n_embd, 2 * self.config.n_layer * self.config.n_embd
