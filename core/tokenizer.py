"""Text to token ids and back. A tokenizer is rebuilt from the `tokenizer` entry of meta.json or of a checkpoint."""

import json
import os
import unicodedata

SPECIALS = ("mask", "pad", "cls")  # they follow the base vocabulary, in this order
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


class CharTokenizer:
    """One id per character: printable ASCII and newline, then MASK, PAD, CLS.

    The vocabulary is fixed and not read off a corpus, so one checkpoint fits every text.
    """

    def __init__(self, characters=ASCII):
        self.characters = characters
        self.ids = {c: i for i, c in enumerate(characters)}
        self.base_vocab_size = len(characters)
        self.vocab_size = len(characters) + len(SPECIALS)
        self.mask_token_id, self.pad_token_id, self.cls_token_id = range(self.base_vocab_size, self.vocab_size)

    def encode(self, text):
        """Ids of the characters; one outside the vocabulary is folded to ASCII or left out."""
        return [self.ids[c] for c in fold_to_ascii(text)[0] if c in self.ids]

    def decode(self, ids, special="_"):
        """Text of the ids; every special token is shown as `special`."""
        return "".join(self.characters[i] if i < self.base_vocab_size else special for i in ids)

    def description(self):
        """Plain values that from_description turns back into this tokenizer; equal for equal vocabularies."""
        special = {f"{name}_token_id": getattr(self, f"{name}_token_id") for name in SPECIALS}
        return {"kind": "char", "characters": self.characters, "base_vocab_size": self.base_vocab_size,
                "vocab_size": self.vocab_size, **special}


def from_description(description, where):
    """The tokenizer that wrote `description`; `where` names the file it stands in, for the error."""
    for key in ("kind", "base_vocab_size", "vocab_size", *(f"{name}_token_id" for name in SPECIALS)):
        if key not in description:
            raise ValueError(f"{where} has no {key}: prepare the dataset again with its prepare.py")
    if description["kind"] != "char":
        raise ValueError(f"{where}: kind={description['kind']!r} of tokenizer is not known (known: char)")
    tokenizer = CharTokenizer(description["characters"])
    if tokenizer.description() != description:
        raise ValueError(f"{where}: its vocabulary sizes and special ids do not agree with its characters; "
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

