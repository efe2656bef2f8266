"""A Hugging Face model behind the model interface (core/model.py): its hidden states, its logits, its cache."""

import copy
import functools
import inspect
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core.cache import RowCache, at_rows
from core.device import ids_on
from core.distributions import at_least_float32
from core.errors import Mistake
from core.huggingface.files import reads_both_ways
from core.huggingface.lora import POLICY, REFERENCE, adapter_identity, adapter_weights, copy_weights, using
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER, freeze
from core.performance.sharding import layers_of, weights_of

BANNED = -1e9         # logit of a token that is never sampled: its probability is 0, and products with 0 stay finite
UNLIMITED = 2**30     # longest input of a model whose config names none
CACHE_NAMES = "cache", "past_key_values", "cache_params"  # of the argument, the last two up to transformers 5.23


class HuggingFaceModel(nn.Module):
    """net: the transformers model, or peft's model around it; tokenizer: its HuggingFaceTokenizer

    A masked-fill model and a judge read a text between the tokenizer's start and end tokens. They are added here:
    tokens and states are those of the text alone.
    """

    judge_head = "realness"
    suffix = ""  # it is saved as a folder

    def __init__(self, net, tokenizer, mode, has_adapter=False):
        super().__init__()
        self.net, self.mode, self.vocabulary = net, mode, tokenizer.base_vocab_size
        self.has_adapter = has_adapter
        self.adapter = POLICY  # the one that it computes with, if there are any
        self.grad_checkpoint = False
        bare = net.get_base_model() if self.has_adapter else net
        body = bare.base_model
        given = GivenStates()
        head = copy.copy(bare)  # the output layers: it shares their weights, and has no other layers
        head._modules = dict(bare._modules) | {bare.base_model_prefix: given}
        # Not registered as modules: their weights are those of net
        self.__dict__ |= {"body": body, "head": head, "given": given, "layers": layers_of(body)}
        self.banned_ids, self.stop_ids = tokenizer.banned_token_ids, tokenizer.stop_token_ids
        self.start_ids = self.end_ids = ()
        if mode != LANGUAGE_MODEL and not reads_both_ways(self.config):
            self.start_ids, self.end_ids = tokenizer.start_ids, tokenizer.end_ids
        self.first_position = first_position(body)
        self.longest_input = most_tokens(body) - len(self.start_ids) - len(self.end_ids)
        takes = inspect.signature(body.forward).parameters
        self.takes_position = "position_ids" in takes
        self.cache_name = next((name for name in CACHE_NAMES if name in takes), None)

    @property
    def reads_columns(self):
        """True if it can read through a core.cache.RowCache."""
        layers = {type(layer).__name__ for layer in self.new_cache().content.layers}
        rope = str(getattr(self.config, "rope_parameters", None))
        plain = self.config._attn_implementation == "sdpa" and not hasattr(self.config, "attention_block")
        alone = "dynamic" not in rope and "longrope" not in rope  # else the longest row changes how the others turn
        return plain and alone and self.takes_position and layers <= {"DynamicLayer"}

    @property
    def config(self):
        return self.body.config.get_text_config()

    def forward(self, tokens, position=None, past=None, padding=None):
        """Float32 logits."""
        return self.project(self.states(tokens, position, past, padding))

    def states(self, tokens, position=None, past=None, padding=None):
        """See core.model.GPT.states."""
        B, T = tokens.shape
        before = 0 if past is None else past.length
        if before + T > self.longest_input:
            raise Mistake(f"an input of {before + T} tokens does not fit a model that reads {self.longest_input}")
        start, end = (tokens.new_tensor(ids).expand(B, -1) for ids in (self.start_ids, self.end_ids))
        if T == 1 and before and past.is_recurrent and torch.is_grad_enabled():
            # One token alone would change the states in place, without a gradient; nothing is read behind these two
            end = tokens
        if isinstance(past, RowCache):
            mask, place = past.mask(T, padding, tokens.device), past.column - padding[:, None]
            inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": self.first_position + place,
                      "use_cache": True, self.cache_name: content_of(past)}
        else:
            inputs = self.inputs(torch.cat((start, tokens, end), 1), before, padding)
            if self.mode == LANGUAGE_MODEL:
                inputs |= {"use_cache": past is not None, self.cache_name: past and past.content}
        with using(self.net, self.adapter), self.checkpointing(past):
            h = self.of_their_own_token(self.body(**inputs).last_hidden_state, padding)
        h = h[:, len(self.start_ids) : len(self.start_ids) + T]                      # (B, T, C)
        if past is not None:
            past.length += T
        return h if position is None else h.take_along_dim(position[..., None], 1)

    def inputs(self, tokens, before=0, padding=None):
        """Arguments of transformers for tokens (B, T), start and end tokens included, behind `before` cached ones."""
        inputs = {"input_ids": tokens}
        block = getattr(self.config, "attention_block", None)
        if padding is None and block:
            padding = tokens.new_zeros(len(tokens))
        if padding is None:
            return inputs
        columns = torch.arange(before + tokens.shape[1], device=tokens.device) - len(self.start_ids)
        real = (columns >= padding[:, None]) | (columns < 0)                         # (B, before + T)
        inputs["attention_mask"] = block_mask(padding, tokens.shape[1], block) if block else real.long()
        if self.takes_position:
            inputs["position_ids"] = self.first_position + (real.cumsum(1) - 1).clamp(min=0)[:, before:]
        return inputs

    def of_their_own_token(self, h, padding=None):
        """States or logits (B, T, C) in the order of the tokens that they predict; the first token has its own."""
        if not getattr(self.config, "shifted_logits", False):
            return h
        first = h.new_zeros(len(h), dtype=torch.long) if padding is None else padding
        place = (torch.arange(h.shape[1], device=h.device) - 1).maximum(first[:, None])  # (B, T)
        return h.take_along_dim(place[..., None], 1)

    def project(self, h):
        """Float32 logits (..., vocabulary) from states (..., C); of a judge the log-odds (...) that a token is true."""
        logits = self.head_logits(h)                                                 # (K, rows), of a judge (K,)
        if self.mode == SEQUENCE_SCORER:
            return -logits.view(h.shape[:-1])  # it was trained on the log-odds that a token was replaced
        logits = logits[:, : self.vocabulary]
        if self.banned_ids:
            logits = logits.index_fill(-1, ids_on(h.device, *self.banned_ids), BANNED)
        return logits.view(*h.shape[:-1], self.vocabulary)

    def head_logits(self, h):
        """Float32 logits of the output layers at K states (..., C): (K, rows of the output layer), of a judge (K,)."""
        kind, casts = h.device.type, nullcontext()
        if torch.is_autocast_enabled(kind) and torch.is_grad_enabled():
            # A weight that autocast keeps for several calls would add up their gradients in its own precision
            casts = torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)
        self.given.states = h.reshape(1, -1, h.shape[-1])                            # (1, K, C)
        unread = torch.zeros(1, 1, dtype=torch.long, device=h.device)
        with using(self.net, self.adapter), casts:
            logits = self.head(input_ids=unread).logits[0]
        self.given.states = None
        return at_least_float32(logits)

    def answer_prompts(self):
        """From now on a masked-fill model reads prompts as a template frames them, and can sample end tokens."""
        self.longest_input += len(self.start_ids) + len(self.end_ids)
        self.start_ids = self.end_ids = ()
        self.banned_ids = tuple(i for i in self.banned_ids if i not in self.stop_ids)

    @contextmanager
    def checkpointing(self, past):
        """A block in which, with grad_checkpoint, every layer keeps only its inputs."""
        again = self.layers if self.grad_checkpoint and torch.is_grad_enabled() else ()
        for i, layer in enumerate(again):
            layer.forward = computed_again(layer.forward, past and past.content.layers, i)
        try:
            yield
        finally:
            for layer in again:
                del layer.forward

    def new_cache(self):
        """A HuggingFaceCache without tokens."""
        from transformers import DynamicCache
        cache = DynamicCache(config=self.config)
        for i, layer in enumerate(cache.layers):
            if hasattr(layer, "recurrent_states"):
                cache.layers[i] = with_methods(RecurrentLayer, layer)
        return HuggingFaceCache(cache)

    def parameters_by_kind(self):
        """See core.model.GPT.parameters_by_kind."""
        kinds = {"matrices": [], "embeddings": [], "vectors": []}
        matrices = {id(p) for p in self.layers.parameters() if p.dim() == 2}  # Muon takes no convolutions or experts
        for p in self.net.parameters():
            kind = "matrices" if id(p) in matrices else "embeddings"
            if p.requires_grad:
                kinds[kind if p.dim() > 1 else "vectors"].append(p)
        return kinds

    def num_parameters(self):
        return sum(p.numel() for p in self.net.parameters())

    def weights(self):
        """{name: tensor} of what training changes: with an adapter, the adapter alone."""
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


