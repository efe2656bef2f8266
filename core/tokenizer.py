"""Text to token ids and back. A tokenizer is rebuilt from the `tokenizer` entry of meta.json or of a checkpoint."""

import base64
import hashlib
import json
import os
import re
import unicodedata

SPECIALS = ("mask", "pad", "cls")  # they follow the base vocabulary, in this order
BPE_ENCODINGS = ("gpt2", "cl100k_base")
ASCII = "\n" + "".join(map(chr, range(32, 127)))
PLAIN = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2026": "...",
         "\t": " "}


def fold_to_ascii(text):
    """Replaces what has an ASCII twin, drops the rest. Returns (text, characters folded, characters dropped)."""
    out, folded, dropped = [], 0, 0
    for c in text:
        if c == "\n" or " " <= c <= "~":
            out.append(c)
            continue
        twin = PLAIN.get(c) or "".join(d for d in unicodedata.normalize("NFKD", c) if " " <= d <= "~")
        out.append(twin)
        folded, dropped = folded + bool(twin), dropped + (not twin)
    return "".join(out), folded, dropped


def number_specials(tokenizer, base_vocab_size):
    """Gives MASK, PAD and CLS the ids behind the base vocabulary, which a model reads but never writes."""
    tokenizer.base_vocab_size, tokenizer.vocab_size = base_vocab_size, base_vocab_size + len(SPECIALS)
    for i, name in enumerate(SPECIALS):
        setattr(tokenizer, f"{name}_token_id", base_vocab_size + i)


def special_ids(tokenizer):
    return {"base_vocab_size": tokenizer.base_vocab_size, "vocab_size": tokenizer.vocab_size,
            **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIALS}}


class CharTokenizer:
    """One id per character: printable ASCII and newline, then tags and STOP if asked for, then MASK, PAD, CLS.

    The vocabulary is fixed and not read off a corpus, so one checkpoint fits every text. tags: strings that are one
    token each, such as '<SOLUTION>'; stop: adds the token that ends a completion, which no text can contain.
    """

    def __init__(self, characters=ASCII, tags=(), stop=False):
        self.characters, self.tags = characters, tuple(tags)
        self.pieces = [*characters, *tags]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.stop_token_id = len(self.pieces) if stop else None
        self.at_tags = re.compile(f"({'|'.join(map(re.escape, self.tags)) or '(?!)'})")
        self.newline_token_id = self.ids.get("\n", -1)
        number_specials(self, len(self.pieces) + stop)

    def encode(self, text):
        """Ids of tags and characters; a character outside the vocabulary is folded to ASCII or left out."""
        ids = []
        for part in self.at_tags.split(text):
            ids += [self.ids[part]] if part in self.tags else [self.ids[c] for c in fold_to_ascii(part)[0]
                                                               if c in self.ids]
        return ids

    def decode(self, ids, special="_"):
        """Text of the ids; every special token is shown as `special`, the stop token not at all."""
        return "".join(self.pieces[i] if i < len(self.pieces) else "" if i == self.stop_token_id else special
                       for i in ids)

    def description(self):
        """Plain values that from_description turns back into this tokenizer; equal for equal vocabularies."""
        causal = self.tags or self.stop_token_id is not None  # without, as fill-in checkpoints have it
        more = {"tags": list(self.tags), "stop_token_id": self.stop_token_id} if causal else {}
        return {"kind": "char", "characters": self.characters, **more, **special_ids(self)}


