"""Text to token ids and back. A tokenizer is rebuilt from the `tokenizer` entry of meta.json or of a checkpoint."""

import base64
import hashlib
import os
import re
import unicodedata

from core.files.json_text import object_from_json
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.settings.ranges import shown

SPECIALS = ("mask", "pad", "cls")  # they follow the base vocabulary, in this order
BPE_ENCODINGS = ("gpt2", "cl100k_base")
ASCII = "\n" + "".join(map(chr, range(32, 127)))
PLAIN = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2026": "...",
         "\t": " "}


def fold_to_ascii(text):
    """Replaces characters by ASCII ones or, without an equivalent, drops them. Returns (text, folded, dropped)."""
    out, folded, dropped = [], 0, 0
    for c in text:
        if c == "\n" or " " <= c <= "~":
            out.append(c)
            continue
        equivalent = PLAIN.get(c) or "".join(d for d in unicodedata.normalize("NFKD", c) if " " <= d <= "~")
        out.append(equivalent)
        folded, dropped = folded + bool(equivalent), dropped + (not equivalent)
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
            ids += [self.ids[part]] if part in self.tags else [self.ids[c] for c in fold_to_ascii(part)[0]
                                                               if c in self.ids]
        return ids

    def encode_prompt(self, text):
        """Ids of a whole prompt: there is no token that begins one."""
        return self.encode(text)

    def decode(self, ids, special="_"):
        """Text of the ids; every special token is shown as `special`, the stop token not at all."""
        return "".join(self.pieces[i] if i < len(self.pieces) else "" if i == self.stop_token_id else special
                       for i in ids)

    def description(self):
        """Plain values that from_description turns back into this tokenizer; equal for equal vocabularies."""
        causal = self.tags or self.stop_token_id is not None  # fill-in checkpoints have neither key
        more = {"tags": list(self.tags), "stop_token_id": self.stop_token_id} if causal else {}
        return {"kind": "char", "characters": self.characters, **more, **special_ids(self)}


class BPETokenizer:
    """tiktoken's byte pairs: 'gpt2', 'cl100k_base', a file of ranks (on each line a base64 token and its rank), or the
    tokens themselves in the order of their ranks.

    The base vocabulary ends with <|endoftext|>, the stop token. The named encodings are downloaded once and kept by
    tiktoken (TIKTOKEN_CACHE_DIR); without a network that is a ValueError that names the remedy.
    """

    def __init__(self, encoding=None, tokens=None):
        self.encoding = encoding if encoding in BPE_ENCODINGS else None
        if self.encoding is not None:
            self.bpe = named_bpe(encoding)
        else:
            self.tokens = read_ranks(encoding) if tokens is None else tokens
            self.bpe = bpe_of_tokens(self.tokens)
        self.stop_token_id, self.words = self.bpe.eot_token, len(self.bpe.token_byte_values())
        self.newline_token_id = next(iter(self.bpe.encode_ordinary("\n")), -1)
        number_specials(self, self.bpe.n_vocab, "<|endoftext|>")

    def encode(self, text):
        """Ids of the text; the name of a special token in it is read as plain characters."""
        return self.bpe.encode_ordinary(text)

    def encode_prompt(self, text):
        """Ids of a whole prompt: there is no token that begins one."""
        return self.encode(text)

    def decode(self, ids, special="_"):
        """Text of the ids; every special token is shown as `special`, the stop token not at all."""
        blank = special.encode()
        token = lambda i: (b"" if i == self.stop_token_id else self.bpe.decode_single_token_bytes(i) if i < self.words
                           else blank)  # cl100k_base has unused ids between its words and its last special token
        return b"".join(map(token, ids)).decode("utf-8", errors="replace")

    def description(self):
        """Plain values that from_description turns back into this tokenizer, without a file of ranks."""
        vocabulary = {"encoding": self.encoding}
        if self.encoding is None:
            vocabulary = {"ranks": " ".join(base64.b64encode(token).decode() for token in self.tokens)}
        return {"kind": "bpe", **vocabulary, "stop_token_id": self.stop_token_id, **special_ids(self)}


def named_bpe(name):
    """The tiktoken encoding of that name."""
    import tiktoken
    from requests.exceptions import RequestException
    try:
        return tiktoken.get_encoding(name)
    except RequestException as error:
        raise ValueError(f"tokenizer {name} could not be downloaded ({type(error).__name__}); set "
                         "TIKTOKEN_CACHE_DIR to a folder that has it, or name a local file of ranks") from None


def bpe_of_tokens(tokens):
    """A tiktoken encoding from tokens in the order of their ranks; text is cut into words as GPT-2 does it."""
    import tiktoken
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    return tiktoken.Encoding("ranks", pat_str=words, mergeable_ranks={token: i for i, token in enumerate(tokens)},
                             special_tokens={"<|endoftext|>": len(tokens)})