class GivenStates(nn.Module):
    """Takes the place of a model's layers and returns hidden states that were computed before."""

    def forward(self, *args, **settings):
        return Output([self.states])


class Output(tuple):
    """The output of layers, of which a head may hand on more than the states: all else is None."""

    def __getattr__(self, name):
        return self[0] if name == "last_hidden_state" else None


def computed_again(forward, cached, i):
    """The forward of layer i that keeps only its inputs. Each time it begins with what cached[i] held at first."""
    if cached and i >= len(cached):  # in transformers 5.17, an upper layer of Gemma 4, which reads another's keys
        cached = None

    def run(*args, **settings):
        before = cached and copy.copy(cached[i])

        def attempt(*args, **settings):
            if cached:
                cached[i] = copy.copy(before)
            return forward(*args, **settings)

        return checkpoint(attempt, *args, use_reentrant=False, **settings)
    return run


def block_mask(padding, length, block):
    """(B, 1, length, length) bool: True where the token of a row reads that of a column, in blocks that are counted
    from the first token behind the padding. Padding reads itself, so that no row is empty.

    padding: (B,) number of leading columns without a token
    """
    column = torch.arange(length, device=padding.device)                             # (T,)
    number = (column - padding[:, None]).div(block, rounding_mode="floor")           # (B, T)
    reads = number[:, :, None] >= number[:, None]                                    # (B, T, T)
    real = (column >= padding[:, None])[:, None]                                     # (B, 1, T)
    itself = torch.eye(length, dtype=torch.bool, device=padding.device)
    return (reads & real | itself)[:, None]


