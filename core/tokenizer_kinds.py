"""Tokenizers of every kind, byte pairs among them, by name or rebuilt from meta.json or a checkpoint."""

from itertools import accumulate

from core.errors import Mistake, others
from core.settings.setting import shown
from core.tokenizer import CharTokenizer, OwnTokenizer

BPE_ENCODINGS = ("gpt2", "cl100k_base")
AGAIN = "prepare it again with its prepare.py"


class BPETokenizer(OwnTokenizer):
    """tiktoken's byte pairs: 'gpt2' or 'cl100k_base', downloaded once and kept by tiktoken (TIKTOKEN_CACHE_DIR).
    The base vocabulary ends with the special tokens, of which <|endoftext|> is the stop token."""

    def __init__(self, encoding):
        import tiktoken
        self.encoding = encoding
        with others(f"tokenizer {encoding} could not be loaded", "set TIKTOKEN_CACHE_DIR to a folder that has it"):
            self.bpe = tiktoken.get_encoding(encoding)
        self.words = len(self.bpe.token_byte_values())
        self.newline_token_id = self.encode("\n")[0]
        self.number_specials(self.bpe.n_vocab, self.bpe.eot_token, "<|endoftext|>")

    def encode(self, text):
        """Ids of the text; the name of a special token in it is read as plain characters."""
        return self.bpe.encode_ordinary(text)

    def text(self, ids):
        pieces = [self.bpe.decode_single_token_bytes(i) if i < self.words else b"_" for i in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def description(self):
        return {"kind": "bpe", "encoding": self.encoding, "stop_token_id": self.stop_token_id, **self.special_ids()}


def named_tokenizer(name, tags=(), key="tokenizer"):
    """The tokenizer of a name: 'char' (with tags and a stop token), 'gpt2', 'cl100k_base', folder or hf:owner/name."""
    if name == "char":
        return CharTokenizer(tags=tags, stop=True)
    if name in BPE_ENCODINGS:
        return BPETokenizer(name)
    from core.huggingface.tokenizer import load_huggingface_tokenizer
    return load_huggingface_tokenizer(name, key)


def from_description(description, where):
    """The tokenizer that wrote `description`; `where` names its file, for the error."""
    kind = description.get("kind")
    with others(f"{where}: its tokenizer of kind={shown(kind)} cannot be read", AGAIN):
        tags = tuple(description.get("tags", ()))
        texts = [description.get(key, "") for key in ("characters", "encoding", "name")]
        if not all(isinstance(text, str) for text in (*texts, *tags)):
            raise Mistake(f"{where}: what describes its tokenizer must be texts; {AGAIN}")
        if kind == "char":
            stop = description.get("stop_token_id") is not None
            tokenizer = CharTokenizer(description["characters"], tags, stop)
        else:
            tokenizer = named_tokenizer(description["encoding" if kind == "bpe" else "name"], key=f"{where}: tokenizer")
    if not same_vocabulary(description, tokenizer):
        raise Mistake(f"{where}: the vocabulary of its tokenizer is not the one that it describes; {AGAIN}")
    return tokenizer


def same_vocabulary(description, tokenizer):
    """Tells whether a description is that of the tokenizer."""
    other = tokenizer.description()
    if description.get("kind") == other["kind"] == "huggingface":  # known by its words, wherever its folder is
        return description.get("vocabulary") == other["vocabulary"]
    return description == other


def character_ends(tokenizer, ids):
    """The number of characters of the text up to and with each token. ids: a list"""
    if len(tokenizer.decode(ids)) == len(ids):  # a character each
        return list(range(1, len(ids) + 1))
    return [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]


def filled(tokenizer, ids, masked):
    """[[first, end]] of the characters of each masked token in the text of ids. ids, masked: lists"""
    ends = list(accumulate(character_ends(tokenizer, ids), max))
    return [[first, end] for first, end, hidden in zip([0, *ends], ends, masked, strict=False) if hidden]
