"""Text to token ids and back. A tokenizer is rebuilt from the `tokenizer` entry of meta.json or of a checkpoint."""

import os
import re
import unicodedata

from core.files.json_text import read_object
from core.settings.optional import on_hub
from core.settings.ranges import shown

SPECIALS = ("mask", "pad", "cls")  # they follow the base vocabulary, in this order
BPE_ENCODINGS = ("gpt2", "cl100k_base")
ASCII = "\n" + "".join(map(chr, range(32, 127)))
PLAIN = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2026": "...",
         "\t": " "}
AGAIN = "prepare it again"


def fold_to_ascii(text):
    """Replaces characters by ASCII ones or, without an equivalent, drops them. Returns (text, folded, dropped)."""
    out, folded, dropped = [], 0, 0
    for c in text:
        if c == "\n" or " " <= c <= "~":
            out.append(c)
            continue
        equivalent = PLAIN.get(c) or "".join(d for d in unicodedata.normalize("NFKD", c) if " " <= d <= "~")
        out.append(equivalent)
        if equivalent:
            folded += 1
        else:
            dropped += 1
    return "".join(out), folded, dropped


def number_specials(tokenizer, base_vocab_size, stop_name):
    """Gives MASK, PAD and CLS the ids after the base vocabulary: a model reads them and never samples them."""
    tokenizer.base_vocab_size, tokenizer.vocab_size = base_vocab_size, base_vocab_size + len(SPECIALS)
    tokenizer.stop_token_ids = () if tokenizer.stop_token_id is None else (tokenizer.stop_token_id,)
    tokenizer.stop_token_names = (stop_name,) * len(tokenizer.stop_token_ids)
    tokenizer.banned_token_ids = ()
    for i, name in enumerate(SPECIALS):
        setattr(tokenizer, f"{name}_token_id", base_vocab_size + i)


def special_ids(tokenizer):
    return {"base_vocab_size": tokenizer.base_vocab_size, "vocab_size": tokenizer.vocab_size,
            **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIALS}}


class CharTokenizer:
    """One id per character: printable ASCII and newline, then tags and STOP if asked for, then MASK, PAD, CLS.

    The vocabulary is fixed, not collected from a corpus, so one checkpoint fits every text. tags: strings that are one
    token each, such as '<SOLUTION>'; stop: adds the token that ends a completion, which no text can contain.
    """

    def __init__(self, characters=ASCII, tags=(), stop=False):
        self.characters, self.tags = characters, tuple(tags)
        self.pieces = [*characters, *tags]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.stop_token_id = len(self.pieces) if stop else None
        self.at_tags = re.compile(f"({'|'.join(map(re.escape, self.tags)) or '(?!)'})")
        self.newline_token_id = self.ids.get("\n", -1)
        number_specials(self, len(self.pieces) + stop, "STOP")

    def encode(self, text):
        """Ids of tags and characters; a character outside the vocabulary is folded to ASCII or left out."""
        ids = []
        for part in self.at_tags.split(text):
            pieces = [part] if part in self.tags else fold_to_ascii(part)[0]
            ids += [self.ids[piece] for piece in pieces if piece in self.ids]
        return ids

    def encode_prompt(self, text):
        """Ids of a whole prompt: there is no token that begins one."""
        return self.encode(text)

    def decode(self, ids, special="_"):
        """Text of the ids; every special token is shown as `special`, the stop token not at all."""
        ids = [i for i in ids if i != self.stop_token_id]
        return "".join(self.pieces[i] if i < len(self.pieces) else special for i in ids)

    def description(self):
        """Plain values that from_description turns back into this tokenizer; equal for equal vocabularies."""
        out = {"kind": "char", "characters": self.characters}
        if self.tags or self.stop_token_id is not None:  # fill-in checkpoints have neither key
            out |= {"tags": list(self.tags), "stop_token_id": self.stop_token_id}
        return out | special_ids(self)


