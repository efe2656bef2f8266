"""Wraps a Hugging Face model as a core.model.Model: hidden states, logits and cache."""

import copy
import functools
import inspect
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from core.cache import RowCache, at_rows
from core.device import ids_on
from core.distributions import at_least_float32
from core.errors import Mistake
from core.huggingface.files import config_value, reads_both_ways
from core.huggingface.lora import (
    POLICY,
    REFERENCE,
    adapter_identity,
    adapter_weights,
    copy_weights,
    using,
)
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER, Model, compiled
from core.performance.sharding import layers_of, weights_of

BANNED = -1e9         # logit of a banned token: its probability is 0, and its products with 0 are finite
UNLIMITED = 2**30     # longest input if the config names none
CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # argument names; the last two: up to transformers 5.23


class HuggingFaceModel(Model):
    """A transformers model behind the interface of core.model.Model.

    net: the transformers model, or peft's wrapper around it; undivided: the transformers model
    body: the model without its output layers; layers: the layers of the body
    Masked-fill models and judges read a text between the tokenizer's start and end tokens. This class adds the tokens;
    callers pass tokens and get states of the text only.
    """

    judge_head = "realness"
    suffix = ""
    compiles = False  # True: layers are compiled

    def __init__(self, net, tokenizer, mode, has_adapter=False):
        super().__init__()
        self.net = net
        self.mode = mode
        self.vocabulary = tokenizer.base_vocab_size
        self.has_adapter = has_adapter
        self.adapter = POLICY  # name of the active adapter, if the model has one
        undivided = net.get_base_model() if has_adapter else net
        body = undivided.base_model
        # Not registered as modules: state_dict() would list the weights of net again under their names
        vars(self).update(
            undivided=undivided,
            body=body,
            layers=layers_of(body))
        self.banned_ids = tokenizer.banned_token_ids
        self.stop_ids = tokenizer.stop_token_ids
        self.start_ids = self.end_ids = ()
        if mode != LANGUAGE_MODEL and not reads_both_ways(self.config):
            self.start_ids = tokenizer.start_ids
            self.end_ids = tokenizer.end_ids
        self.first_position = first_position(body)
        special = len(self.start_ids) + len(self.end_ids)
        self.longest_input = most_tokens(body) - special
        self.block = config_value(self.config, "attention_block")
        parameters = inspect.signature(body.forward).parameters
        self.takes_position = "position_ids" in parameters
        self.cache_name = None
        for name in CACHE_NAMES:
            if name in parameters:
                self.cache_name = name
                break

    @property
    def config(self):
        return self.body.config.get_text_config()

    @property
    def reads_columns(self):
        """True if the model can read through a core.cache.RowCache, in which each row has its own current column."""
        from transformers.cache_utils import DynamicLayer
        rope = str(config_value(self.config, "rope_parameters"))
        if "dynamic" in rope or "longrope" in rope:  # the angles of all rows depend on the longest row
            return False
        if self.config._attn_implementation != "sdpa" or self.block or not self.takes_position:
            return False
        for layer in self.new_cache().content.layers:
            if type(layer) is not DynamicLayer:  # its subclasses, such as sliding windows, do not keep every column
                return False
        return True

    def states(
            self,
            tokens,
            position=None,
            past=None,
            padding=None):
        """See core.model.GPT.states."""
        T = tokens.shape[1]
        before = 0 if past is None else past.length
        if before + T > self.longest_input:
            raise Mistake(f"an input of {before + T} tokens does not fit a model that reads {self.longest_input}")
        if isinstance(past, RowCache):
            inputs = self.inputs_of_rows(tokens, past, padding)
        else:
            inputs = self.inputs_of_texts(tokens, before, past, padding)
        # Layers are not compiled for one token in a cache that grows: core/performance/prepacked.py changes them there
        compiles = self.compiles and (T > 1 or isinstance(past, RowCache))
        content = inputs.get(self.cache_name)
        with using(self.net, self.adapter), self.changed_layers(content, compiles):
            h = self.body(**inputs).last_hidden_state
        if config_value(self.config, "shifted_logits"):
            h = shifted(h, padding)
        first = len(self.start_ids)
        h = h[:, first : first + T]                                                  # (B, T, C)
        if past is not None:
            past.length += T
        if position is not None:
            h = h.take_along_dim(position[..., None], 1)                             # (B, M, C)
        return h

    def inputs_of_texts(self, tokens, before, past, padding):
        """Returns transformers arguments for tokens (B, T), after `before` tokens of a HuggingFaceCache, if any."""
        B, T = tokens.shape
        start = tokens.new_tensor(self.start_ids).expand(B, -1)
        end = tokens.new_tensor(self.end_ids).expand(B, -1)
        if T == 1 and before and past.is_recurrent and torch.is_grad_enabled():
            # Some recurrent layers (Mamba-2) read a single token on a sampling path, which updates the states in place
            # and loses their gradient: a prompt would get no gradient from one-token completions. Two tokens take the
            # training path. The second is a copy; its state and the cache after it are never read, because training
            # continues no row.
            end = tokens
        tokens = torch.cat((start, tokens, end), 1)
        inputs = self.inputs(tokens, before, padding)
        if self.cache_name:
            inputs["use_cache"] = past is not None  # otherwise some models would make a cache of their own
        if past is not None:
            inputs[self.cache_name] = past.content
        return inputs

    def inputs(self, tokens, before=0, padding=None):
        """Returns transformers arguments for tokens (B, T), with start and end tokens, after `before` cached tokens."""
        inputs = {"input_ids": tokens}
        B, T = tokens.shape
        if padding is None:
            if not self.block:
                return inputs
            padding = tokens.new_zeros(B)
        # Padding is counted from the first column of a text. Start tokens, in columns below 0, are never padding
        column = torch.arange(before + T, device=tokens.device) - len(self.start_ids)
        is_token = (column >= padding[:, None]) | (column < 0)                       # (B, before + T)
        if self.block:
            inputs["attention_mask"] = block_mask(padding, T, self.block)
        else:
            inputs["attention_mask"] = is_token.long()
        if self.takes_position:
            place = (is_token.cumsum(1) - 1).clamp(min=0)                            # (B, before + T)
            inputs["position_ids"] = self.first_position + place[:, before:]
        return inputs

    def inputs_of_rows(self, tokens, rows, padding):
        """Returns transformers arguments for the next token (n, 1) of each row of a RowCache."""
        from transformers.cache_utils import DynamicCache, DynamicLayer
        content = DynamicCache()
        row = torch.arange(len(tokens), device=tokens.device)[:, None]               # (n, 1)
        most_heads = max(keys.shape[1] for keys, _ in rows.layers)
        head = torch.arange(most_heads, device=tokens.device)                        # once, not in each layer
        for keys, values in rows.layers:
            layer = with_methods(LayerOfRows, DynamicLayer())
            layer.buffers = keys, values
            layer.place = row, head[: keys.shape[1]], rows.column
            content.layers.append(layer)
        place = rows.column - padding[:, None]                                       # (n, 1)
        return {
            "input_ids": tokens,
            "attention_mask": rows.mask(1, padding, tokens.device),
            "position_ids": self.first_position + place,
            "use_cache": True,
            self.cache_name: content}

    def project(self, h):
        """Float32 logits (..., vocabulary) of states (..., C); for a judge, the log-odds (...) that a token is true."""
        logits = self.head_logits(h)
        if self.mode == SEQUENCE_SCORER:
            return -logits.view(h.shape[:-1])  # the model gives the log-odds that a token was replaced
        logits = logits[:, : self.vocabulary]
        if self.banned_ids:
            banned = ids_on(h.device, *self.banned_ids)
            logits = logits.index_fill(-1, banned, BANNED)
        return logits.view(*h.shape[:-1], self.vocabulary)

    def head_logits(self, h):
        """Float32 logits of the output layers at K states (..., C): (K, rows of the output layer); for a judge, (K,).

        Logits are needed only at a few columns of a batch, and the logits of all columns would not fit into memory.
        So `states` calls the body, and this method calls the rest of the model. Families differ after the body: a
        dense layer and a norm before the output matrix (BERT), a scale (Granite), a soft cap (Gemma). Instead of
        reimplementing each family, this method calls the whole model with the forward of its body replaced by a
        function that returns the states. check_outputs (core/huggingface/load.py) compares the result with the
        logits of the unmodified model.
        """
        kind = h.device.type
        C = h.shape[-1]
        output = Output([h.reshape(1, -1, C)])                                       # (1, K, C)
        unread = torch.zeros(1, 1, dtype=torch.long, device=h.device)
        # With its cache, autocast would cast the output matrix once per block and sum the gradients of all calls in
        # bfloat16. Without the cache each call casts the matrix, and gradients are summed in float32. A block around
        # this one may have turned the cache off, too: a CUDA graph must not hold a cast that ends with the block.
        autocast = torch.autocast(
            kind,
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled() and not torch.is_grad_enabled())
        self.body.forward = lambda *args, **settings: output
        try:
            with using(self.net, self.adapter), autocast:
                logits = self.undivided(input_ids=unread).logits.squeeze(0)  # an index would copy their gradient
        finally:
            del self.body.forward  # restores the method of the class
        return at_least_float32(logits)

    def answer_prompts(self):
        """Prepares a masked-fill model for prompts: it adds no start and end tokens and may sample end tokens."""
        self.longest_input += len(self.start_ids) + len(self.end_ids)
        self.start_ids = self.end_ids = ()
        self.banned_ids = tuple(i for i in self.banned_ids if i not in self.stop_ids)

    def compile_layers(self):
        """Compiles the layers."""
        if self.new_cache().is_recurrent:
            raise Mistake(f"compile=True: {type(self.body).__name__} has recurrent layers, which cannot be compiled; "
                          "set compile=False")
        self.compiles = True

    @contextmanager
    def changed_layers(self, content, compiles):
        """Within the block, layers run compiled if `compiles`, and with grad_checkpoint store only their inputs.

        The checkpointing of transformers disables the cache, but a group reads its prompt through the cache.
        content: the transformers cache of the call, or None
        """
        computes_again = self.grad_checkpoint and torch.is_grad_enabled()
        changed = self.layers if compiles or computes_again else ()
        cached = [] if content is None else content.layers
        for i, layer in enumerate(changed):
            if compiles:
                layer.forward = functools.partial(run_compiled, layer, content, i)
            if computes_again:
                layer.forward = checkpointed(layer.forward, cached, i)
        try:
            yield
        finally:
            for layer in changed:
                del layer.forward

    def new_cache(self):
        """A HuggingFaceCache without tokens."""
        from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin
        content = DynamicCache(config=self.config)
        for i, layer in enumerate(content.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                content.layers[i] = with_methods(RecurrentLayer, layer)
        return HuggingFaceCache(content)

    def weights(self):
        """Returns the trained weights {name: tensor}: with an adapter, only the adapter."""
        if self.has_adapter:
            return adapter_weights(self.net, self.adapter)
        return weights_of(self.net)

    def load_weights(self, weights):
        if self.has_adapter:
            copy_weights(weights, self.weights())
        else:
            self.net.load_state_dict(weights)

    def identity(self):
        return adapter_identity(self.net) if self.has_adapter else {}

    def frozen(self):
        """Returns a frozen model: a copy; with an adapter, the same weights with the reference adapter or with none."""
        if not self.has_adapter:
            return super().frozen()
        twin = copy.copy(self)
        twin.adapter = REFERENCE if REFERENCE in self.net.peft_config else None
        return twin


class Output(tuple):
    """The output of a body, holding only its states. Depending on the family, models also copy other attributes from
    it (past_key_values, attentions, router_logits), which are all None."""

    def __getattr__(self, name):
        return self[0] if name == "last_hidden_state" else None


def run_compiled(layer, content, i, *inputs, **settings):
    """Calls layer i with a program that all layers share.

    The layer gets its own layer of the cache in place of the whole cache, `content`. Otherwise its number in the list
    of cache layers would be a constant, and each layer would need a program of its own.
    """
    own = None
    if content is not None and i < len(content.layers):  # the upper layers of Gemma 4 have none
        own = content.layers[i]
    inputs = [own if x is content else x for x in inputs]
    for name, x in settings.items():
        if x is content:
            settings[name] = own
    return compiled(forward_of)(layer, *inputs, **settings)


def forward_of(layer, *inputs, **settings):
    """Calls the layer, not the function that stands in its place."""
    return type(layer).forward(layer, *inputs, **settings)


def checkpointed(forward, cached, i):
    """Returns a forward of layer i that stores only its inputs and is recomputed in the backward pass.

    By then the cache layers `cached` hold the keys and states that the first call added: the second call would read
    each token twice and continue from the final states. So each call starts from a copy of the cache layer as it was
    before the first call.
    """
    def run(*args, **settings):
        if i >= len(cached):  # no cache, or an upper layer of Gemma 4, which reads the keys of another layer
            return checkpoint(forward, *args, use_reentrant=False, **settings)
        before = copy.copy(cached[i])

        def restore_and_run(*args, **settings):
            cached[i] = copy.copy(before)
            return forward(*args, **settings)

        return checkpoint(restore_and_run, *args, use_reentrant=False, **settings)
    return run


def block_mask(padding, length, block):
    """(B, 1, length, length) bool mask: a token attends to its own block and all earlier blocks. Blocks are counted
    from the first token after the padding. padding: (B,) number of leading columns without a token"""
    place = torch.arange(length, device=padding.device) - padding[:, None]           # (B, T)
    number = place.div(block, rounding_mode="floor")                                 # (B, T) of the block
    # Padding forms the last block, so no token reads it. Its columns read the other blocks, so no softmax is empty
    number = number.masked_fill(place < 0, length)
    own = number[:, :, None]                                                         # (B, T, 1)
    reads = own >= number[:, None]                                                   # (B, T, T)
    return reads[:, None]


def shifted(h, padding):
    """Moves each state (B, T, C) to the token that it predicts, the next one. No state predicts the first token of a
    text, so it keeps its own state. padding: (B,) number of leading columns without a token, or None"""
    first = 0 if padding is None else padding[:, None]
    is_first = torch.arange(h.shape[1], device=h.device) == first                    # (T,) or (B, T)
    return torch.where(is_first[..., None], h, h.roll(1, 1))


def most_tokens(net):
    """The longest input of a transformers model in tokens, special tokens included."""
    config = net.config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len"):
        longest = config_value(config, name)
        if longest:
            return longest - first_position(net)
    return UNLIMITED


def first_position(net):
    """Returns the position id of the first token: 0, or padding_idx + 1 for RoBERTa and similar models."""
    for name, table in net.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            if table.padding_idx is not None:
                return table.padding_idx + 1
    return 0


class HuggingFaceCache:
    """Wraps a transformers cache, `content`, with the methods of core.cache.Cache."""

    def __init__(self, content, length=0):
        self.content = content
        self.length = length

    def expand(self, rows, room=0):
        """See core.cache.Cache.expand. Layers that cannot be written in place still grow with each token."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
        content = copy.copy(self.content)
        content.layers = []
        for prompt_layer in self.content.layers:
            layer = copy.copy(prompt_layer)
            kind = type(layer)
            if kind in (DynamicLayer, DynamicSlidingWindowLayer) and layer.is_initialized:
                layer.keys = at_rows(layer.keys, rows)
                layer.values = at_rows(layer.values, rows)
                if room and kind is DynamicLayer and not torch.is_grad_enabled():
                    layer = with_methods(LayerWithRoom, layer)
                    layer.reserve(room)
            else:
                layer.reorder_cache(rows)
            content.layers.append(layer)
        return HuggingFaceCache(content, self.length)

    def keep(self, rows):
        """Keeps only these rows."""
        self.content.reorder_cache(rows)

    @property
    def layers(self):
        """The (keys, values) of each layer, in the precision of autocast."""
        layers = []
        for layer in self.content.layers:
            keys = in_autocast(layer.keys)
            values = in_autocast(layer.values)
            layers.append((keys, values))
        return layers

    @property
    def is_recurrent(self):
        """True if some layers read tokens into a state of fixed size, as linear attention and Mamba do."""
        return any(isinstance(layer, RecurrentLayer) for layer in self.content.layers)


def with_methods(methods, layer):
    """Returns a copy of a transformers cache layer, with the methods of the class `methods` overriding its own. The
    layer's class depends on the family, so a subclass of both classes is made on first use."""
    out = object.__new__(subclass(methods, type(layer)))
    vars(out).update(vars(layer))
    return out


@functools.cache
def subclass(methods, kind):
    return type(methods.__name__, (methods, kind), {})


class RecurrentLayer:
    """Methods for a cache layer with recurrent states.

    A group continues from the states of its prompt, so the layer is copied for each part of the group. Without these
    methods a copy would share its dict of states with the prompt and overwrite the state tensors in place: completions
    of the first part would change the prompt of the second, and autograd would reject the backward pass, which needs
    the overwritten values.
    """

    def __copy__(self):
        twin = object.__new__(type(self))
        own = tree_map_only(torch.Tensor, torch.clone, vars(self))  # this also copies the dicts
        vars(twin).update(own)
        return twin

    def update_recurrent_state(self, recurrent_states, state_idx=0, **settings):
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def in_autocast(x):
    """Casts keys or values to the precision of autocast, which would otherwise cast float32 ones at each token."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


class LayerOfRows:
    """Methods for a cache layer that writes the next token of each row into the buffers of a RowCache.

    buffers: keys and values (n, H, L, D); place: the row, head and column, each an index tensor, of the new ones
    """

    def update(self, keys, values, *args, **settings):
        # Inductor copies the whole buffers for scatter_, and writes in place for an index of all leading dimensions
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[self.place] = new[:, :, 0].to(buffer.dtype)                       # (n, H, D)
        return self.buffers


class LayerWithRoom:
    """Methods for a cache layer that writes new keys and values in place.

    transformers appends: it copies all keys of a layer for each token, which makes a step 1.3 times as long with long
    prompts. `keys` and `values` cover only the tokens read so far, because some families access these attributes.
    """

    def reserve(self, room):
        """Allocates room for `room` more columns."""
        more = (0, 0, 0, room)
        keys = in_autocast(self.keys)
        values = in_autocast(self.values)
        self.all_keys = F.pad(keys, more)                                            # (n, H, before + room, D)
        self.all_values = F.pad(values, more)

    def update(self, keys, values, *args, **settings):
        before = self.get_seq_length()
        after = before + keys.shape[2]
        self.all_keys[:, :, before:after] = keys
        self.all_values[:, :, before:after] = values
        self.keys = self.all_keys[:, :, :after]                                      # (n, H, after, D)
        self.values = self.all_values[:, :, :after]
        return self.keys, self.values

    def reorder_cache(self, rows):
        """Keeps only these rows. `keys` and `values` follow at the next update."""
        self.all_keys = self.all_keys[rows]
        self.all_values = self.all_values[rows]
