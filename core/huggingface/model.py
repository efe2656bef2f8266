"""A Hugging Face model behind the model interface (core/model.py): its hidden states, its logits, its cache."""

import copy
import inspect
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.distributions import at_least_float32
from core.huggingface.cache import empty_cache
from core.huggingface.diffusion import block_mask, reads_both_ways
from core.huggingface.lora import POLICY, REFERENCE, adapter_identity, adapter_weights, copy_weights, using
from core.huggingface.settings import FULL
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER, freeze
from core.performance.sharding import layers_of, weights_of

BANNED = -1e9         # logit of a token that is never sampled: its probability is 0, and products with 0 stay finite
UNLIMITED = 2**30     # longest input of a model whose config names none
HANDED_ON = ("router_logits", "image_hidden_states", "audio_hidden_states", "image_outputs", "audio_outputs",
             "shared_kv_states", "cache_params", "cache")


class GivenStates(nn.Module):
    """Takes the place of a model's layers and returns hidden states that were computed before."""

    def forward(self, *args, **settings):
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.states)
        for name in HANDED_ON:
            setattr(output, name, None)
        return output


def computed_again(forward, cached, i):
    """The forward of layer i that keeps only its inputs. It adds to cached[i], the layers of the cache, if there is
    one, so each time it begins with what was there first."""
    def run(*args, **settings):
        before = cached and copy.copy(cached[i])

        def attempt(*args, **settings):
            if cached:
                cached[i] = copy.copy(before)
            return forward(*args, **settings)

        return checkpoint(attempt, *args, use_reentrant=False, **settings)
    return run


