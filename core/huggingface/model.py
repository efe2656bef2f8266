"""A Hugging Face model behind the model interface (core/model.py): its hidden states, its logits, its cache."""

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
from core.huggingface.lora import POLICY, REFERENCE, adapter_identity, adapter_weights, copy_weights, using
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER, freeze
from core.performance.sharding import layers_of, weights_of

BANNED = -1e9         # logit of a token that is never sampled: its probability is 0, and products with 0 stay finite
UNLIMITED = 2**30     # longest input of a model whose config names none
CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of the argument, the last two up to transformers 5.23


class HuggingFaceModel(nn.Module):
    """A transformers model, `net`, or peft's model around it. tokenizer: its HuggingFaceTokenizer

    A masked-fill model and a judge read a text between the tokenizer's start and end tokens. They are added here:
    tokens and states are those of the text alone.
    """

    judge_head = "realness"
    suffix = ""  # it is saved as a folder

    def __init__(self, net, tokenizer, mode, has_adapter=False):
        super().__init__()
        self.net = net
        self.mode = mode
        self.vocabulary = tokenizer.base_vocab_size
        self.has_adapter = has_adapter
        self.adapter = POLICY  # the one that it computes with, if it has any
        self.grad_checkpoint = False
        bare = net.get_base_model() if has_adapter else net
        body = bare.base_model
        # Not registered as modules: state_dict() would list the weights of net again under their names
        vars(self).update(bare=bare, body=body, layers=layers_of(body))
        self.banned_ids = tokenizer.banned_token_ids
        self.stop_ids = tokenizer.stop_token_ids
        self.start_ids = self.end_ids = ()
        if mode != LANGUAGE_MODEL and not reads_both_ways(self.config):
            self.start_ids = tokenizer.start_ids
            self.end_ids = tokenizer.end_ids
        self.first_position = first_position(body)
        self.longest_input = most_tokens(body) - len(self.start_ids) - len(self.end_ids)
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
        """True if it can read through a core.cache.RowCache, whose rows have come to different columns."""
        rope = str(config_value(self.config, "rope_parameters"))
        if "dynamic" in rope or "longrope" in rope:  # the longest row of a batch changes the angles of the others
            return False
        if self.config._attn_implementation != "sdpa" or self.block or not self.takes_position:
            return False
        kinds = {type(layer).__name__ for layer in self.new_cache().content.layers}
        return kinds <= {"DynamicLayer"}

    def forward(self, tokens, position=None, past=None, padding=None):
        """Float32 logits."""
        return self.project(self.states(tokens, position, past, padding))

    def states(self, tokens, position=None, past=None, padding=None):
        """See core.model.GPT.states."""
        B, T = tokens.shape
        before = 0 if past is None else past.length
        if before + T > self.longest_input:
            raise Mistake(f"an input of {before + T} tokens does not fit a model that reads {self.longest_input}")
        if isinstance(past, RowCache):
            inputs = self.inputs_of_rows(tokens, past, padding)
        else:
            start = tokens.new_tensor(self.start_ids).expand(B, -1)
            end = tokens.new_tensor(self.end_ids).expand(B, -1)
            if T == 1 and before and past.is_recurrent and torch.is_grad_enabled():
                # For a single token some recurrent layers (Mamba-2) have a path of their own, meant for sampling: it
                # changes the states in place, and their gradient is lost, so a prompt would learn nothing from
                # completions of one token. Two tokens take the path of training. The second one is a copy: nobody
                # reads its state, or the cache after it, because training continues no row.
                end = tokens
            inputs = self.inputs(torch.cat((start, tokens, end), 1), before, padding)
            if self.mode == LANGUAGE_MODEL:
                inputs["use_cache"] = past is not None
                inputs[self.cache_name] = past and past.content
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

    def inputs(self, tokens, before=0, padding=None):
        """Arguments of transformers for tokens (B, T), start and end tokens included, after `before` cached ones."""
        inputs = {"input_ids": tokens}
        B, T = tokens.shape
        if padding is None:
            if not self.block:
                return inputs
            padding = tokens.new_zeros(B)
        column = torch.arange(before + T, device=tokens.device) - len(self.start_ids)
        real = (column >= padding[:, None]) | (column < 0)                           # (B, before + T)
        inputs["attention_mask"] = block_mask(padding, T, self.block) if self.block else real.long()
        if self.takes_position:
            place = (real.cumsum(1) - 1).clamp(min=0)                                # (B, before + T)
            inputs["position_ids"] = self.first_position + place[:, before:]
        return inputs

    def inputs_of_rows(self, tokens, rows, padding):
        """Arguments of transformers for the next token (n, 1) of each row of a RowCache, which its layers write to."""
        from transformers.cache_utils import DynamicCache, DynamicLayer
        content = DynamicCache()
        for i, buffers in enumerate(rows.layers):
            layer = DynamicLayer()
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
            return -logits.view(h.shape[:-1])  # it was trained on the log-odds that a token was replaced
        logits = logits[:, : self.vocabulary]
        if self.banned_ids:
            logits = logits.index_fill(-1, ids_on(h.device, *self.banned_ids), BANNED)
        return logits.view(*h.shape[:-1], self.vocabulary)

    def head_logits(self, h):
        """Float32 logits of the output layers at K states (..., C): (K, rows of the output layer), of a judge (K,).

        States are needed at a few columns of a batch, and logits of a large vocabulary at all columns would not fit
        into memory. So `states` calls the body of the model, and this method the rest. But families do different
        things after the body: a dense layer and a norm before the output matrix (BERT), a scale (Granite), a soft cap
        (Gemma). Rather than rewriting each of them, it calls the forward of the whole class, with a body that
        returns the states. check_outputs (core/huggingface/load.py) compares this with the undivided model.
        """
        kind = h.device.type
        output = Output([h.reshape(1, -1, h.shape[-1])])                             # (1, K, C)
        unread = torch.zeros(1, 1, dtype=torch.long, device=h.device)
        # Autocast would cast the output matrix once for all calls of its block and add up their gradients in bfloat16.
        # Without its cache each call casts the matrix, and the gradients are added up in float32.
        is_on = torch.is_autocast_enabled(kind)
        casts = torch.autocast(kind, enabled=is_on, cache_enabled=not torch.is_grad_enabled())
        self.body.forward = lambda *args, **settings: output
        try:
            with using(self.net, self.adapter), casts:
                logits = self.bare(input_ids=unread).logits[0]
        finally:
            del self.body.forward  # the method of its class is seen again
        return at_least_float32(logits)

    def answer_prompts(self):
        """Makes a masked-fill model read prompts as a template frames them, and sample end tokens."""
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
            layer.forward = computed_again(layer.forward, cached, i)
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

    def parameters_by_kind(self):
        """See core.model.GPT.parameters_by_kind."""
        kinds = {"matrices": [], "embeddings": [], "vectors": []}
        in_layers = {id(p) for p in self.layers.parameters()}
        for p in self.net.parameters():
            kind = "embeddings"
            if p.dim() < 2:
                kind = "vectors"
            elif p.dim() == 2 and id(p) in in_layers:  # Muon takes no convolutions and no stacks of experts
                kind = "matrices"
            if p.requires_grad:
                kinds[kind].append(p)
        return kinds

    def num_parameters(self):
        return sum(p.numel() for p in self.net.parameters())

    def weights(self):
        """{name: tensor} of what training changes: with an adapter, only the adapter."""
        return adapter_weights(self.net, self.adapter) if self.has_adapter else weights_of(self.net)

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
            return freeze(copy.deepcopy(self))
        twin = copy.copy(self)
        twin.adapter = REFERENCE if REFERENCE in self.net.peft_config else None
        return twin


