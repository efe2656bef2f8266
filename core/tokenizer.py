"""Text to token ids and back, a character at a time."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Protocol

SPECIALS = ("mask_token_id", "pad_token_id", "cls_token_id")
ASCII = "\n" + "".join(map(chr, range(32, 127)))
PLAIN = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "\u2026": "...",
         "\t": " "}


class Tokenizer(Protocol):
    """Text to token ids and back: one of this project's, or core/huggingface/tokenizer.py."""

    vocab_size: int
    mask_token_id: int | None
    pad_token_id: int
    stop_token_id: int | None         # the first of stop_token_ids; None: no token ends a completion
    stop_token_ids: tuple[int, ...]
    start_ids: tuple[int, ...]        # before each prompt

    def encode(self, text: str) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


def fold_to_ascii(text: str) -> tuple[str, int, int]:
    """Replaces characters by ASCII ones or, without an equivalent, drops them. Returns (text, folded, dropped)."""
    parts = re.split(r"([^\n -~])", text)  # every second one is a character that is not ASCII
    for i, c in enumerate(parts):
        if i % 2:
            decomposed = unicodedata.normalize("NFKD", c)
            parts[i] = PLAIN.get(c) or re.sub("[^ -~]", "", decomposed)
    dropped = parts[1::2].count("")
    return "".join(parts), len(parts) // 2 - dropped, dropped


class OwnTokenizer:
    """The special tokens of this project's tokenizers: MASK, PAD and CLS have the ids after the base vocabulary, so
    that a model reads them and never samples them."""

    banned_token_ids = start_ids = shown_tokens = ()

    def number_specials(self, base_vocab_size: int, stop_token_id: int | None, stop_name: str) -> None:
        self.base_vocab_size = base_vocab_size
        self.vocab_size = base_vocab_size + len(SPECIALS)
        self.mask_token_id, self.pad_token_id, self.cls_token_id = range(base_vocab_size, self.vocab_size)
        self.stop_token_id = stop_token_id
        self.stop_token_ids = () if stop_token_id is None else (stop_token_id,)
        self.stop_token_names = (stop_name,)

    def special_ids(self) -> dict[str, int]:
        """{name: id} of the special tokens and the sizes of the vocabulary, for a description."""
        return {name: getattr(self, name) for name in ("base_vocab_size", "vocab_size", *SPECIALS)}

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt: there is no token that begins one."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; every special token is shown as an underscore, the stop token not at all."""
        return self.text([i for i in ids if i != self.stop_token_id])


class CharTokenizer(OwnTokenizer):
    """One id per character: printable ASCII and newline, then tags and STOP if asked for, then MASK, PAD, CLS.

    tags: strings that are one token each, such as '<SOLUTION>'; stop: adds the token that ends a completion, which no
    text can contain
    """

    def __init__(self, characters: str = ASCII, tags: Sequence[str] = (), stop: bool = False):
        self.characters = characters
        self.tags = tuple(tags)
        self.pieces = [*characters, *tags]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.at_tags = re.compile(f"({'|'.join(map(re.escape, self.tags)) or '(?!)'})")
        self.newline_token_id = self.ids.get("\n", -1)
        self.number_specials(len(self.pieces) + stop, len(self.pieces) if stop else None, "STOP")

    def encode(self, text: str) -> list[int]:
        """Ids of tags and characters; a character outside the vocabulary is folded to ASCII or left out."""
        pieces = []
        for part in self.at_tags.split(text):
            pieces += [part] if part in self.tags else fold_to_ascii(part)[0]
        return [self.ids[piece] for piece in pieces if piece in self.ids]

    def text(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[i] if i < len(self.pieces) else "_" for i in ids)

    def description(self) -> dict:
        """Plain values that from_description turns back into this tokenizer; equal for equal vocabularies."""
        out = {"kind": "char", "characters": self.characters}
        if self.tags or self.stop_token_id is not None:  # fill-in checkpoints have neither key
            out |= {"tags": list(self.tags), "stop_token_id": self.stop_token_id}
        return out | self.special_ids()
