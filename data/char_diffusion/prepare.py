"""English text for fill-in, as characters or word pieces: writes train.bin, val.bin and meta.json beside this file.

python data/char_diffusion/prepare.py                        the prose of Python's own documentation, no download
python data/char_diffusion/prepare.py --source=shakespeare   nanoGPT's Tiny Shakespeare, downloaded
python data/char_diffusion/prepare.py --input=PATH           any text of yours: a file, or all text files of a folder
--input may be given several times. A file may be compressed with gzip; if it is not UTF-8, name its --encoding=, such
as cp1252. --out=FOLDER writes elsewhere, to be used as --dataset=FOLDER. With that, --tokenizer=MODEL, a folder in
Hugging Face format or hf:owner/name, writes the word pieces of a masked language model such as BERT, for that model.

The shipped models know printable ASCII and newline. Other characters are replaced by similar ones or left out.

A hash of a paragraph's text decides whether it is for training or for validation. So no validation text is in the
training text of any Python version or source, and one pretrained checkpoint can be evaluated on all of them.
"""

import ast
import collections
import gzip
import hashlib
import http.client
import os
import pathlib
import re
import sys
import sysconfig
import urllib.error
import urllib.request
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.data import write_dataset
from core.errors import Mistake, UsageError, run_script
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.logger import fitted
from core.settings.setting import shown
from core.tokenizer import CharTokenizer, fold_to_ascii

HERE = os.path.dirname(os.path.relpath(__file__))
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
VALIDATION_PERCENT = 10
MOST_DROPPED = 0.1  # share of the characters; a text that loses more is refused
ENOUGH = 20_000  # characters from which a held-out part says something
WINDOW = 130  # tokens that training needs on each side at the default block_size
OPTIONS = ("source", "input", "out", "tokenizer", "encoding")