def read_ranks(path):
    """The tokens of a file of ranks, in the order of their ranks."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"tokenizer {path}: neither char, {', '.join(BPE_ENCODINGS)}, a file of ranks nor a "
                                "folder in Hugging Face format")
    ranks = {}
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    token, rank = line.split()
                    ranks[base64.b64decode(token, validate=True)] = int(rank)
                except ValueError:  # binascii.Error is one
                    raise ValueError(f"{path}, line {number}: not a base64 token and its rank") from None
    if set(ranks.values()) != set(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        raise ValueError(f"{path}: ranks must be 0 to {len(ranks) - 1} without gaps, all 256 single bytes among them")
    return sorted(ranks, key=ranks.get)


def described_bpe(description, where):
    """The byte pairs of a description. One without ranks names an encoding or, in its older form, a file of ranks with
    the hash of its content."""
    if "ranks" in description:
        try:
            tokens = [base64.b64decode(token, validate=True) for token in description["ranks"].split(" ")]
        except ValueError:  # binascii.Error is one
            tokens = []
        if len(set(tokens)) != len(tokens) or not all(bytes([b]) in tokens for b in range(256)):
            raise ValueError(f"{where}: the ranks of its tokenizer are damaged; prepare it again")
        return BPETokenizer(tokens=tokens)
    if "encoding" not in description:
        raise ValueError(f"{where}: its tokenizer has neither encoding nor ranks; prepare it again")
    path, sha256 = description["encoding"], description.get("sha256")
    if sha256 is not None:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{where}: its tokenizer is the file of ranks {path}, which does not exist; put it "
                                    "there again, or prepare it again")
        with open(path, "rb") as f:
            if hashlib.sha256(f.read()).hexdigest() != sha256:
                raise ValueError(f"{where}: its tokenizer is the file of ranks {path}, which has changed since; put "
                                 f"the file with sha256 {sha256} there again, or prepare it again")
    return BPETokenizer(path)


def described_huggingface(description, where):
    """The tokenizer in Hugging Face format of a description, which names its folder or its name on the hub."""
    for key in ("name", "vocabulary"):
        if key not in description:
            raise ValueError(f"{where}: its tokenizer has no {key}; prepare it again")
    tokenizer = load_huggingface_tokenizer(description["name"], f"{where}: tokenizer")
    if tokenizer.description()["vocabulary"] != description["vocabulary"]:
        raise ValueError(f"{where}: the vocabulary of its tokenizer {description['name']} has changed since; put the "
                         "old one there again, or prepare it again")
    return tokenizer


def named_tokenizer(name, tags=()):
    """For causal models: 'char' (with tags and a stop token), 'gpt2', 'cl100k_base', a file of ranks, or a folder or
    hf:owner/name in Hugging Face format."""
    if name == "char":
        return CharTokenizer(tags=tags, stop=True)
    if name not in BPE_ENCODINGS and (name.startswith("hf:") or os.path.isdir(name)):
        return load_huggingface_tokenizer(name, "tokenizer")
    return BPETokenizer(name)


KINDS = {"kind": str, "base_vocab_size": int, "vocab_size": int, "stop_token_id": int | None, "characters": str,
         "tags": list, "encoding": str | None, "sha256": str | None, "ranks": str, "name": str,
         "vocabulary": str}  # the types of what a description may have


def from_description(description, where):
    """The tokenizer that wrote `description`; `where` names its file, for the error."""
    for key in ("kind", "base_vocab_size", "vocab_size", *(f"{name}_token_id" for name in SPECIALS)):
        if key not in description:
            raise ValueError(f"{where} has no {key}: prepare the dataset again with its prepare.py")
    for key, kind in KINDS.items():
        if key in description and not isinstance(description[key], kind):
            raise ValueError(f"{where}: {key}={shown(description[key])} of its tokenizer is of the wrong type; prepare "
                             "it again")
    if description["kind"] == "char":
        tokenizer = described_characters(description, where)
    elif description["kind"] == "bpe":
        tokenizer = described_bpe(description, where)
    elif description["kind"] == "huggingface":
        return described_huggingface(description, where)
    else:
        raise ValueError(f"{where}: kind={shown(description['kind'])} of tokenizer is not known (known: char, bpe, "
                         "huggingface)")
    sizes = lambda values: {key: x for key, x in values.items() if key not in ("encoding", "sha256", "ranks")}
    if sizes(tokenizer.description()) != sizes(description):
        raise ValueError(f"{where}: its vocabulary sizes and special ids do not agree with its characters or ranks; "
                         "prepare it again")
    return tokenizer


def described_characters(description, where):
    """The characters and tags of a description."""
    tags = description.get("tags", [])
    if "characters" not in description or not all(isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"{where}: its tokenizer has no characters, or tags that are no texts; prepare it again")
    pieces = [*description["characters"], *tags]
    if not pieces or len(set(pieces)) < len(pieces):
        raise ValueError(f"{where}: its tokenizer has no character, or one of them twice; prepare it again")
    return CharTokenizer(description["characters"], tags, description.get("stop_token_id") is not None)


def same_vocabulary(description, tokenizer, where):
    """Whether a description, of this form or of the older one, is that of the tokenizer."""
    if "sha256" in description:
        description = from_description(description, where).description()
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
    with open(path, "rb") as f:
        meta = object_from_json(f.read(), path, "prepare the dataset again")
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