def most_tokens(net):
    """The most tokens in a row that a transformers model reads, special tokens included."""
    config = net.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or UNLIMITED
    return longest - first_position(net)


def first_position(net):
    """The number of the first token's place: RoBERTa counts from padding_idx + 1."""
    for part in net.modules():
        table = getattr(part, "position_embeddings", None)
        if getattr(table, "padding_idx", None) is not None:
            return table.padding_idx + 1
    return 0


class HuggingFaceCache:
    """A cache of transformers, `content`, with the methods of core.cache.Cache."""

    def __init__(self, content, length=0):
        self.content, self.length = content, length

    def expand(self, rows, room=0):
        """Does what core.cache.Cache.expand does. Layers that cannot be written in place grow as they need."""
        content = copy.copy(self.content)
        content.layers = [copy.copy(layer) for layer in self.content.layers]
        for i, layer in enumerate(content.layers):
            kind = type(layer).__name__
            if kind not in ("DynamicLayer", "DynamicSlidingWindowLayer") or not layer.is_initialized:
                layer.reorder_cache(rows)
                continue
            layer.keys, layer.values = at_rows(layer.keys, rows), at_rows(layer.values, rows)
            if room and kind == "DynamicLayer" and not torch.is_grad_enabled():
                content.layers[i] = with_methods(LayerWithRoom, layer)
                content.layers[i].reserve(room)
        return HuggingFaceCache(content, self.length)

    def keep(self, rows):
        """Drops all rows but these."""
        self.content.reorder_cache(rows)

    @property
    def layers(self):
        """(keys, values) of each layer, as tokens behind them are to read them."""
        return [(in_autocast(layer.keys), in_autocast(layer.values)) for layer in self.content.layers]

    @property
    def is_recurrent(self):
        """True if some layers read tokens into a state of fixed size, as linear attention and Mamba do."""
        return any(hasattr(layer, "recurrent_states") for layer in self.content.layers)


def with_methods(methods, layer):
    """The layer of a transformers cache, with these methods before those of its class."""
    out = object.__new__(subclass(methods, type(layer)))
    out.__dict__ |= layer.__dict__
    return out


@functools.cache
def subclass(*parents):
    return type(parents[0].__name__, parents, {})


def content_of(rows):
    """A cache of transformers whose layers write into a core.cache.RowCache."""
    from transformers.cache_utils import DynamicCache, DynamicLayer
    content = DynamicCache()
    content.layers = [DynamicLayer() for _ in rows.layers]
    for i, layer in enumerate(content.layers):
        layer.update = functools.partial(rows.add, i)
    return content


class RecurrentLayer:
    """Methods of a layer with recurrent states. Those of transformers share the states with the layer's copies, and
    write new states over old ones, which the backward pass needs."""

    def __copy__(self):
        twin = object.__new__(type(self))
        for name, x in vars(self).items():
            if isinstance(x, dict):
                x = {i: state.clone() if torch.is_tensor(state) else state for i, state in x.items()}
            setattr(twin, name, x)
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
    """Methods of a layer of keys and values that writes new columns in place. With long prompts a step takes 1.3 times
    as long where columns are appended."""

    def reserve(self, room):
        """Makes room for so many columns behind those that are there."""
        pair = in_autocast(self.keys), in_autocast(self.values)
        self.whole = [F.pad(x, (0, 0, 0, room)) for x in pair]                       # (n, H, before + room, D)

    def update(self, keys, values, *args, **settings):
        before = self.get_seq_length()
        after = before + keys.shape[2]
        for whole, new in zip(self.whole, (keys, values), strict=True):
            whole[:, :, before:after] = new
        self.keys, self.values = (x[:, :, :after] for x in self.whole)               # (n, H, after, D) each
        return self.keys, self.values

    def reorder_cache(self, rows):
        self.whole = [x[rows] for x in self.whole]
