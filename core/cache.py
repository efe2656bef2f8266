"""Keys and values of the tokens that were read before."""

import torch
from torch.nn import functional as F

from core.attention import attend, attention_mask
from core.performance.shared_cache import SharedCache

SHARE_FROM = 2**16  # numbers in a layer's keys, copied for each row, from which sharing the prompts' keys is faster


class Cache:
    """Keys and values of the tokens that the rows of a batch have read so far, so that no token is read twice.

    In generation new columns are written in place, into room that `expand` reserves. In training the prompt that a
    group shares is read once, and gradients flow back through its keys and values.
    """

    def __init__(self, layers=(), length=0, room=0):
        self.layers = list(layers)          # (keys, values) of each layer, (B, H, length + room, D) each
        self.length = length
        self.room = room

    def mask(self, T, padding, device):
        """The mask of the next T tokens, for the functions of `layer`. padding: (B,) or None."""
        return attention_mask(self.length, T, padding, device)

    def layer(self, i):
        """The attention of layer i: a function of queries, keys and values (B, H, T, D) of new tokens, which read them
        and all tokens before them."""
        before = self.layers[i] if i < len(self.layers) else None  # grad_checkpoint calls the function a second time

        def read(q, k, v, mask, *settings):
            k, v = self.add(i, before, k, v)                                         # (B, H, L, D) each
            return attend(q, k, v, mask, *settings)
        return read

    def add(self, i, before, k, v):
        """Adds keys and values of new tokens to layer i, which held `before`. Returns those of all tokens."""
        if before is None:
            self.layers[i:] = [(k, v)]
            return k, v
        pairs = zip(before, (k, v), strict=True)
        if not self.room:
            self.layers[i] = [torch.cat(pair, 2) for pair in pairs]
            return self.layers[i]
        end = self.length + k.shape[2]
        for old, new in pairs:
            old[:, :, self.length : end] = new
        return [x[:, :, :end] for x in before]

    def expand(self, rows, room=0):
        """A new cache whose row i continues row rows[i] of this one, which stays as it is. Gradients flow back to it.

        rows: (n,) indices; room: columns for tokens that are written in place, one at a time, without gradients
        """
        k = self.layers[0][0]                                                        # (B, H, length, D)
        large = len(rows) * k[0].numel() >= SHARE_FROM
        on_cpu = k.device.type == "cpu" and k.dtype == torch.float32  # its attention has no fused kernel
        if room and large and on_cpu:
            nothing = k.new_empty(len(rows), k.shape[1], room, k.shape[3])
            own = [[torch.empty_like(nothing) for _ in pair] for pair in self.layers]
            return SharedCache(self, rows, Cache(own, room=room))
        layers = []
        for pair in self.layers:
            pair = [x.index_select(0, rows) for x in pair]                           # (n, H, length, D) each
            if room:
                pair = [F.pad(x, (0, 0, 0, room)) for x in pair]
            layers.append(pair)
        return Cache(layers, self.length, room)

    def keep(self, rows):
        """Drops all rows but these. What remains moves forward in place, so that rows that stay where they are cost
        nothing. rows: (n,) indices, each at most once"""
        stays = rows == torch.arange(len(rows), device=rows.device)
        to = (~stays).nonzero().squeeze(1)
        for i, pair in enumerate(self.layers):
            for x in pair:
                x[to, :, : self.length] = x[rows[to], :, : self.length]
            self.layers[i] = [x[: len(rows)] for x in pair]