class BPETokenizer:
    """tiktoken's byte pairs: 'gpt2', 'cl100k_base', or a file of ranks (per line a base64 token and its rank).

    The base vocabulary ends with <|endoftext|>, the stop token. The named encodings are downloaded once and kept by
    tiktoken (TIKTOKEN_CACHE_DIR); without a network that is a ValueError that says what to do.
    """

    def __init__(self, encoding):
        import tiktoken
        from requests.exceptions import RequestException
        self.encoding = encoding
        if encoding in BPE_ENCODINGS:
            try:
                self.bpe = tiktoken.get_encoding(encoding)
            except RequestException as error:
                raise ValueError(f"tokenizer {encoding} could not be downloaded ({type(error).__name__}); set "
                                 "TIKTOKEN_CACHE_DIR to a folder that has it, or name a local file of ranks") from None
        else:
            self.bpe = local_bpe(encoding)
        self.stop_token_id, self.words = self.bpe.eot_token, len(self.bpe.token_byte_values())
        self.newline_token_id = next(iter(self.bpe.encode_ordinary("\n")), -1)
        number_specials(self, self.bpe.n_vocab)

    def encode(self, text):
        """Ids of the text; what looks like a special token in it is read as plain characters."""
        return self.bpe.encode_ordinary(text)

    def decode(self, ids, special="_"):
        """Text of the ids; every special token is shown as `special`, the stop token not at all."""
        blank = special.encode()
        token = lambda i: (b"" if i == self.stop_token_id else self.bpe.decode_single_token_bytes(i) if i < self.words
                           else blank)  # cl100k_base has ids between its words and its last special that mean nothing
        return b"".join(map(token, ids)).decode("utf-8", errors="replace")

    def description(self):
        ranks = {} if self.encoding in BPE_ENCODINGS else {"sha256": file_hash(self.encoding)}
        return {"kind": "bpe", "encoding": self.encoding, **ranks, "stop_token_id": self.stop_token_id,
                **special_ids(self)}


def file_hash(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def local_bpe(path):
    """A tiktoken encoding from a file of ranks, with GPT-2's way to cut text into words."""
    import tiktoken
    if not os.path.isfile(path):
        raise FileNotFoundError(f"tokenizer {path}: neither char, {', '.join(BPE_ENCODINGS)} nor a file of ranks")
    ranks = {}
    for number, line in enumerate(open(path, "rb"), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:  # binascii.Error is one
                raise ValueError(f"{path}, line {number}: not a base64 token and its rank") from None
    words = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    if not set(ranks.values()) == set(range(len(ranks))) or not all(bytes([b]) in ranks for b in range(256)):
        raise ValueError(f"{path}: ranks must be 0 to {len(ranks) - 1} without gaps, all 256 single bytes among them")
    return tiktoken.Encoding(os.path.basename(path), pat_str=words, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": len(ranks)})


def named_tokenizer(name, tags=()):
    """For causal models: 'char' (with tags and a stop token), 'gpt2', 'cl100k_base', or a file of ranks."""
    return CharTokenizer(tags=tags, stop=True) if name == "char" else BPETokenizer(name)


def from_description(description, where):
    """The tokenizer that wrote `description`; `where` names the file it stands in, for the error."""
    for key in ("kind", "base_vocab_size", "vocab_size", *(f"{name}_token_id" for name in SPECIALS)):
        if key not in description:
            raise ValueError(f"{where} has no {key}: prepare the dataset again with its prepare.py")
    if description["kind"] == "char":
        tokenizer = CharTokenizer(description["characters"], description.get("tags", ()),
                                  description.get("stop_token_id") is not None)
    elif description["kind"] == "bpe":
        tokenizer = BPETokenizer(description["encoding"])
    else:
        raise ValueError(f"{where}: kind={description['kind']!r} of tokenizer is not known (known: char, bpe)")
    if tokenizer.description() != description:
        raise ValueError(f"{where}: its vocabulary sizes and special ids do not agree with its characters or ranks; "
                         "prepare it again")
    return tokenizer


def load_meta(folder):
    """meta.json of a prepared dataset, checked, and its tokenizer."""
    path = os.path.join(folder, "meta.json")
    if not os.path.exists(path):
        own = os.path.join(folder, "prepare.py")
        command = own if os.path.exists(own) else f"data/char_diffusion/prepare.py --input=FILE --out={folder}"
        raise FileNotFoundError(f"dataset not prepared: {path} is missing; run python {command}")
    try:
        with open(path) as f:
            meta = json.load(f)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); prepare the dataset again") from None
    return meta, from_description(meta.get("tokenizer", {}), path)

