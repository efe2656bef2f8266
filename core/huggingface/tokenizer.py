"""A tokenizer in Hugging Face format, behind the interface of core/tokenizer.py."""

import hashlib
import json
import os
import re
from functools import cached_property

from core.errors import Mistake, others
from core.files import HUB, on_hub
from core.huggingface.files import PUBLISHED, base_of, declared_in, refuse
from core.settings.optional import local_name, opening, quiet_transformers

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
CAUSAL = "ForCausalLM|ForConditionalGeneration|LMHeadModel"  # in the class names of models that write text


class HuggingFaceTokenizer:
    """transformers' tokenizer of a model. An id of the vocabulary is one that a model may sample, unless it is banned.

    backend: the tokenizer of transformers; path: where it came from
    end_ids_of_model: the end ids that the model's own files declare; fills: the model fills in masks
    start_ids, end_ids: what the tokenizer puts before and after one text (BERT: [CLS] and [SEP]; Llama: BOS, nothing)
    """

    def __init__(self, backend, path, end_ids_of_model, fills):
        self.backend, self.path = backend, path
        vocabulary = backend.get_vocab()
        self.base_vocab_size = self.vocab_size = 1 + max(vocabulary.values())
        self.mask_token_id, self.cls_token_id = backend.mask_token_id, backend.cls_token_id
        self.pad_token_id = 0                              # attention never reads it: any id of the vocabulary will do
        ends = dict.fromkeys((backend.eos_token_id, *end_ids_of_model))  # each once
        self.stop_token_ids = tuple(i for i in ends if i is not None)
        self.stop_token_id = next(iter(self.stop_token_ids), None)
        self.stop_token_names = tuple(backend.convert_ids_to_tokens(list(self.stop_token_ids)))
        self.start_ids, self.end_ids = ids_around(backend)
        added = {i for i, token in backend.added_tokens_decoder.items() if token.special}
        self.special_ids = added.union(backend.all_special_ids) - {None}  # None: of a token that it does not have
        self.shown_ids = ids_to_show(backend) - set(self.stop_token_ids)
        self.hidden_ids = self.special_ids - self.shown_ids - {self.mask_token_id}
        self.shown_tokens = tuple(backend.convert_ids_to_tokens(sorted(self.shown_ids)))
        banned = set(range(self.vocab_size)) - set(vocabulary.values())
        if fills:
            banned |= self.special_ids
        self.banned_token_ids = tuple(sorted(banned))
        newline = self.encode("\n")
        known = len(newline) == 1 and newline != [backend.unk_token_id]
        self.newline_token_id = newline[0] if known else -1
        words = json.dumps([sorted(vocabulary.items()), self.mask_token_id, self.cls_token_id])
        self.sha256 = hashlib.sha256(words.encode()).hexdigest()

    def encode(self, text):
        """Ids of the text alone; the name of a special token in it is read as that token, as chat templates need it."""
        return self.backend.encode(text, add_special_tokens=False, verbose=False)

    def encode_prompt(self, text):
        """Ids of a whole prompt: after the start token, if there is one, and without an end token."""
        return [*self.start_ids, *self.encode(text)]

    def decode(self, ids):
        """Text of the ids; a masked token is shown as an underscore, other special tokens and end tokens not at all,
        except those of shown_ids."""
        ids = [int(i) for i in ids if int(i) not in self.stop_token_ids]
        ids = [i for i in ids if i not in self.hidden_ids]
        if self.mask_token_id not in ids:
            return self.backend.decode(ids, clean_up_tokenization_spaces=False)
        pieces = ["_" if i == self.mask_token_id else piece
                  for i, piece in zip(ids, self.backend.convert_ids_to_tokens(ids), strict=True)]
        return self.backend.convert_tokens_to_string([piece for piece in pieces if piece])

    @property
    def has_chat_template(self):
        return bool(self.backend.chat_template)

    @cached_property
    def shows_system(self):
        """False if the chat template refuses a system message, as Gemma's does, or leaves it out."""
        rules = "the rules"
        try:
            return rules in self.render_chat([{"role": "system", "content": rules}, {"role": "user", "content": "?"}])
        except Mistake:
            return False

    def render_chat(self, messages, **chat_template_kwargs):
        """The text of a chat by the model's own chat template: up to where the assistant's turn begins or, if its
        message is the last one, to the end of that message."""
        goes_on = messages[-1]["role"] == "assistant"
        with others(f"template: the chat template of {self.path} does not render a prompt", "change the prompt or "
                    "chat_template_kwargs, or use template='chat'"):
            return self.backend.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not goes_on, continue_final_message=goes_on,
                **chat_template_kwargs)

    def save(self, folder):
        self.backend.save_pretrained(folder)

    def description(self):
        """Plain values from which core/tokenizer.py loads this tokenizer again."""
        return {"kind": "huggingface", "name": self.path, "vocabulary": self.sha256, "vocab_size": self.vocab_size}


