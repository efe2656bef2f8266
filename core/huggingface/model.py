"""A Hugging Face model as a core.model.Model: its hidden states, its logits, its cache."""

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
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER, Model
from core.performance.sharding import layers_of, weights_of

BANNED = -1e9         # logit of a token that is never sampled: its probability is 0, and products with 0 stay finite
UNLIMITED = 2**30     # longest input of a model whose config names none
CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the argument; the last two up to transformers 5.23


class HuggingFaceModel(Model):
    """A model of transformers with its HuggingFaceTokenizer.

    net: the model, or peft's model around it; undivided: the model itself
    body: the part of it before the output layers; layers: those of the body
    A masked-fill model and a judge read a text between the tokenizer's start and end tokens. These are added here: the
    tokens and states of the interface are those of the text only.
    """

    judge_head = "realness"
    suffix = ""

    def __init__(self, net, tokenizer, mode, has_adapter=False):
        super().__init__()
        self.net = net
        self.mode = mode
        self.vocabulary = tokenizer.base_vocab_size
        self.has_adapter = has_adapter
        self.adapter = POLICY  # the adapter that it computes with, if it has any
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
        """True if it can read through a core.cache.RowCache, whose rows are at different columns."""
        from transformers.cache_utils import DynamicLayer
        rope = str(config_value(self.config, "rope_parameters"))
        if "dynamic" in rope or "longrope" in rope:  # the angles of all rows depend on the longest one
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
        with using(self.net, self.adapter), self.checkpointing(past):
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
        """Arguments of transformers for tokens (B, T) after `before` tokens of a HuggingFaceCache, or without one."""
        B, T = tokens.shape
        start = tokens.new_tensor(self.start_ids).expand(B, -1)
        end = tokens.new_tensor(self.end_ids).expand(B, -1)
        if T == 1 and before and past.is_recurrent and torch.is_grad_enabled():
            # For a single token some recurrent layers (Mamba-2) have a path of their own, meant for sampling: it
            # changes the states in place, and their gradient is lost, so a prompt would learn nothing from completions
            # of one token. Two tokens take the path of training. The second one is a copy: nobody reads its state, or
            # the cache after it, because training continues no row.
            end = tokens
        tokens = torch.cat((start, tokens, end), 1)
        inputs = self.inputs(tokens, before, padding)
        if self.mode == LANGUAGE_MODEL:
            inputs["use_cache"] = past is not None
            if past is not None:
                inputs[self.cache_name] = past.content
        return inputs

    def inputs(self, tokens, before=0, padding=None):
        """Arguments of transformers for tokens (B, T), start and end tokens included, after `before` cached ones."""
        inputs = {"input_ids": tokens}
        B, T = tokens.shape
        if padding is None:
            if not self.block:
                return inputs
            padding = tokens.new_zeros(B)
        # Padding is counted from the first token of a text. The start tokens, in columns below 0, are never padding
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
        """Arguments of transformers for the next token (n, 1) of each row of a RowCache."""
        from transformers.cache_utils import DynamicCache, DynamicLayer
        content = DynamicCache()
        for i, buffers in enumerate(rows.layers):
            layer = DynamicLayer()
            # Each layer of the model writes to its buffers of the RowCache
            layer.update = functools.partial(rows.add, i, buffers)
            content.layers.append(layer)
        place = rows.column - padding[:, None]                                       # (n, 1)
        return {
            "input_ids": tokens,
            "attention_mask": rows.mask(1, padding, tokens.device),
            "position_ids": self.first_position + place,
            "use_cache": True,
            self.cache_name: content}

    def project(self, h):
        """Float32 logits (..., vocabulary) from states (..., C); of a judge the log-odds (...) that a token is true."""
        logits = self.head_logits(h)
        if self.mode == SEQUENCE_SCORER:
            return -logits.view(h.shape[:-1])  # the model gives the log-odds that a token was replaced
        logits = logits[:, : self.vocabulary]
        if self.banned_ids:
            banned = ids_on(h.device, *self.banned_ids)
            logits = logits.index_fill(-1, banned, BANNED)
        return logits.view(*h.shape[:-1], self.vocabulary)

    def head_logits(self, h):
        """Float32 logits of the output layers at K states (..., C): (K, rows of the output layer), of a judge (K,).

        States are needed at a few columns of a batch, and logits of a large vocabulary at all columns would not fit
        into memory. So `states` calls the body of the model, and this method the rest. But families do different
        things after the body: a dense layer and a norm before the output matrix (BERT), a scale (Granite), a soft cap
        (Gemma). Rather than rewriting each of them, it calls the undivided model while the forward of its body is
        replaced by a function that returns the states. check_outputs (core/huggingface/load.py) compares the logits
        with those of the model as it is.
        """
        kind = h.device.type
        C = h.shape[-1]
        output = Output([h.reshape(1, -1, C)])                                       # (1, K, C)
        unread = torch.zeros(1, 1, dtype=torch.long, device=h.device)
        # Autocast would cast the output matrix once for all calls of its block and add up their gradients in bfloat16.
        # Without its cache each call casts the matrix, and the gradients are added up in float32.
        autocast = torch.autocast(
            kind,
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=not torch.is_grad_enabled())
        self.body.forward = lambda *args, **settings: output
        try:
            with using(self.net, self.adapter), autocast:
                logits = self.undivided(input_ids=unread).logits[0]
        finally:
            del self.body.forward  # its class has the real one
        return at_least_float32(logits)

    def answer_prompts(self):
        """Makes a masked-fill model answer prompts: a template frames them, and it may sample end tokens."""
        self.longest_input += len(self.start_ids) + len(self.end_ids)
        self.start_ids = self.end_ids = ()
        self.banned_ids = tuple(i for i in self.banned_ids if i not in self.stop_ids)

    @contextmanager
    def checkpointing(self, past):
        """A block in which, with grad_checkpoint, every layer keeps only its inputs.

        transformers has this too, but its version turns the cache off, through which a group reads its prompt.
        """
        if not self.grad_checkpoint or not torch.is_grad_enabled():
            yield
            return
        cached = [] if past is None else past.content.layers
        for i, layer in enumerate(self.layers):
            layer.forward = checkpointed(layer.forward, cached, i)
        try:
            yield
        finally:
            for layer in self.layers:
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
        """{name: tensor} of what training changes: with an adapter, only the adapter."""
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
        """This model as it is now: a copy, or the same weights with the adapter off or with the second one."""
        if not self.has_adapter:
            return super().frozen()
        twin = copy.copy(self)
        twin.adapter = REFERENCE if REFERENCE in self.net.peft_config else None
        return twin


