"""Wraps a Hugging Face tokenizer in the interface of core/tokenizer.py."""

import hashlib
import json
import os
import re
from functools import cached_property

from core.errors import Mistake, others
from core.files import HUB, on_hub
from core.huggingface.files import base_of, declared_in, published_as
from core.settings.optional import local_name, opening, quiet_transformers

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
CAUSAL = "ForCausalLM|ForConditionalGeneration|LMHeadModel"  # in the class names of models that write text


class HuggingFaceTokenizer:
    """The tokenizer of a transformers model. The model may sample every id of the vocabulary that is not banned.

    backend: the transformers tokenizer; path: the folder or hub name it was loaded from
    end_ids_of_model: the end ids declared in the model's files; fills: True if the model fills in masks
    start_ids, end_ids: ids added before and after a text (BERT: [CLS] and [SEP]; Llama: BOS and none)
    """

    def __init__(self, backend, path, end_ids_of_model, fills):
        self.backend = backend
        self.path = path
        vocabulary = backend.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values())
        self.base_vocab_size = self.vocab_size
        self.mask_token_id = backend.mask_token_id
        self.cls_token_id = backend.cls_token_id
        self.pad_token_id = 0  # attention never reads padding, so any id works
        self.start_ids, self.end_ids = ids_around(backend)

        ends = dict.fromkeys([backend.eos_token_id, *end_ids_of_model])  # without duplicates, in this order
        ends.pop(None, None)  # the backend may have no end token
        self.stop_token_ids = tuple(ends)
        self.stop_token_id = self.stop_token_ids[0] if ends else None
        self.stop_token_names = self.names_of(ends)

        added = set()
        for i, token in backend.added_tokens_decoder.items():
            if token.special:
                added.add(i)
        self.special_ids = added.union(backend.all_special_ids)
        self.special_ids.discard(None)  # the id of a missing token
        shown = ids_to_show(backend, added).difference(ends)
        self.shown_tokens = self.names_of(sorted(shown))
        self.hidden_ids = self.special_ids.difference(shown, [self.mask_token_id])
        self.hidden_ids.update(ends)

        banned = set(range(self.vocab_size)).difference(vocabulary.values())
        if fills:
            banned |= self.special_ids
        self.banned_token_ids = tuple(sorted(banned))

        newline = self.encode("\n")
        self.newline_token_id = -1  # -1: no single token is a newline
        if len(newline) == 1 and newline != [backend.unk_token_id]:
            self.newline_token_id = newline[0]

        facts = [sorted(vocabulary.items()), self.mask_token_id, self.cls_token_id]
        text = json.dumps(facts)
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()

    def names_of(self, ids):
        return tuple(self.backend.convert_ids_to_tokens(list(ids)))

    def encode(self, text):
        """Encodes a text without start and end tokens. Names of special tokens in the text become these tokens, as chat
        templates need."""
        return self.backend.encode(text, add_special_tokens=False, verbose=False)

    def encode_prompt(self, text):
        """Encodes a whole prompt: with the start tokens, if any, and without end tokens."""
        return [*self.start_ids, *self.encode(text)]

    def decode(self, ids):
        """Decodes ids. A mask token becomes an underscore; special tokens, including end tokens, are dropped, except
        shown_tokens."""
        ids = [int(i) for i in ids if int(i) not in self.hidden_ids]
        if self.mask_token_id not in ids:
            return self.backend.decode(ids, clean_up_tokenization_spaces=False)
        pieces = []
        names = self.names_of(ids)
        for i, piece in zip(ids, names):
            if i == self.mask_token_id:
                piece = "_"
            if piece:
                pieces.append(piece)
        return self.backend.convert_tokens_to_string(pieces)

    @property
    def has_chat_template(self):
        return bool(self.backend.chat_template)

    @cached_property
    def shows_system(self):
        """False if the chat template refuses a system message, as Gemma's does, or drops it."""
        rules = "the rules"
        messages = [
            {"role": "system", "content": rules},
            {"role": "user", "content": "?"}]
        try:
            return rules in self.render_chat(messages)
        except Mistake:
            return False

    def render_chat(self, messages, **chat_template_kwargs):
        """Renders a chat with the model's chat template. The text ends with the start of the assistant's turn; if the
        last message is the assistant's, with the end of that message."""
        is_begun = messages[-1]["role"] == "assistant"
        fault = f"template: the chat template of {self.path} does not render a prompt"
        with others(fault, "change the prompt or chat_template_kwargs, or use template='chat'"):
            return self.backend.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not is_begun,
                continue_final_message=is_begun,
                **chat_template_kwargs)

    def save(self, folder):
        self.backend.save_pretrained(folder)

    def description(self):
        """Returns plain values from which core/tokenizer.py can reload this tokenizer."""
        return {
            "kind": "huggingface",
            "name": self.path,
            "vocabulary": self.sha256,
            "vocab_size": self.vocab_size}