class Output(tuple):
    """The output of a body: its states. A model copies more of it into its own output, under names that depend on the
    family (past_key_values, attentions, router_logits): all of them are None."""

    def __getattr__(self, name):
        return self[0] if name == "last_hidden_state" else None


def computed_again(forward, cached, i):
    """The forward of layer i that keeps only its inputs.

    The backward pass calls the layer a second time. The layers `cached` of the cache then hold the keys and states
    that the first call added: it would read each token twice, and continue from the states after it. So each call
    begins with a copy of what the cache held at first.
    """
    def run(*args, **settings):
        if i >= len(cached):  # no cache; or an upper layer of Gemma 4, which reads the keys of another
            return checkpoint(forward, *args, use_reentrant=False, **settings)
        before = copy.copy(cached[i])

        def attempt(*args, **settings):
            cached[i] = copy.copy(before)
            return forward(*args, **settings)

        return checkpoint(attempt, *args, use_reentrant=False, **settings)
    return run


def block_mask(padding, length, block):
    """(B, 1, length, length) bool: True where the token of a row reads that of a column, in blocks that are counted
    from the first token after the padding. padding: (B,) number of leading columns without a token"""
    place = torch.arange(length, device=padding.device) - padding[:, None]           # (B, T)
    number = place.div(block, rounding_mode="floor")                                 # (B, T) of the block
    # As if it came after all tokens, padding is read only by padding. It reads something, so that no softmax is empty
    number = number.masked_fill(place < 0, length)
    reads = number[:, :, None] >= number[:, None]                                    # (B, T, T)
    return reads[:, None]