class BPETokenizer:
    """tiktoken's byte pairs: 'gpt2' or 'cl100k_base', downloaded once and kept by tiktoken (TIKTOKEN_CACHE_DIR).

    The base vocabulary ends with the special tokens, of which <|endoftext|> is the stop token.
    """

    def __init__(self, encoding):
        import tiktoken
        from requests.exceptions import RequestException
        self.encoding = encoding
        try:
            self.bpe = tiktoken.get_encoding(encoding)
        except RequestException as error:
            raise ValueError(f"tokenizer {encoding} could not be downloaded ({type(error).__name__}); set "
                             "TIKTOKEN_CACHE_DIR to a folder that has it") from None
        self.stop_token_id, self.words = self.bpe.eot_token, len(self.bpe.token_byte_values())
        self.newline_token_id = self.encode("\n")[0]
        number_specials(self, self.bpe.n_vocab, "<|endoftext|>")

    def encode(self, text):
        """Ids of the text; the name of a special token in it is read as plain characters."""
        return self.bpe.encode_ordinary(text)

    def encode_prompt(self, text):
        """Ids of a whole prompt: there is no token that begins one."""
        return self.encode(text)

    def decode(self, ids, special="_"):
        """Text of the ids; every special token is shown as `special`, the stop token not at all."""
        ids = [i for i in ids if i != self.stop_token_id]
        pieces = [self.bpe.decode_single_token_bytes(i) if i < self.words else special.encode() for i in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def description(self):
        """Plain values that from_description turns back into this tokenizer."""
        return {"kind": "bpe", "encoding": self.encoding, "stop_token_id": self.stop_token_id, **special_ids(self)}


def named_tokenizer(name, tags=()):
    """For causal models: 'char' (with tags and a stop token), 'gpt2', 'cl100k_base', or a folder or hf:owner/name in
    Hugging Face format."""
    if name == "char":
        return CharTokenizer(tags=tags, stop=True)
    if name in BPE_ENCODINGS:
        return BPETokenizer(name)
    if on_hub(name) or os.path.isdir(name):
        from core.huggingface.tokenizer import load_huggingface_tokenizer
        return load_huggingface_tokenizer(name, "tokenizer")
    raise FileNotFoundError(f"tokenizer {name}: neither char, {', '.join(BPE_ENCODINGS)} nor a folder in Hugging Face "
                            "format; correct the name")


def from_description(description, where):
    """The tokenizer that wrote `description`; `where` names its file, for the error."""
    kind = description.get("kind")
    if kind == "huggingface":
        return described_huggingface(description, where)
    if kind == "char":
        tokenizer = described_characters(description, where)
    elif kind == "bpe" and description.get("encoding") in BPE_ENCODINGS:
        tokenizer = BPETokenizer(description["encoding"])
    else:
        raise ValueError(f"{where}: a tokenizer of kind={shown(kind)}, encoding={shown(description.get('encoding'))} "
                         f"is not known (known: char, bpe of {' or '.join(BPE_ENCODINGS)}, huggingface); {AGAIN}")
    expected = tokenizer.description()
    for key in expected | description:
        if key not in description:
            raise ValueError(f"{where} has no {key}: {AGAIN} with its prepare.py")
        if expected.get(key) != description[key]:
            raise ValueError(f"{where}: {key}={shown(description[key])} of its tokenizer does not agree with its "
                             f"vocabulary; {AGAIN} with its prepare.py")
    return tokenizer


def described_characters(description, where):
    """A tokenizer of the characters and tags of a description."""
    characters, tags = description.get("characters"), description.get("tags", [])
    if not isinstance(characters, str) or not isinstance(tags, list) or not all(isinstance(x, str) for x in tags):
        raise ValueError(f"{where}: its tokenizer has no characters, or tags that are no texts; {AGAIN}")
    pieces = [*characters, *tags]
    if not characters or "" in pieces or len(set(pieces)) < len(pieces):
        raise ValueError(f"{where}: its tokenizer has no character, an empty tag, or one of them twice; {AGAIN}")
    return CharTokenizer(characters, tags, description.get("stop_token_id") is not None)


def described_huggingface(description, where):
    """The tokenizer in Hugging Face format of a description, which names its folder or its name on the hub."""
    from core.huggingface.tokenizer import load_huggingface_tokenizer
    name = description.get("name")
    if not isinstance(name, str):
        raise ValueError(f"{where}: its tokenizer has no name; {AGAIN}")
    tokenizer = load_huggingface_tokenizer(name, f"{where}: tokenizer")
    if not same_vocabulary(description, tokenizer):
        raise ValueError(f"{where}: the vocabulary of its tokenizer {name} has changed since; put the old one there "
                         f"again, or {AGAIN}")
    return tokenizer


def same_vocabulary(description, tokenizer):
    """Whether a description is that of the tokenizer."""
    other = tokenizer.description()
    if description.get("kind") == other["kind"] == "huggingface":  # known by its words, wherever its folder is
        return description.get("vocabulary") == other["vocabulary"]
    return description == other


def read_meta(folder):
    """meta.json of a prepared dataset."""
    path = os.path.join(folder, "meta.json")
    if not os.path.exists(path):
        own, ending = os.path.join(folder, "prepare.py"), f"prepare.py --input=FILE --out={folder}"
        command = own if os.path.exists(own) else f"data/char_diffusion/{ending}, or for prompts data/custom/{ending}"
        if os.path.splitext(folder)[1]:  # data/my.txt, for a file that is not there
            raise FileNotFoundError(f"dataset={os.path.basename(folder)} is no file here, nor {folder} a folder; "
                                    "correct the path, then: python data/char_diffusion/prepare.py --input=FILE "
                                    "--out=data/mine")
        raise FileNotFoundError(f"dataset not prepared: {path} is missing; run python {command}")
    meta = read_object(path, path, "prepare the dataset again")
    if not isinstance(meta.get("tokenizer"), dict):
        raise ValueError(f"{path} has no tokenizer: prepare the dataset again with its prepare.py")
    return meta


def load_meta(folder):
    """meta.json of a prepared dataset, checked, and its tokenizer."""
    meta = read_meta(folder)
    return meta, from_description(meta["tokenizer"], os.path.join(folder, "meta.json"))


def character_ends(tokenizer, ids):
    """For each token, the number of characters of the text up to and with it. ids: a list"""
    if len(tokenizer.decode(ids)) == len(ids):  # a character each
        return list(range(1, len(ids) + 1))
    return [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]


def by_character(tokenizer, ids, mask):
    """For each character of the text of `ids`, the value of `mask`, which has one for each token."""
    out = []
    for value, end in zip(mask, character_ends(tokenizer, ids), strict=True):
        out = out[:end] + [value] * (end - len(out))
    return out