def docstrings(source):
    """Every docstring of a Python source text, in order of appearance; none if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a few library files, such as those of lib2to3, are not valid Python 3
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def python_documentation():
    """A list of texts: the language reference that `help()` shows, then every docstring of the standard library."""
    from pydoc_data import topics
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"} & set(parts):
            texts += docstrings(path.read_text(encoding="utf-8", errors="replace"))
    return texts


def prose(text, shortest=60, letters=0.9):
    """The paragraphs of a text that are prose, one line each: long enough, and mostly letters and spaces."""
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        if len(line) >= shortest and sum(c.isalpha() or c == " " for c in line) >= letters * len(line):
            yield line + "\n"


def blocks(text, few=20):
    """A text cut into paragraphs at its blank lines; one with few of them at every line break; one with few of those
    into pieces of at most 400 characters, between words where it has spaces."""
    parts = re.split(r"\n\s*\n", text)
    if len(parts) >= few:
        return [part.strip("\n") + "\n\n" for part in parts if part.strip()]
    lines = [line + "\n" for line in text.split("\n") if line.strip()]
    return lines if len(lines) >= few else re.findall(r"(?s)\S.{0,399}(?!\S)\s*|\S{400}", text)


def is_validation(paragraph):
    """Tells whether a paragraph is for validation. The answer does not depend on how its lines are wrapped."""
    words = " ".join(paragraph.split()).lower()
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") % 100 < VALIDATION_PERCENT


def download(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read().decode("utf-8")
    except (urllib.error.URLError, TimeoutError, http.client.HTTPException) as error:
        raise Mistake(f"could not download {url} ({error}); "
                      "get the file by other means and pass --input=FILE --out=FOLDER") from None


def read_text(path, encoding=None):
    """The text of a file, with newlines as line ends. encoding: None is UTF-8, or UTF-16 if the file begins as such.
    Raises Mistake for a file that is not text."""
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise Mistake(f"{path} is a damaged gzip file ({error}); get it again") from None
    encoding = encoding or ("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    try:
        text = data.decode(encoding)
    except UnicodeError:
        text = "\0"
    if "\0" in text:
        raise Mistake(f"{path} is not {encoding.removesuffix('-sig')} text; if it is text, name its encoding, such "
                      "as --encoding=cp1252; if it is a document or an archive, save its text as a .txt file")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_folder(folder, encoding=None):
    """The texts of all text files in a folder and in the folders in it; hidden ones are left out."""
    texts, other = [], []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            try:
                texts.append(read_text(path, encoding))
            except ValueError:
                other.append(str(name))
    if not texts:
        raise Mistake(f"--input={folder} has no text file, but {len(other)} others; name another folder or a file, "
                      "or the --encoding= of its files")
    print(f"{folder}: {len(texts)} text files" + (f"; {len(other)} left out, which are not {encoding or 'UTF-8'} text: "
                                                  f"{shown(other)}" if other else ""))
    return texts


def read_source(options):
    """Returns (name of the source, list of its paragraphs)."""
    if "input" in options:
        paths = [pathlib.Path(path).expanduser() for path in options["input"]]
        texts = []
        for path in paths:
            if not path.exists():
                raise Mistake(f"--input={path} does not exist; name a file or a folder (several: --input=A "
                              "--input=B)")
            texts += read_folder(path, options.get("encoding")) if path.is_dir() else [
                read_text(path, options.get("encoding"))]
        return ", ".join(path.name or str(path) for path in paths), blocks("\n\n".join(texts))
    if options.get("source", "python") == "shakespeare":
        return "shakespeare", blocks(download(SHAKESPEARE))
    if options.get("source", "python") == "python":
        return "python", [paragraph for text in python_documentation() for paragraph in prose(text)]
    raise UsageError(f"--source={options['source']} is not one of python, shakespeare; "
                     "for your own text pass --input=PATH")


def choose_tokenizer(name):
    """Characters, or the word pieces of a masked language model."""
    if name == "char":
        return CharTokenizer()
    tokenizer = load_huggingface_tokenizer(name, "tokenizer")
    if tokenizer.mask_token_id is None:
        raise Mistake(f"tokenizer={name} has no mask token, which filling in needs; use the tokenizer of a masked "
                      "language model, such as BERT's")
    return tokenizer


def read_options(argv):
    """{name: value} of the arguments."""
    options = {}
    for argument in argv:
        key, _, value = argument.removeprefix("--").partition("=")
        if os.path.exists(argument):
            raise UsageError(f"{argument}: write --input={argument} --out=data/mine")
        if not argument.startswith("--") or key not in OPTIONS or not value:
            raise UsageError(f"{argument}: known are --source=python|shakespeare, --input=PATH, --encoding=NAME, "
                             "--out=FOLDER, --tokenizer=MODEL")
        options[key] = [*options.get(key, ()), value] if key == "input" else value
    if options.get("tokenizer", "char") != "char" and "out" not in options:
        raise UsageError(f"--tokenizer={options['tokenizer']} needs --out=FOLDER: the folder of this file is for "
                         "characters")
    if "input" in options and "out" not in options:
        raise UsageError(f"--input={options['input'][0]} needs --out=FOLDER, such as --out=data/mine: the folder of "
                         "this file is for the text that the shipped models were trained on")
    try:
        "a".encode(options.get("encoding", "utf-8"))
    except LookupError:
        raise UsageError(f"--encoding={options['encoding']} is not an encoding that Python knows; try cp1252 or "
                         "utf-16") from None
    return options


def check_characters(source, paragraphs, dropped):
    """Prints which characters are left out. Raises Mistake if they are too many.

    dropped: how many characters of the paragraphs have no equivalent in the vocabulary
    """
    total = sum(map(len, paragraphs))
    counts = collections.Counter()
    for paragraph in paragraphs:
        counts.update(paragraph)
    named = ", ".join([f"{c!r} {count}" for c, count in counts.most_common() if fold_to_ascii(c)[2]][:5])
    if dropped > MOST_DROPPED * total:
        raise Mistake(f"{source}: {dropped} of {total} characters are not in the vocabulary of the shipped models, "
                      f"printable ASCII and newline ({named}); use a masked language model that knows them, and "
                      "prepare the text for it: --tokenizer=MODEL (docs/huggingface.md)")
    if dropped:
        print(fitted(f"{source}: {dropped} of {total} characters are not in the vocabulary and are left out ({named})"))


def check_lengths(source, tokens):
    """Raises Mistake for a text without training or validation part; prints a line if one is short."""
    for side, ids in tokens.items():
        side = {"train": "training", "val": "validation"}[side]
        if not ids:
            raise Mistake(f"{source} is too short: no paragraph of it is for {side} (one in ten is for validation); "
                          "use a text of 20,000 characters or more")
        if len(ids) < WINDOW:
            print(f"{source} is short: {len(ids)} {side} tokens; train with a block_size below {len(ids) - 1}, or use "
                  "a longer text")


def check_size(source, characters, read, kept):
    """Prints a line if a text is short, or shorter than it looks because paragraphs repeat each other."""
    if kept < read / 2:
        print(f"{source}: {read - kept} of {read} paragraphs repeat others and are left out")
    if characters < ENOUGH:
        print(f"{source} has {characters} characters to train on and to hold out; with fewer than {ENOUGH} a model "
              "learns them by heart, and held-out figures mean little")


def main(argv):
    """Prepares the text that the arguments name."""
    options = read_options(argv)
    tokenizer = choose_tokenizer(options.get("tokenizer", "char"))
    source, paragraphs = read_source(options)
    characters = isinstance(tokenizer, CharTokenizer)
    seen, sides, folded, dropped = set(), {"train": [], "val": []}, 0, 0
    for paragraph in paragraphs:
        text, f, d = fold_to_ascii(paragraph) if characters else (paragraph, 0, 0)
        folded, dropped = folded + f, dropped + d
        if text.strip() and text not in seen:
            seen.add(text)
            sides["val" if is_validation(text) else "train"].append(text)
    if not sides["val"] and len(sides["train"]) >= 10:  # of few paragraphs chance may take none
        sides["val"].append(sides["train"].pop())
    check_characters(source, paragraphs, dropped)
    if not seen:
        raise Mistake(f"{source} has no text in it; name another file or folder")
    tokens = {side: [i for text in texts for i in tokenizer.encode(text)] for side, texts in sides.items()}
    check_lengths(source, tokens)
    check_size(source, sum(map(len, seen)), len(paragraphs), len(seen))
    counts = {"paragraphs_read": len(paragraphs), "paragraphs_kept": len(seen)}
    if characters:
        counts |= {"characters_folded": folded, "characters_dropped": dropped}
    else:
        counts["unknown_pieces"] = sum(ids.count(tokenizer.backend.unk_token_id) for ids in tokens.values())
    write_dataset(options.get("out", HERE), tokens, tokenizer, source=source, **counts)


if __name__ == "__main__":
    run_script(main)