def shifted(h, padding):
    """States (B, T, C), each moved to the token that it predicts, which is the next one. The first token of a text has
    none before it and keeps its own. padding: (B,) number of leading columns without a token, or None"""
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
        if name.endswith("position_embeddings"):
            padding = vars(table).get("padding_idx")
            if padding is not None:
                return padding + 1
    return 0


class HuggingFaceCache:
    """A cache of transformers, `content`, with the methods of core.cache.Cache."""

    def __init__(self, content, length=0):
        self.content = content
        self.length = length

    def expand(self, rows, room=0):
        """Does what core.cache.Cache.expand does. Layers that cannot be written in place grow as they need."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
        content = copy.copy(self.content)
        content.layers = []
        for layer in self.content.layers:
            layer = copy.copy(layer)
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
        return [(in_autocast(layer.keys), in_autocast(layer.values)) for layer in self.content.layers]

    @property
    def is_recurrent(self):
        """True if some layers read tokens into a state of fixed size, as linear attention and Mamba do."""
        return any(isinstance(layer, RecurrentLayer) for layer in self.content.layers)


def with_methods(methods, layer):
    """The layer of a transformers cache, with these methods before those of its class, which depends on the family."""
    out = object.__new__(subclass(methods, type(layer)))
    vars(out).update(vars(layer))
    return out


@functools.cache
def subclass(*parents):
    return type(parents[0].__name__, parents, {})


class RecurrentLayer:
    """Methods of a layer with recurrent states.

    A group continues the states of its prompt, so a copy of the layer is made for each part of the group. A copy as
    transformers makes it would share the dict of states with the prompt, and new states would be copied into the old
    tensors: the completions of the first part would change the prompt of the second, and autograd would refuse the
    backward pass, which needs the values that were written over.
    """

    def __copy__(self):
        twin = object.__new__(type(self))
        own = tree_map_only(torch.Tensor, torch.clone, vars(self))
        vars(twin).update(own)
        return twin

    def update_recurrent_state(self, recurrent_states, state_idx=0, **settings):
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def in_autocast(x):
    """Keys or values in the precision of autocast, which would cast those in float32 again for each token."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class LayerWithRoom:
    """Methods of a layer of keys and values that writes new columns in place.

    transformers appends: it copies all keys of a layer for each token. With long prompts a step then takes 1.3 times
    as long. `keys` and `values` stay those of the tokens read so far, because families read these attributes too.
    """

    def reserve(self, room):
        """Makes room for `room` columns after the present ones."""
        self.all_keys = F.pad(in_autocast(self.keys), (0, 0, 0, room))               # (n, H, before + room, D)
        self.all_values = F.pad(in_autocast(self.values), (0, 0, 0, room))

    def update(self, keys, values, *args, **settings):
        before = self.get_seq_length()
        after = before + keys.shape[2]
        self.all_keys[:, :, before:after] = keys
        self.all_values[:, :, before:after] = values
        self.keys = self.all_keys[:, :, :after]                                      # (n, H, after, D)
        self.values = self.all_values[:, :, :after]
        return self.keys, self.values

    def reorder_cache(self, rows):  # the next update cuts keys and values from these
        self.all_keys = self.all_keys[rows]
        self.all_values = self.all_values[rows]