def ids_to_show(backend):
    """The special tokens that were added to the tokenizer and belong into a text, such as <think>: not those that its
    chat template puts around turns, and not those of a role, such as the beginning of a text or padding."""
    added = {i for i, token in backend.added_tokens_decoder.items() if token.special and i >= backend.vocab_size}
    added |= set(backend.convert_tokens_to_ids(list(map(str, backend.extra_special_tokens))))
    if backend.chat_template:
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
        try:
            with others("the chat template does not render turns", "nothing of it is shown"):
                text = backend.apply_chat_template(turns, tokenize=False)
        except Mistake:
            return set()
        added -= set(backend.encode(text, add_special_tokens=False))
    roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    return added - {getattr(backend, f"{role}_token_id") for role in roles}


def ids_around(backend):
    """(ids before, ids after) that the tokenizer puts around one text."""
    bare, whole = (backend.encode("a", add_special_tokens=special) for special in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if bare and whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def load_huggingface_tokenizer(path, key="checkpoint"):
    """The tokenizer of a folder or hf:owner/name, else of an adapter's base model. Its own code is never run."""
    transformers, named = quiet_transformers(path, key), f"{key}={path}"
    model = base_of(path, key)  # whose files declare the end tokens
    if not on_hub(path) and not any(os.path.isfile(os.path.join(path, file)) for file in FILES):
        if model != path:
            return load_huggingface_tokenizer(model, f"{named}, base model")
        raise Mistake(f"{named} has no tokenizer ({', '.join(FILES[:2])}); copy the tokenizer's files there, "
                      f"or name another folder or {HUB}owner/name")
    with opening(path, key, ": its tokenizer"):
        config, generation = (declared_in(model, file, key) for file in ("config.json", "generation_config.json"))
        declared = [x.get("eos_token_id") for x in (config, config.get("text_config") or {}, generation)]
        ends = [i for end in declared for i in (end if isinstance(end, list) else [end]) if i is not None]
        published = PUBLISHED.get(config.get("model_type"))
        kind = getattr(transformers, published and published.tokenizer or "AutoTokenizer")
        backend = kind.from_pretrained(local_name(path), trust_remote_code=False)
        if backend.mask_token_id is None and config.get("mask_token_id") is not None:
            backend.mask_token = backend.convert_ids_to_tokens(config["mask_token_id"])
        both_ways = published is not None or config.get("is_causal") is False
        writes = not both_ways and re.search(CAUSAL, " ".join(config.get("architectures") or []))
        fills = backend.mask_token_id is not None and not writes
        lacks_ends = max(ends, default=0) > max(backend.get_vocab().values())
        refuse(named, (lacks_ends, f"has a tokenizer that lacks the end tokens {ends} which the model declares; copy "
                       "the tokenizer files that belong to the model"))
        return HuggingFaceTokenizer(backend, path, ends, fills)
