"""English text for fill-in, as characters or word pieces: writes train.bin, val.bin and meta.json beside this file.

python data/char_diffusion/prepare.py                        the prose of Python's own documentation, no download
python data/char_diffusion/prepare.py --source=shakespeare   nanoGPT's Tiny Shakespeare, downloaded
python data/char_diffusion/prepare.py --input=FILE           any text of yours
With each of them, --out=FOLDER writes elsewhere, to be used as --dataset=FOLDER. With that, --tokenizer=MODEL, a folder
in Hugging Face format or hf:owner/name, writes the word pieces of a masked language model such as BERT, for that model.

A hash of a paragraph's text decides whether it is for training or for validation. So no validation text is in the
training text of any Python version or source, and one pretrained checkpoint can be evaluated on all of them.
"""

import ast
import hashlib
import http.client
import os
import pathlib
import re
import sys
import sysconfig
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import UsageError, run_script
from core.dataset_consumer import write_dataset
from core.tokenizer import CharTokenizer, fold_to_ascii, load_huggingface_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
VALIDATION_PERCENT = 10


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


def blocks(text):
    """A text cut into paragraphs at its blank lines; a text with few blank lines is cut at every line break."""
    parts = re.split(r"\n\s*\n", text)
    if len(parts) < 20:
        return [line + "\n" for line in text.split("\n") if line.strip()]
    return [part.strip("\n") + "\n\n" for part in parts if part.strip()]


def is_validation(paragraph):
    """Whether a paragraph is for validation. The same words give the same answer, however their lines are wrapped."""
    words = " ".join(paragraph.split()).lower()
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") % 100 < VALIDATION_PERCENT


def download(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read().decode("utf-8")
    except (urllib.error.URLError, TimeoutError, http.client.HTTPException) as error:
        raise ValueError(f"could not download {url} ({error}); "
                         "get the file by other means and pass --input=FILE") from None


def read_source(options):
    """Returns (name of the source, list of its paragraphs)."""
    if "input" in options:
        path = pathlib.Path(options["input"])
        if not path.is_file():
            raise FileNotFoundError(f"--input={path} does not exist")
        return path.name, blocks(path.read_text(encoding="utf-8", errors="replace"))
    if options.get("source", "python") == "shakespeare":
        return "shakespeare", blocks(download(SHAKESPEARE))
    if options.get("source", "python") == "python":
        return "python", [paragraph for text in python_documentation() for paragraph in prose(text)]
    raise UsageError(f"--source={options['source']} is not one of python, shakespeare; "
                     "for your own text pass --input=FILE")


def choose_tokenizer(name):
    """Characters, or the word pieces of a masked language model."""
    if name == "char":
        return CharTokenizer()
    tokenizer = load_huggingface_tokenizer(name, "tokenizer")
    if tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer={name} has no mask token, which filling in needs; use the tokenizer of a masked "
                         "language model, such as BERT's")
    return tokenizer


def read_options(argv):
    """{name: value} of the arguments."""
    options = {}
    for argument in argv:
        key, _, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or key not in ("source", "input", "out", "tokenizer") or not value:
            raise UsageError(f"{argument}: known are --source=python|shakespeare, --input=FILE, --out=FOLDER, "
                             "--tokenizer=MODEL")
        options[key] = value
    if options.get("tokenizer", "char") != "char" and "out" not in options:
        raise UsageError(f"--tokenizer={options['tokenizer']} needs --out=FOLDER: the folder of this file is for "
                         "characters")
    return options


def main(argv):
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
    if not seen:
        raise ValueError(f"{source}: no usable characters"
                         + (" (the vocabulary is printable ASCII and newline)" if characters else ""))
    tokens = {side: [i for text in texts for i in tokenizer.encode(text)] for side, texts in sides.items()}
    counts = {"paragraphs_read": len(paragraphs), "paragraphs_kept": len(seen)}
    if characters:
        counts |= {"characters_folded": folded, "characters_dropped": dropped}
    else:
        counts["unknown_pieces"] = sum(ids.count(tokenizer.backend.unk_token_id) for ids in tokens.values())
    write_dataset(options.get("out", HERE), tokens, tokenizer, source=source, **counts)


if __name__ == "__main__":
    run_script(main)
