"""transformers' keys, values and recurrent states with the methods of core.cache.Cache."""

import copy
import functools

import torch
from torch.nn import functional as F


class HuggingFaceCache:
    """content: a cache of transformers; length: the tokens that it has read"""

    def __init__(self, content, length=0):
        self.content, self.length = content, length

    def expand(self, rows, room=0):
        """Does what core.cache.Cache.expand does. Layers that cannot be written in place grow as they need."""
        content = copy.copy(self.content)
        content.layers = [copy.copy(layer) for layer in self.content.layers]
        content.reorder_cache(rows)
        if room and not torch.is_grad_enabled():
            content.layers = [with_room(layer, room) for layer in content.layers]
        return HuggingFaceCache(content, self.length)

    def keep(self, rows):
        """Drops all rows but these."""
        self.content.reorder_cache(rows)

    @property
    def is_recurrent(self):
        """True if some layers read tokens into a state of fixed size, as linear attention and Mamba do."""
        return any(hasattr(layer, "recurrent_states") for layer in self.content.layers)


def empty_cache(config):
    """A cache without tokens for the model of transformers with this config."""
    from transformers import DynamicCache
    cache = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            cache.layers[i] = recurrent_layer(type(layer))(layer)
    return HuggingFaceCache(cache)


@functools.cache
def recurrent_layer(kind):
    """A subclass of a class of layers of transformers. Theirs share the states with their copies, and write new states
    over old ones, which the backward pass needs."""
    class RecurrentLayer(kind):
        def __init__(self, layer):
            self.__dict__ |= layer.__dict__
            for name, states in layer.__dict__.items():
                if isinstance(states, dict):
                    setattr(self, name, {i: x.clone() if torch.is_tensor(x) else x for i, x in states.items()})

        def __copy__(self):
            return type(self)(self)

        def update_recurrent_state(self, recurrent_states, state_idx=0, **settings):
            self.recurrent_states[state_idx] = recurrent_states
            self.is_recurrent_states_initialized[state_idx] = True
            return recurrent_states

    return RecurrentLayer


def with_room(layer, room):
    """A layer of transformers' cache that writes `room` new columns in place; one of another kind as it is."""
    from transformers.cache_utils import DynamicLayer
    if type(layer) is DynamicLayer and layer.is_initialized:
        return layer_with_room()(layer, room)
    return layer


@functools.cache  # transformers is optional: it is imported when a model of it is used
def layer_with_room():
    """The class of such a layer. With long prompts a step takes 1.3 times as long where columns are appended."""
    from transformers.cache_utils import DynamicLayer

    class LayerWithRoom(DynamicLayer):
        def __init__(self, layer, room):
            self.__dict__ |= layer.__dict__
            self.whole = [F.pad(x, (0, 0, 0, room)) for x in (layer.keys, layer.values)]  # (n, H, before + room, D)
            self.show(layer.get_seq_length())

        def show(self, length):
            self.keys, self.values = (x[:, :, :length] for x in self.whole)          # (n, H, length, D) each

        def update(self, keys, values, *args, **settings):
            before = self.get_seq_length()
            after = before + keys.shape[2]
            for whole, new in zip(self.whole, (keys, values), strict=True):
                whole[:, :, before:after] = new
            self.show(after)
            return self.keys, self.values

        def reorder_cache(self, rows):
            self.whole = [x[rows] for x in self.whole]
            self.show(self.get_seq_length())

    return LayerWithRoom
