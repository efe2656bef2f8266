"""Tokenizers of characters, of byte pairs and of Hugging Face, by name or rebuilt from meta.json or a checkpoint."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Protocol

from core.errors import Mistake, others
from core.settings.setting import shown

ASCII = "\n" + "".join(map(chr, range(32, 127)))
REPLACEMENTS = {
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
    "\u2013": "-",
    "\u2014": "-",
    "\u2026": "...",
    "\t": " "}
BPE_ENCODINGS = ("gpt2", "cl100k_base")
AGAIN = "prepare it again with its prepare.py"


class Tokenizer(Protocol):
    """Turns text into token ids and back. Its classes are in this file and in core/huggingface/tokenizer.py."""

    vocab_size: int
    mask_token_id: int | None
    pad_token_id: int
    stop_token_id: int | None         # the first of stop_token_ids; None: no token ends a completion
    stop_token_ids: tuple[int, ...]
    start_ids: tuple[int, ...]        # before each prompt
    has_chat_template: bool

    def encode(self, text: str) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


def fold_to_ascii(text: str) -> tuple[str, int, int]:
    """Replaces characters by ASCII ones or, without an equivalent, drops them. Returns (text, folded, dropped)."""
    parts = re.split(r"([^\n -~])", text)  # every second one is a character that is not ASCII
    for i in range(1, len(parts), 2):
        decomposed = unicodedata.normalize("NFKD", parts[i])
        ascii_part = re.sub("[^ -~]", "", decomposed)
        parts[i] = REPLACEMENTS.get(parts[i], ascii_part)
    replaced = parts[1::2]
    dropped = replaced.count("")
    folded = len(replaced) - dropped
    return "".join(parts), folded, dropped


class OwnTokenizer:
    """The base of this project's tokenizers. MASK, PAD and CLS have the ids after the base vocabulary: a model reads
    them and never samples them. A subclass has `words`, the number of ids that stand for text, and `piece`, the UTF-8
    text of such an id."""

    banned_token_ids = start_ids = shown_tokens = ()
    has_chat_template = False

    def number_specials(
            self,
            base_vocab_size: int,
            stop_token_id: int | None,
            stop_name: str) -> None:
        self.base_vocab_size = base_vocab_size
        self.mask_token_id = base_vocab_size
        self.pad_token_id = base_vocab_size + 1
        self.cls_token_id = base_vocab_size + 2
        self.vocab_size = base_vocab_size + 3
        self.stop_token_id = stop_token_id
        self.stop_token_ids = () if stop_token_id is None else (stop_token_id,)
        self.stop_token_names = (stop_name,)

    def special_ids(self) -> dict[str, int]:
        """Returns {name: id} of the special tokens and the sizes of the vocabulary, for a description."""
        return {
            "base_vocab_size": self.base_vocab_size,
            "vocab_size": self.vocab_size,
            "mask_token_id": self.mask_token_id,
            "pad_token_id": self.pad_token_id,
            "cls_token_id": self.cls_token_id}

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a whole prompt: this project's tokenizers put no token before it."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids, without the stop token; every other special token becomes an underscore."""
        pieces = []
        for i in ids:
            if i < self.words:
                pieces.append(self.piece(i))
            elif i != self.stop_token_id:
                pieces.append(b"_")
        return b"".join(pieces).decode("utf-8", errors="replace")


class CharTokenizer(OwnTokenizer):
    """One id per character: printable ASCII and newline, then tags and STOP if asked for, then MASK, PAD, CLS.

    tags: strings that are one token each, such as '<SOLUTION>'; stop: adds the token that ends a completion, which no
    text can contain
    """

    def __init__(
            self,
            characters: str = ASCII,
            tags: Sequence[str] = (),
            stop: bool = False):
        self.characters = characters
        self.tags = tuple(tags)
        self.pieces = [*characters, *tags]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        any_tag = "|".join(map(re.escape, self.tags))
        if not tags:
            any_tag = "(?!)"  # matches nowhere
        self.at_tags = re.compile(f"({any_tag})")
        self.newline_token_id = self.ids.get("\n", -1)
        self.words = len(self.pieces)
        if stop:
            self.number_specials(self.words + 1, self.words, "STOP")
        else:
            self.number_specials(self.words, None, "STOP")

    def encode(self, text: str) -> list[int]:
        """Encodes tags and characters; a character outside the vocabulary is folded to ASCII or left out."""
        pieces = []
        for part in self.at_tags.split(text):
            if part in self.tags:
                pieces.append(part)
            else:
                characters, _, _ = fold_to_ascii(part)
                pieces += characters
        return [self.ids[piece] for piece in pieces if piece in self.ids]

    def piece(self, i: int) -> bytes:
        return self.pieces[i].encode()

    def description(self) -> dict:
        """Returns plain values from which from_description rebuilds this tokenizer; equal for equal vocabularies."""
        out = {"kind": "char", "characters": self.characters}
        if self.tags or self.stop_token_id is not None:  # fill-in checkpoints have neither key
            out |= {"tags": list(self.tags), "stop_token_id": self.stop_token_id}
        return out | self.special_ids()


