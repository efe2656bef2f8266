"""A tokenizer in Hugging Face format, behind the interface of core/tokenizer.py."""

import hashlib
import json
import os

from core.files.json_text import object_from_json
from core.settings.optional import opening, quiet_transformers
from core.settings.ranges import shown
from core.settings.user_code import guarded

HUB = "hf:"                                                # begins a name of the hub: hf:owner/name
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
WRITERS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")  # architectures that write left to right
MOST_IDS = 2**22                                           # several times the largest vocabulary that is published
TEMPLATE_SECONDS = 10                                      # that a chat template may take for one prompt
PROBES = ("a", "1", ".", "hello world")


class HuggingFaceTokenizer:
    """transformers' tokenizer of a model. An id of the vocabulary is one that a model may write, unless it is banned.

    backend: the tokenizer of transformers; path: where it came from
    end_ids_of_model: the end ids that the model's own files declare; fills: the model fills in masks
    start_ids, end_ids: what the tokenizer puts before and after one text (BERT: [CLS] and [SEP]; Llama: BOS, nothing)
    """

    def __init__(self, backend, path, end_ids_of_model=(), fills=False):
        self.backend, self.path = backend, path
        vocabulary = backend.get_vocab()
        self.base_vocab_size = self.vocab_size = 1 + max(vocabulary.values())
        self.mask_token_id, self.cls_token_id = backend.mask_token_id, backend.cls_token_id
        self.pad_token_id = 0                              # attention never reads it: any id of the vocabulary will do
        declared = (backend.eos_token_id, *end_ids_of_model)
        self.stop_token_ids = tuple(dict.fromkeys(i for i in declared if i is not None and i < self.vocab_size))
        self.stop_token_id = next(iter(self.stop_token_ids), None)
        self.stop_token_names = tuple(backend.convert_ids_to_tokens(list(self.stop_token_ids)))
        self.start_ids, self.end_ids = ids_around(backend)
        added = backend.added_tokens_decoder.items()
        self.special_ids = {*backend.all_special_ids, *(i for i, token in added if token.special)}
        unused = set(range(self.vocab_size)) - set(vocabulary.values())
        self.banned_token_ids = tuple(sorted(unused | self.special_ids if fills else unused))
        newline = self.encode("\n")
        self.newline_token_id = newline[0] if len(newline) == 1 and newline[0] != backend.unk_token_id else -1
        words = json.dumps([sorted(vocabulary.items()), self.mask_token_id, self.cls_token_id])
        self.sha256 = hashlib.sha256(words.encode()).hexdigest()

    def encode(self, text):
        """Ids of the text alone; the name of a special token in it is read as that token, as chat templates need it."""
        return self.backend.encode(text, add_special_tokens=False, verbose=False)

    def encode_prompt(self, text):
        """Ids of a whole prompt: after the start token, if the tokenizer has one, and without an end token."""
        return [*self.start_ids, *self.encode(text)]

    def decode(self, ids, special="_"):
        """Text of the ids; a masked token is shown as `special`, other special tokens and end tokens not at all."""
        ids = [int(i) for i in ids if int(i) not in self.stop_token_ids]
        if self.mask_token_id not in ids:
            return self.backend.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ids = [i for i in ids if i == self.mask_token_id or i not in self.special_ids]
        pieces = [special if i == self.mask_token_id else piece
                  for i, piece in zip(ids, self.backend.convert_ids_to_tokens(ids), strict=True)]
        return self.backend.convert_tokens_to_string([piece for piece in pieces if piece])

    @property
    def has_chat_template(self):
        return bool(self.backend.chat_template)

    def render_chat(self, messages, **chat_template_kwargs):
        """The text of a chat up to where the assistant's turn begins, by the model's own chat template."""
        if not self.has_chat_template:
            raise ValueError(f"template='model': the tokenizer of {self.path} has no chat template; use "
                             "template='chat' or 'plain', or a model that was trained on chats")
        with guarded(f"template='model': the chat template of {self.path} refuses a prompt", "change the prompt or "
                     "chat_template_kwargs, or use template='chat'", TEMPLATE_SECONDS):
            text = self.backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                                    **chat_template_kwargs)
            text.encode()  # raises an error for half of a surrogate pair, which no tokenizer reads
            return text

    def save(self, folder):
        """Writes the tokenizer's own files to a folder, where from_pretrained finds them."""
        self.backend.save_pretrained(folder)

    def description(self):
        """Plain values from which core/tokenizer.py loads this tokenizer again; vocabulary is equal for equal ones."""
        return {"kind": "huggingface", "name": self.path, "vocabulary": self.sha256,
                "base_vocab_size": self.base_vocab_size, "vocab_size": self.vocab_size,
                "mask_token_id": self.mask_token_id, "pad_token_id": self.pad_token_id,
                "cls_token_id": self.cls_token_id, "stop_token_ids": list(self.stop_token_ids)}


