"""One transformer for three jobs: write the next token, fill in masked tokens, or score a text."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

LANGUAGE_MODEL = "language_model"    # causal: position t speaks about token t + 1
MASKED_FILL = "masked_fill"          # bidirectional: position t speaks about token t
SEQUENCE_SCORER = "sequence_scorer"  # bidirectional: how real the text looks, per position or as a whole
MODES = (LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER)
JUDGE_HEADS = ("realness", "cls")


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
        for key, known in (("mode", MODES), ("judge_head", JUDGE_HEADS)):
            if getattr(self, key) not in known:
                raise ValueError(f"{key}={getattr(self, key)!r} is not one of {', '.join(known)}")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd={self.n_embd} must be a multiple of 2 * n_head={2 * self.n_head} (rotary pairs)")
        if not 0 < self.base_vocab_size <= self.vocab_size:
            raise ValueError(f"base_vocab_size={self.base_vocab_size} must lie in 1..vocab_size={self.vocab_size}")


def at_least_float32(x):
    """bfloat16 becomes float32; float64, where gradients are checked, stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotary_table(length, head_size, base=10000.0):
    """cos and sin of RoPE (arXiv 2104.09864), each (length, head_size / 2)."""
    frequency = base ** (-torch.arange(0, head_size, 2).float() / head_size)         # (D/2,)
    angle = torch.arange(length).float()[:, None] * frequency                        # (length, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x: (B, H, T, D), turned by its position: the pair (x[i], x[i + D/2]) is one complex number."""
    a, b = x.chunk(2, dim=-1)                                                        # (B, H, T, D/2) each
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)                 # (B, H, T, D)


class Attention(nn.Module):
    """Self-attention: each position reads from all others; in a language model, only from itself and those before."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.causal = config.mode == LANGUAGE_MODEL
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        q, k = (F.rms_norm(z, z.shape[-1:]) for z in (q, k))  # bounded logits: a high learning rate stays stable
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (at_least_float32(z) if x.device.type == "cpu" else z.to(v.dtype) for z in (q, k, v))
        # On a CPU the bfloat16 kernel is slower than the float32 one
        with torch.autocast(x.device.type, enabled=False):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=self.dropout * self.training)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """One layer: attention, then a small network on each position, both added to x."""

    def __init__(self, config):
        super().__init__()
        self.norm_1 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.attention = Attention(config)
        self.norm_2 = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin):
        x = x + self.drop(self.attention(self.norm_1(x), cos, sin))
        h = F.relu(self.up(self.norm_2(x)))                                         # (B, T, 4C)
        return x + self.drop(self.down(h * h))


class GPT(nn.Module):
    """tokens in, logits out; what a logit means depends on config.mode.

    LANGUAGE_MODEL, MASKED_FILL: logits over the base vocabulary, so that a special token has probability exactly 0.
    SEQUENCE_SCORER, realness:   one logit per position, log-odds that the token there is the true one.
    SEQUENCE_SCORER, cls:        one logit per text, read at position 0, where the caller puts the CLS token.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-5)
        self.scores = config.mode == SEQUENCE_SCORER
        if self.scores or not config.tied:
            self.head = nn.Linear(config.n_embd, 1 if self.scores else config.base_vocab_size, bias=False)
        cos, sin = rotary_table(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.n_layer) ** 0.5 if residual else 0.02)

    def hidden(self, tokens):
        """tokens: (B, T) ids below vocab_size, T <= block_size. Returns the final states (B, T, C)."""
        T = tokens.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"an input of {T} tokens does not fit a model with block_size={self.config.block_size}")
        x = self.drop(self.embed(tokens))                                            # (B, T, C)
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.norm(x)

    def forward(self, tokens, position=None):
        """tokens: (B, T); position: (B, M) where to speak, or None for everywhere.

        Returns float32 logits (B, M or T, base_vocab_size); of a scorer (B, M or T) for realness and (B,) for cls.
        """
        h = self.hidden(tokens)                                                      # (B, T, C)
        if self.scores and self.config.judge_head == "cls":
            return at_least_float32(self.head(h[:, 0]).squeeze(-1))
        if position is not None:
            h = h.gather(1, position[..., None].expand(-1, -1, h.shape[-1]))         # (B, M, C)
        if self.scores:
            return at_least_float32(self.head(h).squeeze(-1))
        weight = self.embed.weight[: self.config.base_vocab_size] if self.config.tied else self.head.weight
        return at_least_float32(F.linear(h, weight))

    def num_parameters(self):
        return sum(p.numel() for p in self.parameters())


def bare(model):
    """The module under torch.compile."""
    return getattr(model, "_orig_mod", model)