class BPETokenizer(OwnTokenizer):
    """tiktoken's byte pairs: 'gpt2' or 'cl100k_base', downloaded once and kept by tiktoken (TIKTOKEN_CACHE_DIR).
    The base vocabulary ends with the special tokens; one of them, <|endoftext|>, is the stop token."""

    def __init__(self, encoding: str):
        import tiktoken
        self.encoding = encoding
        with others(f"tokenizer {encoding} could not be loaded", "set TIKTOKEN_CACHE_DIR to a folder that has it"):
            self.bpe = tiktoken.get_encoding(encoding)
        self.words = len(self.bpe.token_byte_values())
        self.newline_token_id = self.encode("\n")[0]
        self.number_specials(self.bpe.n_vocab, self.bpe.eot_token, "<|endoftext|>")

    def encode(self, text: str) -> list[int]:
        """Encodes a text; the name of a special token in it is read as plain characters."""
        return self.bpe.encode_ordinary(text)

    def piece(self, i: int) -> bytes:
        return self.bpe.decode_single_token_bytes(i)

    def description(self) -> dict:
        out = {"kind": "bpe", "encoding": self.encoding, "stop_token_id": self.stop_token_id}
        return out | self.special_ids()


def named_tokenizer(
        name: str,
        tags: Sequence[str] = (),
        key: str = "tokenizer") -> Tokenizer:
    """Makes a tokenizer by name: 'char' (with tags and a stop token), 'gpt2', 'cl100k_base', a folder or hf:owner/name.
    key: the setting that names it, for errors"""
    if name == "char":
        return CharTokenizer(tags=tags, stop=True)
    if name in BPE_ENCODINGS:
        return BPETokenizer(name)
    from core.huggingface.tokenizer import load_huggingface_tokenizer
    return load_huggingface_tokenizer(name, key)


def from_description(description: dict, where: str) -> Tokenizer:
    """Rebuilds the tokenizer that wrote `description`. where: the name of its file, for the error"""
    kind = description.get("kind")
    with others(f"{where}: its tokenizer of kind={shown(kind)} cannot be read", AGAIN):
        # str accepts any value. A damaged value then gives another vocabulary, which is refused below
        if kind == "char":
            tags = [str(tag) for tag in description.get("tags", ())]
            stop = description.get("stop_token_id") is not None
            tokenizer = CharTokenizer(str(description["characters"]), tags, stop)
        else:
            name = description["encoding" if kind == "bpe" else "name"]
            tokenizer = named_tokenizer(str(name), key=f"{where}: tokenizer")
    if not same_vocabulary(description, tokenizer):
        raise Mistake(f"{where}: the vocabulary of its tokenizer is not the one that it describes; {AGAIN}")
    return tokenizer


def same_vocabulary(description: dict, tokenizer: Tokenizer) -> bool:
    """True if a description fits the tokenizer, or a tokenizer with the same vocabulary in another folder."""
    own = tokenizer.description()
    if description.get("kind") == own["kind"] == "huggingface":
        return description.get("vocabulary") == own["vocabulary"]
    return description == own


def character_ends(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Returns, for each token, the number of characters in the text up to and including this token."""
    ends = []
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        ends.append(len(text))
    return ends


def masked_spans(
        tokenizer: Tokenizer,
        ids: list[int],
        masked: list[bool]) -> list[list[int]]:
    """Returns [[first, end]], the characters of each masked token in the text of ids."""
    spans = []
    first = 0
    ends = character_ends(tokenizer, ids)
    for end, is_masked in zip(ends, masked, strict=True):
        end = max(first, end)  # a token that completes a character can make the text shorter
        if is_masked:
            spans.append([first, end])
        first = end
    return spans