def ids_around(backend):
    """(ids before, ids after) that the tokenizer puts around one text."""
    for text in PROBES:
        bare, whole = (backend.encode(text, add_special_tokens=special) for special in (False, True))
        for start in range(len(whole) - len(bare) + 1 if bare else 0):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def load_huggingface_tokenizer(path, key="checkpoint"):
    """The tokenizer of a folder or of hf:owner/name. Its own code is never run.

    Raises FileNotFoundError or ValueError naming `key`, the setting that named the path.
    """
    transformers, name = quiet_transformers(path, key), path.removeprefix(HUB)
    if not path.startswith(HUB) and not os.path.isdir(path):
        raise FileNotFoundError(f"{key}={path} is no folder; name a folder in Hugging Face format or {HUB}owner/name")
    model = name = name_with_tokenizer(name, f"{key}={path}")
    if os.path.exists(os.path.join(name, "adapter_config.json")):
        model = base_of(name) or name
    with opening(path, key, ": its tokenizer"):
        declared = [declared_by(transformers, model, file, f"{key}={path}")
                    for file in ("config.json", "generation_config.json")]
        backend = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        largest = max(backend.get_vocab().values())
        if largest > MOST_IDS:
            raise ValueError(f"{key}={path}: its tokenizer has a token with the id {largest}, more than any vocabulary "
                             "has; copy its files again")
        writes = any(end in architecture for architecture in declared[0][0] for end in WRITERS)
        ends = [i for _, ids in declared for i in ids]
        tokenizer = HuggingFaceTokenizer(backend, path, ends, fills=backend.mask_token_id is not None and not writes)
    if lacking := [i for i in ends if i >= tokenizer.vocab_size]:
        raise ValueError(f"{key}={path}: the model declares the end token {lacking[0]}, but its tokenizer has "
                         f"{tokenizer.vocab_size} tokens; copy the tokenizer files that belong to the model")
    return tokenizer


def name_with_tokenizer(name, setting):
    """The folder, or its base model if it has an adapter without a tokenizer, or the hub's name as it is.

    Raises an error for a folder without the files of a tokenizer, or with one that is not JSON.
    """
    if not os.path.isdir(name):
        return name
    found = [file for file in FILES if os.path.isfile(os.path.join(name, file))]
    if not found and base_of(name):
        return name_with_tokenizer(base_of(name), f"{setting}, base model {base_of(name)}")
    if not found:
        raise FileNotFoundError(f"{setting} has no tokenizer ({', '.join(FILES[:2])}); copy the tokenizer's files "
                                "there, from where the model came from")
    for file in found:
        if file.endswith(".json"):
            read_json(os.path.join(name, file), setting)
    return name


def base_of(folder):
    """The model that the adapter of a folder was trained on; None if the folder has no adapter."""
    path = os.path.join(folder, "adapter_config.json")
    base = read_json(path, folder).get("base_model_name_or_path") if os.path.isfile(path) else None
    return base if isinstance(base, str) else None


def read_json(path, setting):
    with open(path, "rb") as f:
        return object_from_json(f.read(), f"{setting}: {os.path.basename(path)}", "copy it again")


def declared_by(transformers, name, file, setting):
    """What a JSON file of the model declares: (its architectures, its end ids); nothing if there is no file.

    setting: that names the model, with its value, for errors
    """
    path = transformers.utils.cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    values = {} if path is None else read_json(path, setting)
    inner = values.get("text_config")
    ids = values.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    found = values.get("architectures") or [], ids if isinstance(ids, list) else [] if ids is None else [ids]
    for key, part, kind in zip(("architectures", "eos_token_id"), found, (str, int), strict=True):
        if not isinstance(part, list) or not all(isinstance(x, kind) and (kind is str or x >= 0) for x in part):
            raise ValueError(f"{setting}: {file}: {key}={shown(part)} is not what a model declares")
    return found