def ids_to_show(backend, special):
    """Returns the ids of added special tokens that are part of a text, such as <think>. This excludes tokens that the
    chat template puts around turns, and tokens with a role, such as the beginning of a text or padding.

    special: ids of the special tokens
    """
    found = {i for i in special if i >= backend.vocab_size}  # ids beyond the original vocabulary
    names = [str(token) for token in backend.extra_special_tokens]
    found.update(backend.convert_tokens_to_ids(names))
    roles = list(backend.special_tokens_map.values())
    found.difference_update(backend.convert_tokens_to_ids(roles))
    if not backend.chat_template:
        return found
    user = {"role": "user", "content": "a"}
    assistant = {"role": "assistant", "content": "a"}
    try:
        with others("the chat template does not render turns", "no special token is shown"):
            text = backend.apply_chat_template([user, assistant, user], tokenize=False)
    except Mistake:
        return set()
    return found.difference(backend.encode(text, add_special_tokens=False))


def ids_around(backend):
    """Returns (ids before, ids after) that the tokenizer adds around a single text."""
    bare = backend.encode("a", add_special_tokens=False)
    whole = backend.encode("a", add_special_tokens=True)
    for start in range(len(whole)):
        end = start + len(bare)
        if bare and whole[start:end] == bare:
            return tuple(whole[:start]), tuple(whole[end:])
    return (), ()


def load_huggingface_tokenizer(path, key="checkpoint"):
    """Loads the tokenizer of a folder or hf:owner/name; for an adapter without a tokenizer, of the base model. Custom
    tokenizer code is never run."""
    named = f"{key}={path}"
    transformers = quiet_transformers(path, key)
    model = base_of(path, key)  # the base model's files declare the end tokens
    files = [os.path.join(path, name) for name in FILES]
    if not on_hub(path) and not any(map(os.path.isfile, files)):
        if model != path:
            return load_huggingface_tokenizer(model, f"{named}, base model")
        raise Mistake(f"{named} has no tokenizer ({', '.join(FILES[:2])}); copy the tokenizer's files there, "
                      f"or name another folder or {HUB}owner/name")
    with opening(path, key, ": its tokenizer"):
        config = declared_in(model, "config.json", key)
        published = published_as(config)
        tokenizer_type = None
        if published is not None:
            tokenizer_type = published.tokenizer
        backend = transformers.AutoTokenizer.from_pretrained(
            local_name(path),
            tokenizer_type=tokenizer_type,
            trust_remote_code=False)
        if backend.mask_token_id is None and config.get("mask_token_id") is not None:
            backend.mask_token = backend.convert_ids_to_tokens(config["mask_token_id"])
        generation = declared_in(model, "generation_config.json", key)
        ends = declared_ends(config, generation, backend, named)
        # The tokenizer of a causal model may have a mask token too, but the model was not trained to fill in masks
        classes = " ".join(config.get("architectures") or [])
        is_causal = published is None and config.get("is_causal") is not False and re.search(CAUSAL, classes)
        fills = backend.mask_token_id is not None and not is_causal
        return HuggingFaceTokenizer(backend, path, ends, fills)


def declared_ends(config, generation, backend, named):
    """Returns the end ids that a model's config.json and generation_config.json declare: one, a list or none each.
    Raises Mistake if the transformers tokenizer `backend` lacks one. named: the model, for the error"""
    found = []
    for values in (config, config.get("text_config") or {}, generation):
        ids = values.get("eos_token_id")
        if isinstance(ids, list):
            found += ids
        elif ids is not None:
            found.append(ids)
    last = max(backend.get_vocab().values())
    if max(found, default=0) > last:
        raise Mistake(f"{named} has a tokenizer that lacks the end tokens {found} which the model declares; use the "
                      "tokenizer, or copy the tokenizer files, that belong to the model")
    return found