class HuggingFaceModel(nn.Module):
    """net: the transformers model, or peft's model around it; tokenizer: its HuggingFaceTokenizer

    A masked-fill model and a judge read a text between the tokenizer's start and end tokens. They are added here:
    tokens and states are those of the text alone.
    """

    judge_head = "realness"
    suffix = ""  # it is saved as a folder

    def __init__(self, net, tokenizer, mode, adapter=FULL):
        super().__init__()
        self.net, self.mode, self.vocabulary = net, mode, tokenizer.base_vocab_size
        self.banned_ids = tokenizer.banned_token_ids
        self.has_adapter = adapter.has_adapter
        self.adapter = POLICY  # the one that it computes with, if there are any
        self.grad_checkpoint = False
        bare = net.get_base_model() if self.has_adapter else net
        body = bare.base_model
        given = GivenStates()
        head = copy.copy(bare)  # the output layers: it shares their weights, and has no other layers
        head._modules = dict(bare._modules) | {bare.base_model_prefix: given}
        # Not registered as modules: their weights are those of net
        self.__dict__ |= {"body": body, "head": head, "given": given, "layers": layers_of(body)}
        self.stop_ids = tokenizer.stop_token_ids
        self.start_ids = self.end_ids = ()
        if mode != LANGUAGE_MODEL and not reads_both_ways(self.config):
            self.start_ids, self.end_ids = tokenizer.start_ids, tokenizer.end_ids
        self.first_position = first_position(body)
        self.longest_input = most_tokens(body) - len(self.start_ids) - len(self.end_ids)
        arguments = inspect.signature(body.forward).parameters
        self.takes_position = "position_ids" in arguments
        names = ("cache", "cache_params", "past_key_values")  # the first since transformers 5.24
        self.cache_name = next((name for name in names if name in arguments), None)

    def states(self, tokens, position=None, past=None, padding=None):
        """See core.model.GPT.states."""
        B, T = tokens.shape
        before = 0 if past is None else past.length
        if before + T > self.longest_input:
            raise ValueError(f"an input of {before + T} tokens does not fit a model that reads {self.longest_input}")
        start, end = (tokens.new_tensor(ids).expand(B, -1) for ids in (self.start_ids, self.end_ids))
        if T == 1 and before and past.is_recurrent and torch.is_grad_enabled():
            # One token alone would change the states in place, without a gradient; nothing is read behind these two
            end = tokens
        inputs = self.inputs(torch.cat((start, tokens, end), 1), before, padding)
        if self.mode == LANGUAGE_MODEL:
            inputs |= {"use_cache": past is not None, self.cache_name: past and past.content}
        with using(self.net, self.adapter), self.checkpointing(past):
            h = self.of_their_own_token(self.body(**inputs).last_hidden_state, padding)
        h = h[:, len(self.start_ids) : len(self.start_ids) + T]                      # (B, T, C)
        if past is not None:
            past.length += T
        return h if position is None else h.gather(1, position[..., None].expand(-1, -1, h.shape[-1]))

    def inputs(self, tokens, before=0, padding=None):
        """Arguments of the transformers model for tokens (B, T), start and end tokens included, behind `before` ones in
        its cache. padding: as in `states`"""
        inputs = {"input_ids": tokens}
        block = getattr(self.config, "attention_block", None)
        if padding is None and block:
            padding = tokens.new_zeros(len(tokens))
        if padding is None:
            return inputs
        columns = torch.arange(before + tokens.shape[1], device=tokens.device) - len(self.start_ids)
        real = (columns >= padding[:, None]) | (columns < 0)                         # (B, before + columns read)
        inputs["attention_mask"] = block_mask(padding, tokens.shape[1], block) if block else real.long()
        if self.takes_position:
            inputs["position_ids"] = self.first_position + (real.cumsum(1) - 1).clamp(min=0)[:, before:]
        return inputs

    def of_their_own_token(self, h, padding=None):
        """States or logits (B, T, C) in the order of the tokens that they predict; the first token has its own."""
        if not getattr(self.config, "shifted_logits", False):
            return h
        B, T, C = h.shape
        first = h.new_zeros(B, dtype=torch.long) if padding is None else padding
        place = (torch.arange(T, device=h.device) - 1).maximum(first[:, None])       # (B, T)
        return h.gather(1, place[..., None].expand(B, T, C))

    def answer_prompts(self):
        """From now on a masked-fill model reads prompts as they are, which a template frames, and can sample end
        tokens."""
        self.longest_input += len(self.start_ids) + len(self.end_ids)
        self.start_ids = self.end_ids = ()
        self.banned_ids = tuple(i for i in self.banned_ids if i not in self.stop_ids)

    def project(self, h):
        """Float32 logits (..., vocabulary) from states (..., C); of a judge the log-odds (...) that a token is true."""
        kind, casts = h.device.type, nullcontext()
        if torch.is_autocast_enabled(kind) and torch.is_grad_enabled():
            # A weight that autocast keeps for several calls would add up their gradients in its own precision
            casts = torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)
        self.given.states = h.reshape(1, -1, h.shape[-1])                            # (1, K, C)
        unread = torch.zeros(1, 1, dtype=torch.long, device=h.device)
        with using(self.net, self.adapter), casts:
            logits = self.head(input_ids=unread).logits[0]
        self.given.states = None
        logits = at_least_float32(logits)                                            # (K, rows), of a judge (K,)
        if self.mode == SEQUENCE_SCORER:
            return -logits.view(h.shape[:-1])  # it was trained on the log-odds that a token was replaced
        logits = logits[:, : self.vocabulary]
        if self.banned_ids:
            logits = logits.index_fill(-1, torch.tensor(self.banned_ids, device=h.device), BANNED)
        return logits.view(*h.shape[:-1], self.vocabulary)

    def forward(self, tokens, position=None, past=None, padding=None):
        """Float32 logits."""
        return self.project(self.states(tokens, position, past, padding))

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
        return empty_cache(self.config)

    @property
    def config(self):
        return self.body.config.get_text_config()

    def parameters_by_kind(self):
        """See core.model.GPT.parameters_by_kind."""
        kinds = {"matrices": [], "embeddings": [], "vectors": []}
        in_layers = {id(p) for p in self.layers.parameters()}
        for p in self.net.parameters():
            of_layers = id(p) in in_layers and p.dim() == 2  # Muon takes no convolutions, and no stacked experts
            kind = "matrices" if of_layers else "embeddings"
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
        """A model that stays as this one is now: a copy, or the same weights with the adapter off, or with the second
        adapter that holds the first one's start."""
        if not self.has_adapter:
            return freeze(copy.deepcopy(self))
        twin = copy.copy(self)
        twin.adapter = REFERENCE if REFERENCE in self.net.peft_config else None
        return twin


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