class Output(tuple):
    """The output of a body, with its states only. Models also copy other values from it, whose names depend on the
    family (past_key_values, attentions, router_logits): each of them is None."""

    def __getattr__(self, name):
        return self[0] if name == "last_hidden_state" else None


def checkpointed(forward, cached, i):
    """The forward of layer i, which keeps only its inputs: the backward pass calls it a second time.

    The layers `cached` of the cache then hold the keys and states that the first call added. The second one would read
    each token twice, and continue from the states after it. So each call begins with a copy of what the cache held
    before the first.
    """
    def run(*args, **settings):
        if i >= len(cached):  # no cache; or an upper layer of Gemma 4, which reads the keys of another
            return checkpoint(forward, *args, use_reentrant=False, **settings)
        before = copy.copy(cached[i])

        def restore_and_run(*args, **settings):
            cached[i] = copy.copy(before)
            return forward(*args, **settings)

        return checkpoint(restore_and_run, *args, use_reentrant=False, **settings)
    return run


def block_mask(padding, length, block):
    """(B, 1, length, length) bool: a token reads its own block and all earlier ones. Blocks are counted from the first
    token after the padding. padding: (B,) number of leading columns without a token"""
    place = torch.arange(length, device=padding.device) - padding[:, None]           # (B, T)
    number = place.div(block, rounding_mode="floor")                                 # (B, T) of the block
    # Padding is the last block, which no token reads. It reads the others, so that no softmax is empty
    number = number.masked_fill(place < 0, length)
    own = number[:, :, None]                                                         # (B, T, 1)
    reads = own >= number[:, None]                                                   # (B, T, T)
    return reads[:, None]


def shifted(h, padding):
    """Moves each state (B, T, C) to the next token, which it predicts. The first token of a text, which none predicts,
    keeps its own state. padding: (B,) number of leading columns without a token, or None"""
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
    """The position of the first token: RoBERTa and its like count from padding_idx + 1."""
    for name, table in net.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            if table.padding_idx is not None:
                return table.padding_idx + 1
    return 0


class HuggingFaceCache:
    """A cache of transformers, `content`, with the methods of core.cache.Cache."""

    def __init__(self, content, length=0):
        self.content = content
        self.length = length

    def expand(self, rows, room=0):
        """See core.cache.Cache.expand. Layers that cannot be written in place grow with each token."""
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
        """Drops all rows but these."""
        self.content.reorder_cache(rows)

    @property
    def layers(self):
        """(keys, values) of each layer, in the precision in which later tokens read them."""
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
    """A copy of a layer of a transformers cache, with the methods of a class before those of the layer's own class.
    The own class depends on the family, so a subclass of both is made when it is first needed."""
    out = object.__new__(subclass(methods, type(layer)))
    vars(out).update(vars(layer))
    return out


@functools.cache
def subclass(methods, kind):
    return type(methods.__name__, (methods, kind), {})


class RecurrentLayer:
    """Methods of a layer with recurrent states.

    A group continues the states of its prompt, so a copy of the layer is made for each part of the group. Without
    these methods the copy would share its dict of states with the prompt, and new states would be written into the old
    tensors: the completions of the first part would change the prompt of the second, and autograd would refuse the
    backward pass, which needs the overwritten values.
    """

    def __copy__(self):
        twin = object.__new__(type(self))
        own = tree_map_only(torch.Tensor, torch.clone, vars(self))  # new dicts, too
        vars(twin).update(own)
        return twin

    def update_recurrent_state(self, recurrent_states, state_idx=0, **settings):
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def in_autocast(x):
    """Keys or values in the precision of autocast, which would cast those in float32 again for each token."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


class LayerWithRoom:
    """Methods of a layer of keys and values that writes new columns in place.

    transformers appends: it copies all keys of a layer for each token, and with long prompts a step takes 1.3 times as
    long. `keys` and `values` stay those of the tokens read so far, because families read these attributes too.
    """

    def reserve(self, room):
        """Makes room for `room` columns after the present ones."""
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
        """Keeps only these rows. The next update takes keys and values from the kept ones."""
        self.all_keys = self.all_keys[rows]
        self.all_values = self.all_values[rows]
