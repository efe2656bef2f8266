"""The KV cache: keys and values of earlier tokens, and of the prompt that a group shares."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.model import attend, attention_mask

UNORDERED = ("cuda",)  # devices where index_select adds up gradients in no fixed order, and in bfloat16


def new_cache(model: nn.Module) -> object:
    """Creates an empty cache for a model: its own kind, or else a Cache."""
    if hasattr(model, "new_cache"):
        return model.new_cache()
    none = [None] * len(model.layers)
    return Cache(none)


def at_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Selects rows (n,) of x (B, ...). Gradients of equal rows are summed in a fixed order; on a GPU in float32."""
    if x.device.type in UNORDERED and x.requires_grad:
        selected = x.float()[rows]
        return selected.to(x.dtype)
    return x.index_select(0, rows)


@dataclass(eq=False)
class Cache:
    """Keys and values of the tokens that the rows of a batch have read so far, so that no token is read twice.

    In generation new columns are written in place, into room that `expand` reserves. In training the prompt that a
    group shares is read once, and gradients flow back through its keys and values.
    """

    layers: list      # (keys, values) of each layer, (B, H, length + room, D) each; None before it has read a token
    length: int = 0   # columns that have been read
    room: int = 0     # columns that are reserved after them when generation begins

    def mask(
            self,
            T: int,
            padding: Tensor | None,  # (B,)
            device: torch.device) -> Tensor | None:
        """Returns the attention mask of the next T tokens."""
        return attention_mask(self.length, T, padding, device)

    def layer(self, i: int) -> Callable:
        """Returns the attention function of layer i. It takes queries, keys and values (B, H, T, D) of new tokens,
        which attend to themselves and all earlier tokens."""
        # With grad_checkpoint the function is called again in the backward pass, when self.layers[i] already has the
        # new tokens. They must be appended to the earlier tokens only, as in the first call.
        before = self.layers[i]

        def attention(q, k, v, mask, *settings):
            k, v = self.add(i, before, k, v)                                         # (B, H, L, D) each
            return attend(q, k, v, mask, *settings)
        return attention

    def add(
            self,
            i: int,
            before: tuple | None,
            k: Tensor,
            v: Tensor) -> tuple:
        """Adds keys and values of new tokens to layer i, which held `before`. Returns the keys and values of all
        tokens."""
        if before is not None:
            keys, values = before
            if self.room:
                end = self.length + k.shape[2]
                new = slice(self.length, end)
                keys[:, :, new] = k
                values[:, :, new] = v
                return keys[:, :, :end], values[:, :, :end]
            k = torch.cat((keys, k), 2)
            v = torch.cat((values, v), 2)
        self.layers[i] = k, v
        return k, v

    def expand(self, rows: Tensor, room: int = 0) -> "Cache":
        """Returns a new cache. Its row i continues row rows[i] of this cache, which is unchanged and gets gradients.

        rows: (n,) indices; room: columns for tokens that are written in place, one at a time, without gradients
        """
        layers = []
        for pair in self.layers:
            pair = [at_rows(x, rows) for x in pair]                                  # (n, H, length, D) each
            if room:
                columns_after = 0, 0, 0, room
                pair = [F.pad(x, columns_after) for x in pair]
            layers.append(pair)
        return Cache(layers, self.length, room)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these. rows: (n,) indices"""
        for i, (keys, values) in enumerate(self.layers):
            keys = keys[rows]
            values = values[rows]
            self.layers[i] = keys, values


@dataclass(eq=False)
class RowCache(Cache):
    """A Cache in buffers (n, H, L, D) that keep their addresses. Each row is at its own column and reads one token.
    length and room are not used."""

    column: Tensor = field(kw_only=True)   # (n, 1) the column of each row's token

    def mask(
            self,
            T: int,
            padding: Tensor,  # (n,)
            device: torch.device) -> Tensor:
        """Returns (n, 1, 1, L) bool, True at the columns that each row reads."""
        keys, _ = self.layers[0]
        column = torch.arange(keys.shape[2], device=device)                          # (L,)
        seen = column <= self.column                                                 # (n, L)
        real = column >= padding[:, None]                                            # (n, L)
        mask = seen & real
        return mask[:, None, None]

    def add(
            self,
            i: int,
            before: tuple,
            k: Tensor,
            v: Tensor) -> tuple:
        """Writes keys and values (n, H, 1, D) into the buffers `before` of layer i. Returns these buffers."""
        keys, values = before
        column = self.column[:, None, None]                                          # (n, 1, 1, 1)
        keys.scatter_(2, column.expand_as(k), k.to(keys.dtype))
        values.scatter_(2, column.expand_as(v), v.to(values.dtype))
        return keys, values
